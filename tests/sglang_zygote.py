"""A process of SGLang's environment that has imported what servers import, and from which those of tests are forked.

`python sglang_zygote.py SOCKET OWNER ROLLOUT`: it listens at the Unix socket SOCKET and ends with the process OWNER; ROLLOUT is the
folder of supervise.py. A request is one packet: JSON with command, environment, folder and grace, and with it the ends of two
pipes or files, standard input and output. The reply is the supervisor's process id, and when that has ended, its status.

After the fork all is as in a server that was started: its supervisor is the real one, and a process below it becomes
`python -m sglang.launch_server ...` with the environment, path and arguments of the request.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import tempfile
import threading
import traceback
from functools import partial
from pathlib import Path

PRELOADED = (
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.models.registry",
)
PLUGIN_GROUP = "sglang.srt.plugins"


class Forked:
    """The server's first process, for `supervise.run`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def wait(self) -> int:
        """Its exit status, minus the signal where one ended it."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def be_python(environment: dict[str, str], folder: str) -> None:
    """Take the environment, path and signals that `python` started with them in the folder would have."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    tempfile.tempdir = None
    own = {str(Path(entry).resolve()) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry}
    sys.path[:] = [folder, *environment.get("PYTHONPATH", "").split(os.pathsep), *(p for p in SYSTEM_PATH if p not in own)]
    importlib.invalidate_caches()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def start_server(supervise, command: list[str], environment: dict[str, str], folder: str) -> Forked:
    """Fork what becomes `python -m sglang.launch_server ...`."""
    if pid := os.fork():
        return Forked(pid)
    status = 1
    try:
        supervise.follow_parent()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        be_python(environment, folder)
        serve(command)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            threading._shutdown()
            atexit._run_exitfuncs()
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(status)


def serve(command: list[str]) -> None:
    """Run the server's own main module with the command's arguments."""
    import setproctitle
    import torch
    from sglang.srt.models import registry

    setproctitle.setproctitle(" ".join(command))
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if package := os.environ.get("SGLANG_EXTERNAL_MODEL_PACKAGE"):  # as the registry does when it is imported
        registry.ModelRegistry.models = dict(registry.import_model_classes(package))
        registry.ModelRegistry._default_models_loaded = False
    _, _, module, *arguments = command
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def supervised(supervise, request: dict, pipes: list[int]) -> int:
    """Be the supervisor of one server, with the request's standard input and output. Returns the exit status."""
    os.setsid()
    for number, pipe in zip((0, 1, 2), (*pipes, pipes[1]), strict=True):
        os.dup2(pipe, number)
    for pipe in pipes:
        os.close(pipe)
    be_python(request["environment"], request["folder"])
    with supervise.leftovers.own_folder() as changes:
        environment = request["environment"] | changes
        start = partial(start_server, supervise, request["command"], environment, request["folder"])
        return supervise.run(start, request["grace"], alone=False)


def listen(listener: socket.socket, owner: int, supervise) -> int:
    """Answer requests until the owner ends. In a forked process: returns the exit status of that."""
    living: dict[int, tuple[int, socket.socket]] = {}
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    selector.register(owner, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fd == owner:
                return 0
            if key.fd in living:
                pid, client = living.pop(key.fd)
                selector.unregister(key.fd)
                status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with contextlib.suppress(OSError), client:
                    client.send(str(status).encode())
                os.close(key.fd)
                continue
            client, _ = listener.accept()
            packet, pipes, _, _ = socket.recv_fds(client, 1 << 20, 2)
            if not packet:
                client.close()
                continue
            if (pid := os.fork()) == 0:
                selector.close()
                for file in (listener, client, *(other for _, other in living.values())):
                    file.close()
                for file in (owner, *living):
                    os.close(file)
                return supervised(supervise, json.loads(packet), pipes)
            for pipe in pipes:
                os.close(pipe)
            with contextlib.suppress(OSError):
                client.send(str(pid).encode())
            death = os.pidfd_open(pid)
            living[death] = pid, client
            selector.register(death, selectors.EVENT_READ)


def main() -> int:
    """Listen, then import: who connects meanwhile waits."""
    path, owner, rollout = sys.argv[1:]
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(path + ".new")
    listener.listen(64)
    os.rename(path + ".new", path)
    death = os.pidfd_open(int(owner))
    gc.disable()
    sys.path[0] = rollout
    supervise = importlib.import_module("supervise")
    sys.path.pop(0)
    for module in PRELOADED:
        importlib.import_module(module)
    import setproctitle

    setproctitle.setproctitle("sglang_zygote")  # it takes the place of the first environment, which a fork replaces
    gc.enable()
    gc.collect()
    gc.freeze()
    threads = os.listdir("/proc/self/task")
    if len(threads) > 1:
        raise RuntimeError(f"{len(threads)} threads after the imports would not survive a fork")
    return listen(listener, death, supervise)


SYSTEM_PATH = [*sys.path[1:]]

if __name__ == "__main__":
    sys.exit(main())
