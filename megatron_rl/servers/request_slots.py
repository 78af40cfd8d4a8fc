"""Limit on the number of requests in flight, across several event loops."""

from __future__ import annotations

import asyncio
import heapq
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import count as numbers


@dataclass(order=True)
class _Waiting:
    step: int
    number: int
    """Position in the order of arrival."""
    count: int = field(compare=False)
    loop: asyncio.AbstractEventLoop = field(compare=False)
    turn: asyncio.Future[None] = field(compare=False)
    granted: bool = field(default=False, compare=False)


class RequestSlots:
    """Lets at most `limit` requests run at a time, also across threads with their own event loops.

    Requests of the earliest step are served first, and requests of the same step in order of arrival. No request waits behind
    a request of a later step.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._lock = threading.Lock()
        self._taken = 0
        self._waiting: list[_Waiting] = []
        """Requests that wait, as a heap."""
        self._numbers = numbers()

    @asynccontextmanager
    async def take(self, count: int, step: int = 0) -> AsyncIterator[None]:
        """Wait until `count` slots are free, and hold them during the `async with` block.

        step: training step that waits for the answers. A call with a count above the limit waits until no slot is in use, and
        runs alone.
        """
        loop = asyncio.get_running_loop()
        with self._lock:
            mine = _Waiting(step, next(self._numbers), count, loop, loop.create_future())
            heapq.heappush(self._waiting, mine)
            self._serve()
        try:
            await mine.turn
            yield
        finally:
            with self._lock:
                if mine.granted:
                    self._taken -= count
                else:  # canceled while it waited
                    self._waiting.remove(mine)
                    heapq.heapify(self._waiting)
                self._serve()

    def _serve(self) -> None:
        while self._waiting and (not self._taken or self._taken + self._waiting[0].count <= self.limit):
            first = heapq.heappop(self._waiting)
            first.granted = True
            self._taken += first.count
            with suppress(RuntimeError):  # the loop has ended: its block releases the slots
                first.loop.call_soon_threadsafe(_grant, first.turn)


def _grant(turn: asyncio.Future[None]) -> None:
    if not turn.done():
        turn.set_result(None)
