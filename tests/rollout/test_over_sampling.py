"""Which groups are the first that are complete, and what is counted of the others."""

from __future__ import annotations

import asyncio
import random
from concurrent import futures
from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_rl.errors import UserError
from megatron_rl.metrics.reduce import figures, merge
from megatron_rl.rollout.over_sampling import FirstGroups, LeftOut
from megatron_rl.rollout.recover import generate
from megatron_rl.servers.client import EngineLost


def test_the_first_complete_groups_are_taken_in_the_order_in_which_they_are_seen():
    """Against a simulation: requests of all leaders come in any order, and are looked at now and then."""
    for _ in range(200):
        rng = random.Random()
        groups, samples = rng.randint(2, 12), rng.randint(1, 5)
        wanted = rng.randint(1, groups)
        first, order = FirstGroups(wanted, samples), rng.sample(range(groups * samples), groups * samples)
        came: list[int] = []
        seen: list[int] = []
        while not first.enough:
            came += [order.pop() for _ in range(min(len(order), rng.randint(1, 4)))]
            new = [g for g in range(groups) if g not in seen and all(g * samples + i in came for i in range(samples))]
            seen += new
            assert first.add(came) == (len(seen) >= wanted)
        assert first.taken == sorted(seen[:wanted]) and len(first.taken) == wanted
        first.add(range(groups * samples))
        assert first.taken == sorted(seen[:wanted]), "those that come later change nothing"


def test_what_is_left_out_is_counted_over_rounds_and_leaders():
    rng = np.random.default_rng()
    leaders, asked, dropped, lengths = [], 0, 0, []
    for _ in range(3):
        left_out = LeftOut()
        for _ in range(2):
            taken, whole, aborted = (int(n) for n in rng.integers(1, 9, 3))
            found = {100 + i: int(rng.integers(0, 50)) for i in range(aborted)}
            several = [SimpleNamespace(part=part) for part in [0] * taken + [1, 2]]  # of one sample
            left_out.add(taken + whole + aborted, several, found)
            asked, dropped, lengths = asked + taken + whole + aborted, dropped + whole, [*lengths, *found.values()]
        leaders.append(left_out.metrics())
    assert figures(merge(leaders)) == pytest.approx(
        {
            "rollout/aborted": len(lengths) / asked,
            "rollout/dropped": dropped / asked,
            "rollout/aborted_length": sum(lengths) / len(lengths),
        }
    )


@pytest.mark.parametrize(
    ("problem", "told"),
    [
        (UserError("SGLang refused a request (400)"), True),
        (ZeroDivisionError("of our own"), True),
        (EngineLost("no server answers"), False),
        (asyncio.CancelledError(), False),
        (futures.CancelledError(), False),
        (None, False),
    ],
)
def test_a_fault_is_told_though_enough_groups_are_there(problem, told):
    """A server that is lost is not needed for them, and a call that was cancelled was so for them."""
    answered: Future[None] = Future()
    answered.set_result(None) if problem is None else answered.set_exception(problem)
    calls = []
    collection = SimpleNamespace(finished={0, 1}, complete=False, abort=lambda: calls.append("abort"))
    ranks = SimpleNamespace(
        wait_for=lambda *_: False, gather=lambda value: [value], gather_from_leaders=lambda value: [value]
    )
    arguments: tuple = (collection, None, ranks, lambda: False)
    if told:
        with pytest.raises(type(problem), match=str(problem)[:10]):
            generate(*arguments, begun=answered, first=FirstGroups(1, 2))
    else:
        generate(*arguments, begun=answered, first=FirstGroups(1, 2))
    assert calls == ["abort"]
