"""One event loop in a thread of its own, as long as the run: sessions with tool servers outlive a step."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

CLOSE_TIMEOUT_S = 20.0


class EventLoop:
    """`run` gives a coroutine's result to a thread that has no loop; `close` cancels what is left."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="conversations", daemon=True)
        self._thread.start()

    def run[T](self, work: Coroutine[Any, Any, T]) -> T:
        """The coroutine's result; its error is raised here. One that is interrupted here is cancelled there."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Cancel what is under way, and end the thread."""
        if self._loop.is_closed():
            return
        with suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result(CLOSE_TIMEOUT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_TIMEOUT_S)
        if not self._thread.is_alive():
            self._loop.close()


async def in_thread[T](function: Callable[..., T], *arguments: Any) -> T:
    """What the function returns, called in a thread of its own, which does not hold up the end of the process if it hangs."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(how: Callable[[Any], None], value: Any) -> None:
        with suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(lambda: None if future.done() else how(value))

    def work() -> None:
        try:
            result = function(*arguments)
        except BaseException as error:
            settle(future.set_exception, error)
        else:
            settle(future.set_result, result)

    threading.Thread(target=work, daemon=True).start()
    return await future


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others, timeout=CLOSE_TIMEOUT_S / 2)
