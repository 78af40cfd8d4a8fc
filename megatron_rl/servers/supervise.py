"""Ties a server's whole process tree to its owner: `python supervise.py GRACE_S COMMAND...`. Uses only the standard library.

The owner is the process that starts this program. Standard input is a pipe from the owner. When the owner closes the pipe or
dies, the server gets SIGTERM, and GRACE_S seconds later all remaining processes of the tree get SIGKILL. This covers kill -9 of
the owner too, because the kernel then closes the pipe. If the server's first process ends by itself, the remaining processes
are killed at once. `orphans.py` removes the leftovers of a killed server. The exit status is the server's.

With --alone before GRACE_S there is no owner: SIGTERM and SIGINT end the server.

This program gets the server's API key in an environment variable. It passes the key to the server in a file in the server's own
folder, because other users can read a command line.
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
else:  # run as a script: sys.path holds this folder
    import orphans

KEY = "MEGATRON_RL_SERVER_KEY"
"""Environment variable with the bearer token that requests to the server need."""
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def descendants() -> list[int]:
    """Return the ids of all living descendants, including orphans, because this process is their subreaper."""
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
    """Return the living descendants. If none is found, scan again: a process whose parent ends during a scan can be missed."""
    return descendants() or descendants()


def end(pids: list[int], signal_number: int) -> None:
    """Send a signal to the processes that still exist."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal_number)


def main() -> int:
    """Run the server command that the command line gives, and return the exit status."""
    alone = sys.argv[1] == "--alone"
    grace, *command = sys.argv[2 if alone else 1 :]
    with orphans.own_folder() as changes:
        return run(partial(_start, *with_key(command, os.environ | changes)), float(grace), alone=alone)


def with_key(command: list[str], environment: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Return the server's command and environment, with the key moved to a file that only its owner can read."""
    environment = dict(environment)
    if key := environment.pop(KEY, ""):
        path = Path(environment["TMPDIR"]) / "keys.yaml"
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write("".join(f"{name}: {json.dumps(key)}\n" for name in ("api-key", "admin-api-key")))
        command = [*command, "--config", str(path)]
    return command, environment


def follow_parent(number: int = signal.SIGKILL) -> None:
    """Make the kernel send a signal to this process when its parent ends, even by SIGKILL. SGLang's workers do this too."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number)


def _start(command: list[str], environment: Mapping[str, str]) -> subprocess.Popen:
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment, preexec_fn=follow_parent)


class Server(Protocol):
    """First process of the server, a child of this process. It has the interface of `subprocess.Popen`."""

    pid: int

    def wait(self) -> int:
        """Return the exit status, negative if a signal ended the process."""
        ...


def run(start: Callable[[], Server], grace: float, *, alone: bool) -> int:
    """Run the server until it or its owner ends, and return its exit status.

    start: function that starts the server. grace: seconds between SIGTERM and SIGKILL. alone: there is no owner, and SIGTERM or
    SIGINT ends the server.
    """
    owner, held = os.pipe() if alone else (sys.stdin.fileno(), None)
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1)
    # Near the time limit, the scheduler signals the owner and all processes of the job step, which would end a server. An
    # ignored signal stays ignored in child processes.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    server = start()

    def close(*_: object) -> None:
        nonlocal held
        if held is not None:
            os.close(held)
            held = None

    for number in (signal.SIGINT, signal.SIGTERM):  # an owner decides by closing the pipe
        signal.signal(number, close)
    death = os.pidfd_open(server.pid)
    ended, _, _ = select.select([owner, death], [], [])
    shared = orphans.mapped(survivors())
    # A server without its first process cannot end in order, and its owner should learn of the death at once.
    deadline = time.monotonic() + (0 if death in ended else grace)
    end([server.pid], signal.SIGTERM)  # the server ends its workers itself; workers treat SIGTERM as a crash
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
