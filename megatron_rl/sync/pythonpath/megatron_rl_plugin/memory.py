"""A bucket in the trainer's memory, mapped by the engine: shared memory without a name, a daemon or a copy.

torch's own ways need a key of the parent process (file descriptors) or leave a helper process behind (file names). A
memfd is gone with the trainer, however that ends; on the same machine the engine opens it as /proc/PID/fd/N.
"""

from __future__ import annotations

import os
import pickle
from types import SimpleNamespace

import torch
from torch import Tensor

GLOBAL = ("megatron_rl_plugin.memory", "map_bucket")
"""What the engine's unpickler must admit."""


def allocate(nbytes: int) -> tuple[Tensor, str]:
    """[nbytes] uint8 in shared memory, and the path under which other processes of this machine find it."""
    descriptor = os.memfd_create("megatron_rl_bucket", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, nbytes)
        tensor = torch.from_file(f"/proc/self/fd/{descriptor}", shared=True, size=nbytes, dtype=torch.uint8)
    except BaseException:
        os.close(descriptor)
        raise
    tensor.descriptor = _Descriptor(descriptor)  # open for as long as the tensor lives
    return tensor, f"/proc/{os.getpid()}/fd/{descriptor}"


class _Descriptor:
    def __init__(self, number: int):
        self.number = number

    def __del__(self) -> None:
        os.close(self.number)


def dump_bucket(path: str, nbytes: int, metadata: list[dict]) -> bytes:
    """A pickle whose loading calls `map_bucket` of the engine's own plugin with these arguments."""
    arguments = pickle.dumps((path, nbytes, metadata), protocol=2)
    head, body = arguments[:2], arguments[2:-1]
    module, name = GLOBAL
    return head + pickle.GLOBAL + f"{module}\n{name}\n".encode() + body + pickle.REDUCE + pickle.STOP


def map_bucket(path: str, nbytes: int, metadata: list[dict]) -> dict:
    """What SGLang's load_format `flattened_bucket` expects, the data being the trainer's memory at `path`."""
    data = torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)
    entries = [
        SimpleNamespace(**entry | {"shape": torch.Size(entry["shape"]), "dtype": getattr(torch, entry["dtype"])})
        for entry in metadata
    ]
    return {"flattened_tensor": data, "metadata": entries}
