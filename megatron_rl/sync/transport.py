"""The interface of a weight transport: one way to carry buckets to the engines.

Built-in ones are in `TRANSPORTS` of megatron_rl/sync/transports.py. What checks ask of a class is known before torch is
imported: built-in ones import it in their methods.
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
    """A push did not happen, or the engine does not hold what was pushed."""


# -- buckets -------------------------------------------------------------------------------------------------------------
# Buckets: tensors side by side in one flat buffer that travels in one piece.


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
    """A flat uint8 buffer and the tensors in it, without gaps and each aligned to its elements."""

    buffer: Tensor
    entries: list[Entry] = field(default_factory=list)

    @property
    def used(self) -> int:
        """Bytes that are filled."""
        return self.entries[-1].end if self.entries else 0

    @property
    def data(self) -> Tensor:
        """The filled part, [used] uint8."""
        return self.buffer[: self.used]

    def add(self, name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Copy a tensor in, cast to `dtype`; returns the copy."""
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
    """Yield (bucket, is it the last), of at most `capacity` bytes each unless a single group is larger.

    groups: lists of (name, tensor) that must travel together. dtype_of: the dtype to cast a tensor to. buffer_of: gives a
    buffer of at least this many bytes that nobody reads any more. seen: called with every tensor as it lies in its bucket.
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
    """A way to carry buckets, on the sending rank alone. Order of calls: connect, then for every push begin, send..., finish.

    connect, begin and send run in a thread beside the one that allocates and fills the buckets.
    """

    not_on_one_gpu: ClassVar[str] = ""
    """Why it does not work where trainer and engine are processes on one GPU (rollout.colocate); empty: it does."""
    shares_memory: ClassVar[bool] = False
    """The engine maps the GPU memory of the bucket, which torch must have allocated without expandable segments."""
    needs_peer_access: ClassVar[bool] = False
    """Every GPU of an engine reads from the GPU of the trainer's first process, on the same machine."""
    needs_folder: ClassVar[bool] = False
    """Wants a folder that trainer and servers both see."""
    buffers_on_gpu: ClassVar[bool] = True
    """The two buffers of a push lie on the GPU of the trainer's first process, where there is one; otherwise on the host."""

    def __init__(self, engines: Engines, tensor_parallel: int, folder: Path | None = None):
        """Prepare for servers of `tensor_parallel` ranks each; nothing is reached yet. folder: below the run's."""
        import torch

        self.engines = engines
        self.tensor_parallel = tensor_parallel
        self.folder = (folder or Path()).absolute()
        gpu = torch.cuda.is_available()
        self.device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")

    def connect(self) -> None:
        """Set up what outlives a push."""

    def allocate(self, nbytes: int) -> Tensor:
        """A buffer [nbytes] uint8 in which buckets can be sent."""
        import torch

        return torch.empty(nbytes, dtype=torch.uint8, device=self.device if self.buffers_on_gpu else "cpu")

    def begin(self) -> None:
        """Open a push."""
        self.engines.call("/begin_weight_update")

    @abstractmethod
    def send(self, bucket: Bucket, version: str | None) -> None:
        """Have all engines load a bucket. Returns when they have, as its buffer is filled again then.

        bucket: complete, no kernel still writes to it. version: given with the last bucket of a push.
        """

    def finish(self, version: str) -> None:
        """Close a push: the engines serve `version` from now on."""
        self.engines.call("/end_weight_update")

    def abort(self) -> None:
        """Clean up after a push that failed, whatever state the servers are in; connect() comes next."""
        self.engines.attempt("/end_weight_update")

    def close(self) -> None:
        """Give back what connect set up."""
