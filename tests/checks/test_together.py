"""One process works, all learn how it ended."""

from __future__ import annotations

import time

import pytest

from megatron_rl.errors import UserError, together
from tests.ranks import run_ranks


class TooSmall(UserError):
    pass


def outcomes() -> list[str]:
    from megatron_rl.config import ParallelConfig
    from megatron_rl.distributed import parallel

    ranks = parallel.initialize(ParallelConfig(tensor=2), 0)
    rank = ranks.rank

    def fail(error: Exception):
        raise error

    def ending(work) -> str:
        try:
            return repr(work())
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    told = [
        ending(lambda: ranks.main_does(lambda: f"from {rank}")),
        ending(lambda: ranks.main_does(lambda: fail(TooSmall("disk")))),
        ending(lambda: ranks.leaders_do(lambda: f"leader {rank}")),
        ending(lambda: ranks.all_do(lambda: rank if rank < 2 else fail(UserError(f"of {rank}")))),
        ending(lambda: ranks.all_do(lambda: rank if rank != 1 else fail(ZeroDivisionError("here")))),
        ending(lambda: ranks.all_do(lambda: rank)),
    ]
    parallel.shutdown()
    return told


@pytest.mark.slow
def test_results_and_errors_over_four_processes():
    for rank, (main, main_fails, leader, some_fail, crash, fine) in enumerate(run_ranks(4, "test_together:outcomes")):
        assert main == "'from 0'"
        assert main_fails == "TooSmall: disk"
        assert leader == (f"'leader {rank}'" if rank % 2 == 0 else "None")
        assert some_fail == "UserError: of 2", "the first one's, also on rank 3, which has its own"
        other = "UserError: another process failed: ZeroDivisionError('here')"
        assert crash == ("ZeroDivisionError: here" if rank == 1 else other)
        assert fine == str(rank), "nobody is left in an earlier collective"


def waits() -> list[str]:
    """Of a first process that waits longer than a collective may: told patiently, then not."""
    from megatron_rl.config import ParallelConfig
    from megatron_rl.distributed import parallel

    ranks = parallel.initialize(ParallelConfig(timeout_s=3), 0)

    def late() -> str:
        time.sleep(6)
        return "late"

    def fails() -> str:
        raise UserError(f"of {ranks.rank}")

    found = [ranks.main_does(late, patient=True), str(ranks.leaders_do(late if ranks.rank else str, patient=True))]
    for work in (lambda: ranks.main_does(fails, patient=True), lambda: ranks.main_does(late)):
        start = time.monotonic()
        try:
            found.append(work())
        except Exception as error:
            found.append(f"{type(error).__name__} {'early' if time.monotonic() - start < 5.5 else 'late'}")
    return found


@pytest.mark.slow
def test_a_patient_wait_outlives_the_longest_of_a_collective():
    first, *others = run_ranks(3, "test_together:waits")
    assert first[:3] == ["late", "", "UserError early"]
    for other in others:
        assert other[:3] == ["late", "late", "UserError early"]
        assert other[3].endswith(" early") and "Error" in other[3], "without patience the others give up"


def test_alone_it_is_a_call():
    assert together(lambda: 3) == 3 and together(None) is None
    with pytest.raises(ZeroDivisionError):
        together(lambda: 1 / 0)
