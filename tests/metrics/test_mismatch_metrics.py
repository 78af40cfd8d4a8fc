"""The mismatch metrics of one step by hand: before and after correction, weights, and what pruning took away."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from megatron_rl.config.load import build_config
from megatron_rl.data.packing import Layout, pack
from megatron_rl.data.sequence import Sequence
from megatron_rl.metrics.reduce import figures
from megatron_rl.report.mismatch_metrics import mismatch_metrics
from megatron_rl.trainer.objective import HeadOutputs, Policy, Totals
from megatron_rl.trainer.trainer import Update

RATIOS = [[0.5, 4.0], [1.0, 1.0, 0.25]]
"""trainer / engine, token by token, of two responses."""
ROOTS = [2.0 ** (1 / 2), 0.25 ** (1 / 3)]


def measured(ratios=RATIOS, pruned=0.0, margin=0.0, **config) -> dict[str, float]:
    """Of one update in which everything is computed by the real objective, in one process."""
    config = build_config({"rollout": {"max_new_tokens": 10}, **config})
    samples = [Sequence.demonstration([1, 2], list(range(3, 3 + len(of_response)))) for of_response in ratios]
    for sample in samples:
        sample["rollout_log_probs"], sample["advantages"] = -3.0, 1.0
    batch = pack(samples, [0, 1], Layout())
    train, lost = batch["rollout_log_probs"].clone(), torch.zeros_like(batch["rollout_log_probs"])
    margins = torch.zeros_like(train)
    train[batch.mask] += torch.tensor([r for row in ratios for r in row]).log()
    lost[batch.mask] = torch.as_tensor(pruned, dtype=torch.float32)
    margins[batch.mask] = torch.as_tensor(margin, dtype=torch.float32)
    objective = Policy(config, Totals(int(batch.mask.sum()), 2))
    result = objective(batch, HeadOutputs(train, torch.zeros_like(train), lost, margins))
    updates = [Update(result.metrics, [result.tokens])]
    said = {"pruned": config.pruning.enabled, "max_new_tokens": config.rollout.max_new_tokens}
    return figures(mismatch_metrics(config.correction, [[batch]], updates, {"answer": 2.0, "length": -0.5}, **said))


def ess(weights) -> float:
    return sum(weights) ** 2 / sum(w * w for w in weights) / len(weights)


def k3(ratios) -> float:
    return float(np.mean([r - 1 - math.log(r) for r in ratios]))


def test_without_a_correction():
    found = measured()
    flat = [r for row in RATIOS for r in row]
    assert found["mismatch/kl"] == pytest.approx(k3(flat), rel=1e-5)
    assert found["mismatch/ess"] == pytest.approx(ess(flat), rel=1e-5)
    assert found["mismatch/sequence_ess"] == pytest.approx(ess([2.0, 0.25]), rel=1e-5)
    assert not any(name.startswith(("corrected/", "pruning/")) for name in found)


def test_arms_with_and_without_pruning_compare():
    """By the KL of the tokens that pruning leaves both, and by that with those of ratio 0."""
    margin = [-1.0, -13.5, 0.0, -0.1, -12.9]
    flat = [r for row in RATIOS for r in row]
    naive = measured(margin=margin)
    assert "mismatch/kl_safe" not in naive and naive["mismatch/kl_capped"] == pytest.approx(k3(flat), rel=1e-5)
    looked = measured(margin=margin, pruning={"measure": True})
    assert looked["mismatch/kl_safe"] == pytest.approx(k3([0.5, 1.0, 1.0, 0.25]), rel=1e-5)
    assert looked == naive | {"mismatch/kl_safe": looked["mismatch/kl_safe"]}
    wider = measured(margin=margin, pruning={"measure": True, "rho": math.exp(-14)})
    assert wider["mismatch/kl_safe"] == pytest.approx(k3(flat), rel=1e-5)
    pruned = measured([[0.5, 0.0], RATIOS[1]], pruning={"enabled": True})
    assert pruned["mismatch/kl_safe"] == pruned["mismatch/kl"] == pytest.approx(looked["mismatch/kl_safe"], rel=1e-6)
    assert pruned["mismatch/kl_capped"] == pytest.approx((4 * pruned["mismatch/kl"] + 19) / 5, rel=1e-6)


@pytest.mark.parametrize(
    ("correction", "weights", "sequences"),
    [
        ({"mode": "truncate", "high": 2.0}, [0.5, 2.0, 1.0, 1.0, 0.25], [1.0, 0.25]),
        ({"mode": "mask", "low": 0.4, "high": 2.0}, [0.5, 0.0, 1.0, 1.0, 0.0], [0.5, 1.0]),
        ({"mode": "clip", "low": 0.5, "high": 2.0}, [0.5, 2.0, 1.0, 1.0, 0.5], [1.0, 0.5]),
        # Of whole responses: 2 and 1 / 4, or their roots; every token has its response's.
        ({"mode": "truncate", "level": "sequence", "high": 1.5}, [1.5, 1.5, 0.25, 0.25, 0.25], [1.5, 0.25]),
        ({"mode": "mask", "level": "sequence", "high": 1.5}, [0.0, 0.0, 0.25, 0.25, 0.25], [0.25]),
        ({"mode": "mask", "level": "sequence", "low": 0.5}, [2.0, 2.0, 0.0, 0.0, 0.0], [2.0]),
        ({"mode": "mask", "level": "geometric", "low": 0.7}, [ROOTS[0]] * 2 + [0.0] * 3, ROOTS[:1]),
        ({"mode": "truncate", "level": "geometric", "high": 9.0}, [ROOTS[0]] * 2 + [ROOTS[1]] * 3, ROOTS),
    ],
)
def test_after_correction_ratios_are_weights(correction, weights, sequences):
    found = measured(correction=correction)
    used = [w for w in weights if w > 0]
    flat = [r for row in RATIOS for r in row]
    assert found["mismatch/kl"] == pytest.approx(k3(flat), rel=1e-5)
    assert found["corrected/kl"] == pytest.approx(k3(used), rel=1e-5, abs=1e-9)
    assert found["corrected/chi2"] == pytest.approx(np.mean([(w - 1) ** 2 for w in used]), rel=1e-4, abs=1e-9)
    assert found["corrected/ess"] == pytest.approx(ess(used), rel=1e-5)
    assert found["corrected/sequence_ess"] == pytest.approx(ess(sequences), rel=1e-5)
    assert found["corrected/ratio_max"] == pytest.approx(max(used), rel=1e-5)
    assert found["corrected/masked"] == pytest.approx(1 - len(used) / 5)
    assert found["corrected/weight_mean"] == pytest.approx(np.mean(weights), rel=1e-5)
    assert found["corrected/weight_max"] == pytest.approx(max(weights), rel=1e-5)
    assert found["corrected/weight_ess"] == pytest.approx(ess(weights), rel=1e-5)


def test_a_veto_alone_leaves_the_ratios_of_what_stays():
    found = measured(correction={"veto": 0.3})
    assert found["corrected/vetoed"] == found["corrected/masked"] == pytest.approx(3 / 5)
    assert found["corrected/kl"] == pytest.approx(k3(RATIOS[0]), rel=1e-5)
    assert found["corrected/sequence_ess"] == pytest.approx(1.0)
    assert found["corrected/weight_mean"] == pytest.approx(2 / 5)


def test_a_bias_bound_does_not_end_where_one_minus_its_mass_rounds_to_one():
    """Masses of 4e-8, below half an ulp of 1 in fp32, and of 1e-9: 16,384 tokens make a bound of them that is no 0."""
    rollout = {"max_new_tokens": 16384}
    found = measured(pruned=[4e-8, 1e-9, 0.0, 2e-9, 0.0], pruning={"enabled": True}, rollout=rollout)
    assert found["pruning/pruned_mass_max"] == pytest.approx(4e-8, rel=1e-6)
    assert found["pruning/pruned_mass"] == pytest.approx(4.3e-8 / 5, rel=1e-6)
    # Through 1 - mass in fp64, whose half ulp is 1.1e-16 of 8.6e-9.
    assert found["pruning/bias_bound"] == pytest.approx(2.5 * 16384 * 4e-8, rel=1e-6)
    assert found["pruning/bias_mean"] == pytest.approx(2.5 * 16384 * 4.3e-8 / 5, rel=1e-6)


def test_the_largest_gap_of_a_sequences_log_perplexity():
    """|mean of log r| of the worst response, whichever sign it has; a pruned token is left out, and NaN is of no sequence."""
    of_first, of_second = (sum(math.log(r) for r in row) / len(row) for row in RATIOS)
    found = measured()["mismatch/log_ppl_gap_max"]
    assert found == pytest.approx(max(abs(of_first), abs(of_second)), rel=1e-5)
    assert measured([[1 / r for r in row] for row in RATIOS])["mismatch/log_ppl_gap_max"] == pytest.approx(
        found, rel=1e-5
    )
    found = measured([[0.5, 0.0], [1.0, 1.1, 1.0]], pruning={"enabled": True})
    assert found["mismatch/log_ppl_gap_max"] == pytest.approx(math.log(2), rel=1e-5)


def test_what_pruning_takes_away():
    found = measured([[0.5, 0.0], [1.0, 1.0, 0.25]], [0.1, 0.0, 0.2, 0.0, 0.0], pruning={"enabled": True})
    assert found["pruning/out_of_set"] == found["mismatch/not_finite"] == 1.0
    assert found["mismatch/kl"] == pytest.approx(k3([0.5, 1.0, 1.0, 0.25]), rel=1e-5)
    assert found["mismatch/sequence_ess"] == pytest.approx(ess([0.0, 0.25]), rel=1e-5)
    assert found["pruning/coverage"] == pytest.approx(0.94) and found["pruning/coverage_min"] == pytest.approx(0.8)
    assert found["pruning/pruned_mass"] == pytest.approx(0.06) and found["pruning/pruned_mass_max"] == pytest.approx(
        0.2
    )
    # R_max T (1 - Z): weights 2 and -0.5, ten tokens.
    assert found["pruning/bias_bound"] == pytest.approx(2.5 * 10 * 0.2)
    assert found["pruning/bias_mean"] == pytest.approx(2.5 * 10 * 0.06)
    assert found["corrected/masked"] == pytest.approx(1 / 5)
