"""Stand-in for `torch_memory_saver` on a machine without a GPU. The real package replaces CUDA's allocator.

As in the real package, memory that was allocated in a region keeps its addresses while it is paused, but loses its content. The
operating system takes the pages back, and kills a process that reads them meanwhile. If the region has a backup, the content is
restored on resume. Without a backup, weights are NaN until they are pushed, and a cache is zero.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

if torch.cuda.is_available():
    raise ImportError(
        "megatron_rl's stand-in for torch_memory_saver was imported on a machine with a GPU: start the server with"
        " python -m sglang.launch_server, and not with python -m sglang_on_cpu"
    )

_LOST = {"weights": 0xFF}
"""{tag: byte that fills lost content}; 0 for other tags. A value with all bits set is NaN in every floating-point type."""
_NOTHING, _ALL = 0, mmap.PROT_READ | mmap.PROT_WRITE
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass
class _Allocation:
    reference: StorageWeakRef
    backed_up: bool
    content: torch.Tensor | None = None

    @property
    def data(self) -> torch.Tensor | None:
        """Memory of the allocation, [bytes] uint8; None if all its tensors have been freed."""
        if self.reference.expired():
            return None
        return torch.empty(0, dtype=torch.uint8).set_(torch.UntypedStorage._new_with_weak_ptr(self.reference.cdata))


class _Recorder(TorchDispatchMode):
    """Records the storages that operators create."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        given = {_key(t) for t in tree_iter((args, kwargs)) if isinstance(t, torch.Tensor)}
        for result in tree_iter(results):
            if isinstance(result, torch.Tensor) and result.device.type == "cpu" and _key(result) not in given:
                self.made.setdefault(_key(result), StorageWeakRef(result.untyped_storage()))
        return results


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _protect(data: torch.Tensor, access: int) -> None:
    """Set the access rights of the pages that only `data` uses. Without access, the content of the pages is discarded."""
    start = -(-data.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (data.data_ptr() + data.numel()) // mmap.PAGESIZE * mmap.PAGESIZE - start
    if length <= 0:
        return
    span = (ctypes.c_void_p(start), ctypes.c_size_t(length))
    failed = access == _NOTHING and _libc.madvise(*span, mmap.MADV_DONTNEED)
    if failed or _libc.mprotect(*span, access):
        raise OSError(ctypes.get_errno(), f"torch_memory_saver: {os.strerror(ctypes.get_errno())}")


class TorchMemorySaver:
    """Replacement for the real class, with the methods that SGLang calls."""

    enabled = True

    def __init__(self) -> None:
        self._allocations: dict[str, list[_Allocation]] = defaultdict(list)
        self._paused: set[str] = set()

    @contextmanager
    def region(self, tag: str = "default", enable_cpu_backup: bool = False) -> Iterator[None]:
        """Record the tensors that are created in this context, so that `pause(tag)` pauses those that still exist."""
        with _Recorder() as recorder:
            yield
        self._allocations[tag] += [_Allocation(reference, enable_cpu_backup) for reference in recorder.made.values()]

    def pause(self, tag: str) -> None:
        if tag in self._paused:
            raise RuntimeError(f"torch_memory_saver: {tag} is already paused")
        self._paused.add(tag)
        for allocation in self._allocations[tag]:
            if (data := allocation.data) is not None:
                allocation.content = data.clone() if allocation.backed_up else None
                data.fill_(_LOST.get(tag, 0))  # also bytes on pages shared with other data
                _protect(data, _NOTHING)

    def resume(self, tag: str) -> None:
        if tag not in self._paused:
            raise RuntimeError(f"torch_memory_saver: {tag} is not paused")
        self._paused.remove(tag)
        for allocation in self._allocations[tag]:
            if (data := allocation.data) is not None:
                _protect(data, _ALL)
                data.fill_(_LOST.get(tag, 0)) if allocation.content is None else data.copy_(allocation.content)
                allocation.content = None


torch_memory_saver = TorchMemorySaver()


@contextmanager
def configure_subprocess() -> Iterator[None]:
    """Do nothing. The real package preloads a library into a process that is started in this context."""
    yield
