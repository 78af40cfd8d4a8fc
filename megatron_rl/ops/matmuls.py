"""Products of rows that lie by group with each group's matrix, all groups in one launch: torch's grouped product.

Its kernel takes bf16 on GPUs of compute capability 9 and 10. Matrices [out, in] of the groups come one by one, as
parameters are, and are stacked for each product: its kernel takes them at equal distances alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F

from megatron_rl.ops.device import upload

MOST_GROUPS = 1023
_ALIGNED = 8
"""Every row begins at a multiple of 16 bytes: so many numbers of bf16."""
_BIAS_NUMBERS = 1 << 25
"""So many numbers of biases are gathered at a time."""


def served(x: torch.Tensor, groups: int) -> bool:
    """True where torch's kernel takes rows x [N, in] of so many groups; else torch would go group by group itself."""
    if not (x.is_cuda and x.dtype == torch.bfloat16 and len(x) and groups <= MOST_GROUPS):
        return False
    return torch.cuda.get_device_capability(x.device)[0] in (9, 10)


def aligned(*widths: int) -> bool:
    """True where the kernel takes rows of these widths."""
    return all(width % _ALIGNED == 0 for width in widths)


def ends_of(counts: Sequence[int], device: torch.device) -> torch.Tensor:
    """End of each group's rows, [E] int32 on the device, which the host does not wait for."""
    return upload(torch.tensor(list(accumulate(counts)), dtype=torch.int32), device)


def product(x: torch.Tensor, ends: torch.Tensor, weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Rows x [N, in] by group, weights [out, in] of each -> [N, out]."""
    return F.grouped_mm(x, torch.stack([*weights]).transpose(1, 2), offs=ends)


def input_gradient(grad: torch.Tensor, ends: torch.Tensor, weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Gradient [N, out] of the product -> that of x [N, in]."""
    return F.grouped_mm(grad, torch.stack([*weights]), offs=ends)


def weight_gradients(
    grad: torch.Tensor, x: torch.Tensor, ends: torch.Tensor, counts: Sequence[int]
) -> tuple[torch.Tensor, ...]:
    """Gradient [N, out] of the product and its rows x [N, in] -> that of each weight [out, in], zeros without rows."""
    return _sums_by_group(grad, x, ends, counts).unbind()


def add_biases(out: torch.Tensor, ends: torch.Tensor, biases: torch.Tensor, scales: torch.Tensor | None) -> None:
    """Add to each row of out [N, out] its group's bias of [E, out], times its scale of [N, 1]; some rows at a time."""
    rows = torch.arange(len(out), device=out.device, dtype=ends.dtype)
    groups = torch.searchsorted(ends, rows, right=True)
    for start in range(0, len(out), step := max(1, _BIAS_NUMBERS // out.shape[1])):
        part = slice(start, start + step)
        of_rows = biases[groups[part]]
        out[part] += of_rows if scales is None else scales[part] * of_rows


def bias_gradients(
    grad: torch.Tensor, ends: torch.Tensor, counts: Sequence[int], scales: torch.Tensor | None
) -> torch.Tensor:
    """Gradient [N, out] of the rows -> that of the biases [E, out]: sums over each group's rows, times their scales.

    A product with the scales as columns: fp32 scales are the sum of two of bf16, to 2^-16.
    """
    columns = grad.new_zeros((len(grad), _ALIGNED))
    if scales is None:
        columns[:, 0] = 1.0
    else:
        columns[:, :1] = scales
        columns[:, 1:2] = scales - columns[:, :1]
    return _sums_by_group(grad, columns, ends, counts)[..., :2].sum(-1)


def scale_gradients(grad: torch.Tensor, ends: torch.Tensor, biases: torch.Tensor) -> torch.Tensor:
    """Gradient [N, out] of the rows -> that of their scales [N, 1]: each row times its group's bias of [E, out]."""
    return F.grouped_mm(grad, F.pad(biases.unsqueeze(-1), (0, _ALIGNED - 1)), offs=ends)[:, :1]


def _sums_by_group(left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """left^T right over each group's rows: [E, left's width, right's width]."""
    sums = F.grouped_mm(left.t(), right, offs=ends)
    if empty := [sums[group] for group, count in enumerate(counts) if not count]:
        torch._foreach_zero_(empty)  # pyright: ignore[reportPrivateImportUsage]: on some GPUs nothing was written there
    return sums


# -- head products -------------------------------------------------------------------------------------------------------
# The matrix products of a head, chunk by chunk over tokens: logits, and the gradients of hidden states and weight.


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
