"""Shared memory on one machine: the engine maps the trainer's bucket (CUDA IPC on GPUs), nothing is copied but once."""

from __future__ import annotations

import base64
import io
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace

import torch
import torch.multiprocessing
from torch import Tensor

from megatron_rl.sync.buckets import Bucket
from megatron_rl.sync.transport import Transport


class TensorTransport(Transport):
    """`/update_weights_from_tensor` with a flattened bucket."""

    def allocate(self, nbytes: int) -> Tensor:
        buffer = super().allocate(nbytes)
        if buffer.device.type == "cpu":
            buffer.untyped_storage()._share_filename_cpu_()
        return buffer

    def send(self, bucket: Bucket, version: str | None) -> None:
        metadata = [
            # SGLang's unpickler admits this class and reads nothing but the attributes.
            SimpleNamespace(
                name=entry.name,
                shape=entry.shape,
                dtype=entry.dtype,
                start_idx=entry.start,
                end_idx=entry.end,
                numel=entry.end - entry.start,
            )
            for entry in bucket.entries
        ]
        if bucket.data.is_cuda:
            torch.cuda.synchronize()
        content = {"flattened_tensor": bucket.data, "metadata": metadata}
        self.engines.call(
            "/update_weights_from_tensor",
            [
                {
                    # One payload per rank: each opens a CUDA handle of its own.
                    "serialized_named_tensors": [_serialize(content) for _ in range(self.tensor_parallel)],
                    "load_format": "flattened_bucket",
                    "flush_cache": version is not None,
                    "weight_version": version,
                }
                for _ in self.engines.addresses
            ],
        )


def _serialize(content: dict) -> str:
    """Base64 of a pickle with a handle of the shared memory in place of the data.

    The default strategy passes file descriptors over a socket that is authenticated by a key of the parent process, which
    an unrelated server does not have; a file name needs none.
    """
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        stream = io.BytesIO()
        ForkingPickler(stream).dump(content)
    finally:
        torch.multiprocessing.set_sharing_strategy(before)
    return base64.b64encode(stream.getvalue()).decode()
