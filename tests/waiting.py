"""Waiting in tests: for a condition, with a limit."""

from __future__ import annotations

import os
import time
from collections.abc import Callable


def wait_for[T](true: Callable[[], T], limit_s: float = 60.0) -> T:
    """What is true once it is. Errors: AssertionError at the limit."""
    deadline = time.monotonic() + limit_s
    while not (found := true()):
        assert time.monotonic() < deadline, f"not within {limit_s:g} s"
        time.sleep(0.02)
    return found


def gone(pid: int) -> bool:
    """True if there is no such process."""
    return not os.path.exists(f"/proc/{pid}")
