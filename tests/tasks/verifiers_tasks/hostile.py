"""A task set of the `verifiers` package for tests: its scorer tries what no scorer may, and says what it could do."""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path

import verifiers.v1 as vf

__all__ = ["Hostile"]

SEEN: list[str] = []


def write(path: str) -> None:
    Path(path).write_text("x")


def connect(port: str) -> None:
    socket.create_connection(("127.0.0.1", int(port)), 5).close()


def processes(_: str) -> None:
    os.kill(os.getppid(), 0)
    assert os.getppid() > 1


def root(_: str) -> None:
    os.chroot("/")


def own(_: str) -> None:
    with tempfile.NamedTemporaryFile("w") as file:
        file.write("x")


TRIES = {"write": write, "connect": connect, "processes": processes, "root": root, "own": own}


class Try(vf.Task[vf.TaskData]):
    @vf.reward
    async def done(self, trace: vf.Trace) -> float:
        """1 for what could be done, 10 more for each episode that this process has seen before."""
        before, kind, rest = len(SEEN), *str(self.data.prompt).split(" ", 1)
        SEEN.append(kind)
        if kind == "end":
            os._exit(3)
        try:
            TRIES[kind](rest)
        except (OSError, AssertionError):
            return 10.0 * before
        return 1.0 + 10.0 * before


class Hostile(vf.Taskset[Try, vf.TasksetConfig]):
    def load(self):
        for line in Path(os.environ["HOSTILE_TASKS"]).read_text().splitlines():
            yield Try(vf.TaskData(prompt=line))
