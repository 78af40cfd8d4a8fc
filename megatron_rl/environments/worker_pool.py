"""Processes that call one function with a hard time limit each, for verifiers that may hang or crash on strange text.

The processes are pebble's, made by spawn: a fork of a process with CUDA and gloo threads is not safe. A call that could not
be made because its process was ended from outside is made again; it has no result of its own that could be counted.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, TimeoutError
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import pebble

from megatron_rl.environments.worker import Failure, call, start
from megatron_rl.errors import UserError

START_TIMEOUT_S = 120.0
ATTEMPTS = 2
OWN_SIGNALS = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT}
"""Those with which a call ends its own process; any other one came from outside."""

pebble.CONSTS.term_timeout = 0  # workers heed no SIGTERM, so that SIGKILL follows at once


class WorkerPool:
    """`size` processes that call `target` ('module:function'); started at the first use, replaced when they time out.

    timeout_s bounds each call; importing the modules `imports` comes before the first and does not count. The children
    end with their parent, however that ends, and no signal but SIGKILL ends them before.
    """

    def __init__(
        self,
        target: str,
        *,
        timeout_s: float,
        imports: Sequence[str] = (),
        size: int | None = None,
        memory_mb: int = 4096,
    ):
        self.target = target
        self.timeout_s = timeout_s
        self.size = size or min(8, os.cpu_count() or 1)
        self._settings = (os.getpid(), target, memory_mb, tuple(imports))
        # No more calls are under way than there are workers: each of them starts at once, and none waits in a queue that
        # a broken pool leaves behind.
        self._callers = ThreadPoolExecutor(self.size, thread_name_prefix="verifier")
        # The kernel ends a worker with the thread that started it, so this one lives as long as the pool.
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="verifier-start")
        self._lock = threading.Lock()
        self._pool: pebble.ProcessPool | None = None

    def map(self, calls: Sequence[tuple], keywords: Sequence[dict[str, Any]] | None = None) -> list[Any]:
        """Results in the order of the argument tuples; a Failure stands where a call timed out, raised or crashed.

        Errors: UserError where workers do not start, or were ended from outside again and again.
        """
        return list(self._callers.map(self._call, calls, keywords or [{}] * len(calls)))

    def _call(self, arguments: tuple, keywords: dict[str, Any]) -> Any:
        reason = ""
        for _ in range(ATTEMPTS):
            pool = self._running()
            try:
                future = pool.schedule(call, (self.target, arguments, keywords), timeout=self.timeout_s)
                error = future.exception(START_TIMEOUT_S + self.timeout_s)
            except (RuntimeError, TimeoutError) as problem:
                error = BrokenProcessPool(str(problem) or f"no answer within {START_TIMEOUT_S + self.timeout_s:g} s")
            if error is None:
                return future.result()
            if isinstance(error, BrokenProcessPool):
                self._drop(pool)
                reason = f"its worker processes did not start, or were ended ({error})"
            elif isinstance(error, TimeoutError):
                return Failure(f"longer than {self.timeout_s:g} s", timed_out=True)
            elif not isinstance(error, pebble.ProcessExpired):
                raise error
            elif error.exitcode >= 0:
                return Failure(f"the worker ended with status {error.exitcode}")
            elif -error.exitcode in OWN_SIGNALS:
                return Failure(f"the worker ended with {signal.Signals(-error.exitcode).name}")
            else:
                reason = f"{signal.Signals(-error.exitcode).name} ended its worker process"
        raise UserError(
            f"data.verifier: {self.target} could not score a response in {ATTEMPTS} tries: {reason}; see the messages above,"
            " and whether memory is short"
        )

    def _running(self) -> pebble.ProcessPool:
        """The pool of processes, started where there is none."""
        with self._lock:
            if self._pool is None:
                spawn = multiprocessing.get_context("spawn")
                self._pool = pebble.ProcessPool(self.size, initializer=start, initargs=self._settings, context=spawn)
                self._starter.submit(lambda: self._pool.active).result()
            return self._pool

    def _drop(self, pool: pebble.ProcessPool) -> None:
        """End the processes of a broken pool without waiting for it, as its threads may be stuck."""
        with self._lock:
            if self._pool is not pool:
                return
            self._pool = None
        pool.stop()
        threading.Thread(target=pool.join, daemon=True).start()

    def close(self) -> None:
        """End all workers."""
        self._callers.shutdown()
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.stop()
            pool.join()
        self._starter.shutdown()
