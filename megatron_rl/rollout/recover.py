"""Child servers that have died are started again, every process learns of it, and what they left open is asked again."""

from __future__ import annotations

from collections.abc import Callable

from megatron_rl.errors import UserError
from megatron_rl.rollout.children import ChildServers
from megatron_rl.rollout.client import EngineLost, SGLangClient
from megatron_rl.rollout.collect import Collection
from megatron_rl.trainer.parallel import Ranks

RESTARTS = 3
"""Times that dead servers are started again for one batch of requests, or for one push."""


class Recovery:
    """Restarts of the servers that this run has started. All processes have one and call it together."""

    def __init__(self, servers: ChildServers, ranks: Ranks, make_room: Callable[[], None]) -> None:
        """servers: this process's children, which rank 0 alone may have; make_room: called everywhere before one starts."""
        self._servers, self._ranks, self._make_room = servers, ranks, make_room
        self.restarts = 0
        """Since the start of the run."""

    def revive(self, patience_s: float = 0.0) -> bool:
        """Restart the servers that are dead, or one that dies within the time. Returns whether there was one."""
        if not (count := self._ranks.maximum(len(self._servers.dead(patience_s)))):
            return False
        self._make_room()
        self._ranks.main_does(self._servers.restart)
        self.restarts += count
        return True


def generate(collection: Collection, client: SGLangClient, ranks: Ranks, revive: Callable[[], bool]) -> None:
    """Complete every process's collection.

    revive: brings dead servers back with the current weights, on all processes; returns whether there were any.
    Errors: UserError, the same on every process, for what a restart does not mend, or where one did not help.
    """
    for attempt in range(RESTARTS + 1):
        problem: UserError | None = None
        try:
            if not collection.complete:
                collection.run(client)
        except UserError as error:
            problem = error
        problems = [p for p in ranks.gather(problem) if p is not None]
        if not problems:
            return
        fatal = [p for p in problems if not isinstance(p, EngineLost)]
        if fatal or attempt == RESTARTS or not revive():
            raise (fatal or problems)[0]
