"""A weight transport of a user's own, all of it: `sync.transport: tests/sync/own_transport.py:Files`."""

from __future__ import annotations

import shutil
from typing import override

from safetensors.torch import save_file

from megatron_rl.sync.transport import Bucket, Transport


class Files(Transport):
    """A file for each bucket, which the engines read at the end of a push."""

    needs_folder = True
    buffers_on_gpu = False

    @override
    def begin(self) -> None:
        self.folder.mkdir(parents=True)
        self.files = 0

    @override
    def send(self, bucket: Bucket, version: str | None) -> None:
        parts = {e.name: bucket.buffer[e.start : e.end].view(e.dtype).view(e.shape) for e in bucket.entries}
        save_file(parts, self.folder / f"{self.files}.safetensors")
        self.files += 1

    @override
    def finish(self, version: str) -> None:
        body = {"model_path": str(self.folder), "load_format": "safetensors", "weight_version": version}
        self.engines.call("/update_weights_from_disk", body)
        shutil.rmtree(self.folder)

    @override
    def abort(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
