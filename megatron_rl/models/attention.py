"""Attention modules for Megatron's layer spec: packed sequences, windows, sinks, MLA and context parallelism."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.models.common.embeddings.rope_utils import _rotate_half
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    all_to_all,
    gather_from_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.attention import SelfAttention as MegatronSelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_latent_attention import MLASelfAttention as MegatronMLASelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    is_layer_window_attention,
    make_sharded_tensors_for_checkpoint,
)

from megatron_rl.errors import UserError
from megatron_rl.models.norm import HeadsRMSNorm
from megatron_rl.models.packed import TokenPlaces, token_places
from megatron_rl.ops import sink_attention
from megatron_rl.ops.flash import FlashImpl

# -- rotary --------------------------------------------------------------------------------------------------------------
# Rotary position embedding of all packed tokens at once.


def rotate_packed(
    x: torch.Tensor,
    angles: torch.Tensor,
    positions: torch.Tensor,
    *,
    interleaved: bool = False,
    mla_interleaved: bool = False,
    mscale: float = 1.0,
) -> torch.Tensor:
    """Rotate each token by its position's angles, with the same arithmetic as Megatron's `_apply_rotary_pos_emb_bshd`.

    x: `[T, 1, H, D]`. angles: `[S, 1, 1, R]` of positions 0..S-1, with R <= D; the rest of D stays unchanged. positions:
    `[T]`. mscale: yarn's factor on cos and sin. mla_interleaved: the two numbers of a pair are neighbors in x (DeepSeek).
    Returns `[T, 1, H, D]`. Errors: IndexError for a position of S or above.
    """
    rotated = angles.shape[-1]
    x, rest = x[..., :rotated], x[..., rotated:]
    if mla_interleaved:
        x = torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1)
    cos = (torch.cos(angles) * mscale).to(x.dtype).index_select(0, positions)
    sin = (torch.sin(angles) * mscale).to(x.dtype).index_select(0, positions)
    x = x * cos + _rotate_half(x, interleaved) * sin
    return torch.cat((x, rest), dim=-1) if rest.shape[-1] else x


# -- attention -----------------------------------------------------------------------------------------------------------


_CAUSAL = (None, AttnMaskType.causal, AttnMaskType.padding_causal)


class CoreAttention(MegatronModule):
    """`core_attention` of a layer spec: causal attention through `ops.sink_attention`.

    It replaces Megatron's `DotProductAttention`, which supports neither packed sequences nor context parallelism. The
    parameter `softmax_offset` [heads / tp] (softmax_type "learnable") has the name to which Megatron-Bridge maps gpt-oss's
    sinks.

    Megatron's cp_comm_type selects how context-parallel ranks communicate. "a2a" (or None) uses an all-to-all (arXiv
    2309.14509), so that each rank gets whole sequences for its share of the heads and sinks. Key-value heads are repeated if
    the ranks cannot share them equally. "all_gather" gathers keys and values, and each rank keeps its own queries.

    ignore_sinks: compute attention without sinks; the sinks stay unchanged and get no gradient. This option is for experiments
    that show how gpt-oss behaves with a kernel without sinks. flash_attention: the kernel on GPUs, as in ModelConfig.
    Errors: UserError for dropout, a mask that is not causal, another cp_comm_type, or heads that the ranks cannot share.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        *,
        ignore_sinks: bool = False,
        flash_attention: FlashImpl = "torch",
        **unused: object,
    ):
        super().__init__(config=config)
        self.ignore_sinks, self.flash_attention = ignore_sinks, flash_attention
        if attn_mask_type not in _CAUSAL:
            raise UserError(f"model: attention mask '{attn_mask_type.name}' is not supported; only causal is")
        if (config.attention_dropout if attention_dropout is None else attention_dropout) > 0:
            raise UserError("model: attention dropout is not supported; set attention_dropout to 0")
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        self.tp_group, self.cp_group = groups.tp, groups.cp
        if cp_comm_type not in (None, "a2a", "all_gather"):
            raise UserError(f"parallel.cp_comm_type: '{cp_comm_type}' is not supported; a2a and all_gather are")
        self.gathers_keys = cp_comm_type == "all_gather"
        self.in_fp64 = False
        """True inside `exact_attention`: scores, softmax and sums are in fp64."""
        self.softmax_scale = softmax_scale or 1 / math.sqrt(cast("int", k_channels or config.kv_channels))
        size, pattern = config.window_size, cast("int | list[int]", config.window_attn_skip_freq)
        windowed = size is not None and is_layer_window_attention(size, pattern, layer_number)
        self.window = size[0] + 1 if size is not None and windowed and size[0] >= 0 else None

        heads = config.num_attention_heads // self.tp_group.size()
        self.softmax_offset = None
        if config.softmax_type == "learnable":
            self.softmax_offset = torch.nn.Parameter(torch.zeros(heads, dtype=config.params_dtype))
            set_tensor_model_parallel_attributes(self.softmax_offset, is_parallel=True, dim=0, stride=1)
            if config.perform_initialization and config.init_method is not None:
                config.init_method(self.softmax_offset)
        elif config.softmax_type == "off-by-one":
            self.register_buffer("zero_sinks", torch.zeros(heads), persistent=False)
        elif config.softmax_type != "vanilla":
            raise UserError(f"model: softmax_type '{config.softmax_type}' is not supported")

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """Return the attention output `[T, H * Dv]` from query `[T, H, D]`, key `[T, Hkv, D]` and value `[T, Hkv, Dv]`.

        Without packed_seq_params, all these shapes have `s, b` in place of `T`, and attention is causal over s. The function
        ignores attention_mask, so padding must be at the end of each sequence.
        """
        if attn_mask_type not in _CAUSAL or attention_bias is not None:
            raise UserError("model: attention with a bias or a mask that is not causal is not supported")
        if packed_seq_params is not None:
            places = token_places(packed_seq_params, query.shape[0], self.cp_group)
            return self._attend(query, key, value, places).flatten(1)
        length, batch = query.shape[:2]
        context = self.cp_group.size()
        cu_seqlens = torch.arange(0, batch + 1) * (length * context)
        places = TokenPlaces.build(cu_seqlens.to(query.device), batch * length, context, self.cp_group.rank())
        q, k, v = (x.transpose(0, 1).reshape(batch * length, *x.shape[2:]) for x in (query, key, value))
        return self._attend(q, k, v, places).view(batch, length, -1).transpose(0, 1).contiguous()

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, places: TokenPlaces) -> torch.Tensor:
        sinks = None if self.ignore_sinks else getattr(self, "zero_sinks", self.softmax_offset)
        if self.cp_group.size() == 1:
            return self._sink_attention(q, k, v, sinks, cu_seqlens=places.sequences)
        if self.gathers_keys and places.own is not None:
            # The gradients are summed over the ranks whose queries use the key.
            keys, values = (gather_from_sequence_parallel_region(x.contiguous(), group=self.cp_group) for x in (k, v))
            rows = places.own.rows
            borders = {"cu_seqlens": places.own.queries, "cu_seqlens_k": places.own.keys}
            return self._sink_attention(q, keys.index_select(0, rows), values.index_select(0, rows), sinks, **borders)
        return self._attend_by_heads(q, k, v, sinks, places)

    def _attend_by_heads(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, places: TokenPlaces
    ) -> torch.Tensor:
        context, heads = self.cp_group.size(), q.shape[1]
        repeat = context // math.gcd(k.shape[1], context)
        if heads % context or heads % (k.shape[1] * repeat):
            raise UserError(
                f"parallel.context = {context}: a tensor-parallel rank's {heads} heads in {k.shape[1]} groups"
                " cannot be shared; parallel.cp_comm_type: all_gather needs no sharing"
            )
        k, v = (x.repeat_interleave(repeat, dim=1) for x in (k, v))
        q, k, v = (_heads_for_tokens(x, self.cp_group).index_select(0, places.place) for x in (q, k, v))
        if sinks is not None:
            sinks = sinks.view(context, -1)[self.cp_group.rank()]
        out = self._sink_attention(q, k, v, sinks, cu_seqlens=places.sequences)
        return _tokens_for_heads(out.index_select(0, places.order.view(-1)), self.cp_group)

    def _sink_attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, **borders: Any
    ) -> torch.Tensor:
        dtype = torch.float64 if self.in_fp64 else q.dtype
        wide_q, k, v = (x.to(dtype).contiguous() for x in (q, k, v))
        options: dict[str, Any] = {"window": self.window, "scale": self.softmax_scale}
        options |= {"flash_attention": self.flash_attention}
        return sink_attention(wide_q, k, v, sinks, **options, **borders).to(q.dtype)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> ShardedStateDict:
        """Return the sharded sinks, split over the tensor-parallel ranks."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )


@contextlib.contextmanager
def exact_attention(chunks: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Compute attention of these chunks in fp64 inside the block, as a reference for the results in the model's dtype."""
    modules = [module for chunk in chunks for module in chunk.modules() if isinstance(module, CoreAttention)]
    for module in modules:
        module.in_fp64 = True
    try:
        yield
    finally:
        for module in modules:
            module.in_fp64 = False


def _heads_for_tokens(x: torch.Tensor, group: torch.distributed.ProcessGroup) -> torch.Tensor:
    """Turn `[T, H, D]` into `[c * T, H / c, D]` by all-to-all: this rank's heads, for all ranks' tokens, rank by rank."""
    context, (tokens, heads, width) = group.size(), x.shape
    x = x.view(tokens, context, heads // context, width).transpose(0, 1).contiguous()
    return all_to_all(group, x).view(context * tokens, heads // context, width)


def _tokens_for_heads(x: torch.Tensor, group: torch.distributed.ProcessGroup) -> torch.Tensor:
    context, (tokens, heads, width) = group.size(), x.shape
    x = all_to_all(group, x.contiguous()).view(context, tokens // context, heads, width)
    return x.transpose(0, 1).reshape(tokens // context, context * heads, width)


class SelfAttention(MegatronSelfAttention):
    """Megatron's self-attention, with the rotary embedding of packed sequences applied to all tokens at once.

    Megatron splits the pack into its sequences and rotates them one by one: hundreds of small operations per layer.
    """

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        key_value_states: torch.Tensor | None = None,
        inference_context: Any = None,
        rotary_pos_emb: torch.Tensor | tuple | None = None,
        *args: Any,
        packed_seq_params: PackedSeqParams | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run Megatron's `Attention.forward`, but let this class apply the rotary embedding to packed sequences."""
        self._rotation = None
        if packed_seq_params is not None and rotary_pos_emb is not None and not self.config.apply_rope_fusion:
            without = cast("list[int] | None", self.config.no_rope_freq)  # after __post_init__, a pattern is a list
            skipped = without and without[self.layer_number - 1]
            self._rotation = None if skipped else (rotary_pos_emb, packed_seq_params)
            rotary_pos_emb = None
        try:
            return super().forward(
                hidden_states,
                cast("torch.Tensor", attention_mask),  # Megatron's callers also pass None
                key_value_states,
                inference_context,
                rotary_pos_emb,
                *args,
                packed_seq_params=packed_seq_params,
                **kwargs,
            )
        finally:
            self._rotation = None

    def get_query_key_value_tensors(
        self, hidden_states: torch.Tensor, key_value_states: torch.Tensor | None = None, **kwargs: Any
    ) -> tuple[torch.Tensor, ...]:
        """Return query `[s, b, H, D]`, key and value `[s, b, Hkv, D]` (and a gate); packed sequences are already rotated."""
        projected = super().get_query_key_value_tensors(hidden_states, key_value_states, **kwargs)
        query, key, *rest = cast("tuple[torch.Tensor, ...]", projected)  # split, as sizes are not requested
        if self._rotation is not None:
            rotary, packed_seq_params = self._rotation
            positions = token_places(packed_seq_params, query.shape[0], self.pg_collection.cp).positions
            q_angles, k_angles = rotary if isinstance(rotary, tuple) else (rotary, rotary)
            query, key = self.rotate(query, q_angles, positions), self.rotate(key, k_angles, positions)
        return (query, key, *rest)

    def rotate(self, x: torch.Tensor, angles: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotate x `[T, 1, H, D]` by the angles `[S, 1, 1, R]` of its positions `[T]`."""
        options = {"interleaved": self.config.rotary_interleaved, "mscale": self._yarn_concentration_factor}
        return rotate_packed(x, angles, positions, **options)


class HeadsNormSelfAttention(SelfAttention):
    """OLMoE's attention: q_norm and k_norm run over all heads together, also if tensor parallelism splits the heads."""

    norm: type[HeadsRMSNorm] = HeadsRMSNorm

    def __init__(self, config: TransformerConfig, submodules: Any, *args: Any, **kwargs: Any):
        super().__init__(config, submodules, *args, **kwargs)
        eps, tp_group = config.layernorm_epsilon, self.pg_collection.tp
        kv_heads = cast("int", config.num_query_groups)  # an integer after __post_init__
        if kv_heads % tp_group.size():
            raise UserError(f"parallel.tensor = {tp_group.size()}: does not divide {kv_heads} key-value heads")
        self.q_layernorm = self.norm(config, self.query_projection_size, eps, tp_group)
        self.k_layernorm = self.norm(config, self.kv_projection_size, eps, tp_group)


class MLASelfAttention(MegatronMLASelfAttention):
    """Megatron's multi-latent attention (DeepSeek-V3), with exactly the norms that the spec names.

    If queries have no low-rank projection (Moonlight), Megatron puts a second norm before `linear_q_proj`, which the published
    models do not have. Without Transformer Engine, Megatron selects no norm at all. As in SelfAttention, the rotary embedding
    of packed sequences is applied to all tokens at once.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.rotary_pos_emb = _AnglesByToken(self.rotary_pos_emb)

    def get_query_key_value_tensors(
        self,
        hidden_states: torch.Tensor,
        key_value_states: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor | None, ...]:
        """Return Megatron's query, key and value. Megatron treats a pack as one sequence with one row of angles per token."""
        if packed_seq_params is None or self.config.apply_rope_fusion:
            return super().get_query_key_value_tensors(
                hidden_states, key_value_states, position_ids, packed_seq_params, **kwargs
            )
        tokens = hidden_states.shape[0] * (self.pg_collection.tp.size() if self.config.sequence_parallel else 1)
        positions = token_places(packed_seq_params, tokens, self.pg_collection.cp).positions
        one_sequence = dataclasses.replace(packed_seq_params, qkv_format="sbhd", total_tokens=None)
        with self.rotary_pos_emb.of(positions):
            return super().get_query_key_value_tensors(
                hidden_states, key_value_states, position_ids, one_sequence, **kwargs
            )

    def _resolve_qk_norm_config(self, submodules: object) -> dict[str, object]:
        names = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")
        return {name: getattr(submodules, name) or IdentityOp for name in names}


class _AnglesByToken(torch.nn.Module):
    """A rotary embedding that returns one row of angles per token inside `of(positions)`."""

    def __init__(self, rotary: Any):
        super().__init__()
        self.rotary = rotary
        self.get_rotary_seq_len = rotary.get_rotary_seq_len
        self._positions: torch.Tensor | None = None

    @contextlib.contextmanager
    def of(self, positions: torch.Tensor) -> Iterator[None]:
        """Return angles for the tokens at `positions` [T] inside the block."""
        self._positions = positions
        try:
            yield
        finally:
            self._positions = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the angles of all positions, `[S, 1, 1, R]`.

        Inside `of`, return one row for each token of this rank, `[T, 1, R]`. For yarn, mscale is returned too.
        """
        if self._positions is None:
            return self.rotary(*args, **kwargs)
        answer = self.rotary(*args, **kwargs | {"packed_seq": True})  # else context parallelism cuts the angles
        angles, *mscale = answer if isinstance(answer, tuple) else (answer,)
        angles = angles.index_select(0, self._positions).squeeze(1)
        return (angles, *mscale) if mscale else angles
