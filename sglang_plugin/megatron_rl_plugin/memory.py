"""Weight buckets in the trainer's host memory that the engine maps. They need no file name, no helper process and no copy.

torch's own methods do not fit: file descriptors need a key of the parent process, and file names leave a helper process
running. A memfd (an anonymous file in memory) disappears with the trainer process, however the process ends. On the same
machine, the engine opens it as /proc/PID/fd/N.
"""

from __future__ import annotations

import io
import os
import pickle
from types import SimpleNamespace

import torch
from torch import Tensor

MODULE = "megatron_rl_plugin.memory"
NAME = "megatron_rl_bucket"
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
GLOBALS = {(MODULE, "map_bucket"), (MODULE, "own_copy")}
"""Functions that the engine's restricted unpickler must allow."""


def allocate(nbytes: int) -> Tensor:
    """Allocate a uint8 tensor [nbytes] in shared memory. Other processes of this machine can open the path `.shared.path`."""
    descriptor = os.memfd_create(NAME, os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, nbytes)
        tensor = torch.from_file(f"/proc/self/fd/{descriptor}", shared=True, size=nbytes, dtype=torch.uint8)
    except BaseException:
        os.close(descriptor)
        raise
    tensor.shared = _Descriptor(descriptor)  # stays open as long as the tensor exists
    return tensor


class _Descriptor:
    def __init__(self, number: int):
        self.number = number
        self.path = f"/proc/{os.getpid()}/fd/{number}"

    def __del__(self) -> None:
        os.close(self.number)


def dump_call(name: str, arguments: tuple, pickler: type[pickle.Pickler] = pickle.Pickler) -> bytes:
    """Return a pickle that, when loaded, calls the function `name` of this module in the engine with these arguments."""
    stream = io.BytesIO()
    pickler(stream, 2).dump(arguments)  # later protocols have frames, which cannot be cut and joined
    pickled = stream.getvalue()
    return pickled[:2] + pickle.GLOBAL + f"{MODULE}\n{name}\n".encode() + pickled[2:-1] + pickle.REDUCE + pickle.STOP


def map_bucket(path: str, nbytes: int, metadata: list[dict]) -> dict:
    """Return the dict that SGLang's load_format `flattened_bucket` expects, with data in the trainer's memory at `path`.

    The mapping is copy-on-write, because all ranks and servers share this memory and a loader may change its input. For
    example, SGLang's loader of gpt-oss sets the given biases to zero on all tensor-parallel ranks except the first. Errors:
    ValueError if `path` is not a bucket of this user's trainer.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        own = f"/proc/self/fd/{descriptor}"
        found, name = os.fstat(descriptor), os.readlink(own)
        if name != f"/memfd:{NAME} (deleted)" or found.st_uid != os.geteuid() or found.st_size < nbytes:
            raise ValueError(f"{path} is not a bucket of {nbytes} bytes made by a trainer of this user")
        data = torch.from_file(own, shared=False, size=nbytes, dtype=torch.uint8)
    finally:
        os.close(descriptor)
    entries = [
        SimpleNamespace(**entry | {"shape": torch.Size(entry["shape"]), "dtype": DTYPES[entry["dtype"]]})
        for entry in metadata
    ]
    return {"flattened_tensor": data, "metadata": entries}


def own_copy(bucket: dict) -> dict:
    """Return the bucket with a copy of its data, which is the trainer's GPU memory. The loader may then change the copy.

    The function returns after the copy is complete. SGLang's reply does not wait for GPU kernels, and the trainer overwrites
    its memory after the reply.
    """
    copy = bucket["flattened_tensor"].clone()
    if copy.is_cuda:
        torch.cuda.current_stream(copy.device).synchronize()
    return bucket | {"flattened_tensor": copy}
