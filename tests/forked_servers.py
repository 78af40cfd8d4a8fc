"""SGLang servers of tests, forked from a process that has imported SGLang: two seconds instead of half a minute.

`install` has `RolloutServer` start them so, in this process and in the programs that are forked from it. Processes that are
started as users do start their servers in the real way (tests/rollout/test_server.py, and in --all tests/e2e/test_train.py).
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TextIO

from megatron_rl.servers.own_environment import find_python
from megatron_rl.servers.server import SUPERVISOR, RolloutServer
from tests.zygote import FOLDER, Process, Zygote

GRACE_S = 0.1
"""Between SIGTERM and SIGKILL. SGLang looks at the former every five seconds, and those who stop a server would wait for it."""
PRELOADED = (
    "sglang_server",
    "sglang_on_cpu:prepare",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.models.registry",
    "sglang_server:keep_title",
)
READ_BY_IMPORTS = ("SGLANG_", "HF_", "TRANSFORMERS_", "TORCH", "OMP_", "MKL_", "KMP_", "GOMP_", "ATEN_", "LD_")
"""Environment variables that imports look at begin so;"""
TAKEN_LATER = (
    *("OMP_NUM_THREADS", "SGLANG_EXTERNAL_MODEL_PACKAGE", "TORCHINDUCTOR_CACHE_DIR"),
    *("SGLANG_PYSPY_DUMP_BEFORE_CRASH", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH"),
)
"""but not these, which sglang_server.py takes over or SGLang reads when it wants them."""

SERVE = Path(__file__).resolve().parent.parent / "tools" / "serve.py"
spawn = RolloutServer._spawn
"""Starts a server in the real way."""
_zygotes: list[Zygote] = []


class ForkedServer:
    """A server's supervisor: the part of `subprocess.Popen` that RolloutServer uses."""

    def __init__(self, command: list[str], environment: dict[str, str], log: TextIO) -> None:
        read, write = os.pipe()
        self.stdin = os.fdopen(write, "wb")
        arguments = (command, environment, GRACE_S)
        try:
            self._process = Process(
                _zygote(), "sglang_server:supervised", arguments, files=(read, log.fileno()), outlives=True
            )
        finally:
            os.close(read)
        self.pid = self._process.pid
        self.kill = self._process.kill
        _note(self.pid)

    def poll(self) -> int | None:
        """Its exit status, None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status. Errors: subprocess.TimeoutExpired."""
        self._process.join(timeout)
        if (status := self.poll()) is None:
            raise subprocess.TimeoutExpired("sglang_on_cpu", timeout or 0.0)
        return status


def serve(log: str, *arguments: str) -> None:
    """Be `tools/serve.py ARGUMENTS` with a forked server, which is killed with this process."""
    os.setsid()
    for number in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)

    def become(_: str, command: list[str], environment: dict[str, str]) -> None:
        server = command[command.index("--alone") + 2 :]
        files = (os.open(os.devnull, os.O_RDONLY), 1)
        process = Process(_zygote(), "sglang_server:supervised", (server, environment, GRACE_S, True), files=files)
        _note(process.pid)
        # It ends in order, as a real one does.
        signal.signal(signal.SIGTERM, lambda *_: os.kill(process.pid, signal.SIGTERM))
        process.join()
        os._exit(abs(process.exitcode or 0))

    os.execvpe = become
    sys.argv = [str(SERVE), *arguments]
    runpy.run_path(str(SERVE), run_name="__main__")


def output_of_script(script: Path, given: str = "", timeout: float = 240.0) -> str:
    """What a script prints in SGLang's Python, forked. given: its input. Errors: AssertionError where it fails."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    with (
        tempfile.TemporaryFile("w+") as into,
        tempfile.TemporaryFile("w+") as out,
        tempfile.TemporaryFile("w+") as errors,
    ):
        into.write(given)
        into.seek(0)
        files = [file.fileno() for file in (into, out, errors)]
        process = Process(_zygote(), "sglang_server:script", (str(script), environment), files=files)
        process.join(timeout)
        process.kill()
        process.join(30)
        for file in (out, errors):
            file.seek(0)
        assert process.exitcode == 0, errors.read()[-3000:]
        return out.read()


def supervisors_of(pid: int) -> list[int]:
    """Ids of the running supervisors of the servers that a running process has had forked, which are no children of it."""
    path = _list_of(pid)
    noted = path.read_text().split() if path.exists() else []
    ids = [int(one.partition("-")[0]) for one in noted]
    return [supervisor for supervisor, one in zip(ids, noted, strict=True) if _identity(supervisor) == one]


def _note(supervisor: int) -> None:
    if started := _identity(supervisor):
        with open(_list_of(os.getpid()), "a") as file:
            file.write(f"{started}\n")


def _list_of(pid: int) -> Path:
    return _zygote().folder() / f"servers-of-{_identity(pid)}"


def _identity(pid: int) -> str | None:
    """A process's id and start. The kernel gives an id anew, in a suite that starts tens of thousands of threads too."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
    except (FileNotFoundError, ProcessLookupError):
        return None
    return f"{pid}-{after_name.split()[19]}"


def _zygote() -> Zygote:
    if not _zygotes:
        _zygotes.append(Zygote("sglang", PRELOADED, str(find_python()), _environment()))
    return _zygotes[0]


def _environment() -> dict[str, str]:
    path = (Path(__file__).parent, SUPERVISOR.parent)
    return {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONDONTWRITEBYTECODE": "",
        "PYTHONPATH": os.pathsep.join(map(str, path)),
    }


def _read_by_imports(environment: dict[str, str]) -> dict[str, str]:
    found = {name: value for name, value in environment.items() if name.startswith(READ_BY_IMPORTS)}
    return {name: value for name, value in found.items() if name not in TAKEN_LATER}


def _spawn(command: list[str], environment: dict[str, str], log: TextIO):
    """Fork it, where the imports would have been the same."""
    same = _read_by_imports(environment) == _read_by_imports(_zygote().whole_environment())
    if command[:3] == [str(find_python()), "-m", "sglang_on_cpu"] and same:
        return ForkedServer(command, environment, log)
    return spawn(command, environment, log)


def install() -> None:
    """Have servers forked from now on, in a run of tests."""
    if FOLDER in os.environ:
        RolloutServer._spawn = staticmethod(_spawn)
