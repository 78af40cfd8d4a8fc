"""Scorers that try what no scorer may; `attempt` makes a call of one as a worker does."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron_rl.sandbox import isolated

LIBC = ctypes.CDLL(None, use_errno=True)


def _call(number: int, *arguments: Any) -> None:
    if LIBC.syscall(number, *arguments) == -1:
        raise OSError(ctypes.get_errno(), "refused")


def _fork() -> None:
    if os.fork() == 0:
        os._exit(0)


def _thread() -> None:
    threading.Thread(target=time.sleep, args=(0,)).start()


def _read(path: str) -> None:
    assert Path(path).read_bytes()


def _descriptors() -> None:
    assert {int(name) for name in os.listdir("/proc/self/fd")} - {0, 1, 2, 3, 4} == set(), os.listdir("/proc/self/fd")


TRIES: dict[str, Callable[[str], Any]] = {
    "write a file": lambda path: Path(path).write_text("x"),
    "append to a file": lambda path: os.open(path, os.O_APPEND | os.O_WRONLY | os.O_CREAT),
    "make a file by another call": lambda path: _call(85, path.encode(), 0o600),  # creat
    "make a file without a name": lambda path: os.open("/tmp", os.O_TMPFILE | os.O_RDWR),
    "make a file by openat2": lambda path: _call(437, -100, path.encode(), (ctypes.c_uint64 * 3)(0o102, 0o600, 0), 24),
    "make a folder": lambda path: os.mkdir(path),
    "make a link": lambda path: os.symlink("/etc/passwd", path),
    "remove a file": lambda path: os.unlink(path + ".there"),
    "rename a file": lambda path: os.rename(path + ".there", path),
    "empty a file": lambda path: os.truncate(path + ".there", 0),
    "change a mode": lambda path: os.chmod(path + ".there", 0o777),
    "open a socket": lambda path: socket.socket(),
    "open a local socket": lambda path: socket.socketpair(),
    "start a program": lambda path: subprocess.run(["true"], check=True),
    "become a program": lambda path: os.execv("/bin/true", ["true"]),
    "fork": lambda path: _fork(),
    "start a thread": lambda path: _thread(),
    "a signal to its parent": lambda path: os.kill(os.getppid(), 0),
    "ptrace": lambda path: _call(101, 0xFFFF, os.getppid(), 0, 0),
    "its parent's memory": lambda path: _call(310, os.getppid(), 0, 0, 0, 0, 0),
    "write its parent's memory": lambda path: os.open(f"/proc/{os.getppid()}/mem", os.O_RDWR),
    "become root": lambda path: os.setuid(0) if os.getuid() else _call(0xFFFF),
    "a namespace": lambda path: _call(272, 0x10000000),
    "io_uring": lambda path: _call(425, 1, 0),
    "memory without a file": lambda path: os.memfd_create("x"),
    "a larger limit": lambda path: _call(160, 0, (ctypes.c_uint64 * 2)(2**40, 2**40)),
    "the kernel's keys": lambda path: _call(250, 0, 0, 0, 0, 0),
    "a pipe": lambda path: os.pipe(),
    "a mount": lambda path: _call(165, b"none", path.encode(), b"tmpfs", 0, None),
    "another folder": lambda path: os.chdir("/"),
    "large pages of memory that stay": lambda path: _call(149, 0, 4096),  # mlock
}
"""Each with a path at which there is no file, and `path.there`, at which there is one. None does harm where it is allowed: a
test that fails must leave the machine as it is."""
CHANGED: list[int] = []


def _loop() -> None:
    while True:
        pass


def _changes() -> Mapping[str, float]:
    CHANGED.append(1)
    math.pi = 3.0  # pyright: ignore[reportAttributeAccessIssue]
    sys.modules["json"] = None  # type: ignore[assignment]
    isolated.give_up_privileges = None  # type: ignore[assignment]
    return {"score": float(len(CHANGED)), "pi": math.pi}


ODD: dict[str, Callable[[], Any]] = {
    "changes": _changes,
    "computes": lambda: {"score": sum(range(10**5)) / 10**10},
    "reads": lambda: {"score": float(bool(Path(__file__).read_text()))},
    "descriptors": lambda: {"score": float(_descriptors() is None)},
    "without end": _loop,
    "much memory": lambda: {"score": float(len(mmap.mmap(-1, 2**50)))},
    "memory": lambda: {"score": float(len(bytearray(2**36)))},
    "no numbers": lambda: {"score": "a"},
    "much": lambda: {str(n): 1.0 for n in range(10**5)},
    "nothing": lambda: None,
    "an error": lambda: 1 // 0,
    "an exit": lambda: sys.exit(0),
    "an end": lambda: os._exit(0),
    "an abort": lambda: os.abort(),
    "a forged result": lambda: os.write(3, b'{"score": 1.0}') and os._exit(0),
}


def own(response: str, answer: str, prompt: str = "", timeout_s: float = 0.0) -> float | Mapping[str, float]:
    """As a user's own: it evaluates what it is given."""
    assert prompt and timeout_s
    CHANGED.append(1)
    found = eval(response) if response.startswith("eval") else response
    return (
        float(found == answer)
        if answer == "number"
        else {"correct": float(found == answer), "seen": float(len(CHANGED))}
    )


def tried(name: str, path: str) -> Mapping[str, float]:
    """The number of the system's error; 0 where it was done."""
    try:
        TRIES[name](path)
    except OSError as error:
        return {"errno": float(error.errno or 0)}
    except RuntimeError:  # of a thread that cannot be started
        return {"errno": 1.0}
    return {"errno": 0.0}


def attempt(name: str, path: str) -> Mapping[str, float]:
    """In a worker: what became of it."""
    if name in TRIES:
        return isolated.call(tried, (name, path), timeout_s=20.0)
    return isolated.call(ODD[name], (), timeout_s=1.0 if name == "without end" else 20.0)
