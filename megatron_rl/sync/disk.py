"""Weight transport by a folder of safetensors files. It is slow, but needs only a file system that both sides share."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, override

from megatron_rl.sync.transport import Bucket, Transport, WeightSyncError

if TYPE_CHECKING:
    from megatron_rl.sync.engines import Engines


class DiskTransport(Transport):
    """Sends weights through `/update_weights_from_disk`. Each push writes its own folder and renames it when complete."""

    needs_folder = True
    buffers_on_gpu = False

    def __init__(self, engines: Engines, tensor_parallel: int, folder: Path | None = None):
        super().__init__(engines, tensor_parallel, folder)
        self._pushes = self._files = 0

    @property
    def _partial(self) -> Path:
        return self.folder / f"push-{self._pushes}.partial"

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
    """Write a bucket as a safetensors file, directly from its buffer."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    tensors = {e.name: bucket.buffer[e.start : e.end].view(e.dtype).view(e.shape) for e in bucket.entries}
    try:
        save_file(tensors, path)
    except (OSError, SafetensorError) as error:
        raise WeightSyncError(f"weight sync: cannot write '{path}': {error}") from None
