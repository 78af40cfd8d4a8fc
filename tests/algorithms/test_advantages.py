from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.algorithms import advantages


def groups_of(seed: int):
    """Groups of 1 to 6 responses in random order, random ids; numpy fp64.

    Rewards of a group are a half of their unit apart, so that their deviation is a quarter of it or more: rounding, of 6 units,
    stays below 1e-13 of what is divided by it.
    """
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 7, 7)
    ids = np.repeat(rng.permutation(1000)[:7] - 300, sizes)
    rewards = np.concatenate([rng.permutation(n) - n / 2 + rng.uniform(0, 0.5, n) for n in sizes])
    order = rng.permutation(len(ids))
    return rewards[order] * rng.choice([0.01, 1, 50]), ids[order]


@settings(max_examples=50)
@given(seed=st.integers(0, 2**31), normalize=st.booleans())
def test_group_relative_is_each_groups_standard_score(seed, normalize):
    rewards, ids = groups_of(seed)
    ours = advantages.group_relative(torch.tensor(rewards), torch.tensor(ids), normalize=normalize)
    for group in np.unique(ids):
        r = rewards[ids == group]
        expected = np.zeros(1) if len(r) == 1 else (r - r.mean()) / (r.std() if normalize else 1.0)
        np.testing.assert_allclose(ours.numpy()[ids == group], expected, rtol=1e-9, atol=1e-12)


@settings(max_examples=50)
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


@settings(max_examples=50)
@given(seed=st.integers(0, 2**31), normalize=st.booleans())
def test_process_supervision_is_the_sum_of_normalized_steps_from_a_token_on(seed, normalize):
    """Ragged steps, responses without any, groups of one response, and one of equal scores."""
    rng = np.random.default_rng(seed)
    ids = rng.permutation(np.repeat([7, -3, 40, 5], [4, 3, 1, 3]))
    counts = rng.integers(0, 6, len(ids))
    mask = np.arange(7) < counts[:, None]
    scores = rng.normal(size=mask.shape) * rng.choice([0.01, 1, 50])
    scores[ids == 5] = 0.1  # which has no exact mean
    ours = advantages.process_supervision(
        torch.tensor(np.where(mask, scores, np.nan)), torch.tensor(mask), torch.tensor(ids), normalize=normalize
    ).numpy()
    for group in set(ids):
        rows = [row for row in range(len(ids)) if ids[row] == group]
        everything = [scores[row, k] for row in rows for k in range(counts[row])]
        mean = sum(everything) / max(1, len(everything))
        deviation = math.sqrt(sum((score - mean) ** 2 for score in everything) / max(1, len(everything)))
        for row in rows:
            for k in range(7):
                behind = [(scores[row, later] - mean) for later in range(k, counts[row])]
                if group == 5 or len(everything) < 2:  # no spread
                    assert ours[row, k] == 0.0
                else:  # 30 terms' rounding, over a deviation that is above 1e-6 of them but by a chance of 1e-6
                    wanted = sum(behind) / (deviation if normalize else 1.0)
                    assert ours[row, k] == pytest.approx(wanted, rel=1e-8, abs=1e-8)


def test_process_supervision_by_hand():
    """Two responses: of steps 1 and 0, and of one step 1 that is followed by what was cut off."""
    scores, mask = torch.tensor([[1.0, 0.0], [1.0, 9.0]]), torch.tensor([[True, True], [True, False]])
    found = advantages.process_supervision(scores, mask, torch.tensor([3, 3]))
    root2 = math.sqrt(2)  # mean 2/3, deviation sqrt(2)/3
    torch.testing.assert_close(found, torch.tensor([[1 / root2 - root2, -root2], [1 / root2, 0.0]]))
    assert advantages.process_supervision(torch.zeros(2, 0), torch.ones(2, 0), torch.zeros(2)).shape == (2, 0)
    for wrong in (
        (scores[0], mask[0], torch.zeros(2)),
        (scores, mask[:1], torch.zeros(2)),
        (scores, mask, torch.zeros(3)),
    ):
        with pytest.raises(ValueError, match=r"must be \[N, K\]"):
            advantages.process_supervision(*wrong)
    with pytest.raises(ValueError, match="is not a finite number"):
        advantages.process_supervision(scores * torch.inf, mask, torch.tensor([3, 3]))


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


@settings(max_examples=40)
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


@settings(max_examples=40)
@given(seed=st.integers(0, 2**31), gamma=st.sampled_from([1.0, 0.9]), lam=st.sampled_from([0.0, 0.95, 1.0]))
def test_generalized_goes_on_from_the_bootstrap(seed, gamma, lam):
    """As if one more step followed, whose value the bootstrap is, and whose residual is zero."""
    rng = np.random.default_rng(seed)
    rewards, values = rng.normal(size=(2, 4, 9))
    mask = rng.random((4, 9)) < 0.7
    mask[0] = False
    bootstrap = np.array([5.0, 0.0, *rng.normal(size=2)])
    tensors = [torch.tensor(x) for x in (rewards, values, mask)]
    ours = advantages.generalized(*tensors, gamma=gamma, lam=lam, bootstrap=torch.tensor(bootstrap))
    for row in range(4):
        # The step behind earns what it was worth: reward = value = bootstrap.
        longer = [np.append(x[row], last) for x, last in ((rewards, bootstrap[row]), (values, bootstrap[row]))]
        expected = gae_by_definition(*longer, np.append(mask[row], True), gamma, lam)
        for got, wanted in zip(ours, expected, strict=True):
            np.testing.assert_allclose(got[row].numpy(), np.where(mask[row], wanted[:-1], 0.0), rtol=1e-9, atol=1e-12)
    with pytest.raises(ValueError, match="bootstrap"):
        advantages.generalized(*tensors, gamma=gamma, lam=lam, bootstrap=torch.zeros(3))


def test_generalized_without_values_is_rewards_to_go(rng):
    rewards, mask = rng.normal(size=(3, 8)), rng.random((3, 8)) < 0.7
    end = rng.normal(size=3)
    tensors = torch.tensor(rewards), torch.zeros(3, 8).double(), torch.tensor(mask)
    gained, returns = advantages.generalized(*tensors, gamma=1.0, lam=1.0, bootstrap=torch.tensor(end))
    for row in range(3):
        for t in range(8):
            expected = sum(rewards[row, u] for u in range(t, 8) if mask[row, u]) + end[row] if mask[row, t] else 0.0
            assert float(gained[row, t]) == pytest.approx(expected, rel=1e-12, abs=1e-12)
    assert torch.equal(gained, returns)


# -- the tilted policy ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.05, 1.0, 100.0])
def test_exponential_tilt_is_group_size_times_softmax(rng, temperature):
    rewards, ids = groups_of(int(rng.integers(2**31)))
    ours = advantages.exponential_tilt(torch.tensor(rewards), torch.tensor(ids), temperature=temperature)
    for group in np.unique(ids):
        members = [i for i in range(len(ids)) if ids[i] == group]
        best = max(rewards[i] for i in members)
        shares = [math.exp((rewards[i] - best) / temperature) for i in members]
        for i, share in zip(members, shares, strict=True):
            # r / beta is exact to 1e-16 x 300 / 0.05 at most: 6e-13 relative in its exponential.
            assert float(ours[i]) == pytest.approx(len(members) * share / sum(shares), rel=1e-11, abs=1e-300)


def test_exponential_tilt_has_the_gradient_of_its_cross_entropy(rng):
    """REINFORCE with these advantages, mean over responses, is -sum of omega log pi, mean over groups of one size."""
    rewards, logits = torch.tensor(rng.normal(size=8)), torch.tensor(rng.normal(size=8), requires_grad=True)
    ids, beta = torch.arange(8) % 2, 0.5
    log_probs = logits.log_softmax(0)
    ours = -(advantages.exponential_tilt(rewards, ids, temperature=beta) * log_probs).mean()
    papers = [-beta * ((rewards[ids == g] / beta).softmax(0) * log_probs[ids == g]).sum() for g in (0, 1)]
    papers = torch.stack(papers).mean() / beta
    torch.testing.assert_close(ours, papers, rtol=1e-12, atol=1e-14)
    (gradient,) = torch.autograd.grad(ours, logits, retain_graph=True)
    torch.testing.assert_close(gradient, torch.autograd.grad(papers, logits)[0], rtol=1e-12, atol=1e-14)


def test_exponential_tilt_without_spread_and_at_extremes():
    rewards = torch.tensor([0.9, 0.8, 7.0, 0.0, 1.0, 1e4, -1e4])
    rewards[1] += 0.1
    ids = torch.tensor([2, 2, 5, 9, 9, 4, 4])
    ours = advantages.exponential_tilt(rewards, ids, temperature=1e-9)
    assert ours.tolist() == [1.0, 1.0, 1.0, 0.0, 2.0, 2.0, 0.0]  # the rounding of 0.8 + 0.1 is no difference
    even = advantages.exponential_tilt(rewards, ids, temperature=1e12)
    torch.testing.assert_close(even, torch.ones(7), rtol=1e-6, atol=0)
    assert advantages.exponential_tilt(rewards.bfloat16(), ids, temperature=1.0).dtype == torch.bfloat16
    for temperature in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="temperature"):
            advantages.exponential_tilt(rewards, ids, temperature=temperature)


# -- whitening --------------------------------------------------------------------------------------------------------


def whitened_by_definition(values, mask):
    """(x - mean) / standard deviation in exact fractions, but for the root."""
    inside = [Fraction(float(x)) for x in values[mask]]
    mean = sum(inside, Fraction(0)) / len(inside)
    deviation = math.sqrt(sum((x - mean) ** 2 for x in inside) / len(inside))
    exact = [float((Fraction(float(x)) - mean) / Fraction(deviation)) for x in np.nan_to_num(values.flatten())]
    return np.where(mask, np.reshape(exact, mask.shape), 0.0), float(mean), deviation


@pytest.mark.parametrize("mean", [0.0, 1.0, -1e4, 1e6])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_batch_normalized_is_whitening_whatever_the_mean(rng, mean, dtype):
    values = (mean + rng.normal(size=(5, 40)) * 0.7).astype(dtype)
    mask = rng.random((5, 40)) < 0.6
    mask[2] = False
    expected, *_ = whitened_by_definition(values, mask)
    held = np.where(mask, values, np.nan).astype(dtype)
    ours = advantages.batch_normalized(torch.tensor(held), torch.tensor(mask))
    assert ours.dtype == torch.tensor(held).dtype
    # Two passes: the mean is wrong by 1e6 x 1e-15 at most, and that of the shift is corrected by the second pass.
    np.testing.assert_allclose(ours.numpy(), expected, rtol=1e-6 if dtype is np.float32 else 1e-9, atol=1e-9)
    flat = advantages.batch_normalized(torch.tensor(held[mask]), torch.ones(int(mask.sum())))
    torch.testing.assert_close(flat, ours[torch.tensor(mask)])


def test_moments_add_up_over_parts(rng):
    """As over micro-batches and ranks: a reduction for the shift, and one for the moments around it."""
    # A variance of 100: below 0.2, which is the rounding of (1e6)^2, one pass would tell none.
    values, mask = 1e6 + 10 * rng.normal(size=(6, 10)), rng.random((6, 10)) < 0.5
    expected, mean, deviation = whitened_by_definition(values, mask)
    values, mask = torch.tensor(values), torch.tensor(mask)
    parts = [slice(0, 1), slice(1, 4), slice(4, 4), slice(4, 6)]
    shift, _ = advantages.mean_and_variance(sum(advantages.moments(values[part], mask[part]) for part in parts))
    around = sum(advantages.moments(values[part], mask[part], shift=shift) for part in parts)
    assert float(around[0]) == float(mask.sum())
    assert float(advantages.mean_and_variance(around)[1].sqrt()) == pytest.approx(deviation, rel=1e-12)
    whole = torch.cat([advantages.whiten(values[part], around, shift=shift) for part in parts])
    np.testing.assert_allclose(np.where(mask, whole, 0.0), expected, rtol=1e-9, atol=1e-9)
    kept = advantages.whiten(values, around, shift=shift, shift_mean=False)
    np.testing.assert_allclose(np.where(mask, kept - mean, 0.0), expected, rtol=1e-8, atol=1e-8)
    # Without a shift, one pass: some 30 roundings of (1e6)^2 x 1e-16, 3e-3, are left of a variance of 100.
    once = sum(advantages.moments(values[part], mask[part]) for part in parts)
    assert float(advantages.mean_and_variance(once)[1].sqrt()) == pytest.approx(deviation, rel=1e-3)
    with pytest.raises(ValueError, match="values .* and mask"):
        advantages.moments(values, mask[:1])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_values_without_spread_are_zeros(rng, dtype):
    level = float(rng.uniform(0.1, 1e4)) * float(rng.choice([-1.0, 1.0]))
    constant = torch.full((7, 11), level, dtype=dtype)
    nudged = constant.clone()
    nudged[3, 3] *= 1 + torch.finfo(dtype).eps  # in the last bit
    everywhere = torch.ones(7, 11)
    for values in (constant, nudged, constant[:1, :1]):
        mask = everywhere[: len(values), : values.shape[1]]
        assert not advantages.batch_normalized(values, mask).any()
        for shift in (0.0, 0.99 * level):  # a shift that is none, or is beside the mean
            found = advantages.moments(values, mask, shift=shift)
            assert not advantages.whiten(values, found, shift=shift).any()
            kept = advantages.whiten(values, found, shift=shift, shift_mean=False)
            # A mean of n equal numbers is right to n / 2 roundings of fp64 in any order of the sum; one number is nudged.
            rounding = 4 * torch.finfo(dtype).eps + values.numel() / 2 * 2**-53
            torch.testing.assert_close(kept, values, rtol=rounding, atol=0)
    nothing = advantages.batch_normalized(torch.full((2, 3), torch.nan, dtype=dtype), torch.zeros(2, 3))
    assert torch.equal(nothing, torch.zeros(2, 3, dtype=dtype))


# -- rewards of tokens ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("coefficient", [0.0, 0.3])
def test_token_rewards_are_the_penalty_and_the_end(rng, coefficient):
    final, kl = rng.normal(size=5), rng.normal(size=(5, 9))
    mask = rng.random((5, 9)) < 0.6
    mask[0], mask[1], mask[2] = False, True, np.arange(9) == 0
    mask[[3, 4], rng.integers(9, size=2)] = True  # a token counts in all but the first
    held = torch.tensor(np.where(mask, kl, np.nan))
    ours = advantages.token_rewards(torch.tensor(final), torch.tensor(mask), kl=held, kl_coefficient=coefficient)
    for row in range(5):
        inside = [t for t in range(9) if mask[row, t]]
        for t in range(9):
            expected = -coefficient * kl[row, t] if t in inside else 0.0
            expected += final[row] if inside and t == inside[-1] else 0.0
            assert float(ours[row, t]) == pytest.approx(expected, rel=1e-14, abs=1e-14)
    short = advantages.token_rewards(torch.tensor(final).bfloat16(), torch.tensor(mask))
    assert short.dtype == torch.bfloat16
    assert torch.equal(short.sum(1)[1:], torch.tensor(final).bfloat16()[1:])


def test_token_rewards_refuse_what_does_not_fit():
    final, mask = torch.zeros(2), torch.ones(2, 3)
    for arguments, options, message in (
        ((final[:1], mask), {}, r"must be \[B\] and \[B, T\]"),
        ((final, mask[0]), {}, r"must be \[B\] and \[B, T\]"),
        ((final, mask), {"kl_coefficient": 0.1}, "needs kl"),
        ((final, mask), {"kl": mask, "kl_coefficient": -0.1}, "must not be negative"),
        ((final, mask), {"kl": mask[:, :2], "kl_coefficient": 0.1}, "kl .* and mask"),
    ):
        with pytest.raises(ValueError, match=message):
            advantages.token_rewards(*arguments, **options)
