"""A time limit that stands still while the engine is waited for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType


class TimeLimit:
    """`async with TimeLimit(seconds)` ends its body with TimeoutError, as asyncio.timeout does; `paused` stops the clock."""

    def __init__(self, seconds: float) -> None:
        self.left = seconds
        """Seconds that are left; right while paused, and after the end."""
        self._pauses = 0
        self._since = 0.0

    async def __aenter__(self) -> TimeLimit:
        self._since = time.monotonic()
        self._timeout = asyncio.timeout(self.left)
        await self._timeout.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        if not self._pauses:
            self.left -= time.monotonic() - self._since
        return await self._timeout.__aexit__(kind, error, trace)

    def expired(self) -> bool:
        """Whether it was this limit that ended the body."""
        return self._timeout.expired()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The time of this block does not count. Blocks may overlap, and be of other tasks than the body's."""
        if not self._pauses:
            self.left -= time.monotonic() - self._since
            self._reschedule(None)
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1
            if not self._pauses:
                self._since = time.monotonic()
                self._reschedule(asyncio.get_running_loop().time() + self.left)

    def _reschedule(self, when: float | None) -> None:
        with suppress(RuntimeError):  # it has struck already, or the body has ended
            self._timeout.reschedule(when)
