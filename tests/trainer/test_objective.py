"""The policy's loss with rollout correction and pruning: its value and gradient against loops over tokens."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from megatron_rl.config import build_config
from megatron_rl.data.packing import Layout, Sample, pack
from megatron_rl.trainer.objective import Scale, importance_weights, is_pointwise, log_probs_before, policy_objective


def alone(tensor):
    return tensor


def draw(seed: int, sizes=((2, 5), (3, 7), (1, 4), (2, 6))):
    """A packed batch, the current policy's log-probs as a leaf, and the old policy's."""
    rng = np.random.default_rng(seed)
    samples = [
        Sample(
            rng.integers(1, 50, p + r).astype(np.int32),
            p,
            np.r_[rng.random(r - 1) < 0.8, True],
            rng.normal(-2, 0.5, r).astype(np.float32),
            float(rng.normal()),
        )
        for p, r in sizes
    ]
    batch = pack(samples, list(range(len(samples))), Layout())
    old = batch.rollout_log_probs + torch.tensor(rng.normal(0, 0.4, len(batch.mask)), dtype=torch.float32)
    current = (old + torch.tensor(rng.normal(0, 0.2, len(batch.mask)), dtype=torch.float32)).requires_grad_()
    return batch, current, old


def objective(config, batch, log_probs, old=None, weight=1.0):
    """(loss, gradient of the log-probs)"""
    batch.scored = {} if old is None else {"old": old}
    values = torch.stack([log_probs, torch.zeros_like(log_probs), torch.ones_like(log_probs)])
    scale = Scale(int(batch.mask.sum()), batch.num_sequences, weight)
    loss, _ = policy_objective(config, scale, batch, values, alone)
    (grad,) = torch.autograd.grad(loss, log_probs)
    return float(loss.detach()), grad


def config_of(correction=None, updates=1, **algorithm):
    return build_config(
        {"algorithm": algorithm, "correction": correction or {}, "batch": {"updates_per_step": updates}}
    )


@pytest.mark.parametrize("loss", ["ppo", "reinforce"])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_on_policy_the_gradient_is_minus_weight_times_advantage(loss, level):
    batch, current, _ = draw(int(np.random.SeedSequence().entropy % 2**32))
    correction = {"mode": "truncate", "level": level, "high": 1.3, "veto": 0.4}
    config = config_of(correction, loss=loss)
    assert is_pointwise(config) is False and log_probs_before(config) is None
    _, grad = objective(config, batch, current)
    d = (current.detach() - batch.rollout_log_probs).double()
    for t in range(len(d)):
        if not batch.mask[t]:
            assert grad[t] == 0
            continue
        own = batch.mask & (batch.sequence_ids == batch.sequence_ids[t])
        log_ratio = {"token": d[t], "sequence": d[own].sum(), "geometric": d[own].mean()}[level]
        weight = 0.0 if (d[own].exp() < 0.4).any() else min(math.exp(log_ratio), 1.3)
        assert float(grad[t]) == pytest.approx(-weight * float(batch.advantages[t]), rel=1e-5, abs=1e-7)


def test_decoupled_and_bypass_are_two_ratios_and_one():
    """Decoupled: old / engine as a weight, current / old in the clip. Bypass: current / engine in the clip."""
    batch, current, old = draw(int(np.random.SeedSequence().entropy % 2**32))
    wide = {"clip_low": 0.99, "clip_high": 1e6}  # nothing is clipped: both are the whole ratio then
    _, decoupled = objective(config_of({"mode": "clip", "high": 1e6}, 2, **wide), batch, current, old)
    _, bypass = objective(config_of({"bypass": True}, 2, **wide), batch, current)
    torch.testing.assert_close(decoupled, bypass, rtol=1e-4, atol=1e-6)
    ratio = torch.exp(current.detach() - batch.rollout_log_probs)
    expected = torch.where(batch.mask, -ratio * batch.advantages, 0.0)
    torch.testing.assert_close(bypass, expected, rtol=1e-4, atol=1e-6)
    # With a clip they differ: it acts on drift alone, or on mismatch and drift.
    _, decoupled = objective(config_of({"mode": "clip", "high": 1e6}, 2), batch, current, old)
    _, bypass = objective(config_of({"bypass": True}, 2), batch, current)
    assert (decoupled - bypass).abs().max() > 1e-3
    assert log_probs_before(config_of({"bypass": True}, 2)) is None and log_probs_before(config_of({}, 2)) == "old"


def test_normalised_weights_have_mean_one_over_the_update():
    batch, current, _ = draw(int(np.random.SeedSequence().entropy % 2**32))
    config = config_of({"mode": "truncate", "high": 1.2, "normalize": True}, loss="reinforce")
    assert log_probs_before(config) == "normalizer"
    old = current.detach().clone()
    weights = importance_weights(config, batch, old, alone).weights
    mean = float(weights.sum()) / int(batch.mask.sum())
    _, plain = objective(config, batch, current, old)
    _, grad = objective(config, batch, current, old, weight=mean)
    torch.testing.assert_close(grad, plain / mean)
    counted = batch.mask & (batch.advantages != 0)
    assert float((grad / -batch.advantages)[counted].mean()) == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize(
    ("loss", "bypass"), [("ppo", False), ("ppo", True), ("reinforce", False), ("gspo", False), ("gspo", True)]
)
@pytest.mark.parametrize("where", ["now", "then"])
def test_a_token_outside_the_safe_set_has_ratio_zero(loss, where, bypass):
    batch, current, old = draw(int(np.random.SeedSequence().entropy % 2**32))
    config = config_of({"bypass": bypass}, 2, loss=loss, kl={"coefficient": 0.1}, entropy_coefficient=0.01)
    reference = current.detach() - 0.1
    token = int(batch.mask.nonzero()[3])
    whole = batch.mask & (batch.sequence_ids == batch.sequence_ids[token])
    pruned = current.detach().clone()
    if where == "now":
        pruned[token] = -torch.inf
    else:
        old = old.clone()
        old[token] = -torch.inf
    pruned.requires_grad_()
    batch.scored = {"old": old, "reference": reference}
    values = torch.stack([pruned, torch.ones_like(pruned), torch.ones_like(pruned)])
    loss_sum, sums = policy_objective(config, Scale(int(batch.mask.sum()), 4), batch, values, alone)
    (grad,) = torch.autograd.grad(loss_sum, pruned)
    assert torch.isfinite(loss_sum) and torch.isfinite(grad).all()
    assert all(torch.isfinite(value) for value in sums.values())
    assert grad[token] == 0 and batch.corrected.weights[token] == 0
    gone = whole if loss == "gspo" else torch.arange(len(grad)) == token  # GSPO's ratio is the sequence's
    assert ((batch.corrected.weights == 0) == (gone | ~batch.mask)).all()


@pytest.mark.parametrize("mode", ["truncate", "mask", "clip"])
def test_a_ratio_of_zero_is_zero_in_every_mode(mode):
    batch, current, _ = draw(3)
    pruned = current.detach().clone()
    token = int(batch.mask.nonzero()[2])
    pruned[token] = -torch.inf
    whole = batch.mask & (batch.sequence_ids == batch.sequence_ids[token])
    for level in ("token", "sequence", "geometric"):
        correction = {"mode": mode, "level": level, "high": 1e9} | ({} if mode == "truncate" else {"low": 1e-9})
        objective(config_of(correction), batch, pruned.clone().requires_grad_())
        gone = torch.arange(len(pruned)) == token if level == "token" else whole
        assert ((batch.corrected.weights == 0) == (gone | ~batch.mask)).all()


def test_drift_out_of_the_safe_set_is_no_mismatch():
    """The veto compares old and engine; what the current policy has pruned since loses its term, not its response."""
    batch, current, old = draw(4)
    old = batch.rollout_log_probs.clone()
    token = int(batch.mask.nonzero()[1])
    pruned = current.detach().clone()
    pruned[token] = -torch.inf
    config = config_of({"veto": 1e-4}, 2)
    objective(config, batch, pruned.requires_grad_(), old)
    assert not batch.corrected.vetoed.any()
    assert ((batch.corrected.weights == 0) == (~batch.mask | (torch.arange(len(old)) == token))).all()


@pytest.mark.parametrize(
    "correction", [{"veto": 1e-4}, {"reject": "abs_log_ratio", "reject_above": 2.0, "reject_level": "token"}]
)
def test_what_is_dropped_has_no_kl_and_no_entropy_either(correction):
    """A token that the trainer finds impossible has a KL to the reference that would outweigh the whole update."""
    batch, current, _ = draw(int(np.random.SeedSequence().entropy % 2**32))
    token = int(batch.mask.nonzero()[2])
    with torch.no_grad():
        current[token] = batch.rollout_log_probs[token] - 14
    gone = torch.arange(len(current)) == token
    if "veto" in correction:
        gone = batch.mask & (batch.sequence_ids == batch.sequence_ids[token])
    batch.scored = {"reference": batch.rollout_log_probs.clone()}
    entropy = torch.ones_like(current, requires_grad=True)
    values = torch.stack([current, entropy, torch.ones_like(current)])
    config = config_of(correction, kl={"coefficient": 0.1, "estimator": "k3"}, entropy_coefficient=0.01)
    loss, sums = policy_objective(config, Scale(int(batch.mask.sum()), 4), batch, values, alone)
    of_log_probs, of_entropy = torch.autograd.grad(loss, (current, entropy))
    assert (of_log_probs[gone] == 0).all() and (of_entropy[gone] == 0).all()
    stays = batch.mask & ~gone
    assert (of_log_probs[stays] != 0).all() and (of_entropy[stays] < 0).all()
    assert float(sums["kl/reference"]) > 1e5, "the metric shows it"
