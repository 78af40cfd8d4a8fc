"""A step is given up in its middle, where the run was asked to end and nothing has been changed yet."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from megatron_rl.errors import StopRequested
from megatron_rl.trainer.parallel import Ranks


class Interrupt:
    """What trainers look at between passes, and between micro-batches where no pipeline has others on their way.

    All processes look equally often. Each look learns what was asked before the one before it, so that none waits for it.
    """

    def __init__(self, ranks: Ranks, asked: Callable[[], bool], *, deep: bool) -> None:
        """asked: whether this process was asked to end; deep: look between micro-batches too."""
        self.deep = deep
        self._ranks, self._asked = ranks, asked
        self.armed = False
        """Whether nothing has been changed yet in the step at hand."""
        self._flag = torch.zeros(())
        self._sum: dist.Work | None = None

    def arm(self) -> None:
        """A step begins (all processes)."""
        self.disarm()
        self.armed = True

    def disarm(self) -> None:
        """Something has been changed, so that the step has to come to its end (all processes)."""
        self.armed = False
        if self._sum is not None:
            self._sum.wait()
            self._sum = None

    def look(self) -> None:
        """Errors: StopRequested, on all processes at the same look."""
        if not self.armed:
            return
        if self._sum is not None:
            self._sum.wait()
            self._sum = None
            if self._flag > 0:
                raise StopRequested
        self._flag = torch.tensor(int(self._asked()))
        self._sum = dist.all_reduce(self._flag, dist.ReduceOp.MAX, self._ranks.world_group, async_op=True)
