"""Products with large fp32 weight matrices on the CPU by oneDNN, where torch would ask MKL; those in bf16 through fp32.

The latter on processors that have no instructions for bf16, on which torch's own loops are many times slower.
benchmarks/matmul.py measures both (docs/results.md). A trainer without a GPU uses them too.
"""

from __future__ import annotations

from functools import cache

import torch

LARGE = 1 << 19
"""Elements of a weight matrix from which oneDNN wins; below it the set-up of a call counts."""
FEW_ROWS = 32
"""Up to so many rows the weight is the left factor: it is then streamed once, without being packed."""


MANY_ROWS = 64
"""From so many rows on a copy of the weight in fp32 is worth it."""


@cache
def slow_bf16() -> bool:
    """True if this processor has no instructions for bf16 that oneDNN knows."""
    return not torch.ops.mkldnn._is_mkldnn_bf16_supported()


@cache
def install() -> torch.library.Library | None:
    """Replace aten::mm on CPU tensors, for this process. The result keeps the replacement alive; None without oneDNN."""
    if not torch.backends.mkldnn.is_available():
        return None
    library = torch.library.Library("aten", "IMPL")
    library.impl("mm", mm, "CPU")
    return library


def mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A [M, K] @ b [K, N]. Weight gradients (a transposed) and all that is small or not fp32 stay with torch's choice."""
    if a.dtype is b.dtype is torch.float32 and b.numel() >= LARGE and a.stride(1) == 1 and a.shape[1] == b.shape[0]:
        if a.shape[0] > FEW_ROWS:
            return _linear(a, b.t())
        if a.shape[0] and b.stride(0) == 1:  # a row-major b, as for input gradients, would have to be turned round
            return _linear(b.t(), a).t().contiguous()
    if a.dtype is b.dtype is torch.bfloat16 and min(a.shape[0], a.shape[1]) >= MANY_ROWS and slow_bf16():
        return mm(a.float(), b.float()).bfloat16()  # sums are in fp32 either way
    return torch.mm(a, b, out=a.new_empty(0))  # the kernel of mm.out is not replaced, and sizes an empty result itself


def _linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
