"""This machine taken for one with an H100 by SGLang: what it asks of torch, of the driver and of NCCL; numbers of none.

For a process of its own: `stand_in_for_the_driver` and `pretend` come before SGLang is imported, `without_a_device` after it.
"""

from __future__ import annotations

import ctypes
import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch._subclasses import fake_tensor

from tests.platform import fake_gpu

CAPABILITY = (9, 0)


class H100:
    """Properties of one, as torch.cuda.get_device_properties gives them."""

    name, (major, minor), total_memory, uuid = "NVIDIA H100 80GB HBM3", CAPABILITY, 80 * 2**30, "0"
    multi_processor_count, warp_size, L2_cache_size, is_integrated, gcnArchName = 132, 32, 50 * 2**20, 0, ""
    max_threads_per_multi_processor, regs_per_multiprocessor = 2048, 65536
    shared_memory_per_block_optin, shared_memory_per_multiprocessor = 232448, 233472


def stand_in_for_the_driver() -> None:
    """Whoever wants libcuda.so.1 from here on finds one: libraries of GPU packages are linked against it."""
    try:
        ctypes.CDLL("libcuda.so.1")
        return
    except OSError:
        pass
    spec = importlib.util.find_spec("sgl_kernel")
    assert spec is not None and spec.origin is not None, "sglang-kernel is not installed"
    libraries = map(str, Path(spec.origin).parent.rglob("*.so"))
    listing = ["nm", "-D", "--undefined-only", *libraries]
    symbols = subprocess.run(listing, capture_output=True, text=True, check=True).stdout.split()
    names = {word for word in symbols if word.startswith("cu") and word[2:3].isupper()} - {"cuDriverGetVersion"}
    code = 'extern "C" int cuDriverGetVersion(int* version) { *version = 13000; return 0; }\n'
    code += "".join(f'extern "C" int {name}() {{ return 0; }}\n' for name in sorted(names))
    with tempfile.TemporaryDirectory() as folder:
        library = f"{folder}/libcuda.so.1"
        build = ["g++", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", library, "-x", "c++", "-"]
        subprocess.run(build, input=code, text=True, check=True)
        ctypes.CDLL(library, ctypes.RTLD_GLOBAL)


def pretend() -> None:
    """Before SGLang is imported: what it asks torch for besides what Megatron does."""
    fake_gpu.pretend(CAPABILITY)
    cuda: Any = torch.cuda
    cuda.get_device_properties = lambda device=None: H100
    cuda.get_device_name = lambda device=None: H100.name
    cuda.mem_get_info = lambda device=None: (70 * 2**30, 80 * 2**30)
    for name in ("set_device", "empty_cache", "ipc_collect"):
        setattr(cuda, name, lambda *_: None)  # a function each: torch keeps lists of them
    for name in ("memory_allocated", "memory_reserved"):
        setattr(cuda, name, lambda *_: 0)
    fake_tensor.init_gpu_context = lambda device: None
    of_cpu, as_cpu = torch.tensor, torch.as_tensor

    def on_gpu(device: Any) -> bool:
        return device is not None and torch.device(device).type == "cuda"

    def tensor(data, *, dtype=None, device=None, pin_memory=False, requires_grad=False):
        made = of_cpu(data, dtype=dtype)
        return made.to(device) if on_gpu(device) else made

    def as_tensor(data, dtype=None, device=None):
        made = data if isinstance(data, torch.Tensor) else as_cpu(data, dtype=dtype)
        return made.to(device=device, dtype=dtype) if on_gpu(device) or dtype is not None else made

    torch.tensor, torch.as_tensor = tensor, as_tensor  # they make no fake tensors by themselves


def everywhere(old: Any, new: Any, name: str) -> None:
    """In every module that has imported it by this name."""
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(name) is old:
            setattr(module, name, new)


def without_a_device() -> None:
    """Groups of processes are gloo's, weights are not filled, and memory is not pinned."""
    import sglang.srt.mem_cache.pool_host.common as pool
    import sglang.srt.model_loader.loader as weights
    import torch.distributed as dist

    weights.initialize_dummy_weights = lambda *_, **__: None
    pool._cuda_host_register = lambda *_, **__: None
    start, group = dist.init_process_group, dist.new_group

    def start_gloo(_backend: str | None = None, *args: Any, **options: Any) -> None:
        start("gloo", *args, **{k: v for k, v in options.items() if k not in ("backend", "device_id")})

    def group_gloo(*args: Any, **options: Any) -> Any:
        kept = {k: v for k, v in options.items() if k not in ("backend", "device_id", "pg_options")}
        return group(*args, **kept, backend="gloo")

    everywhere(start, start_gloo, "init_process_group")
    everywhere(group, group_gloo, "new_group")
