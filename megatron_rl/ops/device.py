"""Copies from the host to a GPU, and checks on GPU tensors, with as few synchronizations as possible."""

from __future__ import annotations

from collections.abc import Callable

import torch


def upload(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a host tensor to `device`. A copy to a GPU uses pinned memory, so that the host does not wait."""
    if device.type == "cuda" and not tensor.is_cuda and torch.cuda.is_available():
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


# -- late checks ---------------------------------------------------------------------------------------------------------
# Conditions on tensors, read together: each read of a GPU tensor waits for all work queued on the GPU.


MakeError = Callable[[int], Exception]
"""Function from the number of the first wrong row to the exception to raise."""


class LateChecks:
    """Collects the conditions of `check` until `look` reads them all."""

    def __init__(self) -> None:
        self._pending: list[tuple[torch.Tensor, MakeError]] = []

    def add(self, wrong: torch.Tensor, error: MakeError) -> None:
        """Store a condition: `wrong` [n] bool, in which no entry may be true, and the error for a row."""
        self._pending.append((wrong, error))

    def look(self) -> None:
        """Read all stored conditions, with one synchronization. Errors: the error of the first wrong row."""
        pending, self._pending = self._pending, []
        found = torch.stack([wrong.any() for wrong, _ in pending]).tolist() if pending else []
        for (wrong, error), bad in zip(pending, found, strict=True):
            if bad:
                raise error(int(wrong.byte().argmax()))


def check(wrong: torch.Tensor, error: MakeError, late: LateChecks | None = None) -> None:
    """Raise error(row) for the first true row of `wrong` [n] bool: at once, or in `late.look()` if `late` is given."""
    checks = LateChecks() if late is None else late
    checks.add(wrong, error)
    if late is None:
        checks.look()
