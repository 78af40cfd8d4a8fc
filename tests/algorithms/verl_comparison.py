"""verl's formulas beside ours, on fresh random inputs: run by `test_against_verl.py` in the environment that has verl.

Where both define a thing alike, values and gradients are equal to rounding (fp64, sums of some hundred terms: 1e-11), but for
verl's additions of 1e-8 and 1e-6 to denominators. DIFFERENT says where definitions differ; each line has its test.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from verl.trainer.ppo import core_algos as theirs
from verl.trainer.ppo import rollout_corr_helper as their_correction
from verl.workers.config.actor import ActorConfig

from megatron_rl.algorithms import advantages, correction, kl, losses
from megatron_rl.algorithms.segments import Segments

ROUNDING = 1e-11
DIFFERENT = {
    "the deviation of a group (grpo)": "ours divides by its size, verl by size - 1 and adds 1e-6",
    "a group of one": "ours has no advantage; verl gives the reward itself, rloo too",
    "whitening": "ours divides by the number of tokens, verl by number - 1 and adds 1e-8 to the variance",
    "dual clip": "verl's vanilla bounds the loss of a negative advantage by clip_ratio_c = 3; ours is PPO's",
    "k1 as a loss": "ours has the gradient of k2, as verl's `k1+`; verl's `k1` has one that is zero in expectation",
    "k3 far away": "verl cuts its value at 10; ours is exact up to a log-ratio of 20",
    "a ratio of 0": "ours gives a pruned token the weight 0, verl e^-20",
    "effective sample size": "ours is of the ratios as they are, verl's of those that it has truncated",
}
"""Definitions in which the two differ, and how."""


@pytest.fixture
def rng():
    entropy = np.random.SeedSequence().entropy
    print("entropy", entropy)
    torch.manual_seed(entropy % 2**63)
    return np.random.default_rng(entropy)


class Batch:
    """Log-probs, advantages and a mask with holes, of rows of which none is empty; padded, and packed as ours are."""

    def __init__(self, rng: np.random.Generator, spread: float = 0.5) -> None:
        self.rows, self.columns = int(rng.integers(3, 9)), int(rng.integers(4, 25))
        shape = (self.rows, self.columns)
        self.mask = torch.from_numpy((rng.random(shape) < 0.7).astype(np.float64))
        self.mask[torch.arange(self.rows), torch.from_numpy(rng.integers(0, self.columns, self.rows))] = 1.0
        self.where = self.mask.bool()
        self.old = torch.from_numpy(-rng.exponential(1.0, shape))
        self.new = (self.old + torch.from_numpy(spread * rng.standard_normal(shape))).requires_grad_()
        self.advantages = torch.from_numpy(rng.standard_normal(shape))
        rows = torch.arange(self.rows)[:, None].expand(shape)
        self.segments = Segments(rows.flatten(), self.rows)

    def inputs(self, clip_low: float, clip_high: float) -> losses.LossInputs:
        packed = [x.flatten() for x in (self.new, self.old, self.advantages, self.where)]
        return losses.LossInputs(*packed, self.segments, clip_low, clip_high)

    def mean(self, terms: torch.Tensor, aggregation: str) -> torch.Tensor:
        weights = losses.loss_weights(self.where.flatten(), self.segments, aggregation).double()
        return (terms * weights).sum() / (self.mask.sum() if aggregation == "token_mean" else self.rows)


VECTORIZED = {"": ROUNDING, "_vectorized": 1e-4}
"""verl's second form of an advantage computes in fp32: roundings of 6e-8 of rewards below 6, over deviations above 0.005."""
MODES = {"token-mean": "token_mean", "seq-mean-token-mean": "sequence_mean"}


def same(found, expected, at: float = ROUNDING) -> None:
    torch.testing.assert_close(found, expected, rtol=at, atol=at, check_dtype=False)


def groups(rng: np.random.Generator, smallest: int = 2) -> tuple[np.ndarray, torch.Tensor]:
    """Group ids in any order, and rewards."""
    sizes = rng.integers(smallest, 7, rng.integers(2, 6))
    ids = rng.permutation(np.repeat(rng.permutation(100)[: len(sizes)], sizes))
    return ids, torch.from_numpy(rng.standard_normal(len(ids)))


def of_responses(function, rewards: torch.Tensor, ids: np.ndarray, **more) -> torch.Tensor:
    """verl's advantage of each response; it takes rewards of tokens."""
    tokens = torch.zeros(len(ids), 3, dtype=torch.float64)
    tokens[:, 1] = rewards
    return function(tokens, torch.ones_like(tokens), index=ids, **more)[0][:, 0]


# -- advantages


def test_grpo(rng):
    ids, rewards = groups(rng)
    ours = advantages.group_relative(rewards, torch.from_numpy(ids))
    for function, at in VECTORIZED.items():
        found = of_responses(theirs.get_adv_estimator_fn(f"grpo{function}"), rewards, ids, epsilon=0.0)
        for group in np.unique(ids):
            n = int((ids == group).sum())
            if (
                float((rewards[ids == group] - rewards[ids == group].mean()).abs().max()) > 0.01
            ):  # by which fp32 is divided
                same(ours[ids == group] * math.sqrt((n - 1) / n), found[ids == group], at=at)


@pytest.mark.parametrize("function", VECTORIZED)
def test_dr_grpo(rng, function):
    ids, rewards = groups(rng)
    found = of_responses(theirs.get_adv_estimator_fn(f"grpo{function}"), rewards, ids, norm_adv_by_std_in_grpo=False)
    same(advantages.ADVANTAGES["dr_grpo"](rewards, torch.from_numpy(ids)), found, at=VECTORIZED[function])


@pytest.mark.parametrize("function", VECTORIZED)
def test_rloo(rng, function):
    ids, rewards = groups(rng)
    found = of_responses(theirs.get_adv_estimator_fn(f"rloo{function}"), rewards, ids)
    same(advantages.leave_one_out(rewards, torch.from_numpy(ids)), found, at=VECTORIZED[function])


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
def test_a_group_of_one(rng, name):
    rewards, ids = torch.from_numpy(rng.uniform(1, 2, 3)), np.arange(3)
    assert not advantages.ADVANTAGES[name](rewards, torch.from_numpy(ids)).any()
    found = of_responses(theirs.get_adv_estimator_fn(name.removeprefix("dr_")), rewards, ids)
    same(found, rewards, at=1e-5)


def sample_deviation(whitened: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Ours, by the deviation of a sample."""
    return whitened * torch.sqrt((mask.sum() - 1) / mask.sum())


@pytest.mark.parametrize("outcome", [True, False])
def test_gae(rng, outcome):
    batch = Batch(rng)
    gamma, lam = rng.uniform(0.5, 1.0, 2)
    values = torch.from_numpy(rng.standard_normal(batch.mask.shape))
    rewards = batch.advantages * batch.mask
    if outcome:
        rewards = advantages.token_rewards(batch.advantages[:, 0], batch.where)
    found, returns = theirs.compute_gae_advantage_return(rewards, values, batch.mask, gamma, lam)
    ours, our_returns = advantages.generalized(rewards, values, batch.mask, gamma=gamma, lam=lam)
    same(our_returns, returns * batch.mask)
    assert ours.std() > 0.05, "verl's 1e-8 beside the variance is then below 2e-6 of the result"
    same(sample_deviation(advantages.batch_normalized(ours, batch.mask), batch.mask), found * batch.mask, at=1e-5)


def test_reinforce_plus_plus(rng):
    batch, gamma = Batch(rng), rng.uniform(0.5, 1.0)
    rewards = advantages.token_rewards(batch.advantages[:, 0], batch.where)
    config = type("Config", (), {"gamma": gamma})
    found, returns = theirs.compute_reinforce_plus_plus_outcome_advantage(rewards, batch.mask, config=config)
    nothing = torch.zeros_like(rewards)
    _, ours = advantages.generalized(rewards, nothing, batch.mask, gamma=gamma, lam=1.0)
    same(ours, returns)
    assert ours.std() > 0.05
    same(sample_deviation(advantages.batch_normalized(ours, batch.mask), batch.mask), found, at=1e-5)


def test_reinforce_plus_plus_with_a_baseline(rng):
    ids, rewards = groups(rng)
    mask = torch.from_numpy((rng.random((len(ids), 7)) < 0.8).astype(np.float64))
    mask[:, 0] = 1.0
    tokens = torch.zeros_like(mask)
    tokens[:, 0] = rewards
    found, _ = theirs.compute_reinforce_plus_plus_baseline_outcome_advantage(tokens, mask, index=ids)
    centered = advantages.ADVANTAGES["dr_grpo"](rewards, torch.from_numpy(ids))
    ours = advantages.batch_normalized(centered[:, None].expand_as(mask), mask)
    same(sample_deviation(ours, mask), found, at=1e-5)


# -- KL


@pytest.mark.parametrize(
    ("ours", "verl"), [("k1", "k1+"), ("k2", "k2"), ("k2", "mse"), ("k3", "k3"), ("k3", "low_var_kl")]
)
def test_kl(rng, ours, verl):
    batch = Batch(rng)
    found = kl.estimate(batch.new, batch.old, ours)
    expected = theirs.kl_penalty(batch.new, batch.old, verl)
    same(found, expected)
    same(*(torch.autograd.grad(x.sum(), batch.new)[0] for x in (found, expected)))


def test_k1_as_a_loss(rng):
    batch = Batch(rng)
    same(kl.estimate(batch.new, batch.old, "k1"), theirs.kl_penalty(batch.new, batch.old, "k1"))
    (gradient,) = torch.autograd.grad(theirs.kl_penalty(batch.new, batch.old, "k1").sum(), batch.new)
    assert (gradient == 1).all(), "whatever the log-ratio: its mean over the policy's own tokens is zero"


def test_k3_far_away(rng):
    distance = torch.from_numpy(rng.uniform(3, 15, 50))
    nothing = torch.zeros_like(distance)
    assert (theirs.kl_penalty(-distance, nothing, "k3") == 10).all()
    same(kl.estimate(-distance, nothing, "k3"), torch.expm1(distance) - distance)


# -- losses


def config(low: float, high: float, **more) -> ActorConfig:
    return ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio=low,
        clip_ratio_low=low,
        clip_ratio_high=high,
        **more,
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("ours", "verl"), [("ppo", "vanilla"), ("gspo", "gspo"), ("cispo", "cispo"), ("reinforce", "gpg")]
)
@pytest.mark.parametrize("weighted", [False, True])
def test_policy_losses(rng, ours, verl, mode, weighted):
    batch = Batch(rng)
    low, high = rng.uniform(0.05, 0.4, 2)
    weights = torch.from_numpy(rng.uniform(0, 2, batch.mask.shape)) if weighted else None
    settings = config(low, high, clip_ratio_c=1e9)
    expected, metrics = theirs.get_policy_loss_fn(verl)(
        batch.old, batch.new, batch.advantages, batch.mask, mode, settings, weights
    )
    terms, sums = losses.policy_terms(losses.POLICY_LOSSES[ours], batch.inputs(low, high))
    found = batch.mean(terms * (weights.flatten() if weighted else 1.0), MODES[mode])
    # `loss_weights` are fp32, as is 1 / the tokens of a sequence
    at = ROUNDING if mode == "token-mean" else 1e-6
    same(found, expected, at=at)
    same(*(torch.autograd.grad(x, batch.new)[0] for x in (found, expected)), at=at)
    if verl != "gpg":
        assert float(sums["loss/clip_fraction"] / batch.mask.sum()) == pytest.approx(metrics["actor/pg_clipfrac"])


def test_dual_clip(rng):
    batch = Batch(rng, spread=2.0)
    with torch.no_grad():
        ratio = torch.exp(batch.new - batch.old)
        beyond = (batch.advantages < 0) & (ratio > 3.0)
        terms, _ = losses.policy_terms(losses.POLICY_LOSSES["ppo"], batch.inputs(0.2, 0.2))
        terms = terms.view_as(batch.mask)
        expected = torch.where(beyond, -3.0 * batch.advantages, terms)
        found, metrics = theirs.compute_policy_loss_vanilla(
            batch.old, batch.new, batch.advantages, batch.mask, "token-mean", config(0.2, 0.2)
        )
        same(found, (expected * batch.mask).sum() / batch.mask.sum())
        share = float((beyond & batch.where).sum() / batch.mask.sum())
        assert metrics["actor/pg_clipfrac_lower"] == pytest.approx(share)


@pytest.mark.parametrize("mode", MODES)
def test_aggregation(rng, mode):
    batch = Batch(rng)
    empty = rng.integers(0, batch.rows)
    batch.mask[empty], batch.where[empty] = (
        0,
        False,
    )  # verl leaves out sequences without tokens, and so does who counts ours
    batch.rows -= 1
    found = batch.mean(batch.advantages.flatten(), MODES[mode])
    same(found, theirs.agg_loss(batch.advantages, batch.mask, mode), at=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_value_loss(rng, mode):
    batch, clip = Batch(rng), rng.uniform(0.1, 1.0)
    returns = torch.from_numpy(rng.standard_normal(batch.mask.shape))
    expected, share = theirs.compute_value_loss(batch.new, returns, batch.old, batch.mask, clip, mode)
    terms, clipped = losses.value_terms(batch.new, batch.old, returns, clip=clip)
    found = batch.mean(torch.where(batch.where, terms, 0.0).flatten(), MODES[mode])
    same(found, expected, at=1e-6)
    same(*(torch.autograd.grad(x, batch.new)[0] for x in (found, expected)), at=1e-6)
    assert float((clipped & batch.where).sum() / batch.mask.sum()) == pytest.approx(float(share))


# -- rollout correction


def weights_of(batch: Batch, **settings) -> correction.TokenWeights:
    log_ratios = (batch.new - batch.old).detach().flatten()
    return correction.token_weights(
        log_ratios, batch.where.flatten(), batch.segments, correction.Correction(**settings)
    )


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_importance_weights(rng, level, mode):
    batch = Batch(rng)
    low, high = rng.uniform(0.2, 0.9), rng.uniform(1.1, 3.0)
    ratio = math.exp(float((batch.new - batch.old).detach()[0][batch.where[0]].sum()))
    low, high = min(low, 0.9 * ratio), max(high, 1.1 * ratio)  # verl divides by zero where it masks all there is
    threshold = high if mode == "truncate" else f"{low!r}_{high!r}"
    found, mask, metrics = their_correction.compute_rollout_correction_and_rejection_mask(
        batch.new.detach(), batch.old, batch.mask, rollout_is=level, rollout_is_threshold=threshold
    )
    ours = weights_of(batch, mode=mode, level=level, low=low if mode == "mask" else None, high=high)
    same(ours.weights.view_as(mask), found.batch["rollout_is_weights"])
    assert torch.equal(mask, batch.mask)
    if mode == "mask":
        outside = float(ours.bounded.sum() / batch.mask.sum())
        assert metrics["rollout_corr/rollout_is_oob_ratio"] == pytest.approx(outside)


LEVELS = {"token": "token", "seq_sum": "sequence", "seq_mean": "geometric"}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("statistic", ["k1", "k2", "k3"])
def test_rejection(rng, level, statistic):
    batch = Batch(rng)
    log_ratios = (batch.new - batch.old).detach()
    values = {"k1": -log_ratios, "k2": log_ratios.square() / 2, "k3": log_ratios.expm1() - log_ratios}[statistic]
    sums, counts = (values * batch.mask).sum(1), batch.mask.sum(1)
    found = {"token": values[batch.where], "seq_sum": sums, "seq_mean": sums / counts}[level].sort().values
    # between two of the values, so that some are on either side and none is near
    below, bound = (float(found[i : i + 2].mean()) for i in (int(q * (len(found) - 1)) for q in (0.2, 0.7)))
    if statistic == "k1":
        below, bound = math.exp(below), math.exp(bound)
    mask, _ = their_correction.compute_rollout_rejection_mask(
        log_ratios,
        batch.mask,
        f"{level}_{statistic}",
        f"{below!r}_{bound!r}" if statistic == "k1" else bound,
    )
    if statistic == "k1":  # of -log r: bounds of 1 / r
        ours = weights_of(batch, mode="mask", level=LEVELS[level], low=1 / bound, high=1 / below)
    else:
        ours = weights_of(batch, reject=statistic, reject_level=LEVELS[level], reject_above=bound)
    assert torch.equal(ours.weights.view_as(mask) != 0, mask.bool())
    assert 0 < int(mask.sum()) < int(batch.mask.sum())


def test_a_ratio_of_zero(rng):
    batch = Batch(rng)
    row, column = batch.where.nonzero()[0].tolist()
    with torch.no_grad():
        batch.new[row, column] = -torch.inf
    weights, _ = their_correction.compute_rollout_correction_weights(
        (batch.new - batch.old).detach(), batch.mask, "token", 2.0
    )
    assert float(weights[row, column]) == pytest.approx(math.exp(-20))
    ours = weights_of(batch, mode="truncate", level="token", high=2.0).weights.view_as(weights)
    assert ours[row, column] == 0
    others = batch.where.clone()
    others[row, column] = False
    same(ours[others], weights[others])


def test_effective_sample_size(rng):
    batch = Batch(rng)
    log_ratios = (batch.new - batch.old).detach()
    highest = float(log_ratios[batch.where].max().exp())
    for bound, alike in ((2 * highest, True), (highest / 2, False)):
        _, metrics = their_correction.compute_rollout_correction_weights(log_ratios, batch.mask, "token", bound)
        ours = float(correction.effective_sample_size(log_ratios[batch.where]) / batch.mask.sum())
        assert (metrics["rollout_is_eff_sample_size"] == pytest.approx(ours, rel=1e-6)) == alike


def test_what_the_table_says_has_its_test():
    assert len(DIFFERENT) == 8, "a line more wants a test more, and one in docs/results.md"
