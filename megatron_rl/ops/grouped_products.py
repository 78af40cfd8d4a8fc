"""Products of rows that lie by group with each group's matrix, all groups in one launch: torch's grouped product.

Its kernel takes bf16 on GPUs of compute capability 9 and 10. Matrices [out, in] of the groups come one by one, as
parameters are, and are stacked for each product: its kernel takes them at equal distances alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F

from megatron_rl.ops.placement import upload

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
