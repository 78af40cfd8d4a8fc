"""sink_attention in plain torch: its definition, and kernels for cases that the compiled kernels do not support.

`forward` and `backward` compute tile by tile. They handle fp64 on every device, and on CUDA also fp32 and all heads that no
flash attention supports. `flash_forward` and `flash_backward` add the sink to torch's flash attention, if the CUDA part of csrc
is not built. All have the signatures of the kernels in csrc.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

_BLOCK = 256
"""Largest number of queries per block; longer sequences are cut into blocks."""
_TILE_SCORES = 1 << 22
"""Largest number of scores (heads x queries x keys) of one tile, which bounds the memory."""


def attention_by_definition(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    *,
    cu_seqlens: Tensor,
    cu_seqlens_k: Tensor | None = None,
    window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """Compute attention one sequence at a time, in the precision of the inputs; differentiable.

    Arguments as in `ops.sink_attention`.
    """
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    heads, groups = q.shape[1], q.shape[1] // k.shape[1]
    borders = [c.tolist() for c in (cu_seqlens, cu_seqlens if cu_seqlens_k is None else cu_seqlens_k)]
    outputs = []
    for start, end, k_start, k_end in zip(borders[0], borders[0][1:], borders[1], borders[1][1:], strict=False):
        keys, values = (x[k_start:k_end].repeat_interleave(groups, dim=1) for x in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q[start:end], keys) * factor
        hidden = _mask(k_end - k_start - (end - start), k_end - k_start, 0, k_end - k_start, window, q.device)
        scores = scores.masked_fill(hidden, -math.inf)
        if sinks is not None:
            sink = sinks.to(scores.dtype)[:, None, None].expand(heads, end - start, 1)
            scores = torch.cat([scores, sink], dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., : k_end - k_start]
        outputs.append(torch.einsum("hij,jhd->ihd", weights, values))
    return torch.cat(outputs) if outputs else q.new_zeros((0, heads, v.shape[-1]))


def forward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, cu_q: Tensor, cu_k: Tensor, window: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Return out [Tq, H, Dv], in the dtype of q, and lse [H, Tq], the log of the softmax denominator, including the sink.

    cu_q, cu_k: int64 borders on the CPU; window 0: none. Softmax in fp32 (fp64 for fp64).
    """
    work = torch.promote_types(q.dtype, torch.float32)
    out = q.new_zeros((q.shape[0], q.shape[1], v.shape[2]))
    lse = torch.zeros(q.shape[1], q.shape[0], dtype=work, device=q.device)
    for tile in _tiles(cu_q, cu_k, window, q.shape[1]):
        scores, _, _ = _scores(q, k, tile, window, scale, work)
        log_sum = torch.logsumexp(scores, dim=-1)  # [Hkv, G, Lq]
        if sinks is not None:
            log_sum = torch.logaddexp(log_sum, sinks.to(work).view(*scores.shape[:2], 1))
        weights = scores.sub_(log_sum.unsqueeze(-1)).exp_()
        values = v[tile.keys].to(work).transpose(0, 1).unsqueeze(1)  # [Hkv, 1, Lk, Dv]
        out[tile.queries] = (weights @ values).flatten(0, 1).transpose(0, 1).to(out.dtype)
        lse[:, tile.queries] = log_sum.flatten(0, 1)
    return out, lse


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return (grad_q, grad_k, grad_v, in the dtype of q, grad_sinks or None). Tiles recompute their weights from lse."""
    work = lse.dtype
    grad_q, grad_k, grad_v = (torch.zeros_like(x, dtype=work) for x in (q, k, v))
    delta = (grad.to(work) * out.to(work)).sum(-1).t()  # [H, Tq]
    for tile in _tiles(cu_q, cu_k, window, q.shape[1]):
        scores, queries, keys = _scores(q, k, tile, window, scale, work)
        heads = scores.shape[:2]
        weights = scores.sub_(lse[:, tile.queries].unflatten(0, heads).unsqueeze(-1)).exp_()
        values = v[tile.keys].to(work).transpose(0, 1).unsqueeze(1)
        grads = grad[tile.queries].to(work).transpose(0, 1).unflatten(0, heads)  # [Hkv, G, Lq, Dv]
        grad_v[tile.keys] += (weights.transpose(-1, -2) @ grads).sum(1).transpose(0, 1)
        means = delta[:, tile.queries].unflatten(0, heads).unsqueeze(-1)
        grad_scores = (grads @ values.transpose(-1, -2)).sub_(means).mul_(weights).mul_(scale)
        grad_q[tile.queries] = (grad_scores @ keys).flatten(0, 1).transpose(0, 1)
        grad_k[tile.keys] += (grad_scores.transpose(-1, -2) @ queries).sum(1).transpose(0, 1)
    grad_sinks = None if sinks is None else -(torch.exp(sinks.to(work)[:, None] - lse) * delta).sum(1)
    return grad_q.to(q.dtype), grad_k.to(q.dtype), grad_v.to(q.dtype), grad_sinks


def apply_sink(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> None:
    """Turn plain attention into attention with sinks, in place: O' = O exp(L - L'), L' = log(exp(L) + exp(sink)).

    out: [T, H, D]; lse: [H, >= T] fp32, columns after T do not change; sinks: [H].
    """
    plain = lse[:, : out.shape[0]]
    sinks = sinks[:, None]
    # exp(L - L') = 1 / (1 + exp(sink - L)). Without a sink the factor is 1, also in a row without keys.
    share = torch.where(sinks == -math.inf, 1.0, torch.sigmoid(plain - sinks))
    out.mul_(share.t().unsqueeze(-1))
    plain.copy_(torch.where(sinks == -math.inf, plain, torch.logaddexp(plain, sinks)))


def sink_gradient(grad: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Return the gradient of the sinks, [H] fp32: -sum over tokens of exp(sink - L') (O' . dO').

    out and lse are O' and L', the results of `apply_sink`.
    """
    delta = (grad.to(lse.dtype) * out).sum(-1).t()
    weights = torch.exp(sinks[:, None] - lse[:, : out.shape[0]])
    return -torch.where(sinks[:, None] == -math.inf, 0.0, weights * delta).sum(1)


def flash_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return out, lse and two tensors for the backward, as in csrc/sink_attention/binding.cpp.

    cu_q, cu_k: int32 borders on the device.
    """
    if len(q) == 0:
        none = q.new_empty(0, dtype=torch.float32)
        return q.new_empty(0, q.shape[1], v.shape[2]), none.view(q.shape[1], 0), none, none
    out, lse, rng_state, unused, _ = torch.ops.aten._flash_attention_forward(
        q, k, _pad(v, q), cu_q, cu_k, *_lengths(max_q, max_k), 0.0, True, False, scale=scale, **_window(window)
    )
    if sinks is not None:
        out = out.contiguous()
        apply_sink(out, lse, sinks)
    return out[..., : v.shape[2]].contiguous(), lse, rng_state, unused


def flash_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    window: int,
    scale: float,
    rng_state: Tensor,
    unused: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return (grad_q, grad_k, grad_v, grad_sinks or None).

    Flash attention's backward pass runs with grad, out and lse of the attention with sinks (O' and L' in `apply_sink`).
    """
    if len(q) == 0:
        return torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v), None if sinks is None else 0 * sinks
    grad_q, grad_k, grad_v = torch.ops.aten._flash_attention_backward(
        *(_pad(grad, q), q, k, _pad(v, q), _pad(out, q), lse, cu_q, cu_k, *_lengths(max_q, max_k), 0.0, True),
        *(rng_state, unused),
        scale=scale,
        **_window(window),
    )
    grad_sinks = None if sinks is None else sink_gradient(grad, out, lse, sinks)
    return grad_q, grad_k, grad_v[..., : v.shape[2]].contiguous(), grad_sinks


def _pad(x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Pad the last dimension to the width of q, as the kernels require."""
    return F.pad(x, (0, q.shape[2] - x.shape[2])) if x.shape[2] < q.shape[2] else x


def _lengths(max_q: int, max_k: int) -> tuple[int, int]:
    """Return the lengths with max_q at least 2. For one query per sequence FlashAttention 2 would use a decoding path."""
    return max(max_q, 2), max_k


def _window(window: int) -> dict[str, int | None]:
    return {"window_size_left": window - 1 if window else None, "window_size_right": 0 if window else None}


@dataclass(frozen=True)
class _Tile:
    """Queries of one sequence and the keys that they may attend to. Positions are indices of the sequence's keys."""

    queries: slice
    keys: slice
    first_query: int
    first_key: int


def _tiles(cu_q: torch.Tensor, cu_k: torch.Tensor, window: int, heads: int) -> list[_Tile]:
    tiles = []
    for start, end, k_start, k_end in zip(
        cu_q.tolist(), cu_q[1:].tolist(), cu_k.tolist(), cu_k[1:].tolist(), strict=False
    ):
        before = k_end - k_start - (end - start)
        block = max(16, min(_BLOCK, _TILE_SCORES // (heads * max(1, k_end - k_start))))
        for first in range(start, end, block):
            last = min(first + block, end)
            position = before + first - start
            oldest = max(0, position - window + 1) if window else 0
            keys = slice(k_start + oldest, k_start + before + last - start)
            tiles.append(_Tile(slice(first, last), keys, position, oldest))
    return tiles


def _mask(
    q_first: int, q_last: int, k_first: int, k_last: int, window: int | None, device: torch.device
) -> torch.Tensor:
    i, j = torch.arange(q_first, q_last, device=device)[:, None], torch.arange(k_first, k_last, device=device)[None]
    return (j > i) | (j <= i - window) if window else j > i


def _scores(
    q: Tensor, k: Tensor, tile: _Tile, window: int, scale: float, work: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return scaled scores [Hkv, G, Lq, Lk] (-inf if masked), queries [Hkv, G, Lq, D] and keys [Hkv, 1, Lk, D]."""
    kv_heads = k.shape[1]
    queries = q[tile.queries].to(work).transpose(0, 1).unflatten(0, (kv_heads, -1))
    keys = k[tile.keys].to(work).transpose(0, 1).unsqueeze(1)
    scores = (queries * scale) @ keys.transpose(-1, -2)
    ends = tile.first_query + scores.shape[-2], tile.first_key + scores.shape[-1]
    hidden = _mask(tile.first_query, ends[0], tile.first_key, ends[1], window, q.device)
    return scores.masked_fill_(hidden, -math.inf), queries, keys
