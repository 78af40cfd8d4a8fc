"""Processes that are forked from one that has imported what they need: a fraction of a second instead of half a minute.

A zygote is `python zygote.py SOCKET OWNER MODULE...`: it listens at a Unix socket, imports the modules, and forks a process for
each request. The processes of a run of tests share zygotes, for which conftest.py makes a folder; who needs one first starts
it. It ends with the run. Its children end with it, or with the process that asked for them. Standard library alone: one of
them runs in SGLang's environment.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import os
import pickle
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

FOLDER = "MEGATRON_RL_TESTS_ZYGOTES"
"""Environment variable: the folder of a run's zygotes. Its name ends with the id of the process that they end with."""
_ENVIRONMENT = "environment"
START_S = 280.0
PR_SET_PDEATHSIG = 1
SELDOM = (10_000, 10, 10)
"""Thresholds of the collection of garbage, which by Python's own take a twentieth of the tests' time."""
ENDS, OUTLIVES = b"ends", b"outlives"
"""Whether the process ends with the one that asked for it."""


def make_folder() -> str:
    """Make a folder for zygotes that end with this process, and have its environment; returns the path.

    What a test sets for a process of its own is none of theirs, whoever asks first: imports look at some of it.
    """
    folder = tempfile.mkdtemp(prefix="megatron-rl-tests-", suffix=f"-{os.getpid()}")
    with open(os.path.join(folder, _ENVIRONMENT), "wb") as file:
        pickle.dump(dict(os.environ), file)
    return folder


@dataclass
class Zygote:
    """One of a run's zygotes, started when it is first asked for."""

    name: str
    modules: Sequence[str]
    """Modules that it imports; with `:function`, which it also calls."""
    python: str = sys.executable
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables beside those of the run."""
    _folder: str = field(default="", init=False)

    def folder(self) -> Path:
        """Folder of its socket and log."""
        if not self._folder:
            self._folder = os.environ.get(FOLDER, "")
        if not self._folder:  # of this process alone
            self._folder = make_folder()
            atexit.register(shutil.rmtree, self._folder, ignore_errors=True)
        return Path(self._folder)

    def whole_environment(self) -> dict[str, str]:
        """Environment variables that it starts with."""
        run = pickle.loads((self.folder() / _ENVIRONMENT).read_bytes())
        own = {FOLDER: os.environ[FOLDER]} if FOLDER in os.environ else {}
        return {**run, **own, **self.environment}

    def socket(self) -> str:
        """Path of the socket at which it listens, or soon will. Errors: AssertionError where it does not start."""
        folder = self.folder()
        path = folder / f"{self.name}.socket"
        with open(folder / f"{self.name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                with open(self.log(), "w") as log:
                    started = subprocess.Popen(
                        [self.python, __file__, str(path), folder.name.rpartition("-")[2], *self.modules],
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        env=self.whole_environment(),
                        start_new_session=True,
                    )
                with contextlib.suppress(subprocess.TimeoutExpired):
                    started.wait(START_S)  # it listens then, by a process that is no child of this one
        return str(path)

    @property
    def pid(self) -> int | None:
        """Id of its process; None while it has not started."""
        path = self.folder() / f"{self.name}.pid"
        return int(path.read_text()) if path.exists() else None

    def log(self) -> Path:
        """Its output, and that of its children where they have none of their own."""
        return self.folder() / f"{self.name}.log"


class Process:
    """A process that is forked from a zygote at once: `target` with `args`, in this process's environment and folder.

    It has the part of `multiprocessing.Process` that tests use, and is killed when this object is gone.
    """

    def __init__(
        self,
        zygote: Zygote,
        target: str | Callable,
        args: tuple = (),
        *,
        files: Sequence[int] = (),
        path: Sequence[str] = (),
        outlives: bool = False,
    ) -> None:
        """target: a function, or "module:name". files: open files, whose numbers it is given as its first argument, a list.
        path: its sys.path, by default the zygote's. outlives: it is not killed, but ends by itself.
        """
        if not isinstance(target, str):
            target = f"{target.__module__}:{target.__qualname__}"
        request = {
            "target": target,
            "args": pickle.dumps(args),  # which are imported from the path
            "environment": dict(os.environ),
            "folder": os.getcwd(),
            "path": [*path],
            "follows": not outlives,
        }
        self._exitcode: int | None = None
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(START_S)
        content = os.memfd_create("request")
        try:
            with open(content, "wb", closefd=False) as file:
                pickle.dump(request, file)
            self._socket.connect(zygote.socket())
            socket.send_fds(self._socket, [OUTLIVES if outlives else ENDS], [content, *files])
            self.pid = int(self._socket.recv(64))
        except (OSError, ValueError) as error:
            log = zygote.log()
            said = log.read_text(errors="replace")[-3000:] if log.exists() else ""
            raise AssertionError(f"{zygote.name}: no process was forked ({error!r}):\n{said}") from error
        finally:
            os.close(content)

    @property
    def exitcode(self) -> int | None:
        """Its exit status, minus the signal where one ended it; None while it runs."""
        self.join(0)
        return self._exitcode

    def is_alive(self) -> bool:
        """Whether it runs."""
        return self.exitcode is None

    def join(self, timeout: float | None = None) -> None:
        """Wait until it has ended, or for these seconds."""
        if self._exitcode is not None:
            return
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            if not selector.select(timeout):
                return
        self._exitcode = int(self._socket.recv(64) or b"-9")  # its zygote is gone, and it with it
        self._socket.close()

    def kill(self) -> None:
        """SIGKILL, if it runs."""
        if self.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


# --- the zygote's own process ---------------------------------------------------------------------------------------------


def follow_parent() -> None:
    """Have this process killed when its parent ends."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def forget_exit_handlers() -> None:
    """Drop what the zygote's imports do at their process's end: a fork that ends must not remove the zygote's folders."""
    atexit._clear()
    for entry in weakref.finalize._registry.values():
        entry.atexit = False
    weakref.finalize._registered_with_atexit = False  # the first finalizer of this process registers again


def take_place(environment: Mapping[str, str], folder: str, path: Sequence[str]) -> None:
    """Have the environment, folder, path and signals that a process which is started there would have."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.path[:] = path
    importlib.invalidate_caches()
    tempfile.tempdir = None
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def run(function: Callable[[], Any]) -> None:
    """Call a function, and end this process, which was forked, with its exit status: as Python's own end does."""
    status = 1
    try:
        function()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if not isinstance(end.code, int | None):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            threading._shutdown()  # waits for threads
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(BaseException):
                stream.flush()
        os._exit(status)


def _answer(content: int, files: list[int]) -> None:
    """In the forked process: do what the request says."""
    with open(content, "rb") as file:
        file.seek(0)
        request = pickle.load(file)
    if request["follows"]:
        follow_parent()
    forget_exit_handlers()
    take_place(request["environment"], request["folder"], request["path"] or sys.path)
    module, _, name = request["target"].partition(":")
    target = getattr(importlib.import_module(module), name)
    target(*([files] if files else []), *pickle.loads(request["args"]))


def _listen(listener: socket.socket, owner: int) -> None:
    """Fork a process for each request, and tell who asked its id and, at the end, its exit status, until the owner ends."""
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    selector.register(owner, selectors.EVENT_READ)
    children: dict[int, tuple[int, socket.socket]] = {}
    """By the descriptor of the process: its id, and who asked for it."""
    while True:
        key, _ = selector.select()[0]  # one at a time: the next one's descriptor may be another's by then
        if key.fd == owner:
            return
        if key.fileobj is listener:
            client, _ = listener.accept()
            packet, files, _, _ = socket.recv_fds(client, 64, 8)
            if not packet:
                client.close()
                continue
            if (pid := os.fork()) == 0:
                selector.close()
                for file in (listener, client, *(other for _, other in children.values())):
                    file.close()
                for file in (owner, *children):
                    os.close(file)
                run(partial(_answer, files[0], files[1:]))
            for file in files:
                os.close(file)
            death = os.pidfd_open(pid)
            children[death] = pid, client
            selector.register(death, selectors.EVENT_READ)
            if packet == ENDS:
                selector.register(client, selectors.EVENT_READ, death)
            with contextlib.suppress(OSError):
                client.send(str(pid).encode())
        elif key.fd in children:
            pid, client = children.pop(key.fd)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            selector.unregister(key.fd)
            os.close(key.fd)
            with contextlib.suppress(KeyError):
                selector.unregister(client)
            with contextlib.suppress(OSError):
                client.send(str(status).encode())
            client.close()
        else:  # who asked for it is gone
            selector.unregister(key.fileobj)
            os.kill(children[key.data][0], signal.SIGKILL)


def main() -> int:
    """Listen first, then import: who asks meanwhile waits."""
    path, owner, *modules = sys.argv[1:]
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(path + ".new")
    listener.listen(64)
    os.rename(path + ".new", path)
    if os.fork():
        os._exit(0)  # whoever asks first has no processes of others below it
    Path(path).with_suffix(".pid").write_text(str(os.getpid()))
    death = os.pidfd_open(int(owner))
    sys.path.pop(0)  # of this script
    gc.disable()  # imports make no garbage
    for entry in modules:
        module, _, function = entry.partition(":")
        imported = importlib.import_module(module)
        if function:
            getattr(imported, function)()
    gc.enable()
    gc.collect()
    gc.freeze()  # no process looks at a million objects again, and copies their pages
    gc.set_threshold(*SELDOM)
    threads = [Path("/proc/self/task", task, "comm").read_text().strip() for task in os.listdir("/proc/self/task")]
    if others := {*threads[1:]} - {"jemalloc_bg_thd"}:  # pyarrow's, which jemalloc starts again in a fork
        raise RuntimeError(f"threads after the imports, which a fork would not have: {', '.join(others)}")
    _listen(listener, death)
    shutil.rmtree(Path(path).parent, ignore_errors=True)  # the owner may have been killed
    return 0


if __name__ == "__main__":
    sys.exit(main())
