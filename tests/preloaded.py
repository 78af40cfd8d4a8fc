"""Processes that have imported what others are forked from, and Pythons that are forked from them.

`PYTHON_WITH_TRAINER -m MODULE ARGUMENTS` does what `python -m MODULE ARGUMENTS` does, without the seconds of the imports. So
do `-c CODE`, and a script. What looks at how the trainer is imported takes PYTHON_WITH_PACKAGES.
"""

from __future__ import annotations

import atexit
import os
import resource
import runpy
import signal
import sys
import types
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from tests.zygote import Process, Zygote

_REPOSITORY = Path(__file__).resolve().parent.parent
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(_REPOSITORY)}

# Megatron takes ten seconds to import, and modelopt, which the Bridge asks of every module, seven. A pool of threads would not
# survive the fork.
TRAINER = Zygote(
    "trainer",
    ("megatron_rl.train", "megatron.core.models.mimo.optimizer", "modelopt.torch", "tests.forked_servers:install"),
    environment=_ENVIRONMENT,
)
PACKAGES = Zygote(
    "packages", ("transformers.modeling_utils", "torch._dynamo", "mcp.server.mcpserver"), environment=_ENVIRONMENT
)
"""It knows nothing of Megatron."""
VERIFIERS = Zygote(
    "verifiers",
    ("openenv.core.env_server.http_server", "verifiers.v1"),
    str(_REPOSITORY / ".venv-verifiers/bin/python"),
    _ENVIRONMENT,
)
_PYTHONS = _REPOSITORY / "tests" / "pythons"
PYTHON_WITH_TRAINER, PYTHON_WITH_PACKAGES, PYTHON_WITH_VERIFIERS = (
    str(_PYTHONS / zygote.name) for zygote in (TRAINER, PACKAGES, VERIFIERS)
)
_WITH_VALUE = ("-W", "-X")
_LIMITS = (resource.RLIMIT_FSIZE, resource.RLIMIT_AS, resource.RLIMIT_NOFILE)
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


def run(files: list[int], arguments: Sequence[str], limits: Mapping[int, tuple[int, int]], own: str) -> None:
    """In a fork: be what `python ARGUMENTS` would be. files: its input, output and errors. limits: those of
    resources. own: what it has as `sys.executable`."""
    for kind, limit in limits.items():
        resource.setrlimit(kind, limit)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    options = [*arguments]
    safe = False
    while options[0].startswith("-") and options[0] not in ("-c", "-m"):
        option = options.pop(0)
        safe = safe or option in ("-P", "-I")
        if option in _WITH_VALUE:
            options.pop(0)
    path = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    sys.path[:] = [*path, *(folder for folder in sys.path if folder != str(_REPOSITORY))]
    try:
        if options[0] == "-c":
            sys.path[:0] = [] if safe else [""]
            main = sys.modules["__main__"] = types.ModuleType("__main__")
            sys.argv = ["-c", *options[2:]]
            exec(compile(options[1], "<string>", "exec"), main.__dict__)
        elif options[0] == "-m":
            sys.path[:0] = [] if safe else [""]
            sys.argv = [options[1], *options[2:]]
            sys.executable = own  # by which torchrun starts others
            runpy.run_module(options[1], run_name="__main__", alter_sys=True)
        else:
            sys.path[:0] = [] if safe else [str(Path(options[0]).resolve().parent)]
            sys.argv = options
            runpy.run_path(options[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()


def main(name: str, *arguments: str) -> int:
    """Have a Python forked that runs with the arguments, and end as it does. name: the zygote's."""
    zygote = next(zygote for zygote in (TRAINER, PACKAGES, VERIFIERS) if zygote.name == name)
    limits = {kind: resource.getrlimit(kind) for kind in _LIMITS}
    process = Process(zygote, "tests.preloaded:run", (arguments, limits, str(_PYTHONS / name)), files=(0, 1, 2))
    for number in _FORWARDED:
        signal.signal(number, lambda number, _: os.kill(process.pid, number))
    for number in (0, 1, 2):  # of which others are to see the end
        os.close(number)
    process.join()
    status = process.exitcode or 0
    if status < 0:
        with suppress(OSError):  # SIGKILL has no other
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status
