"""From the host to a GPU without waiting for it."""

from __future__ import annotations

import torch


def upload(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host on `device`: to a GPU through pinned memory, so that the host goes on at once."""
    if device.type == "cuda" and not tensor.is_cuda and torch.cuda.is_available():
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
