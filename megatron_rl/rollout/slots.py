"""How many requests are in flight, over several event loops."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass


@dataclass(eq=False)
class _Waiting:
    count: int
    loop: asyncio.AbstractEventLoop
    turn: asyncio.Future[None]
    granted: bool = False


class Slots:
    """At most `limit` at a time; who came first is served first, whatever the thread of its event loop."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._lock = threading.Lock()
        self._taken = 0
        self._waiting: deque[_Waiting] = deque()

    @asynccontextmanager
    async def take(self, count: int) -> AsyncIterator[None]:
        """Wait until `count` more fit, and hold them in the block; more than the limit are held alone."""
        loop = asyncio.get_running_loop()
        mine = _Waiting(count, loop, loop.create_future())
        with self._lock:
            self._waiting.append(mine)
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
                self._serve()

    def _serve(self) -> None:
        while self._waiting and (not self._taken or self._taken + self._waiting[0].count <= self.limit):
            first = self._waiting.popleft()
            first.granted = True
            self._taken += first.count
            with suppress(RuntimeError):  # its loop has ended: its block gives them back
                first.loop.call_soon_threadsafe(_grant, first.turn)


def _grant(turn: asyncio.Future[None]) -> None:
    if not turn.done():
        turn.set_result(None)
