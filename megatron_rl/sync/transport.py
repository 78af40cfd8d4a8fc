"""The interface of the three ways to carry buckets to the engines: `distributed`, `tensor` and `disk`."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from megatron_rl.sync.buckets import Bucket
from megatron_rl.sync.engines import Engines


class Transport(ABC):
    """A way to carry buckets, on the sending rank alone. Order of calls: connect, then for every push begin, send..., finish.

    connect, begin and send run in a thread beside the one that allocates and fills the buckets.
    """

    def __init__(self, engines: Engines, tensor_parallel: int):
        """Prepare for servers of `tensor_parallel` ranks each; nothing is reached yet."""
        self.engines = engines
        self.tensor_parallel = tensor_parallel
        gpu = torch.cuda.is_available()
        self.device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")

    def connect(self) -> None:
        """Set up what outlives a push."""

    def allocate(self, nbytes: int) -> Tensor:
        """A buffer [nbytes] uint8 in which buckets can be sent."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

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
