"""Counterparts, on the CPU, of the `torch.cuda` names that Megatron uses.

In rewritten modules of `megatron.*` this module replaces `torch.cuda` (see rules.py); no other code uses it. `is_available`
still returns False. The names of `NO_COUNTERPART` remain torch's own: classes that are used in annotations, and functions that
raise torch's error when they are called. For each name the table says why training without a GPU does not need it.
"""

from __future__ import annotations

import contextlib
import time
from types import SimpleNamespace
from typing import Any

import torch

from megatron_rl.platform.megatron.gloo import all_gather_uneven  # noqa: F401 (seen by rewritten modules)

_CPU = torch.device("cpu")

NO_COUNTERPART = {
    "CUDAGraph": "CUDA graphs (cuda_graph_impl, use_cudagraphable_rng) need a GPU",
    "graph": "CUDA graphs need a GPU",
    "graph_pool_handle": "CUDA graphs need a GPU",
    "MemPool": "pools of the NCCL and unified-memory allocators",
    "CUDAPluggableAllocator": "allocator of the inference engine's unified memory",
    "use_mem_pool": "pools of the NCCL and unified-memory allocators",
    "ExternalStream": "NVSHMEM copy service",
    "cudart": "profiler switches (nsys, memory snapshots)",
    "check_error": "profiler switches",
    "memory_snapshot": "memory snapshots of the profiler and the inference engine",
    "get_device_properties": "guards of GPU kernels and the DeepEP dispatcher",
    "get_device_capability": "guards of GPU kernels",
    "temperature": "GPU telemetry of the straggler detector",
    "power_draw": "GPU telemetry of the straggler detector",
    "utilization": "GPU telemetry of the straggler detector",
    "clock_rate": "GPU telemetry of the straggler detector",
    "device_memory_used": "inference engine",
    "_sleep": "CUDA graph warm-up",
}
"""Name -> reason why no run without a GPU needs it."""


# --- devices ------------------------------------------------------------------------------------------------------


def is_available() -> bool:
    return False


def is_initialized() -> bool:
    return False


def current_device() -> torch.device:
    """Return the CPU device, which works wherever Megatron passes the index of its GPU."""
    return _CPU


def device_count() -> int:
    return 0


def set_device(device: Any) -> None:
    pass


def device(index: Any) -> contextlib.AbstractContextManager:
    return contextlib.nullcontext()


def synchronize(device: Any = None) -> None:
    pass


# --- streams: everything is in order on the CPU -------------------------------------------------------------------


class Stream(contextlib.nullcontext):
    """A stream that does nothing; work runs in the order in which it is issued."""

    device = _CPU

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__()

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record()
        return event

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return (0, 0)


class Event:
    """An event that is always complete; elapsed_time is wall-clock time in milliseconds."""

    def __init__(self, *args: Any, **kwargs: Any):
        self._time = 0.0

    def record(self, stream: Any = None) -> None:
        self._time = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        return (end._time - self._time) * 1e3


_STREAM = Stream()


def current_stream(device: Any = None) -> Stream:
    return _STREAM


def default_stream(device: Any = None) -> Stream:
    return _STREAM


def stream(stream: Any) -> contextlib.AbstractContextManager:
    return contextlib.nullcontext()


def set_stream(stream: Any) -> None:
    pass


def is_current_stream_capturing() -> bool:
    return False


# --- random numbers: the CPU generator is the only one ------------------------------------------------------------


def get_rng_state(device: Any = None) -> torch.Tensor:
    return torch.get_rng_state()


def set_rng_state(new_state: torch.Tensor, device: Any = None) -> None:
    torch.set_rng_state(new_state)


def manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)


manual_seed_all = manual_seed
random = SimpleNamespace(get_rng_state=get_rng_state, set_rng_state=set_rng_state)


class _Generators:
    def __getitem__(self, index: Any) -> torch.Generator:
        return torch.default_generator


default_generators = _Generators()


def _lazy_init() -> None:
    pass


def _lazy_call(callback: Any, **kwargs: Any) -> None:
    callback()


# --- memory -------------------------------------------------------------------------------------------------------


def empty_cache() -> None:
    pass


def memory_stats(device: Any = None) -> dict[str, int]:
    return {}


def memory_allocated(device: Any = None) -> int:
    return 0


def memory_reserved(device: Any = None) -> int:
    return 0


max_memory_allocated = max_memory_reserved = memory_allocated
memory = SimpleNamespace(
    memory_stats=memory_stats, memory_allocated=memory_allocated, max_memory_allocated=max_memory_allocated
)
OutOfMemoryError = torch.cuda.OutOfMemoryError


def for_host(copy: torch.Tensor, like: torch.Tensor | None = None) -> torch.Tensor:
    """Mark a copy that would be on the host if there were a GPU. like: mark the copy only if this tensor is marked."""
    copy.for_host = like is None or not on_device(like)  # pyright: ignore[reportAttributeAccessIssue]: mark of megatron_rl
    return copy


def on_device(tensor: torch.Tensor) -> bool:
    """Return True if a tensor would be on the GPU, that is, if it was not marked by `for_host`."""
    return not getattr(tensor, "for_host", False)


# --- types, profiler ranges, autocast -----------------------------------------------------------------------------

FloatTensor = torch.FloatTensor
HalfTensor = torch.HalfTensor
BFloat16Tensor = torch.BFloat16Tensor


def range_push(message: str) -> None:
    pass


def range_pop() -> None:
    pass


nvtx = SimpleNamespace(
    range_push=range_push, range_pop=range_pop, range=lambda message: contextlib.nullcontext(), mark=range_push
)
amp = SimpleNamespace(
    custom_fwd=lambda function: torch.amp.custom_fwd(function, device_type="cpu"),
    custom_bwd=lambda function: torch.amp.custom_bwd(function, device_type="cpu"),
)


# --- not of torch.cuda, but of the same kind ----------------------------------------------------------------------


def leave_eager(function: Any = None, **kwargs: Any) -> Any:
    """Return the function unchanged (replaces `torch.compile`): on a CPU, compiling small fusions is not worthwhile."""
    return function if function is not None else lambda decorated: decorated


def __getattr__(name: str) -> Any:
    if name in NO_COUNTERPART:
        return getattr(torch.cuda, name, None) or getattr(torch.cuda.memory, name)
    raise AttributeError(f"Megatron used torch.cuda.{name}, for which megatron_rl.platform has no counterpart")
