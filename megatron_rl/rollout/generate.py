"""All processes ask for a step's responses together; what a dead engine left open is asked again."""

from __future__ import annotations

from collections.abc import Callable

from megatron_rl.errors import UserError
from megatron_rl.rollout.client import EngineLost, SGLangClient
from megatron_rl.rollout.collect import Collection
from megatron_rl.rollout.recover import RESTARTS
from megatron_rl.trainer.parallel import Ranks


def generate(collection: Collection, client: SGLangClient, ranks: Ranks, revive: Callable[[], bool]) -> None:
    """Complete every process's collection.

    revive: brings dead servers back with the current weights, on all processes; returns whether there were any.
    Errors: UserError, the same on every process, for what a restart does not mend, or where one did not help.
    """
    for attempt in range(RESTARTS + 1):
        problem: UserError | None = None
        try:
            if not collection.complete:
                collection.run(client)
        except UserError as error:
            problem = error
        problems = [p for p in ranks.gather(problem) if p is not None]
        if not problems:
            return
        fatal = [p for p in problems if not isinstance(p, EngineLost)]
        if fatal or attempt == RESTARTS or not revive():
            raise (fatal or problems)[0]
