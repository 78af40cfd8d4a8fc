from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.algorithms import advantages


def groups_of(seed: int):
    """Groups of 1 to 6 responses in random order, random ids; numpy fp64."""
    rng = np.random.default_rng(seed)
    ids = np.repeat(rng.permutation(1000)[:7] - 300, rng.integers(1, 7, 7))
    rng.shuffle(ids)
    return rng.normal(size=len(ids)) * rng.choice([0.01, 1, 50]), ids


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**31), normalize=st.booleans())
def test_group_relative_is_each_groups_standard_score(seed, normalize):
    rewards, ids = groups_of(seed)
    ours = advantages.group_relative(torch.tensor(rewards), torch.tensor(ids), normalize=normalize)
    for group in np.unique(ids):
        r = rewards[ids == group]
        expected = np.zeros(1) if len(r) == 1 else (r - r.mean()) / (r.std() if normalize else 1.0)
        np.testing.assert_allclose(ours.numpy()[ids == group], expected, rtol=1e-9, atol=1e-12)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_leave_one_out_is_reward_minus_mean_of_the_others(seed):
    rewards, ids = groups_of(seed)
    ours = advantages.leave_one_out(torch.tensor(rewards), torch.tensor(ids))
    for i, (reward, group) in enumerate(zip(rewards, ids, strict=True)):
        others = [r for j, (r, g) in enumerate(zip(rewards, ids, strict=True)) if g == group and j != i]
        expected = reward - np.mean(others) if others else 0.0
        assert float(ours[i]) == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("function", [advantages.group_relative, advantages.leave_one_out])
def test_no_spread_gives_exact_zeros(function):
    # 0.1 has no exact mean; 0.8 + 0.1 is not 0.9: neither is a difference between responses.
    rewards = torch.tensor([0.1, 0.1, 0.1, 0.9, 0.8, 0.0, 1.0])
    rewards[4] += 0.1
    assert rewards[3] != rewards[4]
    ids = torch.tensor([5, 5, 5, 2, 2, 9, 9])
    out = function(rewards, ids)
    assert out[:5].tolist() == [0.0] * 5
    assert out[5] < 0 < out[6]
    assert out.dtype == torch.float32


def test_grpo_by_hand():
    out = advantages.group_relative(torch.tensor([1, 0, 0, 0, 7]), torch.tensor([4, 4, 4, 4, 1]))
    root3 = math.sqrt(3)
    torch.testing.assert_close(out, torch.tensor([root3, -1 / root3, -1 / root3, -1 / root3, 0.0]))


def test_a_reward_that_is_no_number_is_named():
    with pytest.raises(ValueError, match=r"rewards\[1\] = nan \(group 8\)"):
        advantages.group_relative(torch.tensor([0.0, torch.nan]), torch.tensor([3, 8]))
    with pytest.raises(ValueError, match="both must be"):
        advantages.leave_one_out(torch.zeros(3), torch.zeros(2))


def gae_by_definition(rewards, values, mask, gamma, lam):
    """Sum of discounted TD residuals over the masked-in steps of one row, from the definition, in numpy."""
    steps = np.flatnonzero(mask)
    advantage = np.zeros(len(rewards))
    for i, t in enumerate(steps):
        for j in range(i, len(steps)):
            following = values[steps[j + 1]] if j + 1 < len(steps) else 0.0
            delta = rewards[steps[j]] + gamma * following - values[steps[j]]
            advantage[t] += (gamma * lam) ** (j - i) * delta
    return advantage, np.where(mask, advantage + values, 0.0)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), gamma=st.sampled_from([1.0, 0.99, 0.5]), lam=st.sampled_from([0.0, 0.95, 1.0]))
def test_generalized_is_the_sum_of_td_residuals(seed, gamma, lam):
    rng = np.random.default_rng(seed)
    rewards, values = rng.normal(size=(2, 4, 12))
    mask = rng.random((4, 12)) < 0.7
    mask[0] = False
    padded = [np.where(mask, x, np.nan) for x in (rewards, values)]  # what is masked out counts for nothing
    tensors = [torch.tensor(x) for x in (*padded, mask)]
    ours = advantages.generalized(*tensors, gamma=gamma, lam=lam)
    for row in range(4):
        expected = gae_by_definition(rewards[row], values[row], mask[row], gamma, lam)
        for got, wanted in zip(ours, expected, strict=True):
            np.testing.assert_allclose(got[row].numpy(), wanted, rtol=1e-9, atol=1e-12)
