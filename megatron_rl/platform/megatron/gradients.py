"""Norm and clipping of gradients where Megatron finds neither Transformer Engine's kernels nor Apex's for many tensors.

Megatron's own stand-ins wait for the GPU once a tensor. Signatures are those of `amp_C`, as far as Megatron calls them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def apply(
    function: Callable[..., Any], noop_flag: torch.Tensor, tensor_lists: list[list[torch.Tensor]], *args: Any
) -> Any:
    """Call function on all tensors at once: there are no chunks."""
    return function(0, noop_flag, tensor_lists, *args)


def l2_norm(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: list[list[torch.Tensor]], per_tensor: bool
) -> tuple[torch.Tensor, None]:
    """Norm of all tensors as one vector, [1] fp32 on their device; the host does not wait for it.

    fp32 on a CPU: bit by bit what Megatron's own gives. bf16: it would round each tensor's norm, and the whole, to bf16.
    """
    norms = torch._foreach_norm(tensor_lists[0], dtype=torch.float32)  # pyright: ignore[reportPrivateImportUsage]
    return torch.linalg.vector_norm(torch.stack(norms)).view(1), None


def scale(chunk_size: int, noop_flag: torch.Tensor, tensor_lists: list[list[torch.Tensor]], factor: float) -> None:
    """Multiply in place: gradients are clipped from and to the same tensors."""
    torch._foreach_mul_(tensor_lists[1], factor)  # pyright: ignore[reportPrivateImportUsage]
