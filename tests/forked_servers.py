"""SGLang servers of tests, forked from a process that has imported SGLang (sglang_zygote.py): seconds instead of half a minute.

`install` has `RolloutServer` start them so, in this process and in the programs that are forked from it. Processes that are
started as users do, as by `tests.program.command`, start their servers in the real way.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import TextIO

from megatron_rl.platform import sglang as cpu_platform
from megatron_rl.rollout.server import SUPERVISOR, RolloutServer, find_python

FOLDER = "MEGATRON_RL_TESTS_ZYGOTE"
"""Environment variable: the folder of tests/conftest.py for the process that all of a run's servers are forked from. Its name
ends with the id of the process that it ends with."""
START_S = 100.0
GRACE_S = 0.1
"""Between SIGTERM and SIGKILL. SGLang looks at the former every five seconds, and those who stop a server would wait for it."""
ZYGOTE = Path(__file__).with_name("sglang_zygote.py")
READ_BY_IMPORTS = ("SGLANG_", "HF_", "TRANSFORMERS_", "TORCH", "OMP_", "MKL_", "KMP_", "GOMP_", "ATEN_", "LD_")
"""Environment variables that imports look at begin so;"""
TAKEN_LATER = (
    *("OMP_NUM_THREADS", "SGLANG_EXTERNAL_MODEL_PACKAGE", "TORCHINDUCTOR_CACHE_DIR"),
    *("SGLANG_PYSPY_DUMP_BEFORE_CRASH", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH"),
)
"""but not these, which sglang_zygote.py takes over or SGLang reads when it wants them."""

spawn = RolloutServer._spawn
"""Starts a server in the real way."""


class ForkedServer:
    """A server's supervisor: the part of `subprocess.Popen` that RolloutServer uses."""

    def __init__(self, command: list[str], environment: dict[str, str], log: TextIO) -> None:
        read, write = os.pipe()
        self.stdin = os.fdopen(write, "wb")
        self._status: int | None = None
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(START_S)
        request = {"command": command, "environment": environment, "folder": os.getcwd(), "grace": GRACE_S}
        try:
            self._socket.connect(zygote())
            socket.send_fds(self._socket, [json.dumps(request).encode()], [read, log.fileno()])
            self.pid = int(self._socket.recv(64))
        except (OSError, ValueError) as error:
            log_of_zygote = Path(os.environ[FOLDER], "log").read_text(errors="replace")
            raise AssertionError(f"no server was forked ({error!r}):\n{log_of_zygote[-3000:]}") from error
        finally:
            os.close(read)

    def poll(self) -> int | None:
        """Its exit status, None while it runs."""
        if self._status is None and select.select([self._socket], [], [], 0)[0]:
            self._status = int(self._socket.recv(64) or b"-9")
            self._socket.close()
        return self._status

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status. Errors: subprocess.TimeoutExpired."""
        if self._status is None and not select.select([self._socket], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("sglang.launch_server", timeout or 0.0)
        status = self.poll()
        assert status is not None
        return status

    def kill(self) -> None:
        """SIGKILL, if it runs."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def _read_by_imports(environment: dict[str, str]) -> dict[str, str]:
    found = {name: value for name, value in environment.items() if name.startswith(READ_BY_IMPORTS)}
    return {name: value for name, value in found.items() if name not in TAKEN_LATER}


def _zygote_environment() -> dict[str, str]:
    environment = {**os.environ, **cpu_platform.environment(1), "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    return environment | {"PYTHONPATH": str(cpu_platform.PYTHONPATH)}


def zygote() -> str:
    """The socket at which the process listens that servers are forked from; the first who asks starts it."""
    folder = Path(os.environ[FOLDER])
    path = folder / "socket"
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            command = [find_python(), ZYGOTE, path, folder.name.rpartition("-")[2], SUPERVISOR.parent]
            with open(folder / "log", "w") as log:
                started = subprocess.Popen(
                    [str(word) for word in command],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=_zygote_environment(),
                    start_new_session=True,
                )
            deadline = time.monotonic() + START_S
            while not path.exists() and started.poll() is None and time.monotonic() < deadline:
                time.sleep(0.01)
    return str(path)


def _spawn(command: list[str], environment: dict[str, str], log: TextIO):
    """Fork it, where the imports would have been the same."""
    same = _read_by_imports(environment) == _read_by_imports(_zygote_environment())
    if command[:3] == [str(find_python()), "-m", "sglang.launch_server"] and same:
        return ForkedServer(command, environment, log)
    return spawn(command, environment, log)


def install() -> None:
    """Have servers forked from now on, unless it is nobody's run of tests."""
    if FOLDER in os.environ:
        RolloutServer._spawn = staticmethod(_spawn)
