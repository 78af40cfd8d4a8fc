"""Servers that died are started again or left out, new ones are taken in, and what was left open is asked again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future, wait

from megatron_rl.distributed.parallel import Ranks, in_background
from megatron_rl.errors import StopRequested, UserError
from megatron_rl.rollout.collect import Collection
from megatron_rl.rollout.over_sampling import FirstGroups
from megatron_rl.servers.client import EngineLost, SGLangClient
from megatron_rl.servers.fleet import Fleet
from megatron_rl.servers.local import LocalServers

RESTARTS = 3
"""Times that dead servers are started again for one batch of requests, or for one push."""
CANCEL_S = 5.0
"""Longest wait for requests that are given up."""
CANCELLED = (asyncio.CancelledError, futures.CancelledError)
"""Errors of work that was given up: of a coroutine, and of a thread that waits for one."""


class Recovery:
    """Changes among the servers. All processes have one and call it together."""

    def __init__(
        self,
        servers: LocalServers | Fleet,
        ranks: Ranks,
        make_room: Callable[[], None],
        moved: Callable[[list[str]], None],
        *,
        external: bool,
    ) -> None:
        """servers: which rank 0 alone may have; make_room: called everywhere before one starts.

        moved: called everywhere with the addresses after a change. external: others start them.
        """
        self._servers, self._ranks, self._make_room, self._moved = servers, ranks, make_room, moved
        self.external = external
        self.restarts = 0
        """Servers that were started again, or came or went, since the start of the run."""

    def revive(self, patience_s: float = 0.0, *, trouble: bool = False) -> bool:
        """Start the children that are dead again; leave external servers out that are gone, and take new ones in.

        patience_s: while there is no change, one within this time will do. trouble: something failed; children that hang are
        dead then, and external servers are used anew also where no change is seen, as one may have been away for a moment.
        Returns whether the servers are to be sent the weights, as they are others or new.
        """

        def changed() -> tuple[int, list[str]]:
            return self._servers.changed(patience_s, trouble=trouble), [*self._servers.addresses]

        count, before = self._ranks.main_does(changed, patient=True)
        if not count and not (trouble and self.external):
            return False
        self._make_room()
        now = self._ranks.main_does(self._servers.renew, patient=True)
        self._moved(now)
        # More may have gone or come since they were counted.
        self.restarts += max(count, len({*before} ^ {*now})) if self.external else count
        return True


def generate(
    collection: Collection,
    client: SGLangClient,
    ranks: Ranks,
    revive: Callable[[], bool],
    *,
    begun: Future[None] | None = None,
    step: int = 0,
    stop: Callable[[], bool] = lambda: False,
    first: FirstGroups | None = None,
) -> None:
    """Complete every process's collection, or the groups that are taken of it.

    revive: brings servers back with the current weights, on all processes; returns whether there were any. begun: where
    `begin` was called before. step: that waits for it. stop: whether to end it. first: which groups are taken, where not all
    are.
    Errors: UserError, the same on every process, for what a restart does not mend, or where one did not help; StopRequested.
    """

    def enough() -> bool:
        """True once the answers of all processes will do. Collective."""
        return first is not None and first.add(
            r for mine in ranks.gather_from_leaders(collection.finished) for r in mine
        )

    for attempt in range(RESTARTS + 1):
        answered = begun if begun is not None and not attempt else start_collection(collection, client, step)
        if ranks.wait_for(answered, stop, enough):
            collection.cancel()
            wait([answered], CANCEL_S)
            raise StopRequested
        settled = first is not None and (first.enough or enough())
        if settled:
            collection.abort()
            if not wait([answered], CANCEL_S).done:
                collection.cancel()
                wait([answered], CANCEL_S)
        problem = answered.exception() if answered.done() or not settled else None
        mended = settled or collection.complete  # what was begun, where a server has been revived since then
        if (mended and isinstance(problem, EngineLost)) or (settled and isinstance(problem, CANCELLED)):
            problem = None
        if problem is not None and not isinstance(problem, UserError):
            raise problem
        problems = [p for p in ranks.gather(problem) if p is not None]
        if not problems:
            return
        fatal = [p for p in problems if not isinstance(p, EngineLost)]
        if fatal or attempt == RESTARTS:
            raise (fatal or problems)[0]
        # What was begun may have failed by servers that have been revived meanwhile.
        if not revive() and (attempt or begun is None):
            raise problems[0]


def start_collection(collection: Collection, client: SGLangClient, step: int = 0) -> Future[None]:
    """Ask for a collection in a thread of its own, by a client of its own. step: that waits for it."""
    return in_background(lambda: None if collection.complete else collection.run(client.copy(step)))
