"""Errors that the user can fix, and a function that raises the error of one process on all processes of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch.distributed


class UserError(Exception):
    """Invalid input or a broken environment. The command line prints it as one line and exits with status 2."""


class StopRequested(BaseException):
    """Raised on all processes if the run was asked to stop (SIGTERM, SIGUSR1) during a step. The run then saves its state."""


def together[T](work: Callable[[], T] | None, group: torch.distributed.ProcessGroup | None = None) -> T | None:
    """Run `work` (None: nothing) and return its result. If it fails on one process, all processes of the group raise the error.

    In this way, no process waits in a collective operation for a process that has stopped. All processes of the group must call
    this function. Without torch.distributed, it only calls `work()`. Errors: the error of the failing process with the lowest
    rank. If this error is no UserError, the other processes raise a UserError with its text.
    """
    import torch.distributed as dist

    result, problem = None, None
    try:
        result = work() if work is not None else None
    except Exception as error:
        problem = error
    if dist.is_initialized() and dist.get_world_size(group) > 1:
        mine = problem if isinstance(problem, UserError | None) else UserError(f"another process failed: {problem!r}")
        problems: list[UserError | None] = [None] * dist.get_world_size(group)
        dist.all_gather_object(problems, mine, group=group)
        first = next((p for p in problems if p is not None), None)
        problem = first if isinstance(problem, UserError | None) else problem
    if problem is not None:
        raise problem
    return result
