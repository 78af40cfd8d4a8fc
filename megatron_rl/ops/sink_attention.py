"""Causal attention over packed sequences, with sliding windows and learnable attention sinks.

A sink (gpt-oss, after "Efficient Streaming Language Models with Attention Sinks", arXiv 2309.17453) is one more logit
per head that takes part in the softmax's denominator and has no value:

    out_i = sum_j exp(s_ij) v_j / (exp(sink) + sum_j exp(s_ij)),    s_ij = scale * q_i . k_j

With L_i = log(exp(sink) + sum_j exp(s_ij)) and p_ij = exp(s_ij - L_i) the gradients are those of plain attention, and
d sink = -sum_i exp(sink - L_i) (out_i . dout_i).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

_BLOCK = 256
"""Sequences longer than this are cut into blocks of so many queries."""
_TILE_SCORES = 1 << 22
"""Scores (heads x queries x keys) of one tile at most: what bounds the memory."""
_WIDTHS = torch.tensor([1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256])
"""Padded lengths of short sequences, which are computed in batches of similar length."""


def sink_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    *,
    cu_seqlens: torch.Tensor,
    window: int | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """Causal attention inside each packed sequence.

    q `[T, H, D]`, k `[T, Hkv, D]`, v `[T, Hkv, Dv]`, H a multiple of Hkv (query head h reads key head h // (H / Hkv));
    sinks `[H]` or None; cu_seqlens `[S + 1]` starts of the sequences and T, empty sequences allowed; with `window` w
    query i sees keys i-w < j <= i; scale defaults to 1 / sqrt(D). Returns `[T, H, Dv]` of q's type; softmax in fp32
    (fp64 for fp64). Gradients reach q, k, v and sinks. Memory: a few tiles beside inputs and outputs, whatever the
    lengths.
    Errors: ValueError where shapes do not fit.
    """
    _check(q, k, v, sinks, cu_seqlens, window)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return _SinkAttention.apply(q, k, v, sinks, cu_seqlens, window, scale)


def sink_attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    *,
    cu_seqlens: torch.Tensor,
    window: int | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """The definition, one sequence at a time, in the inputs' own precision. Arguments as in `sink_attention`."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    heads, groups = q.shape[1], q.shape[1] // k.shape[1]
    outputs = []
    for start, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        keys, values = (x[start:end].repeat_interleave(groups, dim=1) for x in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q[start:end], keys) * scale
        i, j = torch.arange(end - start)[:, None], torch.arange(end - start)[None]
        visible = (j <= i) if window is None else (j <= i) & (j > i - window)
        scores = scores.masked_fill(~visible.to(q.device), -math.inf)
        if sinks is not None:
            sink = sinks.to(scores.dtype)[:, None, None].expand(heads, end - start, 1)
            scores = torch.cat([scores, sink], dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., : end - start]
        outputs.append(torch.einsum("hij,jhd->ihd", weights, values))
    return torch.cat(outputs) if outputs else q.new_zeros((0, heads, v.shape[-1]))


def _check(q, k, v, sinks, cu_seqlens, window) -> None:
    tokens, heads = q.shape[0], q.shape[1]
    if k.shape[0] != tokens or v.shape[:2] != k.shape[:2] or k.shape[2] != q.shape[2] or heads % k.shape[1]:
        raise ValueError(
            f"sink_attention: shapes of q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} do not fit"
        )
    if sinks is not None and sinks.shape != (heads,):
        raise ValueError(f"sink_attention: sinks {tuple(sinks.shape)} for {heads} heads")
    if window is not None and window < 1:
        raise ValueError(f"sink_attention: window {window} is below 1")
    if cu_seqlens.ndim != 1 or len(cu_seqlens) == 0 or int(cu_seqlens[0]) != 0 or int(cu_seqlens[-1]) != tokens:
        raise ValueError(f"sink_attention: cu_seqlens must run from 0 to {tokens} tokens")


@dataclass(frozen=True)
class _Tile:
    """Queries and keys of one batched computation: B problems of Lq queries and Lk keys each."""

    q_rows: torch.Tensor | slice
    """[B * Lq] token of each query (one that exists where it is padding), or the tokens themselves."""
    k_rows: torch.Tensor | slice
    q_valid: torch.Tensor | None
    """[B * Lq] bool, None where there is no padding. Keys need none: no valid query sees a padded key."""
    k_valid: torch.Tensor | None
    batch: int
    mask: torch.Tensor
    """[Lq, Lk] bool, True where a query may not look."""


def _tiles(cu_seqlens: torch.Tensor, window: int | None, heads: int, device: torch.device) -> list[_Tile]:
    """Cut the packed sequences into tiles: short ones batched by padded length, long ones block by block of queries."""
    starts = cu_seqlens[:-1].to("cpu", torch.int64)
    lengths = cu_seqlens[1:].to("cpu", torch.int64) - starts
    tiles = []
    short = (lengths > 0) & (lengths <= _BLOCK)
    bucket = torch.searchsorted(_WIDTHS, lengths.clamp(max=_BLOCK))
    for index in bucket[short].unique().tolist():
        width = int(_WIDTHS[index])
        chosen = short & (bucket == index)
        mask = _mask(0, width, 0, width, window).to(device)
        per_tile = max(1, _TILE_SCORES // (heads * width * width))
        for part_starts, part_lengths in zip(
            starts[chosen].split(per_tile), lengths[chosen].split(per_tile), strict=True
        ):
            tiles.append(_short_tile(part_starts, part_lengths, width, mask, device))
    for start, length in zip(starts[lengths > _BLOCK].tolist(), lengths[lengths > _BLOCK].tolist(), strict=True):
        block = max(16, min(_BLOCK, _TILE_SCORES // (heads * min(length, (window or length) + _BLOCK))))
        for first in range(0, length, block):
            last = min(first + block, length)
            oldest = 0 if window is None else max(0, first - window + 1)
            mask = _mask(first, last, oldest, last, window).to(device)
            q_rows, k_rows = slice(start + first, start + last), slice(start + oldest, start + last)
            tiles.append(_Tile(q_rows, k_rows, None, None, 1, mask))
    return tiles


def _short_tile(starts, lengths, width: int, mask: torch.Tensor, device: torch.device) -> _Tile:
    offsets = torch.arange(width)
    valid = (offsets < lengths[:, None]).reshape(-1)
    if bool(valid.all()) and bool((starts[1:] == starts[:-1] + width).all()):
        rows: torch.Tensor | slice = slice(int(starts[0]), int(starts[-1]) + width)
    else:
        rows = (starts[:, None] + torch.minimum(offsets, lengths[:, None] - 1)).reshape(-1).to(device)
    padding = None if bool(valid.all()) else valid.to(device)
    return _Tile(rows, rows, padding, padding, len(starts), mask)


def _mask(q_first: int, q_last: int, k_first: int, k_last: int, window: int | None) -> torch.Tensor:
    i, j = torch.arange(q_first, q_last)[:, None], torch.arange(k_first, k_last)[None]
    return (j > i) if window is None else (j > i) | (j <= i - window)


def _take(x: torch.Tensor, rows: torch.Tensor | slice, batch: int, groups: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of `[T, Hkv * groups, D]` as `[B * Hkv, groups * L, D]`."""
    x = (x[rows] if isinstance(rows, slice) else x.index_select(0, rows)).to(dtype)
    length, heads, width = x.shape[0] // batch, x.shape[1] // groups, x.shape[2]
    return (
        x.view(batch, length, heads, groups, width)
        .permute(0, 2, 3, 1, 4)
        .reshape(batch * heads, groups * length, width)
    )


def _put(out: torch.Tensor, x: torch.Tensor, rows, valid, batch: int, groups: int, add: bool = False) -> None:
    """The inverse of `_take`: write (or add) `[B * Hkv, groups * L, D]` to the rows of out, padding left out."""
    heads, width = out.shape[1] // groups, out.shape[2]
    length = x.shape[1] // groups
    x = (
        x.view(batch, heads, groups, length, width)
        .permute(0, 3, 1, 2, 4)
        .reshape(batch * length, heads * groups, width)
    )
    if isinstance(rows, slice):
        out[rows] = out[rows] + x if add else x.to(out.dtype)
        return
    if valid is not None:
        x, rows = x[valid], rows[valid]
    out[rows] = x.to(out.dtype)


def _scores(queries, keys, mask, scale: float, groups: int) -> torch.Tensor:
    """`[B * Hkv, groups, Lq, Lk]` scaled scores, -inf where masked."""
    scores = torch.bmm(queries * scale, keys.transpose(1, 2)).view(len(queries), groups, *mask.shape)
    return scores.masked_fill_(mask, -math.inf)


class _SinkAttention(torch.autograd.Function):
    """Tiles forward; the backward computes each tile's weights again from L (the log of the denominator)."""

    @staticmethod
    def forward(ctx, q, k, v, sinks, cu_seqlens, window, scale):
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        groups, kv_heads = q.shape[1] // k.shape[1], k.shape[1]
        tiles = _tiles(cu_seqlens, window, q.shape[1], q.device)
        out = q.new_zeros((q.shape[0], q.shape[1], v.shape[2]))
        denominators = []
        for tile in tiles:
            queries = _take(q, tile.q_rows, tile.batch, groups, dtype)
            keys, values = (_take(x, tile.k_rows, tile.batch, 1, dtype) for x in (k, v))
            scores = _scores(queries, keys, tile.mask, scale, groups)
            log_sum = torch.logsumexp(scores, dim=-1)
            if sinks is not None:
                log_sum = torch.logaddexp(log_sum, _sink(sinks, tile.batch, kv_heads, groups, dtype))
            weights = scores.sub_(log_sum.unsqueeze(-1)).exp_()
            _put(out, torch.bmm(weights.flatten(1, 2), values), tile.q_rows, tile.q_valid, tile.batch, groups)
            denominators.append(log_sum)
        ctx.save_for_backward(q, k, v, sinks, out, *denominators)
        ctx.tiles, ctx.scale, ctx.dtype = tiles, scale, dtype
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        q, k, v, sinks, out, *denominators = ctx.saved_tensors
        groups, kv_heads, dtype = q.shape[1] // k.shape[1], k.shape[1], ctx.dtype
        grad_q = torch.zeros_like(q)
        grad_k, grad_v = (torch.zeros_like(x, dtype=dtype) for x in (k, v))
        grad_sinks = None if sinks is None else torch.zeros(sinks.shape, dtype=dtype, device=sinks.device)
        delta = (grad.to(dtype) * out.to(dtype)).sum(-1, keepdim=True)  # [T, H, 1]
        for tile, log_sum in zip(ctx.tiles, denominators, strict=True):
            batch = tile.batch
            queries = _take(q, tile.q_rows, batch, groups, dtype)
            keys, values = (_take(x, tile.k_rows, batch, 1, dtype) for x in (k, v))
            grads = _take(grad, tile.q_rows, batch, groups, dtype)
            deltas = _take(delta, tile.q_rows, batch, groups, dtype)
            if tile.q_valid is not None:
                padding = _take(~tile.q_valid[:, None, None], slice(None), batch, 1, torch.bool)
                padding = padding.repeat_interleave(kv_heads, dim=0).repeat(1, groups, 1)
                grads, deltas = grads.masked_fill_(padding, 0), deltas.masked_fill_(padding, 0)
            weights = (
                _scores(queries, keys, tile.mask, ctx.scale, groups).sub_(log_sum.unsqueeze(-1)).exp_().flatten(1, 2)
            )
            _put(grad_v, torch.bmm(weights.transpose(1, 2), grads), tile.k_rows, tile.k_valid, batch, 1, add=True)
            grad_scores = torch.bmm(grads, values.transpose(1, 2)).sub_(deltas).mul_(weights).mul_(ctx.scale)
            _put(grad_q, torch.bmm(grad_scores, keys), tile.q_rows, tile.q_valid, batch, groups)
            _put(grad_k, torch.bmm(grad_scores.transpose(1, 2), queries), tile.k_rows, tile.k_valid, batch, 1, add=True)
            if sinks is not None:
                on_sink = (_sink(sinks, batch, kv_heads, groups, dtype) - log_sum).exp_()  # [B * Hkv, groups, Lq]
                share = (on_sink * deltas.view_as(on_sink)).view(batch, kv_heads, groups, -1)
                grad_sinks -= share.sum(dim=(0, 3)).flatten()
        grad_k, grad_v = grad_k.to(k.dtype), grad_v.to(v.dtype)
        return grad_q, grad_k, grad_v, None if sinks is None else grad_sinks.to(sinks.dtype), None, None, None


def _sink(sinks: torch.Tensor, batch: int, kv_heads: int, groups: int, dtype: torch.dtype) -> torch.Tensor:
    """`[B * Hkv, groups, 1]`"""
    return sinks.to(dtype).view(kv_heads, groups, 1).repeat(batch, 1, 1)
