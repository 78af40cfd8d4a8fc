"""The KL's coefficient over the steps of a run: Ziegler's rule by hand, and what no step may move it by."""

from __future__ import annotations

import math
import random

import pytest
import torch
from test_objective import draw

from megatron_rl.config import KLConfig
from megatron_rl.config.load import build_config
from megatron_rl.metrics.reduce import Metrics, figures, ratio
from megatron_rl.trainer.kl_control import KLControl
from megatron_rl.trainer.objective import HeadOutputs, Policy, Totals
from megatron_rl.trainer.trainer import Update


def update(kl: float, tokens: int) -> Update:
    metrics: Metrics = {"kl/sampled": ratio(kl * tokens, tokens), "kl/reference": ratio(tokens, tokens)}
    return Update(metrics, [])


def test_the_coefficient_follows_the_tokens_of_a_steps_updates():
    """Their mean KL, of all updates together, moves it once; a step in which no token counted does not."""
    control, value = KLControl(KLConfig(coefficient=0.5, target=0.04, horizon=200)), 0.5
    for _ in range(30):
        counts = [random.choice([0, 0, random.randint(1, 90)]) for _ in range(3)]
        kls = [random.uniform(0, 0.08) for _ in counts]
        found = figures(control.update([update(kl, n) for kl, n in zip(kls, counts, strict=True)], 50))
        assert found["kl/coefficient"] == pytest.approx(value, rel=1e-12)
        if tokens := sum(counts):
            mean = sum(kl * n for kl, n in zip(kls, counts, strict=True)) / tokens
            value *= 1 + min(max(mean / 0.04 - 1, -0.2), 0.2) * 50 / 200
        assert math.isclose(control.value, value, rel_tol=1e-12)


K3 = {"k1": lambda d: d, "k2": lambda d: d * d / 2, "k3": lambda d: math.exp(-d) - 1 + d}


def updates_of_a_step(policy: Policy, parts: list, rng: random.Random, epochs: int) -> list[Update]:
    """The objective's metrics of each update, the policy further away from the old one in each."""
    found = []
    for number in range(len(parts) * epochs):
        batch, _, old = parts[number % len(parts)]
        current = old + number * rng.uniform(0.05, 0.2) * torch.randn_like(old)
        objective = policy.for_update(Totals(int(batch.mask.sum()), batch.segments.count))
        zeros = torch.zeros_like(current)
        found.append(Update(objective(batch, HeadOutputs(current, zeros, zeros)).metrics, []))
    return found


@pytest.mark.parametrize("estimator", K3)
@pytest.mark.parametrize("bypass", [False, True], ids=["decoupled", "bypass"])
def test_a_trace_of_steps_with_several_updates_by_hand(estimator, bypass):
    """Two epochs of two parts: Ziegler's KL is of the policy that sampled, each token once, whatever updates made of it."""
    entropy = random.randrange(2**32)
    print("entropy", entropy)
    rng = random.Random(entropy)
    torch.manual_seed(entropy)
    kl = {"coefficient": 0.3, "target": 0.02, "horizon": 40, "estimator": estimator, "placement": "reward"}
    config = build_config(
        {
            "algorithm": {"kl": kl},
            "batch": {"updates_per_step": 2, "epochs": 2},
            "correction": {"bypass": bypass},
        }
    )
    control, value, moved = KLControl(config.algorithm.kl), 0.3, 0
    for _ in range(8):
        parts, total, tokens = [draw(rng.randrange(2**32)) for _ in range(2)], 0.0, 0
        gap = rng.uniform(-0.4, 0.4)
        for batch, _, old in parts:
            batch.fields["old_log_probs"] = old
            sampler = batch["rollout_log_probs"] if bypass else old
            reference = sampler - gap - 0.05 * torch.randn_like(old)
            batch.fields["reference_log_probs"] = reference
            for t in batch.mask.nonzero()[:, 0].tolist():
                total += K3[estimator](float(sampler[t]) - float(reference[t]))
                tokens += 1
        updates = updates_of_a_step(Policy(config), parts, rng, epochs=2)
        found = figures(control.update(updates[:2], 16))
        assert found["kl/coefficient"] == pytest.approx(value, rel=1e-12)
        value *= 1 + min(max(total / tokens / 0.02 - 1, -0.2), 0.2) * 16 / 40
        # fp32 of differences of log-probs near 2: 2.4e-7 each, a slope of at most 2.2 in d, over a target of 0.02.
        assert control.value == pytest.approx(value, rel=1e-4)
        value = control.value
        later = figures(updates[3].metrics)
        assert later["kl/sampled"] == pytest.approx(figures(updates[1].metrics)["kl/sampled"], rel=1e-6)
        moved += later["kl/reference"] != pytest.approx(later["kl/sampled"], rel=1e-2)
    assert moved, "the policy never moved: nothing was told apart"


@pytest.mark.parametrize("estimator", K3)
def test_on_policy_the_sampler_is_the_policy_itself(estimator):
    """One update: kl/sampled has the bits of kl/reference, and no pass of its own."""
    batch, current, _ = draw(random.randrange(2**32))
    config = build_config({"algorithm": {"kl": {"coefficient": 0.1, "estimator": estimator}}})
    batch.fields["reference_log_probs"] = current.detach() - 0.3 * torch.rand_like(current)
    objective = Policy(config, Totals(int(batch.mask.sum()), batch.segments.count))
    assert objective.needs == {"reference_log_probs"}
    metrics = figures(
        objective(batch, HeadOutputs(current, torch.zeros_like(current), torch.zeros_like(current))).metrics
    )
    assert metrics["kl/sampled"] == metrics["kl/reference"] != 0.0
