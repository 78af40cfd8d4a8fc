"""An event loop in its own thread. Its connections outlive a step, and threads without an event loop can use it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

CLOSE_TIMEOUT_S = 20.0


class EventLoop:
    """An event loop in a thread. `run` returns a coroutine's result to another thread; `close` cancels running coroutines."""

    def __init__(self, name: str = "conversations") -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def start[T](self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine and return the future of its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run[T](self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine and return its result or raise its error. If the wait is interrupted, the coroutine is cancelled."""
        future = self.start(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Cancel all running coroutines and stop the thread."""
        if self._loop.is_closed():
            return
        with suppress(TimeoutError):
            self.start(_cancel_others()).result(CLOSE_TIMEOUT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_TIMEOUT_S)
        if not self._thread.is_alive():
            self._loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others, timeout=CLOSE_TIMEOUT_S / 2)
