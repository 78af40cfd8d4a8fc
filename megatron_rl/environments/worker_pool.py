"""Processes that call one function with a hard time limit each, for verifiers that may hang or crash on strange text.

Own processes and pipes rather than concurrent.futures: that pool cannot end a single call, and starting it by fork from
a process with CUDA and gloo threads is not safe.
"""

from __future__ import annotations

import os
import pickle
import queue
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from megatron_rl.environments.worker import HEADER
from megatron_rl.errors import UserError

START_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Failure:
    """A call without a result: it took longer than allowed, raised, or ended its process."""

    reason: str
    timed_out: bool = False


class _Worker:
    def __init__(self, target: str, memory_mb: int, imports: Sequence[str]):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "megatron_rl.environments.worker", target, str(memory_mb), *imports],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=os.environ
            | {
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
                "PYTHONWARNINGS": "ignore",
            },
        )
        try:
            self._receive(START_TIMEOUT_S)
        except OSError:  # TimeoutError and BrokenPipeError are among them
            self.kill()
            raise UserError(f"data: the verifier process {target} did not start: see the messages above") from None

    def call(self, arguments: tuple, timeout_s: float) -> Any:
        """The function's result, or a Failure after which the worker is to be replaced unless it merely raised."""
        data = pickle.dumps(arguments)
        try:
            self.process.stdin.write(HEADER.pack(len(data)) + data)
            kind, value = self._receive(timeout_s)
        except TimeoutError:
            self.kill()
            return Failure(f"longer than {timeout_s:g} s", timed_out=True)
        except OSError:
            self.kill()
            return Failure(f"the worker ended with status {self.process.returncode}")
        return value if kind == "result" else Failure(value)

    def _receive(self, timeout_s: float) -> tuple[str, Any]:
        deadline = time.monotonic() + timeout_s
        size = HEADER.unpack(self._read(HEADER.size, deadline))[0]
        return pickle.loads(self._read(size, deadline))  # from our own child

    def _read(self, count: int, deadline: float) -> bytes:
        data = b""
        while len(data) < count:
            ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError
            chunk = os.read(self.process.stdout.fileno(), count - len(data))
            if not chunk:
                raise BrokenPipeError
            data += chunk
        return data

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


class WorkerPool:
    """`size` processes that call `target` ('module:function'); started at the first use, replaced when they time out.

    timeout_s bounds each call; importing the modules `imports` comes before the first and does not count. The children
    end with their parent, however that ends.
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
        self.imports = tuple(imports)
        self.size = size or min(8, os.cpu_count() or 1)
        self.memory_mb = memory_mb
        self._workers: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        for _ in range(self.size):
            self._workers.put(None)
        self._threads = ThreadPoolExecutor(self.size, thread_name_prefix="verifier")

    def map(self, calls: Sequence[tuple]) -> list[Any]:
        """Results in the order of the argument tuples; a Failure stands where there is none."""
        return list(self._threads.map(self._call, calls))

    def _call(self, arguments: tuple) -> Any:
        worker = self._workers.get()
        try:
            if worker is None:
                worker = _Worker(self.target, self.memory_mb, self.imports)
            return worker.call(arguments, self.timeout_s)
        finally:
            self._workers.put(worker if worker is not None and worker.alive else None)

    def close(self) -> None:
        """End all workers."""
        self._threads.shutdown()
        for _ in range(self.size):
            if worker := self._workers.get():
                worker.kill()
            self._workers.put(None)
