"""Recovery from lost servers: restart or drop dead servers, add new servers, and repeat unanswered requests."""

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
"""Number of times that dead servers are restarted for one batch of requests, or for one push."""
CANCEL_S = 5.0
"""Longest wait, in seconds, for the end of requests that were canceled or aborted."""
CANCELLED = (asyncio.CancelledError, futures.CancelledError)
"""Errors that canceled work raises: in a coroutine, and in a thread that waits for a coroutine."""


class Recovery:
    """Replaces lost servers, and tells all processes the new addresses. All processes call the method together."""

    def __init__(
        self,
        servers: LocalServers | Fleet,
        ranks: Ranks,
        make_room: Callable[[], None],
        moved: Callable[[list[str]], None],
        *,
        external: bool,
    ) -> None:
        """servers: used on rank 0 only. make_room: called on every process before a server starts.

        moved: called on every process with the addresses after a change. external: the servers are not started by this run.
        """
        self._servers, self._ranks, self._make_room, self._moved = servers, ranks, make_room, moved
        self.external = external
        self.restarts = 0
        """Number of restarted servers since the start of the run; with external servers, number of servers that appeared or
        left."""

    def revive(self, patience_s: float = 0.0, *, trouble: bool = False) -> bool:
        """Restart dead child servers, or update the list of external servers. Return True if the servers need the weights.

        patience_s: longest wait for a change, in seconds. trouble: True if a request or push failed. In this case,
        child servers that hang count as dead, and external servers are connected again even without a visible change: a server
        may have been away for a moment.
        """

        def changed() -> tuple[int, list[str]]:
            return self._servers.changed(patience_s, trouble=trouble), [*self._servers.addresses]

        count, before = self._ranks.main_does(changed, patient=True)
        if not count and not (trouble and self.external):
            return False
        self._make_room()
        now = self._ranks.main_does(self._servers.renew, patient=True)
        self._moved(now)
        # More servers may have gone or come since the count.
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
    """Complete the collections of all processes, or only the groups that `first` chooses.

    revive: brings servers back with the current weights, on all processes; returns True if it brought back any server.
    begun: future of the collection, if it was already started. step: step that waits for the responses. stop: returns True to
    end the collection. first: chooses the groups to use; None: all groups.
    Errors: UserError, the same on every process, if a restart cannot help or did not help; StopRequested.
    """

    def enough() -> bool:
        """Return True if the answered requests of all processes complete enough groups. Collective over all ranks."""
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
        mended = settled or collection.complete  # the early requests are complete, though a server was lost meanwhile
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
        # The early requests may have failed because of servers that have been brought back since then.
        if not revive() and (attempt or begun is None):
            raise problems[0]


def start_collection(collection: Collection, client: SGLangClient, step: int = 0) -> Future[None]:
    """Run a collection in its own thread, with its own client. step: step that waits for the answers."""
    return in_background(lambda: None if collection.complete else collection.run(client.copy(step)))
