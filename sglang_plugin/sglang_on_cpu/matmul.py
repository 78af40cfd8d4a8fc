"""Faster matrix multiplications on the CPU: oneDNN instead of MKL for large fp32 weights, and fp32 instead of bf16.

On processors without bf16 instructions, bf16 matrices are multiplied in fp32, because torch's own bf16 loops are many times
slower. benchmarks/matmul.py measures both (docs/results.md). A trainer without a GPU also uses this module.
"""

from __future__ import annotations

from functools import cache

import torch

LARGE = 1 << 19
"""Smallest number of weight elements for which oneDNN is faster. With fewer, setting up a call takes most of the time."""
FEW_ROWS = 32
"""Largest number of rows with which the weight is the left factor. The weight is then read once, without being packed."""


MANY_ROWS = 64
"""Smallest number of rows for which multiplying an fp32 copy of a bf16 weight is faster."""


@cache
def slow_bf16() -> bool:
    """Return True if this processor has no bf16 instructions that oneDNN can use."""
    return not torch.ops.mkldnn._is_mkldnn_bf16_supported()


@cache
def install() -> torch.library.Library | None:
    """Replace aten::mm on CPU tensors in this process. The returned object keeps the replacement alive; None without oneDNN."""
    if not torch.backends.mkldnn.is_available():
        return None
    library = torch.library.Library("aten", "IMPL")
    library.impl("mm", mm, "CPU")
    return library


def mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a [M, K] @ b [K, N]. Weight gradients (a transposed), small matrices and other dtypes use torch's own choice."""
    if a.dtype is b.dtype is torch.float32 and b.numel() >= LARGE and a.stride(1) == 1 and a.shape[1] == b.shape[0]:
        if a.shape[0] > FEW_ROWS:
            return _linear(a, b.t())
        if a.shape[0] and b.stride(0) == 1:  # a row-major b (input gradients) would need a transposed copy
            return _linear(b.t(), a).t().contiguous()
    if a.dtype is b.dtype is torch.bfloat16 and min(a.shape[0], a.shape[1]) >= MANY_ROWS and slow_bf16():
        return mm(a.float(), b.float()).bfloat16()  # both ways sum in fp32
    return torch.mm(a, b, out=a.new_empty(0))  # the kernel of mm.out is not replaced


def _linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
