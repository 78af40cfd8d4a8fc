"""Weight transport by shared memory on one machine: the engine maps the trainer's bucket (CUDA IPC on GPUs) and copies from it.

The bucket is on the GPU of the trainer's first process. SGLang's ranks on other GPUs read it over NVLink or PCIe, which needs
peer access (megatron_rl/checks/preflight.py checks it). The bucket's GPU need not be visible to these ranks.
"""

from __future__ import annotations

import base64
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast, override

from megatron_rl.sync.transport import Bucket, Transport

if TYPE_CHECKING:
    from torch import Tensor

DEVICE_ARGUMENT = 6
"""Index of the device in the arguments of torch's rebuild_cuda_tensor; SGLang relies on it too (utils/patch_torch.py)."""


class TensorTransport(Transport):
    """Sends buckets as one flat tensor each, through `/update_weights_from_tensor`."""

    shares_memory = needs_peer_access = True

    @override
    def allocate(self, nbytes: int) -> Tensor:
        from megatron_rl_plugin import memory

        if self.device.type == "cuda":
            return super().allocate(nbytes)
        return memory.allocate(nbytes)

    @override
    def send(self, bucket: Bucket, version: str | None) -> None:
        dump = self._dump_cuda if bucket.buffer.is_cuda else self._dump_cpu
        self.engines.call(
            "/update_weights_from_tensor",
            [
                {
                    # One payload per rank: each rank opens its own CUDA handle.
                    "serialized_named_tensors": [dump(bucket, rank) for rank in range(self.tensor_parallel)],
                    "load_format": "flattened_bucket",
                    "flush_cache": version is not None,
                    "weight_version": version,
                }
                for _ in self.engines.addresses
            ],
        )

    def _dump_cpu(self, bucket: Bucket, rank: int) -> str:
        from megatron_rl_plugin import memory

        entries = [entry | {"dtype": str(entry["dtype"]).removeprefix("torch.")} for entry in _metadata(bucket)]
        path = cast("Any", bucket.buffer).shared.path  # set by `memory.allocate`
        arguments = (path, bucket.used, entries)
        return base64.b64encode(memory.dump_call("map_bucket", arguments)).decode()

    def _dump_cuda(self, bucket: Bucket, rank: int) -> str:
        from megatron_rl_plugin import memory

        metadata = [SimpleNamespace(**entry) for entry in _metadata(bucket)]
        arguments = ({"flattened_tensor": _OpenedAt(bucket.data, rank), "metadata": metadata},)
        return base64.b64encode(memory.dump_call("own_copy", arguments, ForkingPickler)).decode()


class _OpenedAt:
    """A CUDA tensor for pickling. The receiver opens it on its own device number `device`, not on the sender's number."""

    def __init__(self, tensor: Tensor, device: int) -> None:
        self._tensor, self._device = tensor, device

    def __reduce__(self):
        from torch.multiprocessing import reductions

        function, arguments = reductions.reduce_tensor(self._tensor)
        return function, (*arguments[:DEVICE_ARGUMENT], self._device, *arguments[DEVICE_ARGUMENT + 1 :])


def _metadata(bucket: Bucket) -> list[dict]:
    """Return the fields of SGLang's FlattenedTensorMetadata as dicts, because SGLang's unpickler accepts only plain objects."""
    return [
        {
            "name": entry.name,
            "shape": entry.shape,
            "dtype": entry.dtype,
            "start_idx": entry.start,
            "end_idx": entry.end,
            "numel": entry.end - entry.start,
        }
        for entry in bucket.entries
    ]
