"""Norm and clipping of gradients, if Megatron finds no multi-tensor kernels of Transformer Engine or Apex.

Megatron's own replacements wait for the GPU once per tensor. The functions have the signatures of `amp_C`, as far as Megatron
uses them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def apply(
    function: Callable[..., Any], noop_flag: torch.Tensor, tensor_lists: list[list[torch.Tensor]], *args: Any
) -> Any:
    """Call `function` on all tensors at once, without chunks."""
    return function(0, noop_flag, tensor_lists, *args)


def l2_norm(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: list[list[torch.Tensor]], per_tensor: bool
) -> tuple[torch.Tensor, None]:
    """Return the norm of all tensors as one vector, [1] fp32 on their device, without waiting for the device.

    For fp32 on a CPU the result equals that of Megatron's own function, bit for bit. For bf16, Megatron's function would round
    the norm of each tensor and the total norm to bf16; this function does not.
    """
    norms = torch._foreach_norm(tensor_lists[0], dtype=torch.float32)  # pyright: ignore[reportPrivateImportUsage]
    return torch.linalg.vector_norm(torch.stack(norms)).view(1), None


def scale(chunk_size: int, noop_flag: torch.Tensor, tensor_lists: list[list[torch.Tensor]], factor: float) -> None:
    """Multiply the tensors in place by `factor`; both tensor lists hold the same gradients."""
    torch._foreach_mul_(tensor_lists[1], factor)  # pyright: ignore[reportPrivateImportUsage]
