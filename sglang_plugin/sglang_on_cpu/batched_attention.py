"""Attention over SGLang's paged key-value cache in plain torch, for all requests of a batch at once.

SGLang's `torch_native` backend loops over the requests in Python and does not support attention sinks. This backend gathers
the keys of many requests into one padded block and calls scaled_dot_product_attention on it once.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch.nn.functional import scaled_dot_product_attention

MAX_MASK_ELEMENTS = 1 << 22
"""Largest number of elements in a padded mask [requests, query tokens, key tokens], which limits the memory for padding."""


class Block:
    """Requests that are computed together, padded to the size of the longest one.

    query_rows: [B, Q], rows of the batch's query tensor (row 0 for padding); key_slots: [B, K], slots in the key-value cache;
    visible: [B, Q, K] bool, or None if every query sees every key; valid: [B, Q] bool, or None if no query is padding.
    """

    def __init__(self, query_starts, query_lens, key_lens, key_slots):
        queries, keys = int(query_lens.max()), int(key_lens.max())
        step = torch.arange(queries)
        self.key_slots = key_slots[:, :keys]
        self.query_rows = query_starts[:, None] + step
        self.valid = None
        if int(query_lens.min()) < queries:
            self.valid = step < query_lens[:, None]
            self.query_rows = self.query_rows * self.valid
        # Positions of the queries in their sequence: the new tokens are the last ones.
        self.query_positions = (key_lens - query_lens)[:, None] + step
        self.key_positions = torch.arange(keys)
        self.visible = self.key_positions <= self.query_positions[:, :, None]
        if queries == 1 and int(key_lens.min()) == keys:
            self.visible = None

    def mask(self, window: int | None) -> torch.Tensor | None:
        """Return the mask [B, Q, K] bool; None if every query sees every key. Query i sees the keys i - window <= j <= i."""
        if window is None:
            return self.visible
        near = self.key_positions >= self.query_positions[:, :, None] - window
        return near if self.visible is None else near & self.visible


class BatchedTorchAttention(TorchNativeAttnBackend):
    """Replaces SGLang's `torch_native` backend. Cross-attention and encoders use the original."""

    def init_forward_metadata(self, forward_batch):
        super().init_forward_metadata(forward_batch)
        self.blocks = []
        batch_size = forward_batch.batch_size
        if batch_size == 0 or forward_batch.forward_mode.is_idle():
            return
        key_lens = forward_batch.seq_lens
        if forward_batch.forward_mode.is_decode():
            query_lens = torch.ones_like(key_lens)
        else:
            query_lens = forward_batch.extend_seq_lens.to(key_lens.dtype)
        query_starts = query_lens.cumsum(0) - query_lens
        slots = self.req_to_token_pool.req_to_token[forward_batch.req_pool_indices, : int(key_lens.max())].long()
        self.borders = tuple(F.pad(lengths.long().cumsum(0), (1, 0)) for lengths in (query_lens, key_lens))
        self.packed_slots = slots[torch.arange(slots.shape[1]) < key_lens[:, None]]
        for rows in self._split(query_lens, key_lens):
            self.blocks.append(Block(query_starts[rows], query_lens[rows], key_lens[rows], slots[rows]))

    @staticmethod
    def _split(query_lens: torch.Tensor, key_lens: torch.Tensor) -> list[torch.Tensor]:
        """Sort requests by size, and split them into blocks with at most MAX_MASK_ELEMENTS elements after padding."""
        count = len(key_lens)
        if count * int(query_lens.max()) * int(key_lens.max()) <= MAX_MASK_ELEMENTS:
            return [torch.arange(count)]
        order = torch.argsort(query_lens * key_lens.max() + key_lens)
        groups, first = [], 0
        for last in range(1, count + 1):
            rows = order[first : last + 1]
            padded = len(rows) * int(query_lens[rows].max()) * int(key_lens[rows].max())
            if last == count or padded > MAX_MASK_ELEMENTS:
                groups.append(order[first:last])
                first = last
        return groups

    def _attend(self, q, k, v, layer, forward_batch, save_kv_cache, sinks):
        """Compute attention of queries q [T, H * D] over the cache. Returns [T, H * Dv]."""
        pool, heads, kv_heads = self.token_to_kv_pool, layer.tp_q_head_num, layer.tp_k_head_num
        if save_kv_cache and k is not None:
            pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc), k, v)
        q = q.reshape(-1, heads, layer.qk_head_dim)
        out = q.new_empty(q.shape[0], heads, layer.v_head_dim)
        keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
        window = layer.sliding_window_size if (layer.sliding_window_size or -1) > -1 else None
        group = heads // kv_heads
        if (attend := getattr(layer, "attend", None)) is not None:  # operator of megatron_rl_plugin/identical.py
            return self._attend_by(attend, q, keys, values, layer, window, sinks).view(-1, heads * layer.v_head_dim)
        for block in self.blocks:
            slots = block.key_slots
            if self.use_sliding_window_kv_pool and pool_of_window(pool, layer):
                slots = pool.translate_loc_from_full_to_swa(slots.reshape(-1)).view_as(slots)
            batch, queries = block.query_rows.shape
            # [B, Q, Hkv, G, D] -> [B, Hkv, G * Q, D]: heads that share a key head become queries of this head.
            rows = q[block.query_rows].view(batch, queries, kv_heads, group, -1)
            rows = rows.permute(0, 2, 3, 1, 4).reshape(batch, kv_heads, group * queries, -1)
            block_keys = keys[slots].transpose(1, 2).to(q.dtype)
            block_values = values[slots].transpose(1, 2).to(q.dtype)
            mask = block.mask(window)
            if mask is not None:
                mask = mask[:, None].expand(-1, group, -1, -1).reshape(batch, 1, group * queries, -1)
            if sinks is not None:
                mask, block_keys, block_values = _with_sink(mask, block_keys, block_values, sinks, queries)
            result = scaled_dot_product_attention(rows, block_keys, block_values, attn_mask=mask, scale=layer.scaling)
            result = result.view(batch, kv_heads, group, queries, -1).permute(0, 3, 1, 2, 4)
            result = result.reshape(batch, queries, heads, -1)
            if block.valid is None:
                out[block.query_rows] = result
            else:
                out[block.query_rows[block.valid]] = result[block.valid]
        return out.view(-1, heads * layer.v_head_dim)

    def _attend_by(self, attend, q, keys, values, layer, window, sinks):
        """Compute attention of q [T, H, D] with the function `attend`, all requests packed in batch order.

        Returns [T, H, Dv].
        """
        slots = self.packed_slots
        if self.use_sliding_window_kv_pool and pool_of_window(self.token_to_kv_pool, layer):
            slots = self.token_to_kv_pool.translate_loc_from_full_to_swa(slots)
        packed = (q.contiguous(), keys[slots].to(q.dtype), values[slots].to(q.dtype))
        width = None if window is None else window + 1
        return attend(*packed, sinks, *self.borders, window=width, scale=layer.scaling)

    def _plain(self, layer) -> bool:
        return not layer.is_cross_attention and layer.attn_type == AttentionType.DECODER

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, sinks=None, **kwargs):
        if not self._plain(layer):
            return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache, sinks)

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True, sinks=None, **kwargs):
        if not self._plain(layer):
            return super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache)
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache, sinks)


def pool_of_window(pool, layer) -> bool:
    """Return True if the layer's keys are in the cache for layers with a sliding window."""
    return pool.layers_mapping[layer.layer_id][1]


def _with_sink(mask, keys, values, sinks, queries):
    """Append an attention sink to mask, keys and values.

    It is a zero key and a zero value, with the sink's logit in the mask.
    """
    batch, kv_heads, length, _ = keys.shape
    rows = len(sinks) // kv_heads * queries
    bias = keys.new_zeros(batch, kv_heads, rows, length + 1)
    if mask is not None:
        bias[..., :length].masked_fill_(~mask, float("-inf"))
    bias[..., length] = sinks.to(keys.dtype).view(kv_heads, -1, 1).expand(-1, -1, queries).reshape(kv_heads, rows)
    pad = (0, 0, 0, 1)
    return bias, torch.nn.functional.pad(keys, pad), torch.nn.functional.pad(values, pad)
