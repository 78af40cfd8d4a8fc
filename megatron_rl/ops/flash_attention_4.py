"""Attention of packed sequences by FlashAttention 4 (flash-attn-4, CuTe DSL), with the signatures of csrc's flash attention.

The kernels support sinks. Their log of the softmax denominator ([H, T] fp32, natural logarithm) includes the sink. The backward
returns the gradient of the sinks, summed in a fixed order. Each kernel is compiled on first use (2 to 6 s). There is one kernel
per combination of head widths, number of query heads per key head, causal or windowed, with or without sinks.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from megatron_rl.ops.flash import MODULES

LONG = 512
"""Smallest max_seqlen passed to the kernels. It exceeds a tile: smaller values would need extra compiled kernels."""


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
) -> tuple[Tensor, Tensor]:
    """Return (out [T, H, Dv], lse [H, T] fp32, including the sink). cu_q, cu_k: int32 borders on the device; window 0: none."""
    options = _options(cu_q, cu_k, max_q, max_k, window, scale, sinks)
    out, lse, *_ = _interface()._flash_attn_fwd(q, k, v, return_lse=True, **options)
    return out, lse


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
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return (grad_q, grad_k, grad_v, grad_sinks or None).

    Under torch.use_deterministic_algorithms repeated calls give the same bits.
    """
    options = _options(cu_q, cu_k, max_q, max_k, window, scale, sinks)
    deterministic = torch.are_deterministic_algorithms_enabled()
    found = _interface()._flash_attn_bwd(q, k, v, out, grad, lse, deterministic=deterministic, **options)
    return *found[:3], None if sinks is None else found[3]


def _interface() -> Any:
    return importlib.import_module(MODULES["FA4"])


def _options(
    cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, window: int, scale: float, sinks: Tensor | None
) -> dict[str, Any]:
    return {
        "cu_seqlens_q": cu_q,
        "cu_seqlens_k": cu_k,
        "max_seqlen_q": max(max_q, LONG),
        "max_seqlen_k": max(max_k, LONG),
        "softmax_scale": scale,
        "causal": True,
        "window_size_left": window - 1 if window else None,
        "window_size_right": 0 if window else None,
        "learnable_sink": None if sinks is None else sinks.detach(),  # the kernel detaches q, k and v itself
    }
