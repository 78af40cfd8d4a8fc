"""From the host to a GPU without waiting for it."""

from __future__ import annotations

from collections.abc import Callable

import torch


def upload(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host on `device`: to a GPU through pinned memory, so that the host goes on at once."""
    if device.type == "cuda" and not tensor.is_cuda and torch.cuda.is_available():
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


# -- late checks ---------------------------------------------------------------------------------------------------------
# Conditions on tensors, looked at in one go: each look at a GPU's tensor waits for all the work that was asked of it.


MakeError = Callable[[int], Exception]
"""The number of the first wrong row -> what to raise."""


class LateChecks:
    """Collects what `check` finds, until `look`."""

    def __init__(self) -> None:
        self._pending: list[tuple[torch.Tensor, MakeError]] = []

    def add(self, wrong: torch.Tensor, error: MakeError) -> None:
        """Note wrong [n] bool, of which none may be true, and the error of a row."""
        self._pending.append((wrong, error))

    def look(self) -> None:
        """One synchronization, where there is something to look at. Errors: that of the first wrong row."""
        pending, self._pending = self._pending, []
        found = torch.stack([wrong.any() for wrong, _ in pending]).tolist() if pending else []
        for (wrong, error), bad in zip(pending, found, strict=True):
            if bad:
                raise error(int(wrong.byte().argmax()))


def check(wrong: torch.Tensor, error: MakeError, late: LateChecks | None = None) -> None:
    """Raise error(row) of the first true row of wrong [n] bool: at once, or when `late`, if given, is looked at."""
    checks = LateChecks() if late is None else late
    checks.add(wrong, error)
    if late is None:
        checks.look()
