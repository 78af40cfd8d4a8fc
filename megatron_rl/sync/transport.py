"""Interface of a weight transport, which carries buckets to the engines.

`TRANSPORTS` of megatron_rl/sync/transports.py lists the built-in transports. They import torch only in their methods, because
the checks of a config read the classes' attributes before torch is imported.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from megatron_rl.errors import UserError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from megatron_rl.sync.engines import Engines


class WeightSyncError(UserError):
    """Raised if a push failed, or if the engine does not hold the pushed weights."""


# -- buckets -------------------------------------------------------------------------------------------------------------
# A bucket is one flat buffer with tensors side by side, which is sent in one piece.


@dataclass(frozen=True)
class Entry:
    """One tensor in a bucket: bytes [start, end) of the buffer."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass
class Bucket:
    """A flat uint8 buffer and the tensors in it. There are no gaps between tensors, and each is aligned to its element size."""

    buffer: Tensor
    entries: list[Entry] = field(default_factory=list)

    @property
    def used(self) -> int:
        """Number of bytes in use."""
        return self.entries[-1].end if self.entries else 0

    @property
    def data(self) -> Tensor:
        """The part of the buffer in use, [used] uint8."""
        return self.buffer[: self.used]

    def add(self, name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Copy a tensor into the bucket, cast to `dtype`. Returns the copy."""
        start, end = self.used, self.used + tensor.numel() * dtype.itemsize
        copy = self.buffer[start:end].view(dtype).view(tensor.shape)
        copy.copy_(tensor.detach())
        self.entries.append(Entry(name, dtype, tuple(tensor.shape), start, end))
        return copy


def fill_buckets(
    groups: Iterable[list[tuple[str, Tensor]]],
    *,
    capacity: int,
    dtype_of: Callable[[str], torch.dtype],
    buffer_of: Callable[[int], Tensor],
    seen: Callable[[str, Tensor], None],
) -> Iterator[tuple[Bucket, bool]]:
    """Yield (bucket, is_last). A bucket has at most `capacity` bytes, except if a single group is larger.

    groups: lists of (name, tensor); the tensors of a group stay in one bucket. dtype_of: returns the dtype to cast a tensor to.
    buffer_of: returns a free buffer of at least the given number of bytes. seen: called with the name and the bucket's copy of
    every tensor.
    """
    bucket = None
    for group in groups:
        typed = [(name, tensor, dtype_of(name)) for name, tensor in group]
        size = sum(tensor.numel() * dtype.itemsize for _, tensor, dtype in typed)
        if bucket is not None:
            aligned = all(bucket.used % dtype.itemsize == 0 for *_, dtype in typed)
            if bucket.used + size > capacity or not aligned:
                yield bucket, False
                bucket = None
        if bucket is None:
            bucket = Bucket(buffer_of(max(capacity, size)))
        for name, tensor, dtype in typed:
            seen(name, bucket.add(name, tensor, dtype))
    if bucket is not None:
        yield bucket, True


# -- transport -----------------------------------------------------------------------------------------------------------


class Transport(ABC):
    """A way to send buckets, used only on the sending rank. Order of calls: connect, then for each push begin, send..., finish.

    One thread calls connect, begin and send; another thread allocates and fills the buckets.
    """

    not_on_one_gpu: ClassVar[str] = ""
    """Reason why the transport fails if trainer and engine processes share a GPU (rollout.colocate); '' if it works there."""
    shares_memory: ClassVar[bool] = False
    """True if the engine maps the bucket's GPU memory; torch must then allocate it without expandable segments."""
    needs_peer_access: ClassVar[bool] = False
    """True if every GPU of an engine reads from the GPU of the trainer's first process, which must be on the same machine."""
    needs_folder: ClassVar[bool] = False
    """True if the transport needs a folder that trainer and servers can access."""
    buffers_on_gpu: ClassVar[bool] = True
    """True if a push has two buffers on the GPU of the trainer's first process (without a GPU, in host memory)."""

    def __init__(self, engines: Engines, tensor_parallel: int, folder: Path | None = None):
        """Prepare for servers of `tensor_parallel` ranks each, without connecting. folder: for files, in the run's folder."""
        import torch

        self.engines = engines
        self.tensor_parallel = tensor_parallel
        self.folder = (folder or Path()).absolute()
        gpu = torch.cuda.is_available()
        self.device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")

    def connect(self) -> None:
        """Set up resources that several pushes use."""

    def allocate(self, nbytes: int) -> Tensor:
        """Return a uint8 buffer [nbytes] from which the transport can send buckets."""
        import torch

        return torch.empty(nbytes, dtype=torch.uint8, device=self.device if self.buffers_on_gpu else "cpu")

    def begin(self) -> None:
        """Start a push."""
        self.engines.call("/begin_weight_update")

    @abstractmethod
    def send(self, bucket: Bucket, version: str | None) -> None:
        """Make all engines load a bucket. Return when they have loaded it, because the caller then refills the buffer.

        bucket: complete bucket; no GPU kernel still writes to it. version: given only with the last bucket of a push.
        """

    def finish(self, version: str) -> None:
        """End a push. From now on, the engines serve the weights `version`."""
        self.engines.call("/end_weight_update")

    def abort(self) -> None:
        """Clean up after a failed push, whatever state the servers are in. The next call is connect()."""
        self.engines.attempt("/end_weight_update")

    def close(self) -> None:
        """Release the resources that `connect` set up."""
