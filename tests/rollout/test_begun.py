"""What was begun in the background, and how its end is taken."""

from __future__ import annotations

import random
import threading
from concurrent.futures import Future
from typing import Any

import pytest

from megatron_rl.config import ParallelConfig
from megatron_rl.distributed import parallel
from megatron_rl.errors import StopRequested, UserError
from megatron_rl.rollout.recover import RESTARTS, Recovery, generate, start_collection
from megatron_rl.servers.client import EngineLost, SGLangClient


class Asked:
    """A collection that is lost a number of times, then complete."""

    def __init__(self, losses: int, error: Exception | None = None) -> None:
        self.losses, self.error = losses, error or EngineLost("nobody answers")
        self.runs, self.complete = 0, False
        self.canceled = threading.Event()

    def run(self, client: SGLangClient) -> None:
        self.runs += 1
        if self.runs <= self.losses:
            raise self.error
        self.complete = True

    def cancel(self) -> None:
        self.canceled.set()


@pytest.fixture(scope="module")
def ranks():
    yield parallel.initialize(ParallelConfig(), 0)
    parallel.shutdown()


CLIENT = SGLangClient(["127.0.0.1:1"])


def ask(
    asked: Any, ranks: parallel.Ranks, *, revives: list[bool], begun: Future | None = None, **more: Any
) -> list[bool]:
    """revives: what each look at the servers finds. Returns those that were not needed."""
    left = list(revives)
    generate(asked, CLIENT, ranks, lambda: left.pop(0), begun=begun, **more)
    return left


def failed(asked: Any) -> Future:
    begun = start_collection(asked, CLIENT)
    assert begun.exception(20) is not None
    return begun


def test_servers_that_were_revived_since_then_are_asked_again(ranks):
    """The push behind the step has restarted them, so that nobody finds a change any more."""
    asked = Asked(losses=1)
    assert ask(asked, ranks, begun=failed(asked), revives=[False]) == []
    assert asked.complete and asked.runs == 2


def test_what_was_mended_since_then_is_no_error(ranks):
    asked = Asked(losses=1)
    begun = failed(asked)
    asked.run(CLIENT)
    assert ask(asked, ranks, begun=begun, revives=[]) == [] and asked.runs == 2


def test_a_second_loss_without_a_change_is_an_error(ranks):
    for asked, begins in ((Asked(losses=2), True), (Asked(losses=1), False)):
        begun = failed(asked) if begins else None
        with pytest.raises(EngineLost, match="nobody answers"):
            ask(asked, ranks, begun=begun, revives=[False, False])
    asked = Asked(losses=RESTARTS + 1)
    with pytest.raises(EngineLost):
        ask(asked, ranks, revives=[True] * RESTARTS)
    assert asked.runs == RESTARTS + 1


def test_other_errors_end_it_at_once(ranks):
    for error in (UserError("a wrong request"), ZeroDivisionError("here")):
        asked = Asked(losses=1, error=error)
        with pytest.raises(type(error), match=str(error)):
            ask(asked, ranks, begun=failed(asked), revives=[])


def test_a_run_that_is_told_to_end_gives_up_what_it_has_asked(ranks):
    class Endless(Asked):
        def run(self, client: SGLangClient) -> None:
            assert self.canceled.wait(30)
            raise EngineLost("canceled")

    asked: Any = Endless(losses=0)
    with pytest.raises(StopRequested):
        ask(asked, ranks, begun=start_collection(asked, CLIENT), revives=[], stop=lambda: True)
    assert asked.canceled.is_set()


def test_servers_that_go_after_the_count_are_counted_too(ranks):
    """One is missed, and until the others are looked for more go and come."""
    for _ in range(20):
        before, now = (random.sample("abcdef", random.randint(1, 5)) for _ in range(2))

        class Servers:
            addresses = before

            def changed(self, patience_s: float, *, trouble: bool) -> int:
                return 1

            def renew(self, now: list[str] = now) -> list[str]:
                self.addresses = now
                return now

        moved: list[list[str]] = []
        recovery = Recovery(Servers(), ranks, lambda: None, moved.append, external=True)
        assert recovery.revive() and moved == [now]
        gone_or_come = sum((name in before) != (name in now) for name in "abcdef")
        assert recovery.restarts == max(1, gone_or_come), "one that was away for a moment counts"
