"""The matrix products of a head, chunk by chunk over tokens: logits, and the gradients of hidden states and weight."""

from __future__ import annotations

import torch

_FP32_ROWS = 8192
"""Rows of the weight that are fp32 at a time without a GPU, whose product has no such output."""


def token_chunks(tokens: int, size: int) -> list[slice]:
    """Cut `tokens` tokens into slices of `size`, the last one shorter; no tokens: no slices."""
    return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)]


def fp32_product(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[n, V] fp32 = hidden [n, H] @ weight [V, H]^T, without an fp32 copy of the whole weight; fp64 stays fp64."""
    if hidden.dtype != torch.bfloat16:
        return hidden @ weight.t()
    if hidden.is_cuda:
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    hidden = hidden.float()
    return torch.cat([hidden @ part.float().t() for part in weight.split(_FP32_ROWS)], 1)


class HeadGradients:
    """The gradients of hidden [T, H] and weight [V, H], summed chunk by chunk."""

    def __init__(self, hidden: torch.Tensor, weight: torch.Tensor, chunks: int, *, of_weight: bool) -> None:
        """of_weight: a frozen head has none, which saves a product and the memory of its sum."""
        self.hidden, self._of_weight = torch.empty_like(hidden), of_weight
        # Summed over chunks in fp32 at least.
        total = torch.promote_types(weight.dtype, torch.float32)
        self.weight = torch.zeros_like(weight, dtype=total) if of_weight and chunks != 1 else None

    def add(self, chunk: slice, hidden: torch.Tensor, weight: torch.Tensor, grad_logits: torch.Tensor) -> None:
        """Add what grad_logits [n, V] of tokens `chunk`, whose hidden states are `hidden` [n, H], give."""
        grad_logits = grad_logits.to(weight.dtype)
        self.hidden[chunk] = grad_logits @ weight
        if not self._of_weight:
            return
        if self.weight is None:
            self.weight = grad_logits.t() @ hidden
        elif self.weight.dtype == grad_logits.dtype:
            self.weight.addmm_(grad_logits.t(), hidden)
        else:
            self.weight += grad_logits.t() @ hidden
