"""A step is given up on all processes at the same place, whichever of them was asked to end."""

from __future__ import annotations

import random
from concurrent.futures import Future

import pytest
from ranks import run_ranks

LOOKS = 12


def looks(asked_rank: int, asked_at: int) -> list:
    from megatron_rl.config import ParallelConfig
    from megatron_rl.distributed import parallel
    from megatron_rl.distributed.parallel import Interrupt
    from megatron_rl.errors import StopRequested

    ranks = parallel.initialize(ParallelConfig(), 0)
    now = -1
    interrupt = Interrupt(ranks, lambda: ranks.rank == asked_rank and now >= asked_at, deep=True)

    def raised_at() -> int | None:
        nonlocal now
        for now in range(LOOKS):
            try:
                interrupt.look()
            except StopRequested:
                return now
        return None

    found: list = [raised_at()]  # nobody has begun a step
    interrupt.arm()
    found.append(raised_at())
    interrupt.arm()
    now = -1
    interrupt.look()
    interrupt.disarm()  # an optimizer steps while a look is on its way
    found.append(raised_at())

    finished, endless = Future(), Future()
    finished.set_result(None)
    # One that waits for nothing hears of it as well.
    found.append(ranks.wait_for(endless if ranks.rank else finished, lambda: ranks.rank == asked_rank))
    found.append(ranks.wait_for(finished))
    parallel.shutdown()
    return found


@pytest.mark.parametrize("asked_rank", [0, 1])
def test_all_processes_give_up_at_the_same_look(asked_rank):
    asked_at = random.randrange(LOOKS - 1)
    for found in run_ranks(2, "trainer.test_interrupt:looks", (asked_rank, asked_at), timeout=120):
        assert found == [None, asked_at + 1, None, True, False]
