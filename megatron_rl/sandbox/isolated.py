"""Isolated calls of other packages' scoring functions. Each call runs in its own process, which can only compute.

Some scoring functions evaluate the model's text as code. Therefore each call runs in a fork of the worker process. The fork has
no privileges. It cannot start a process or thread, open a socket, or open a file for writing. It ends with the call, so no
response can change the state in which the next response is scored. The numbers are returned as text.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import json
import os
import resource
import select
import signal
import stat
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_rl.sandbox.bubblewrap import NOBODY

ALLOWED = (
    *("read", "readv", "pread64", "write", "writev", "lseek", "close", "close_range", "dup", "dup2", "dup3", "fcntl"),
    *("stat", "fstat", "lstat", "newfstatat", "statx", "access", "faccessat", "faccessat2", "readlink", "readlinkat"),
    *("getdents64", "getcwd", "mmap", "munmap", "mremap", "mprotect", "madvise", "brk", "futex", "rseq"),
    *("rt_sigaction", "rt_sigprocmask", "rt_sigreturn", "sigaltstack", "restart_syscall", "membarrier", "arch_prctl"),
    *("clock_gettime", "clock_getres", "clock_nanosleep", "nanosleep", "gettimeofday", "time", "getrandom"),
    *("getpid", "getppid", "gettid", "getuid", "geteuid", "getgid", "getegid", "getgroups", "getpgrp"),
    *("getrusage", "getrlimit", "times", "uname", "sysinfo", "sched_yield", "sched_getaffinity", "set_robust_list"),
    *("exit", "exit_group"),
)
"""System calls that a process needs to compute. Files may be opened only for reading. All other calls are forbidden."""
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | (os.O_TMPFILE & ~os.O_DIRECTORY)
_PR_SET_NO_NEW_PRIVS, _PR_SET_DUMPABLE, _PR_SET_PDEATHSIG, _PR_CAPBSET_DROP = 38, 4, 1, 24
MOST_BYTES = 65536
"""Largest size of a result in bytes, as text."""


class Unscored(Exception):
    """Raised if a call has no result. The message gives the reason."""


def problem() -> str:
    """Return the reason why this machine cannot isolate a scoring function, with the remedy; '' if it can."""
    try:
        _filter()
    except (ImportError, OSError) as error:
        return f"scorers of other packages cannot be isolated here ({error}); install libseccomp (apt-get install libseccomp2)"
    return ""


@functools.cache
def _filter() -> Any:
    import pyseccomp

    found = pyseccomp.SyscallFilter(pyseccomp.ERRNO(errno.EPERM))
    for name in ALLOWED:
        with suppress(ValueError, OSError):  # a call that this architecture lacks
            found.add_rule(pyseccomp.ALLOW, name)
    for name, index in (("open", 1), ("openat", 2)):
        with suppress(ValueError, OSError):
            to_read = pyseccomp.Arg(index, pyseccomp.MASKED_EQ, _WRITES, 0)
            found.add_rule(pyseccomp.ALLOW, name, to_read)
    return found


def call(function: Callable[..., Any], arguments: tuple, *, timeout_s: float) -> Mapping[str, float]:
    """Return the reward parts that `function` computes in a process that can only compute. Errors: Unscored, TimeoutError."""
    _filter()  # cached here, once for all forks
    drops_user()
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        _child(writing, function, arguments, timeout_s)
    os.close(writing)
    try:
        text = _read(reading, time.monotonic() + timeout_s)
    finally:
        os.close(reading)
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    try:
        found = json.loads(text)
        return {str(name): float(value) for name, value in found.items()}
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise Unscored(f"it gave no numbers: {text[:200]!r}") from None


def _read(descriptor: int, deadline: float) -> str:
    found = b""
    while len(found) <= MOST_BYTES:
        if not select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise TimeoutError("longer than its limit")
        if not (part := os.read(descriptor, 65536)):
            return found.decode(errors="replace")
        found += part
    raise Unscored("it gave more than a few numbers")


def _child(writing: int, function: Callable[..., Any], arguments: tuple, timeout_s: float) -> None:
    try:
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(nothing, descriptor)
        os.dup2(writing, 3)
        os.closerange(4, min(2**20, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        give_up_privileges(int(timeout_s) + 1)
        try:
            result = json.dumps(dict(function(*arguments)))
        except BaseException as error:
            result = f"{type(error).__name__}: {error}"
        os.write(3, result.encode(errors="replace")[: MOST_BYTES + 1])
    finally:
        os._exit(0)


def give_up_privileges(cpu_s: int) -> None:
    """Drop all privileges of this process that it does not need to compute. This cannot be undone."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for limit, value in (
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_MEMLOCK, 0),
    ):
        resource.setrlimit(limit, (value, value))
    if os.geteuid() == 0:
        for capability in range(64):
            libc.prctl(_PR_CAPBSET_DROP, capability)
        if drops_user():
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
        else:
            _drop_capabilities(libc)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    libc.prctl(_PR_SET_DUMPABLE, 0)
    _filter().load()


def _drop_capabilities(libc: ctypes.CDLL) -> None:
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # version 3, this process
    libc.capset(header, (ctypes.c_uint32 * 6)())


@functools.cache
def drops_user() -> bool:
    """Return whether root can run scoring functions as the user `nobody`.

    For this, `nobody` must have access to the folders of all modules.
    """
    folders = {Path(path).resolve() for path in (*sys.path, sys.prefix, sys.base_prefix) if path}
    return all(
        folder.stat().st_mode & stat.S_IXOTH for path in folders for folder in (path, *path.parents) if folder.exists()
    )
