"""A folder of safetensors files that trainer and engines both see: slow, but a shared file system is all it needs."""

from __future__ import annotations

import json
import os
import shutil
import struct
from pathlib import Path
from typing import override

import torch
from torch import Tensor

from megatron_rl.sync.buckets import Bucket
from megatron_rl.sync.engines import Engines, WeightSyncError
from megatron_rl.sync.transport import Transport

_SAFETENSORS_DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
}


class DiskTransport(Transport):
    """Sends by `/update_weights_from_disk`. A push is a folder of its own that gets its final name when complete."""

    def __init__(self, engines: Engines, tensor_parallel: int, folder: Path):
        super().__init__(engines, tensor_parallel)
        self.folder = folder.absolute()
        self._pushes = self._files = 0

    @property
    def _partial(self) -> Path:
        return self.folder / f"push-{self._pushes}.partial"

    @override
    def allocate(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    @override
    def begin(self) -> None:
        self._pushes += 1
        self._files = 0
        try:
            shutil.rmtree(self._partial, ignore_errors=True)
            self._partial.mkdir(parents=True)
        except OSError as error:
            raise WeightSyncError(f"weight sync: cannot write '{self._partial}': {error.strerror}") from None

    @override
    def send(self, bucket: Bucket, version: str | None) -> None:
        self._files += 1
        write_safetensors(self._partial / f"model-{self._files:05d}.safetensors", bucket)

    @override
    def finish(self, version: str) -> None:
        complete = self._partial.with_suffix("")
        shutil.rmtree(complete, ignore_errors=True)
        os.rename(self._partial, complete)
        try:
            self.engines.call(
                "/update_weights_from_disk",
                {
                    "model_path": str(complete),
                    "load_format": "safetensors",
                    "flush_cache": True,
                    "weight_version": version,
                },
            )
        finally:
            shutil.rmtree(complete, ignore_errors=True)

    @override
    def abort(self) -> None:
        shutil.rmtree(self._partial, ignore_errors=True)


def write_safetensors(path: Path, bucket: Bucket) -> None:
    """Write a bucket as a safetensors file (8 bytes of header size, header as JSON, data); its buffer is already the data."""
    header = {
        entry.name: {
            "dtype": _SAFETENSORS_DTYPES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [entry.start, entry.end],
        }
        for entry in bucket.entries
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the data starts aligned
    try:
        with open(path, "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.write(memoryview(bucket.data.numpy()))
    except OSError as error:
        raise WeightSyncError(f"weight sync: cannot write '{path}': {error.strerror}") from None
