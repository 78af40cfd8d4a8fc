"""Experts on the CPU, for rows sorted by expert: two matrix multiplications per expert, and all other work at once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F


def moe_forward(original: Callable, layer, x: torch.Tensor, topk_output, config) -> torch.Tensor:
    """Compute the MoE layer like SGLang's `moe_forward_native`, which is still used for unsupported options.

    x: [T, d]; layer.w13_weight: [E, 2i, d]; layer.w2_weight: [E, d, i]; biases: fp32 or none. Returns [T, d]. The original runs
    a dozen operators per expert. For gpt-oss, it also compiles its activation at the first request.
    """
    if config.apply_router_weight_on_input or config.activation != "silu":
        return original(layer, x, topk_output, config)
    weights, ids, _ = topk_output
    rows, topk = ids.shape
    experts, order = ids.reshape(-1).sort()
    counts = torch.bincount(experts, minlength=layer.num_experts).tolist()
    hidden = _grouped_linear(x[order // topk], layer.w13_weight, counts)
    hidden = _add_bias(hidden, getattr(layer, "w13_weight_bias", None), experts)
    hidden = _swiglu(hidden, config.gemm1_alpha, config.gemm1_clamp_limit)
    out = _grouped_linear(hidden, layer.w2_weight, counts)
    out = _add_bias(out, getattr(layer, "w2_weight_bias", None), experts)
    unsorted = torch.empty_like(out)
    unsorted[order] = out
    # The router's weights are fp32, so products and sum are fp32 too.
    return (unsorted.view(rows, topk, -1) * weights[..., None]).sum(1).to(x.dtype)


def _grouped_linear(x: torch.Tensor, weight: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """Multiply x [T, n], sorted by expert, by the transpose of each expert's weight [m, n]: [T, m]. counts: rows per expert."""
    out = x.new_empty(len(x), weight.shape[1])
    start = 0
    for expert, count in enumerate(counts):
        if count:
            out[start : start + count] = torch.mm(x[start : start + count], weight[expert].t())
        start += count
    return out


def _add_bias(x: torch.Tensor, bias: torch.Tensor | None, experts: torch.Tensor) -> torch.Tensor:
    return x if bias is None else (x.float() + bias[experts]).to(x.dtype)


def _swiglu(x: torch.Tensor, alpha: float | None, limit: float | None) -> torch.Tensor:
    """Apply SwiGLU: [T, 2i] -> [T, i].

    With alpha (gpt-oss), the inputs are interleaved and clamped: gate * sigmoid(alpha * gate) * (up + 1).
    """
    if alpha is None:
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up
    gate, up = x[..., ::2].clamp(max=limit), x[..., 1::2].clamp(-limit, limit)
    return gate * torch.sigmoid(gate * alpha) * (up + 1)
