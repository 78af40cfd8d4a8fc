"""Which groups a step learns from, where those without spread are left out."""

from __future__ import annotations

import random
from fractions import Fraction
from itertools import count
from math import ceil

import numpy as np
import pytest

from megatron_rl.data.trajectory import Trajectory
from megatron_rl.rollout.dynamic_sampling import Groups, prompts_to_ask, with_spread
from megatron_rl.tasks import Prompt

SAMPLES = 3


def response(group: int, reward: float, name: str) -> Trajectory:
    tokens = np.arange(4, dtype=np.int32)
    return Trajectory(prompt_id=name, group_id=group, tokens=tokens, prompt_length=2, reward=reward)


def test_a_group_has_spread_where_two_rewards_differ():
    rewards = [(group, random.choice([0.0, 1.0])) for group in range(50) for _ in range(SAMPLES)]
    random.shuffle(rewards)
    expected = {group for group in range(50) if len({reward for g, reward in rewards if g == group}) > 1}
    assert with_spread(rewards) == expected
    assert with_spread([]) == set() and with_spread([(7, 0.3)]) == set()
    assert with_spread([(1, 0.1 + 0.2), (1, 0.3)]) == {1}, "no tolerance: advantages.group_relative has none"


@pytest.mark.parametrize("tenths", range(10, 31))
def test_prompts_are_asked_for_by_the_exact_product(tenths):
    """In floats, 1.1 x 10 is a little more than 11."""
    for missing in range(1, 200):
        assert prompts_to_ask(missing, tenths / 10) == ceil(Fraction(tenths, 10) * missing)


@pytest.mark.parametrize("leaders", [1, 2, 3])
@pytest.mark.parametrize("wanted, rounds", [(1, 1), (5, 1), (5, 4), (8, 9)])
def test_rounds_make_a_batch_in_the_order_of_the_prompts(leaders, wanted, rounds):
    """Shared out over leaders, a group may lie on two of them: all choose the same groups, and each has its own responses."""
    every = [Groups(wanted) for _ in range(leaders)]
    names, asked, spread = count(), [], []
    for _ in range(rounds):
        if not every[0].missing:
            break
        prompts = [Prompt(f"prompt {next(names)}", "text") for _ in range(random.randint(wanted, 2 * wanted))]
        fine = [random.random() < 0.3 for _ in prompts]
        rows = [
            response(place, float(sample == 0) if fine[place] else 1.0, prompt.prompt_id)
            for place, prompt in enumerate(prompts)
            for sample in range(SAMPLES)
        ]
        cuts = [0, *sorted(random.randrange(len(rows)) for _ in range(leaders - 1)), len(rows)]
        rewards = [(t.group_id, t.reward) for t in rows]
        for groups, start, end in zip(every, cuts[:-1], cuts[1:], strict=True):
            groups.add(prompts, rows[start:end], rewards)
        asked += prompts
        spread += [p.prompt_id for p, good in zip(prompts, fine, strict=True) if good]
        assert {groups.missing for groups in every} == {max(0, wanted - len(spread))}
    others = [p.prompt_id for p in asked if p.prompt_id not in spread]
    expected = {*(spread + others)[:wanted]}
    found = []
    for groups in every:
        assert groups.share_without_spread == pytest.approx(len(others) / len(asked))
        prompts, trajectories = groups.chosen()
        assert [p.prompt_id for p in prompts] == [p.prompt_id for p in asked if p.prompt_id in expected]
        assert all(prompts[t.group_id].prompt_id == t.prompt_id for t in trajectories)
        found += trajectories
    assert len(found) == wanted * SAMPLES
    assert sum(len(groups.generated) for groups in every) == len(asked) * SAMPLES
    assert all(sum(t.prompt_id == name for t in found) == SAMPLES for name in expected)
