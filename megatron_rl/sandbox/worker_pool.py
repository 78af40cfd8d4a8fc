"""Pool of processes that call one function with a hard time limit, for verifiers that may hang or crash on unusual text.

The package pebble starts the processes by spawn, because forking a process with CUDA and gloo threads is not safe. If a worker
process is killed from outside during a call, the call is repeated.
"""

from __future__ import annotations

import ctypes
import importlib
import multiprocessing
import os
import resource
import signal
import threading
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, TimeoutError
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from queue import LifoQueue
from typing import Any

import pebble

from megatron_rl.config.registry import resolve
from megatron_rl.errors import UserError

# -- worker --------------------------------------------------------------------------------------------------------------
# Functions that run in a worker process of `WorkerPool`: its start, and one call.


_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Failure:
    """Result of a call that took longer than allowed, raised an exception, or ended its process."""

    reason: str
    timed_out: bool = False
    fatal: bool = False
    """True if the machine causes the failure, so that calls for other responses would fail too."""


def start(parent: int, target: str, memory_mb: int, imports: Sequence[str]) -> None:
    """Set the limits of this process, and import modules, so that the first call does not include the imports' time."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a busy worker must not outlive a killed trainer
    if os.getppid() != parent:
        os._exit(1)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # signals to the group are for the trainer, which ends its workers
    limit = memory_mb * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    warnings.simplefilter("ignore")
    os.dup2(2, 1)  # a verifier's output must not mix with the trainer's
    try:
        for name in imports:
            importlib.import_module(name)
        resolve("function", target, {}, "data.verifier")
    except (Exception, SystemExit) as error:
        print(f"megatron-rl: a verifier process of {target} does not start: {error}", flush=True)
        os._exit(1)


def call(target: str, arguments: tuple, keywords: dict[str, Any]) -> Any:
    """Return the function's result, or a Failure if it raises an exception."""
    try:
        return resolve("function", target, {}, "data.verifier")(*arguments, **keywords)
    except UserError as error:
        return Failure(str(error), fatal=True)
    except TimeoutError as error:
        return Failure(str(error), timed_out=True)
    except (Exception, SystemExit) as error:
        return Failure(f"{type(error).__name__}: {error}"[:500])


# -- worker pool ---------------------------------------------------------------------------------------------------------


START_TIMEOUT_S = 120.0
"""Longest time in seconds to wait for a process to start and import its modules."""
TAKE_TIMEOUT_S = 30.0
"""Longest time in seconds to wait until a started process takes a call, or until a killed process is replaced."""
ATTEMPTS = 2
OWN_SIGNALS = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT}
"""Signals with which a call can end its own process. All other signals come from outside."""

pebble.CONSTS.term_timeout = 0  # workers ignore SIGTERM, so send SIGKILL at once


class WorkerPool:
    """Pool of `size` processes that call `target` ('module:function'). They start at the first use.

    timeout_s: time limit of each call, after which its process is replaced. imports: modules to import before the first call;
    the import does not count toward the time limit. The worker processes end when their parent ends for any reason. Until then,
    only the signal SIGKILL ends them.
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
        size = size or min(8, os.cpu_count() or 1)
        self._settings = (os.getpid(), target, memory_mb, tuple(imports))
        self._callers = ThreadPoolExecutor(size, thread_name_prefix="verifier")
        # The kernel kills a worker when the thread that started it ends, so this thread lives as long as the pool.
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="verifier-start")
        # One pool per process, None until it is needed: a process that is killed during a transfer leaves half a message and
        # held locks, which would end or block other processes of the same pool.
        self._idle: LifoQueue[pebble.ProcessPool | None] = LifoQueue()
        for _ in range(size):
            self._idle.put(None)

    def map(self, calls: Sequence[tuple], keywords: Sequence[dict[str, Any]] | None = None) -> list[Any]:
        """Return the results of the calls in order.

        The result is a Failure if a call timed out, raised an exception or crashed.

        calls: positional arguments of each call. keywords: keyword arguments of each call. Errors: UserError if workers do not
        start, or were repeatedly killed from outside.
        """
        return list(self._callers.map(self._call, calls, keywords or [{}] * len(calls)))

    def _call(self, arguments: tuple, keywords: dict[str, Any]) -> Any:
        pool, reason = self._idle.get(), ""
        try:
            for _ in range(ATTEMPTS):
                limit_s = TAKE_TIMEOUT_S if pool else START_TIMEOUT_S
                pool = pool or self._start()
                try:
                    future = pool.schedule(call, (self.target, arguments, keywords), timeout=self.timeout_s)
                    error = self._error(future, limit_s)
                except (RuntimeError, TimeoutError) as problem:
                    error = BrokenProcessPool(str(problem) or "no answer after its time limit")
                else:
                    if error is None:
                        return future.result()
                if isinstance(error, TimeoutError):
                    return Failure(f"longer than {self.timeout_s:g} s", timed_out=True)
                if isinstance(error, BrokenProcessPool):
                    reason = f"its worker processes did not start, or were ended ({error})"
                elif not isinstance(error, pebble.ProcessExpired):
                    raise error
                elif error.exitcode >= 0:
                    return Failure(f"the worker ended with status {error.exitcode}")
                elif -error.exitcode in OWN_SIGNALS:
                    return Failure(f"the worker ended with {signal.Signals(-error.exitcode).name}")
                else:
                    reason = f"{signal.Signals(-error.exitcode).name} ended its worker process"
                pool.stop()
                threading.Thread(target=pool.join, daemon=True).start()  # its threads may be stuck
                pool = None
        finally:
            self._idle.put(pool)
        raise UserError(
            f"data.verifier: {self.target} could not score a response in {ATTEMPTS} tries: {reason}; check the messages above,"
            " and whether memory is short"
        )

    def _error(self, future: pebble.ProcessFuture, limit_s: float) -> BaseException | None:
        """Return the exception that a call raised, or None. Errors: TimeoutError if no process takes the call within limit_s.

        If a process is killed while it accepts a call, the pool may have no process left that can accept calls.
        """
        try:
            return future.exception(limit_s)
        except TimeoutError:
            if not future.running():
                raise TimeoutError(f"no process took the call within {limit_s:g} s") from None
            return future.exception(self.timeout_s + TAKE_TIMEOUT_S)

    def _start(self) -> pebble.ProcessPool:
        spawn = multiprocessing.get_context("spawn")
        pool = pebble.ProcessPool(1, initializer=start, initargs=self._settings, context=spawn)
        self._starter.submit(lambda: pool.active).result()
        return pool

    def close(self) -> None:
        """Stop all worker processes."""
        self._callers.shutdown()
        while not self._idle.empty():
            if pool := self._idle.get():
                pool.stop()
                pool.join()
        self._starter.shutdown()
