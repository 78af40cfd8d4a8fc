"""Inside a worker process of `WorkerPool`: how it starts, and one call."""

from __future__ import annotations

import ctypes
import importlib
import os
import resource
import signal
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_rl.errors import UserError
from megatron_rl.registry import resolve

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Failure:
    """A call without a result: it took longer than allowed, raised, or ended its process."""

    reason: str
    timed_out: bool = False
    fatal: bool = False
    """The machine's fault: no other response would fare better."""


def start(parent: int, target: str, memory_mb: int, imports: Sequence[str]) -> None:
    """Limits of the process, and its imports, which do not count for the first call."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a busy worker must not outlive a killed trainer
    if os.getppid() != parent:
        os._exit(1)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # sent to the group they mean the trainer, which ends its workers
    limit = memory_mb * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    warnings.simplefilter("ignore")
    os.dup2(2, 1)  # what a verifier prints is no output of the trainer
    try:
        for name in imports:
            importlib.import_module(name)
        resolve("function", target, {}, "data.verifier")
    except (Exception, SystemExit) as error:
        print(f"megatron-rl: a verifier process of {target} does not start: {error}", flush=True)
        os._exit(1)


def call(target: str, arguments: tuple, keywords: dict[str, Any]) -> Any:
    """The function's result, or a Failure where it raises."""
    try:
        return resolve("function", target, {}, "data.verifier")(*arguments, **keywords)
    except UserError as error:
        return Failure(str(error), fatal=True)
    except TimeoutError as error:
        return Failure(str(error), timed_out=True)
    except (Exception, SystemExit) as error:
        return Failure(f"{type(error).__name__}: {error}"[:500])
