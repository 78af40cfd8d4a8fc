"""Operations that Megatron needs and gloo lacks."""

from __future__ import annotations

import torch
import torch.distributed as dist


def all_gather_uneven(
    outputs: list[torch.Tensor], tensor: torch.Tensor, group: dist.ProcessGroup | None = None
) -> None:
    """Gather tensors `[n_r, ...]` whose first dimension differs between ranks. outputs[r] has the shape `[n_r, ...]`."""
    longest = max(output.shape[0] for output in outputs)
    if all(output.shape[0] == longest for output in outputs):
        dist.all_gather(outputs, tensor.contiguous(), group=group)
        return
    padded = tensor.new_zeros((longest, *tensor.shape[1:]))
    padded[: tensor.shape[0]] = tensor
    gathered = [torch.empty_like(padded) for _ in outputs]
    dist.all_gather(gathered, padded, group=group)
    for output, full in zip(outputs, gathered, strict=True):
        output.copy_(full[: output.shape[0]])
