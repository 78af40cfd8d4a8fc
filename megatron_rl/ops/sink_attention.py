"""Causal attention over packed sequences, with sliding windows and learnable attention sinks.

A sink (gpt-oss, after "Efficient Streaming Language Models with Attention Sinks", arXiv 2309.17453) is an extra logit per head
that enters the softmax denominator but has no value:

    out_i = sum_j exp(s_ij) v_j / (exp(sink) + sum_j exp(s_ij)),    s_ij = scale * q_i . k_j

Let L_i = log(exp(sink) + sum_j exp(s_ij)) and p_ij = exp(s_ij - L_i). The gradients of q, k and v have the same form as in
plain attention. The gradient of the sink is d sink = -sum_i exp(sink - L_i) (out_i . dout_i).

The kernels are in csrc/sink_attention/.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatron_rl.ops import flash, flash_attention_4
from megatron_rl.ops import sink_attention_torch as plain
from megatron_rl.ops.device import upload
from megatron_rl.ops.extensions import sink_attention as compiled

_OP = "sink_attention"


@dataclass(frozen=True)
class PackedSequences:
    """Borders of packed sequences, read once for all layers of the model."""

    borders: torch.Tensor
    """[S + 1] int64 on the CPU: start of each sequence, then the end of the last one."""
    on_device: torch.Tensor
    """The same borders, int32, on the device of the tokens."""
    max_length: int
    """Number of tokens of the longest sequence."""

    @classmethod
    def of(cls, cu_seqlens: torch.Tensor, device: torch.device) -> PackedSequences:
        """Read the borders cu_seqlens [S + 1]. If they are on a GPU, the host waits for them.

        Errors: ValueError if the borders do not start at 0 or do not rise.
        """
        _require(
            cu_seqlens.ndim == 1 and cu_seqlens.numel() > 0 and not cu_seqlens.is_floating_point(),
            f"cu_seqlens must be integers of shape [S + 1], not {cu_seqlens.dtype} {list(cu_seqlens.shape)}",
        )
        borders = cu_seqlens.to("cpu", torch.int64).contiguous()
        lengths = borders.diff()
        _require(int(borders[0]) == 0, f"cu_seqlens starts at {int(borders[0])}, must start at 0")
        _require(
            bool((lengths >= 0).all()),
            f"cu_seqlens falls after entry {int((lengths < 0).byte().argmax())}: {borders.tolist()[:20]}",
        )
        return cls(borders, cu_seqlens.to(device, torch.int32), int(lengths.max()) if len(lengths) else 0)

    def to(self, device: torch.device) -> PackedSequences:
        """Return the borders for tokens on `device`, without waiting for the device."""
        return replace(self, on_device=upload(self.on_device, device))


def sink_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    *,
    cu_seqlens: torch.Tensor | PackedSequences,
    window: int | None = None,
    scale: float | None = None,
    cu_seqlens_k: torch.Tensor | PackedSequences | None = None,
    flash_attention: flash.FlashImpl = "torch",
) -> torch.Tensor:
    """Compute causal attention inside each packed sequence: `[T, H, Dv]` in the dtype of q.

    q: `[T, H, D]`; k: `[T, Hkv, D]`; v: `[T, Hkv, Dv]`; all contiguous and of one dtype (fp32, bf16 or fp64). H is a multiple
    of Hkv; query head h reads key head h // (H / Hkv).
    sinks: `[H]` or None; -inf means no sink.
    cu_seqlens: `[S + 1]`, starts of the sequences, then T; sequences may be empty.
    window: with window w, query i sees the keys i-w < j <= i.
    scale: 1 / sqrt(D) by default.
    cu_seqlens_k: separate borders of the keys. Each sequence has at least as many keys as queries, and its last query is at
    the position of its last key.
    flash_attention: kernel for bf16 on CUDA, as in ModelConfig.

    The softmax is in fp32 (fp64 for fp64). Gradients reach q, k, v and sinks. Repeated runs give the same bits; the gradients
    of a flash attention on CUDA need torch.use_deterministic_algorithms for this.
    Memory: a few tiles besides inputs, outputs and gradients, for any sequence length.
    Errors: ValueError that names the argument, before anything is computed.
    """
    _check(q, k, v, sinks, window)
    sequences = _sequences(cu_seqlens, q.device)
    key_sequences = sequences if cu_seqlens_k is None else _sequences(cu_seqlens_k, q.device)
    _check_borders(q, k, sequences, key_sequences)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if window is not None and window >= key_sequences.max_length:
        window = None
    out: Any = _SinkAttention.apply(q, k, v, sinks, sequences, key_sequences, window or 0, scale, flash_attention)
    return out


def sink_attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    *,
    cu_seqlens: torch.Tensor,
    window: int | None = None,
    scale: float | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute attention by its definition, in plain differentiable torch and in the precision of the inputs.

    Arguments as in `sink_attention`.
    """
    options = {"cu_seqlens": cu_seqlens, "cu_seqlens_k": cu_seqlens_k, "window": window, "scale": scale}
    return plain.attention_by_definition(q, k, v, sinks, **options)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(f"{_OP}: {message}")


def _sequences(cu_seqlens: torch.Tensor | PackedSequences, device: torch.device) -> PackedSequences:
    return cu_seqlens if isinstance(cu_seqlens, PackedSequences) else PackedSequences.of(cu_seqlens, device)


def _check(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, window: int | None) -> None:
    shapes = f"shapes of q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)} do not fit"
    _require(q.ndim == k.ndim == v.ndim == 3, f"{shapes}: must be [T, H, D]")
    _require(min(q.shape[1], k.shape[1], q.shape[2], v.shape[2]) > 0, f"{shapes}: heads and widths must be at least 1")
    _require(
        v.shape[:2] == k.shape[:2] and k.shape[2] == q.shape[2] and k.shape[1] > 0 and q.shape[1] % k.shape[1] == 0,
        shapes,
    )
    floating = (torch.float32, torch.bfloat16, torch.float64)
    for name, x in (("q", q), ("k", k), ("v", v)):
        _require(
            x.dtype in floating and x.dtype == q.dtype,
            f"{name} is {x.dtype}; q, k and v must be fp32, bf16 or fp64 alike",
        )
        _require(x.device == q.device, f"{name} is on {x.device}, q on {q.device}")
        _require(x.is_contiguous(), f"{name} is not contiguous: call .contiguous() first")
    _require(q.device.type in ("cpu", "cuda"), f"q is on {q.device}, must be on a CPU or a CUDA GPU")
    if sinks is not None:
        _require(sinks.shape == (q.shape[1],), f"sinks {list(sinks.shape)} for {q.shape[1]} heads")
        _require(sinks.is_floating_point() and sinks.device == q.device, f"sinks are {sinks.dtype} on {sinks.device}")
    _require(window is None or window >= 1, f"window {window} is below 1")


def _check_borders(q: Tensor, k: Tensor, sequences: PackedSequences, key_sequences: PackedSequences) -> None:
    for name, x, borders in (("cu_seqlens", q, sequences.borders), ("keys' cu_seqlens", k, key_sequences.borders)):
        _require(
            int(borders[-1]) == x.shape[0], f"{name} must run from 0 to {x.shape[0]} tokens, not to {int(borders[-1])}"
        )
    if sequences is not key_sequences:
        _require(len(sequences.borders) == len(key_sequences.borders), "cu_seqlens and cu_seqlens_k differ in length")
        more = sequences.borders.diff() > key_sequences.borders.diff()
        _require(not bool(more.any()), f"sequence {int(more.byte().argmax())} has more queries than keys")


def _kernels(
    q: Tensor, v: Tensor, sequences: PackedSequences, key_sequences: PackedSequences, asked: flash.FlashImpl
) -> tuple[Callable, Callable, tuple]:
    if q.is_cuda:
        capability = torch.cuda.get_device_capability(q.device)
        heads = flash.Heads(q.shape[2], v.shape[2], grouped=q.shape[1] != v.shape[1])
        chosen = flash.choose(asked, q.dtype, heads, capability)
        if chosen is not None:
            kernels = flash_attention_4 if chosen == "FA4" else compiled if compiled.cuda else plain
            borders = sequences.on_device, key_sequences.on_device, sequences.max_length, key_sequences.max_length
            return kernels.flash_forward, kernels.flash_backward, borders
    kernels = plain if q.dtype == torch.float64 or q.is_cuda else compiled
    return kernels.forward, kernels.backward, (sequences.borders, key_sequences.borders)


class _SinkAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        sequences: PackedSequences,
        key_sequences: PackedSequences,
        window: int,
        scale: float,
        flash_attention: flash.FlashImpl,
    ) -> Tensor:
        fp32_sinks = None if sinks is None else sinks.to(torch.promote_types(q.dtype, torch.float32)).contiguous()
        forward, ctx.kernel, borders = _kernels(q, v, sequences, key_sequences, flash_attention)
        ctx.options = (*borders, window, scale)
        out, lse, *more = forward(q, k, v, fp32_sinks, *ctx.options)
        ctx.save_for_backward(q, k, v, fp32_sinks, out, lse, *more)
        ctx.sinks_dtype = None if sinks is None else sinks.dtype
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, lse, *more = ctx.saved_tensors
        *grads, grad_sinks = ctx.kernel(grad.contiguous(), q, k, v, sinks, out, lse, *ctx.options, *more)
        return *grads, None if sinks is None else grad_sinks.to(ctx.sinks_dtype), *[None] * 5
