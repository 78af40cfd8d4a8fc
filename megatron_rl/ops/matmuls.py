"""Grouped matrix multiplications: rows sorted by group times the matrix of their group, in one launch (torch's grouped_mm).

The kernel supports bf16 on GPUs of compute capability 9 and 10. The matrices [out, in] of the groups are separate parameters.
They are stacked for each call, because the kernel needs them at equal distances in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F

from megatron_rl.ops.device import upload

MOST_GROUPS = 1023
"""Largest number of groups that the kernel supports."""
_ALIGNED = 8
"""Row widths must be multiples of this number of bf16 elements (16 bytes)."""
_BIAS_NUMBERS = 1 << 25
"""Number of bias elements that are gathered at a time."""


def served(x: torch.Tensor, groups: int) -> bool:
    """Return True if torch's kernel supports rows x [N, in] of `groups` groups. Otherwise torch would loop over groups."""
    if not (x.is_cuda and x.dtype == torch.bfloat16 and len(x) and groups <= MOST_GROUPS):
        return False
    return torch.cuda.get_device_capability(x.device)[0] in (9, 10)


def aligned(*widths: int) -> bool:
    """Return True if the kernel supports rows of these widths."""
    return all(width % _ALIGNED == 0 for width in widths)


def ends_of(counts: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return the end of each group's rows, [E] int32 on the device, without waiting for the device."""
    return upload(torch.tensor(list(accumulate(counts)), dtype=torch.int32), device)


def product(x: torch.Tensor, ends: torch.Tensor, weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Multiply rows x [N, in] by the transposed weight [out, in] of their group: [N, out]."""
    return F.grouped_mm(x, torch.stack([*weights]).transpose(1, 2), offs=ends)


def input_gradient(grad: torch.Tensor, ends: torch.Tensor, weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the gradient of x [N, in] from the gradient [N, out] of the product."""
    return F.grouped_mm(grad, torch.stack([*weights]), offs=ends)


def weight_gradients(
    grad: torch.Tensor, x: torch.Tensor, ends: torch.Tensor, counts: Sequence[int]
) -> tuple[torch.Tensor, ...]:
    """Return the gradient of each weight [out, in] from grad [N, out] and rows x [N, in]; zeros for a group without rows."""
    return _sums_by_group(grad, x, ends, counts).unbind()


def add_biases(out: torch.Tensor, ends: torch.Tensor, biases: torch.Tensor, scales: torch.Tensor | None) -> None:
    """Add to each row of out [N, out] the bias of its group, from biases [E, out], times its scale; some rows at a time."""
    rows = torch.arange(len(out), device=out.device, dtype=ends.dtype)
    groups = torch.searchsorted(ends, rows, right=True)
    for start in range(0, len(out), step := max(1, _BIAS_NUMBERS // out.shape[1])):
        part = slice(start, start + step)
        of_rows = biases[groups[part]]
        out[part] += of_rows if scales is None else scales[part] * of_rows


def bias_gradients(
    grad: torch.Tensor, ends: torch.Tensor, counts: Sequence[int], scales: torch.Tensor | None
) -> torch.Tensor:
    """Return the gradient of the biases [E, out] from grad [N, out]: the sum over each group's rows times their scales.

    One grouped matrix multiplication computes the sums, with the scales as columns of the second matrix. An fp32 scale is split
    into two bf16 numbers, exact to 2^-16.
    """
    columns = grad.new_zeros((len(grad), _ALIGNED))
    if scales is None:
        columns[:, 0] = 1.0
    else:
        columns[:, :1] = scales
        columns[:, 1:2] = scales - columns[:, :1]
    return _sums_by_group(grad, columns, ends, counts)[..., :2].sum(-1)


def scale_gradients(grad: torch.Tensor, ends: torch.Tensor, biases: torch.Tensor) -> torch.Tensor:
    """Return the gradient of the scales [N, 1] from grad [N, out]: each row times the bias of its group, biases [E, out]."""
    return F.grouped_mm(grad, F.pad(biases.unsqueeze(-1), (0, _ALIGNED - 1)), offs=ends)[:, :1]


def _sums_by_group(left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """Return left^T right over the rows of each group: [E, width of left, width of right]."""
    sums = F.grouped_mm(left.t(), right, offs=ends)
    if empty := [sums[group] for group, count in enumerate(counts) if not count]:
        torch._foreach_zero_(empty)  # pyright: ignore[reportPrivateImportUsage]: some GPUs write nothing there
    return sums


# -- head products -------------------------------------------------------------------------------------------------------
# The matrix products of an output head, chunk by chunk over tokens: logits, and gradients of hidden states and weight.


_FP32_ROWS = 8192
"""Rows of the weight that are converted to fp32 at a time on a CPU, which cannot multiply bf16 matrices into fp32."""


def token_chunks(tokens: int, size: int) -> list[slice]:
    """Cut `tokens` tokens into slices of `size`; the last slice may be shorter. No tokens give no slices."""
    return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)]


def fp32_product(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return hidden [n, H] @ weight [V, H]^T, [n, V] fp32 (fp64 for fp64), without an fp32 copy of the whole weight."""
    if hidden.dtype != torch.bfloat16:
        return hidden @ weight.t()
    if hidden.is_cuda:
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    hidden = hidden.float()
    return torch.cat([hidden @ part.float().t() for part in weight.split(_FP32_ROWS)], 1)


def scaled(tensor: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return tensor times factor [1], rounded to dtype. On a GPU this is one pass, without a temporary of the same size."""
    return torch.mul(tensor, factor, out=torch.empty_like(tensor, dtype=dtype))


class HeadGradients:
    """Gradients of hidden [T, H] and weight [V, H], summed chunk by chunk."""

    def __init__(self, hidden: torch.Tensor, weight: torch.Tensor, chunks: int, *, of_weight: bool) -> None:
        """of_weight: False for a frozen head, which saves a matrix multiplication and the memory of the gradient."""
        self.hidden, self._of_weight = torch.empty_like(hidden), of_weight
        # The sum over chunks is at least fp32. On a GPU it starts with the first product.
        self._total = torch.promote_types(weight.dtype, torch.float32) if chunks != 1 else weight.dtype
        zeros = of_weight and (chunks == 0 or (chunks > 1 and not weight.is_cuda))
        self.weight = torch.zeros_like(weight, dtype=self._total) if zeros else None

    def add(self, chunk: slice, hidden: torch.Tensor, weight: torch.Tensor, grad_logits: torch.Tensor) -> None:
        """Add the contribution of the tokens `chunk`, with hidden states `hidden` [n, H] and grad_logits [n, V]."""
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
        elif weight.is_cuda:  # adds in fp32 without a second [V, H] tensor
            torch.addmm(total, left, hidden, out_dtype=self._total, out=total)
        else:
            total += left @ hidden
