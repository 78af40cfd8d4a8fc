"""Errors that the user can fix, and the function that raises an error on all processes of a run together."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch.distributed


class UserError(Exception):
    """Invalid input or a broken environment. The command line prints it as one line and exits with status 2."""


class StopRequested(BaseException):
    """The run was asked to stop (SIGTERM, SIGUSR1) in the middle of a step; it saves its state. Raised on all processes."""


def together[T](work: Callable[[], T] | None, group: torch.distributed.ProcessGroup | None = None) -> T | None:
    """Run `work` (None: nothing) and return its result; an error of one process is raised on all processes of the group.

    No process then waits in a collective operation for a process that has stopped. All processes of the group must
    call this; without torch.distributed it only calls `work()`. Errors: the error of the first failing process, by
    rank. An error that is no UserError becomes a UserError with its text on the other processes.
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
