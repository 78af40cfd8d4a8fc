"""Keeps a server's whole process tree tied to its owner: `python supervise.py GRACE_S COMMAND...`, stdlib alone.

The owner holds the other end of standard input. When it closes that pipe, or dies in whatever way (kill -9 included:
the kernel closes the pipe), the server gets SIGTERM and, GRACE_S seconds later, what is left of its tree SIGKILL. When
the server's first process ends by itself, the rest of the tree is killed at once, and what a killed server leaves is
removed (`orphans.py`). Exits with the server's status.

With --alone before GRACE_S there is no owner: SIGTERM and SIGINT end the server.

The server's key comes in the environment and goes on in a file of the server's own folder: a command line is public.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Protocol

if __package__:
    from megatron_rl.servers import orphans
else:  # a script, whose path is this folder
    import orphans

KEY = "MEGATRON_RL_SERVER_KEY"
"""Environment variable: what requests to the server must have as their bearer token."""
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def descendants() -> list[int]:
    """Ids of the living processes below this one. Orphans stay among them, because this process is their subreaper."""
    children: dict[int, list[int]] = {}
    living = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text(errors="replace").rpartition(")")[2].split()[:2]
        except OSError:
            continue
        children.setdefault(int(parent), []).append(int(stat.parent.name))
        if state != "Z":
            living.add(int(stat.parent.name))
    found, frontier = [], [os.getpid()]
    while frontier:
        frontier = [pid for parent in frontier for pid in children.get(parent, [])]
        found += frontier
    return [pid for pid in found if pid in living]


def survivors() -> list[int]:
    """Scan for descendants, twice: a process whose parent ends during a scan can be missing from that scan."""
    return descendants() or descendants()


def end(pids: list[int], signal_number: int) -> None:
    """Send a signal to those that are still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal_number)


def main() -> int:
    """Run the command of the command line. Returns the exit status."""
    alone = sys.argv[1] == "--alone"
    grace, *command = sys.argv[2 if alone else 1 :]
    with orphans.own_folder() as changes:
        return run(partial(_start, *with_key(command, os.environ | changes)), float(grace), alone=alone)


def with_key(command: list[str], environment: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """The server's command and environment, where its key is in a file that its owner alone may read."""
    environment = dict(environment)
    if key := environment.pop(KEY, ""):
        path = Path(environment["TMPDIR"]) / "keys.yaml"
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write("".join(f"{name}: {json.dumps(key)}\n" for name in ("api-key", "admin-api-key")))
        command = [*command, "--config", str(path)]
    return command, environment


def follow_parent(number: int = signal.SIGKILL) -> None:
    """Have this process sent a signal when its parent ends, also with -9. SGLang's workers follow the server by themselves."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number)


def _start(command: list[str], environment: Mapping[str, str]) -> subprocess.Popen:
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment, preexec_fn=follow_parent)


class Server(Protocol):
    """The server's first process, a child of this one, as `subprocess.Popen` has it."""

    pid: int

    def wait(self) -> int:
        """Its exit status, minus the signal where one ended it."""
        ...


def run(start: Callable[[], Server], grace: float, *, alone: bool) -> int:
    """Start the server and keep it until it or its owner ends; alone: until a signal comes. Returns its exit status."""
    owner, held = os.pipe() if alone else (sys.stdin.fileno(), None)
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1)
    # A scheduler's notice to the owner that its time ends reaches all processes of a job step, and would end a server. What
    # is ignored here stays so below.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    server = start()

    def close(*_: object) -> None:
        nonlocal held
        if held is not None:
            os.close(held)
            held = None

    for number in (signal.SIGINT, signal.SIGTERM):  # with an owner it decides, by closing the pipe
        signal.signal(number, close)
    death = os.pidfd_open(server.pid)
    ended, _, _ = select.select([owner, death], [], [])
    shared = orphans.mapped(survivors())
    # Without its first process the server has nothing to finish in order: its owner wants to know at once.
    deadline = time.monotonic() + (0 if death in ended else grace)
    end([server.pid], signal.SIGTERM)  # it ends its workers itself; to them a SIGTERM looks like a crash
    while survivors() and time.monotonic() < deadline:
        time.sleep(0.05)
    while left := survivors():
        end(left, signal.SIGKILL)
        time.sleep(0.05)
    orphans.remove(shared)
    status = server.wait()
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main())
