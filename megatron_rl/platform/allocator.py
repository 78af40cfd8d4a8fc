"""The C library's allocator for processes whose tensors live in the CPU's memory.

By default glibc asks the kernel for fresh pages of 4 KiB for most tensors and gives them back when they are freed, so that
a step faults in gigabytes anew. With these settings freed memory is kept, in one heap of huge pages; only the largest
blocks still come from the kernel each time, as a heap that holds them all would fragment (measured: twice the memory).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

ENVIRONMENT = {
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",  # madvise for transparent huge pages
    "MALLOC_ARENA_MAX": "1",  # the backward pass runs in a thread, whose own heap would be too small for tensors
    "MALLOC_MMAP_THRESHOLD_": str(1 << 25),  # the largest that glibc allows
    "MALLOC_TOP_PAD_": str(1 << 26),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
}
"""Read by glibc when a process starts, and by nothing else."""

_OTHERS = ("GLIBC_TUNABLES", "LD_PRELOAD")
_GPU_DRIVER = Path("/proc/driver/nvidia/version")


def environment() -> dict[str, str]:
    """The settings; none where the user has chosen an allocator or settings of their own, or where there is a GPU."""
    own = any(name in os.environ for name in _OTHERS) or any(name.startswith("MALLOC_") for name in os.environ)
    return {} if own or _GPU_DRIVER.exists() else dict(ENVIRONMENT)


def restart_program() -> None:
    """Run this program from its beginning with the settings; returns where there is nothing to change."""
    if settings := environment():
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | settings)
