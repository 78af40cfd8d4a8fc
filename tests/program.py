"""The program in processes of its own: started as users do, or forked from a process that has imported what it needs."""

from __future__ import annotations

import atexit
import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Self

from megatron_rl.servers.server import reserve_port
from tests.preloaded import PYTHON_WITH_TRAINER
from tests.ranks import NEAR_TIE, fork, rank_environment, refusing_ties
from tests.zygote import Process


class Program:
    """`megatron-rl ARGUMENTS`, forked: without the fifteen seconds in which a process imports Megatron.

    From `megatron_rl.cli.main` on it is what users start, with the environment of this process and one thread. `ranks`
    above 1 takes the place of --nproc: so many processes that know of each other as torchrun's do, but without torchrun.
    In --all tests/e2e/test_train.py starts a run as users do, with torchrun. As a context it is killed at the end.
    """

    def __init__(
        self, *arguments: str, log: Path, errors: Path | None = None, ranks: int = 1, refuse_ties: bool = False
    ) -> None:
        """log: what its output is appended to; errors: its standard error, by default log. refuse_ties: it ends with status
        `ranks.NEAR_TIE` where two experts tie but for rounding."""
        self.log = log
        self._reserved = reserve_port()
        self._processes: list[Process] = []
        try:
            for rank in range(ranks):
                environment = os.environ | {"OMP_NUM_THREADS": "1"}
                if ranks > 1:
                    environment |= rank_environment(rank, ranks, self._reserved)
                self._processes.append(fork(_main, arguments, environment, log, errors or log, refuse_ties))
        except BaseException:
            self.kill()
            raise

    @property
    def pid(self) -> int:
        """Of its first process."""
        return self._processes[0].pid

    def poll(self) -> int | None:
        """Its exit status, None while it runs: 0 once all processes have ended well, or that of the first that has not."""
        statuses = [process.exitcode for process in self._processes]
        failed = [status for status in statuses if status]
        return failed[0] if failed else None if None in statuses else 0

    def wait(self, timeout: float) -> int:
        """Its exit status, when it has one; all its processes have ended then. Errors: TimeoutError."""
        deadline = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"megatron-rl took over {timeout} s")
            time.sleep(0.02)
        self.kill()
        return status

    def finish(self, timeout: float) -> None:
        """Wait for an end that is a good one. Errors: TimeoutError; AssertionError with the end of its log."""
        assert self.wait(timeout) == 0, self.log.read_text()[-4000:]

    def until(self, true: Callable[[], Any], timeout: float, what: str = "it") -> None:
        """Wait for what is true while it runs. Errors: AssertionError with the end of its log."""
        await_while_running(self, true, timeout, self.log, what)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """kill -9 of what still runs, and wait for it."""
        for process in self._processes:
            process.kill()
            process.join(30)
        self._reserved.close()


def await_while_running(
    process: Program | subprocess.Popen, true: Callable[[], Any], timeout: float, log: Path, what: str
) -> None:
    """As `Program.until`, also for a process that was started as users do."""
    deadline = time.monotonic() + timeout
    while not true():
        assert process.poll() is None, f"the run ended before {what}:\n{log.read_text()[-4000:]}"
        assert time.monotonic() < deadline, f"{what}: not within {timeout:g} s\n{log.read_text()[-4000:]}"
        time.sleep(0.003)


def forked(*arguments: str, ranks: int = 1, timeout: float = 280, check: bool = True) -> subprocess.CompletedProcess:
    """A `Program` to its end, with its output as text. Errors: with `check`, AssertionError with the end of
    the output where it fails."""
    with tempfile.TemporaryDirectory() as folder:
        out, errors = Path(folder) / "out", Path(folder) / "errors"
        program = Program(*arguments, log=out, errors=errors, ranks=ranks)
        try:
            status = program.wait(timeout)
        finally:
            program.kill()
        done = subprocess.CompletedProcess(arguments, status, out.read_text(), errors.read_text())
    assert status == 0 or not check, done.stdout[-3000:] + done.stderr[-3000:]
    return done


def output_of_script(script: Path, *arguments: str, timeout: float = 100) -> str:
    """What a Python script prints, forked: without the seconds of its imports. Errors: AssertionError, TimeoutError."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        process = fork(_script, str(script), arguments, log)
        try:
            process.join(timeout)
            if process.exitcode is None:
                raise TimeoutError(f"{script} took over {timeout} s")
        finally:
            process.kill()
            process.join(30)
        assert process.exitcode == 0, log.read_text()[-3000:]
        return log.read_text()


def _write_to(log: Path, errors: Path) -> None:
    """Where standard output and errors of this process go."""
    for number, path in ((1, log), (2, errors)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)


def _script(script: str, arguments: tuple[str, ...], log: Path) -> None:
    _write_to(log, log)
    sys.argv = [script, *arguments]
    repository = str(Path(__file__).resolve().parent.parent)
    sys.path[:] = [str(Path(script).parent), *(path for path in sys.path if path not in ("", repository))]
    runpy.run_path(script, run_name="__main__")


def _main(arguments: tuple[str, ...], environment: dict[str, str], log: Path, errors: Path, refuse_ties: bool) -> None:
    """One process of the program."""
    _write_to(log, errors)
    os.environ.clear()
    os.environ.update(environment)
    from megatron_rl.cli import main

    if "--nproc" in arguments:
        sys.executable = PYTHON_WITH_TRAINER  # of the processes that torchrun starts
    with refusing_ties(partial(os._exit, NEAR_TIE)) if refuse_ties else nullcontext():
        status = main([*arguments])
    atexit._run_exitfuncs()  # a forked process would leave without them
    sys.exit(status)
