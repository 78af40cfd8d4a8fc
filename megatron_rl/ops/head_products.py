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


def scaled(tensor: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Tensor times factor [1], rounded to dtype; on a GPU one pass over it, in which nothing else of its size is written."""
    return torch.mul(tensor, factor, out=torch.empty_like(tensor, dtype=dtype))


class HeadGradients:
    """The gradients of hidden [T, H] and weight [V, H], summed chunk by chunk."""

    def __init__(self, hidden: torch.Tensor, weight: torch.Tensor, chunks: int, *, of_weight: bool) -> None:
        """of_weight: a frozen head has none, which saves a product and the memory of its sum."""
        self.hidden, self._of_weight = torch.empty_like(hidden), of_weight
        # Summed over chunks in fp32 at least. On a GPU the sum begins with the first product.
        self._total = torch.promote_types(weight.dtype, torch.float32) if chunks != 1 else weight.dtype
        zeros = of_weight and (chunks == 0 or (chunks > 1 and not weight.is_cuda))
        self.weight = torch.zeros_like(weight, dtype=self._total) if zeros else None

    def add(self, chunk: slice, hidden: torch.Tensor, weight: torch.Tensor, grad_logits: torch.Tensor) -> None:
        """Add what grad_logits [n, V] of tokens `chunk`, whose hidden states are `hidden` [n, H], give."""
        grad_logits = grad_logits.to(weight.dtype)
        self.hidden[chunk] = grad_logits @ weight
        if not self._of_weight:
            return
        total, left = self.weight, grad_logits.t()
        if total is None and self._total == weight.dtype:
            self.weight = left @ hidden
        elif total is None:
            self.weight = torch.mm(left, hidden, out_dtype=self._total)
        elif self._total == weight.dtype:
            total.addmm_(left, hidden)
        elif weight.is_cuda:  # the product adds to the sum: none is rounded to bf16, and no second [V, H] is made
            torch.addmm(total, left, hidden, out_dtype=self._total, out=total)
        else:
            total += left @ hidden
