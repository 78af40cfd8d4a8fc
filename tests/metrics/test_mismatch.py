from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.metrics import mismatch
from megatron_rl.report.page import write_report
from megatron_rl.report.run_folder import by_probability, probability_bound
from tests.report.page import Page


def log_probs(seed: int, scale: float, shape=(4, 50)):
    rng = np.random.default_rng(seed)
    rollout = -rng.exponential(size=shape)
    train = rollout + rng.standard_t(3, size=shape) * scale
    mask = rng.random(shape) < 0.7
    mask[0, 0] = True
    return train, rollout, mask


@settings(max_examples=40)
@given(seed=st.integers(0, 2**31), scale=st.sampled_from([1e-5, 1e-3, 0.05, 1.0]))
def test_metrics_are_those_of_all_tokens_together_however_they_are_split(seed, scale):
    train, rollout, mask = log_probs(seed, scale)
    parts = [mismatch.measure(*(torch.tensor(x[i]) for x in (train, rollout, mask))) for i in range(4)]
    nothing = mismatch.measure(torch.zeros(2), torch.zeros(2), torch.zeros(2))
    found = mismatch.figures(parts[0] + nothing + sum(parts[1:], mismatch.Mismatch()))

    d = np.clip((train - rollout)[mask], -20, 20)
    w = np.exp(d)
    exact = {
        "kl": np.mean(np.expm1(d) - d),
        "k1": np.mean(-d),
        "chi2": np.mean((w - 1) ** 2),
        "ppl_gap": np.exp(np.mean(-rollout[mask] - d)) - np.exp(np.mean(-rollout[mask])),
        "ess": w.sum() ** 2 / (w**2).sum() / len(d),
        "ratio_max": w.max(),
        "ratio_min": w.min(),
        "abs_mean": np.abs(d).mean(),
        "not_finite": 0.0,
    }
    for name, value in exact.items():
        assert found[f"{name}"] == pytest.approx(value, rel=1e-9, abs=1e-12), name
    # Quantiles come from the histogram: right to the width of a bin.
    quantiles = {
        "abs_median": np.quantile(np.abs(d), 0.5, method="inverted_cdf"),
        "abs_p99": np.quantile(np.abs(d), 0.99, method="inverted_cdf"),
    }
    for name, value in quantiles.items():
        assert found[f"{name}"] == pytest.approx(value, rel=0.01, abs=1e-8), name
    for name, share in (("ratio_p01", 0.01), ("ratio_p99", 0.99)):
        value = np.quantile(d, share, method="inverted_cdf")
        assert math.log(found[f"{name}"]) == pytest.approx(value, rel=0.01, abs=1e-8), name


@settings(max_examples=40)
@given(seed=st.integers(0, 2**31), scale=st.sampled_from([1e-3, 0.05, 1.0]), known=st.booleans())
def test_the_kl_with_pruned_tokens_and_without_unsafe_ones(seed, scale, known):
    """However the tokens are split: a ratio of 0 counts as e^-20, and what lies outside the safe set not at all."""
    train, rollout, mask = log_probs(seed, scale)
    rng = np.random.default_rng(seed + 1)
    train[rng.random(train.shape) < 0.1] = -np.inf
    train[rng.random(train.shape) < 0.05] = np.nan
    safe = rng.random(train.shape) < 0.8
    parts = [[torch.tensor(x[i]) for x in (train, rollout, mask, safe)] for i in range(4)]
    measured = [mismatch.measure(*part[:3], safe=part[3] if known else None) for part in parts]
    found = mismatch.kl_figures(sum(measured, mismatch.Mismatch()))
    d = np.clip(train - rollout, -20, 20)
    k3, there = np.expm1(d) - d, mask & ~np.isnan(train)
    assert ("kl_capped" in found) == there.any()
    if there.any():
        assert found["kl_capped"] == pytest.approx(k3[there].mean(), rel=1e-9, abs=1e-12)
    inside = there & safe & np.isfinite(train)
    assert ("kl_safe" in found) == (known and inside.any())
    if "kl_safe" in found:
        assert found["kl_safe"] == pytest.approx(k3[inside].mean(), rel=1e-9, abs=1e-12)


def test_equal_log_probs_are_no_mismatch():
    x = torch.randn(100)
    found = mismatch.figures(mismatch.measure(x, x, torch.ones(100)))
    assert found["kl"] == found["abs_median"] == found["abs_p99"] == 0.0
    assert found["ess"] == found["ratio_max"] == found["ratio_p01"] == 1.0


def test_tokens_without_a_finite_ratio_are_counted_apart():
    train = torch.tensor([-1.0, -torch.inf, torch.nan, -1.0])
    found = mismatch.figures(mismatch.measure(train, torch.full((4,), -1.0), torch.ones(4)))
    assert found["not_finite"] == 2.0
    assert found["kl"] == 0.0
    # Of ratios 1, 0 and 1: a token that the trainer has pruned weighs nothing, which is not the same as not being there.
    assert found["chi2"] == pytest.approx(1 / 3)
    assert found["ess"] == pytest.approx(2**2 / 2 / 3)
    empty = mismatch.figures(mismatch.Mismatch())
    assert math.isnan(empty["kl"]) and empty.keys() == found.keys()


@settings(max_examples=40)
@given(seed=st.integers(0, 2**31), scale=st.sampled_from([1e-3, 0.05, 1.0]))
def test_where_in_the_distribution_it_sits(seed, scale):
    """Classes of p, the fitted bound of proposition 4.2 and the tail's bias, in parts and from their definitions."""
    rng = np.random.default_rng(seed)
    rollout = np.log(np.concatenate([rng.random(150), 10 ** -rng.uniform(0, 8, 150), [1.0, 1.0 - 1e-9]]))
    train = rollout + rng.normal(size=302) * scale
    parts = [mismatch.measure(*(torch.tensor(x[i::2]) for x in (train, rollout, np.ones(302)))) for i in (0, 1)]
    found = mismatch.law_figures(sum(parts, mismatch.Mismatch()))
    d, p = train - rollout, np.exp(np.minimum(train, 0.0))
    above = 0.0
    for below in mismatch.BELOW:
        members = (p >= above) & (p < below) if below < 1 else p >= above
        above = below
        if not members.any():
            assert f"p<{below:g}/abs" not in found
            continue
        expected = {
            "tokens": members.sum(),
            "abs": np.abs(d[members]).mean(),
            "bias": -d[members].mean(),
            "abs_max": np.abs(d[members]).max(),
        }
        for name, value in expected.items():
            assert found[f"p<{below:g}/{name}"] == pytest.approx(value, rel=1e-9, abs=1e-13)
    rest = -np.expm1(np.minimum(rollout, np.minimum(train, 0.0)))
    needed = (np.abs(d) / (2 * np.maximum(rest, 1e-300)))[rest >= mismatch.CERTAIN]
    for name, share in (("epsilon_p99", 0.99), ("epsilon_p100", 1.0)):
        exact = np.quantile(needed, share, method="inverted_cdf")
        assert found[f"{name}"] == pytest.approx(min(exact, mismatch.LIMIT), rel=0.02, abs=1e-6)
    tail = -d[p < mismatch.TAIL]
    assert found["tail_bias"] == pytest.approx(tail.mean(), rel=1e-9, abs=1e-13)
    assert found["tail_bias_z"] == pytest.approx(tail.mean() / (tail.std() / (len(tail) - 1) ** 0.5), rel=1e-6)
    assert mismatch.law_figures(mismatch.Mismatch()) == {}


def test_the_effective_sample_size_of_sequences():
    ones = torch.ones(3)
    parts = [mismatch.measure(ones, ones, ones, sequences) for sequences in ([0.0, math.log(3.0)], [-math.inf])]
    found = mismatch.figures(sum(parts, mismatch.Mismatch()))
    assert found["sequence_ess"] == pytest.approx((1 + 3) ** 2 / (1 + 9) / 3)


def test_the_picture_by_probability(tmp_path):
    """Means over steps by their tokens, the largest of all; a mark that says which side says more."""

    def row(tokens, size, largest, bias, epsilon):
        values = {"tokens": tokens, "abs": size, "abs_max": largest, "bias": bias}
        return {f"mismatch/p<0.1/{name}": value for name, value in values.items()} | {
            "mismatch/epsilon_p99": epsilon,
            "step": 1,
        }

    nothing = {"step": 2, "mismatch/p<0.1/tokens": 0}
    lines = [row(10, 0.1, 0.5, 0.1, 0.2), nothing, row(30, 0.2, 0.4, 0.0, 0.4), row(20, 0.3, 0.1, 0.2, 0.3)]
    found = by_probability(lines)
    assert list(found) == [0.1]
    expected = {"tokens": 60, "abs": 13 / 60, "abs_max": 0.5, "bias": 5 / 60}
    assert found[0.1] == pytest.approx(expected)
    # The bound 2 e (1 - p) of the median e, at the class's geometric middle.
    assert probability_bound(lines, 0.1) == pytest.approx(2 * 0.3 * (1 - math.sqrt(0.1 * 0.01)))
    assert probability_bound([nothing], 0.1) is None
    for name, bias in (("above", 0.1), ("below", -0.1)):
        log = row(10, 0.1, 0.5, bias, 0.2)
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text(json.dumps(log) + "\n")
        marks = Page(write_report(tmp_path / name)).drawn("Mismatch by probability")
        (dot,) = (mark for mark in marks if mark["marktype"] == "symbol")
        assert (dot["fill"] != "transparent") == (bias > 0)
        heights = {
            mark["width"]: mark["y"] for mark in marks if mark["marktype"] == "rect" and mark.get("width", 0) < 30
        }
        assert heights[18] < heights[28]  # the largest is above the mean
        assert dot["y"] == pytest.approx(heights[28] + 1.5, abs=2)  # |bias| is the mean here
