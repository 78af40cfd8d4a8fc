"""A GPU that does not exist, to look at what a process would build and run on one: shapes, types, devices, waits; no numbers.

`pretend` makes the process take this machine for one with a GPU, so that Megatron is what it is there. Inside `FakeGPU` a
tensor on "cuda" is one of torch's fake tensors and nothing is computed with it, while tensors on the CPU are what they
always are. What would make the host wait for the GPU, or copy to it, is noted with its place. For a process of its own:
what `pretend` replaces in torch stays so. There is no backward pass: the autograd engine asks the driver for its devices.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from megatron_rl.platform.megatron import cuda

aten = torch.ops.aten
_AS_ON_THE_CPU = (
    *("is_current_stream_capturing", "synchronize", "set_device", "device", "_lazy_init", "empty_cache"),
    *("Stream", "Event", "stream", "current_stream", "default_stream", "set_stream"),
    *("get_rng_state", "set_rng_state", "manual_seed", "manual_seed_all", "default_generators", "_lazy_call"),
    *("memory_stats", "memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"),
)
"""Names that have a counterpart on the CPU platform, which needs no driver."""


def pretend(capability: tuple[int, int] = (9, 0), devices: int = 1) -> None:
    """From here on torch.cuda says that there are GPUs of this compute capability. Before the first import of Megatron."""
    for name in _AS_ON_THE_CPU:
        setattr(torch.cuda, name, getattr(cuda, name))
        if hasattr(torch.cuda.random, name):
            setattr(torch.cuda.random, name, getattr(cuda, name))
    torch.cuda.is_available = torch.cuda.is_initialized = lambda: True
    torch.cuda.device_count = lambda: devices
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_capability = lambda device=None: capability
    methods = (
        (torch.Tensor, "cuda", lambda tensor, *_, **options: tensor.to("cuda", **options)),  # its own asks the driver
        (torch.Tensor, "record_stream", lambda *_: None),
        (FakeTensor, "tolist", lambda tensor: tensor.cpu().tolist()),  # its own reads number by number
        (torch.nn.Module, "cuda", _move),
        (fake_tensor, "init_gpu_context", lambda device: None),  # torch 2.11's makes a real tensor first
    )
    for owner, name, replacement in methods:
        setattr(owner, name, replacement)
    torch._C._ensureCUDADeviceGuardSet()


def _move(module: torch.nn.Module, *_) -> torch.nn.Module:
    """Module.cuda swaps tensors in place, which a fake one cannot take the part of."""
    for part in module.modules():
        for tensors in (vars(part)["_parameters"], vars(part)["_buffers"]):
            for name, old in tensors.items():
                if old is not None and not old.is_cuda:
                    new = old.detach().to("cuda")
                    if isinstance(old, torch.nn.Parameter):
                        new = torch.nn.Parameter(new, old.requires_grad)
                    tensors[name] = new
                    vars(new).update(vars(old))
    return module


Kind = Literal["wait", "upload"]


@dataclass(frozen=True)
class Transfer:
    """The host waits for the GPU (it reads a value, or a size that depends on one), or copies a tensor to it."""

    kind: Kind
    operator: str
    place: str
    """file:line function of the nearest frame in the packages that are watched, and of the nearest of ours."""


class FakeGPU(TorchDispatchMode):
    """Inside it, tensors on "cuda" are fake. `transfers`: in order, what crossed between host and GPU.

    answer: what the host reads where it waits, a CPU tensor, given the Transfer and the fake tensor; None: nothing is known,
    and the read raises torch's own error.
    """

    def __init__(self, answer: Callable[[Transfer, torch.Tensor], torch.Tensor | None] = lambda *_: None) -> None:
        super().__init__()
        self.fake = FakeTensorMode()
        self.answer = answer
        self.transfers: list[Transfer] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        gpu = [t for t in tensors if isinstance(t, FakeTensor)]
        host = [t for t in tensors if not isinstance(t, FakeTensor)]
        device = kwargs.get("device")
        device = None if device is None else torch.device(device).type
        if func is aten.is_pinned.default:
            return False
        if func is aten._pin_memory.default:
            return args[0].clone()
        if not gpu and device != "cuda":
            return func(*args, **kwargs)
        if gpu and (func is aten._local_scalar_dense.default or device == "cpu"):
            return self._read(func, gpu[0], lambda seen: func(seen, *args[1:], **kwargs))
        if func is aten.copy_.default and host and host[0] is args[0]:
            return self._read(func, gpu[0], lambda seen: func(args[0], seen, *args[2:], **kwargs))
        if any(t.dim() for t in host):
            self._note("upload", func)
        args, kwargs = tree_map_only(torch.Tensor, self._as_fake, (args, kwargs))
        with self.fake:
            try:
                return func(*args, **kwargs)
            except (DataDependentOutputException, DynamicOutputShapeException):
                self._note("wait", func)
                raise

    def _as_fake(self, tensor: torch.Tensor) -> FakeTensor:
        return tensor if isinstance(tensor, FakeTensor) else self.fake.from_tensor(tensor, static_shapes=True)

    def _note(self, kind: Kind, func: Any) -> Transfer:
        self.transfers.append(Transfer(kind, str(func), _place()))
        return self.transfers[-1]

    def _read(self, func: Any, tensor: torch.Tensor, read: Callable[[torch.Tensor], object]) -> object:
        seen = self.answer(self._note("wait", func), tensor)
        if seen is None:
            raise DataDependentOutputException(func)
        return read(seen)


def _place() -> str:
    """Where the Python code of ours or of Megatron stands, and the nearest of ours."""
    frames = [f for f in traceback.extract_stack() if Path(f.filename) != Path(__file__)]
    named = lambda frame: f"{Path(frame.filename).name}:{frame.lineno} {frame.name}"  # noqa: E731
    watched = [f for f in frames if "/megatron" in f.filename]
    ours = [f for f in watched if "/megatron_rl/" in f.filename]
    nearest = dict.fromkeys(named(part[-1]) for part in (watched, ours) if part)
    return " < ".join(nearest)
