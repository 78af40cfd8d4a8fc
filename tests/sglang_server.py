"""In SGLang's environment: what is forked from its zygote becomes a server and its supervisor, as if they had been started.

The supervisor is the real one. Below it a process becomes `python -m sglang_on_cpu ...`, with the arguments, environment
and path that it would have.
"""

from __future__ import annotations

import atexit
import os
import runpy
import sys
from collections.abc import Mapping
from functools import partial

import orphans
import supervise
import zygote
from sglang_on_cpu import STAND_INS

OWN = os.environ["PYTHONPATH"].split(os.pathsep)
"""Folders of this file and of the supervisor."""
PATH = [entry for entry in sys.path if entry not in OWN]
"""Of a Python that is started with no others."""
sys.path[:] = PATH


class Forked:
    """A server's first process, for `supervise.run`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def wait(self) -> int:
        """Its exit status, minus the signal where one ended it."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def keep_title() -> None:
    """Have processes named later: their name takes the place of the first environment, which a fork replaces."""
    import setproctitle

    setproctitle.setproctitle("zygote of sglang")


def supervised(
    pipes: list[int], command: list[str], environment: Mapping[str, str], grace: float, alone: bool = False
) -> None:
    """Be a server's supervisor. pipes: standard input, by which its owner keeps it, and output. alone: it has no owner."""
    os.setsid()
    for number, pipe in zip((0, 1, 2), (*pipes, pipes[1]), strict=True):
        os.dup2(pipe, number)
    for pipe in pipes:
        os.close(pipe)
    zygote.take_place(environment, os.getcwd(), sys.path)
    kept = _open_files()
    with orphans.own_folder() as changes:
        keyed = supervise.with_key(command, {**environment, **changes})
        status = supervise.run(partial(_fork_server, *keyed, kept), grace, alone=alone)
    sys.exit(status)


def _path_of(environment: Mapping[str, str], first: str) -> list[str]:
    return [first, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)), *PATH]


def script(files: list[int], path: str, environment: Mapping[str, str]) -> None:
    """Be a script. files: its input, output and errors."""
    for number, file in enumerate(files):
        os.dup2(file, number)
    zygote.take_place(environment, os.getcwd(), [str(STAND_INS), *_path_of(environment, os.path.dirname(path))])
    sys.argv = [path]
    runpy.run_path(path, run_name="__main__")


def _open_files() -> set[int]:
    names = os.listdir("/proc/self/fd")  # with the listing's own, whose number the next file gets
    return {int(name) for name in names if os.path.lexists(f"/proc/self/fd/{name}")}


def _fork_server(command: list[str], environment: Mapping[str, str], kept: set[int]) -> Forked:
    """kept: open files that the server has too; those that the supervisor has opened since end with it, as after an exec."""
    if pid := os.fork():
        return Forked(pid)
    for file in _open_files() - kept:
        os.close(file)
    zygote.run(partial(_serve, command, environment))
    raise AssertionError("a forked process ends in run")


def _serve(command: list[str], environment: Mapping[str, str]) -> None:
    supervise.follow_parent()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    folder = os.getcwd()
    zygote.take_place(environment, folder, _path_of(environment, folder))
    import setproctitle
    import torch
    from sglang.srt.models import registry

    setproctitle.setproctitle(" ".join(command))
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    if package := environment.get("SGLANG_EXTERNAL_MODEL_PACKAGE"):  # as the registry does when it is imported
        registry.ModelRegistry.models = dict(registry.import_model_classes(package))
        registry.ModelRegistry._default_models_loaded = False
    _, _, module, *arguments = command
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()
