"""A bucket in the trainer's memory, mapped by the engine: shared memory without a name, a daemon or a copy.

torch's own ways need a key of the parent process (file descriptors) or leave a helper process behind (file names). A
memfd is gone with the trainer, however that ends; on the same machine the engine opens it as /proc/PID/fd/N.
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
"""Names that the engine's unpickler must admit."""


def allocate(nbytes: int) -> Tensor:
    """[nbytes] uint8 in shared memory; `.shared.path` is where other processes of this machine find it."""
    descriptor = os.memfd_create(NAME, os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, nbytes)
        tensor = torch.from_file(f"/proc/self/fd/{descriptor}", shared=True, size=nbytes, dtype=torch.uint8)
    except BaseException:
        os.close(descriptor)
        raise
    tensor.shared = _Descriptor(descriptor)  # open for as long as the tensor lives
    return tensor


class _Descriptor:
    def __init__(self, number: int):
        self.number = number
        self.path = f"/proc/{os.getpid()}/fd/{number}"

    def __del__(self) -> None:
        os.close(self.number)


def dump_call(name: str, arguments: tuple, pickler: type[pickle.Pickler] = pickle.Pickler) -> bytes:
    """A pickle whose loading calls `name` of the engine's own plugin with these arguments."""
    stream = io.BytesIO()
    pickler(stream, 2).dump(arguments)  # later protocols have frames, which could not be cut open
    pickled = stream.getvalue()
    return pickled[:2] + pickle.GLOBAL + f"{MODULE}\n{name}\n".encode() + pickled[2:-1] + pickle.REDUCE + pickle.STOP


def map_bucket(path: str, nbytes: int, metadata: list[dict]) -> dict:
    """The mapping that SGLang's load_format `flattened_bucket` expects, the data being the trainer's memory at `path`.

    Copied on writing: SGLang's loader of gpt-oss zeroes the biases that it is handed on all tensor-parallel ranks but the
    first, and the memory is that of all ranks and servers. Errors: ValueError for what is no bucket of this user's trainer.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        own = f"/proc/self/fd/{descriptor}"
        found, name = os.fstat(descriptor), os.readlink(own)
        if name != f"/memfd:{NAME} (deleted)" or found.st_uid != os.geteuid() or found.st_size < nbytes:
            raise ValueError(f"{path} is no bucket of {nbytes} bytes that a trainer of this user has made")
        data = torch.from_file(own, shared=False, size=nbytes, dtype=torch.uint8)
    finally:
        os.close(descriptor)
    entries = [
        SimpleNamespace(**entry | {"shape": torch.Size(entry["shape"]), "dtype": DTYPES[entry["dtype"]]})
        for entry in metadata
    ]
    return {"flattened_tensor": data, "metadata": entries}


def own_copy(bucket: dict) -> dict:
    """The same with a copy of its data, which is the trainer's memory on a GPU: to be written to, as above.

    Returns when the copy is there. SGLang's reply waits for no kernel, and after it the trainer fills that memory anew.
    """
    copy = bucket["flattened_tensor"].clone()
    if copy.is_cuda:
        torch.cuda.current_stream(copy.device).synchronize()
    return bucket | {"flattened_tensor": copy}
