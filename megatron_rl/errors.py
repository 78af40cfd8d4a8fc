"""Errors that the user can mend, and that all processes of a run raise together."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch.distributed


class UserError(Exception):
    """Bad input or a broken environment. The command line prints it as a single line and exits with status 2."""


class StopRequested(BaseException):
    """The run was asked to end (SIGTERM, SIGUSR1) in the middle of a step: it saves what it has. Raised on all processes."""


def together[T](work: Callable[[], T] | None, group: torch.distributed.ProcessGroup | None = None) -> T | None:
    """Run `work` (None: nothing) and return its result; an error of one process is raised on all of the group.

    So none waits in a collective for one that has stopped. Errors: the first process's, by rank; one that is no UserError is
    a UserError with its text elsewhere. Every process of the group calls it; without torch.distributed it is `work()`.
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
