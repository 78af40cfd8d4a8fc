from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.metrics import mismatch


def log_probs(seed: int, scale: float, shape=(4, 50)):
    rng = np.random.default_rng(seed)
    rollout = -rng.exponential(size=shape)
    train = rollout + rng.standard_t(3, size=shape) * scale
    mask = rng.random(shape) < 0.7
    mask[0, 0] = True
    return train, rollout, mask


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), scale=st.sampled_from([1e-5, 1e-3, 0.05, 1.0]))
def test_metrics_are_those_of_all_tokens_together_however_they_are_split(seed, scale):
    train, rollout, mask = log_probs(seed, scale)
    parts = [mismatch.measure(*(torch.tensor(x[i]) for x in (train, rollout, mask))) for i in range(4)]
    nothing = mismatch.measure(torch.zeros(2), torch.zeros(2), torch.zeros(2))
    found = mismatch.metrics(mismatch.merge([parts[0], nothing, mismatch.merge(parts[1:])]))

    d = np.clip((train - rollout)[mask], -20, 20)
    w = np.exp(d)
    exact = {
        "kl": np.mean(np.expm1(d) - d),
        "k1": np.mean(-d),
        "ess": w.sum() ** 2 / (w**2).sum() / len(d),
        "ratio_max": w.max(),
        "ratio_min": w.min(),
        "abs_mean": np.abs(d).mean(),
        "not_finite": 0.0,
    }
    for name, value in exact.items():
        assert found[f"mismatch/{name}"] == pytest.approx(value, rel=1e-9, abs=1e-15), name
    # Quantiles come from the histogram: right to the width of a bin.
    quantiles = {
        "abs_median": np.quantile(np.abs(d), 0.5, method="inverted_cdf"),
        "abs_p99": np.quantile(np.abs(d), 0.99, method="inverted_cdf"),
    }
    for name, value in quantiles.items():
        assert found[f"mismatch/{name}"] == pytest.approx(value, rel=0.01, abs=1e-8), name
    for name, share in (("ratio_p01", 0.01), ("ratio_p99", 0.99)):
        value = np.quantile(d, share, method="inverted_cdf")
        assert math.log(found[f"mismatch/{name}"]) == pytest.approx(value, rel=0.01, abs=1e-8), name


def test_equal_log_probs_are_no_mismatch():
    x = torch.randn(100)
    found = mismatch.metrics(mismatch.measure(x, x, torch.ones(100)))
    assert found["mismatch/kl"] == found["mismatch/abs_median"] == found["mismatch/abs_p99"] == 0.0
    assert found["mismatch/ess"] == found["mismatch/ratio_max"] == found["mismatch/ratio_p01"] == 1.0


def test_tokens_without_a_finite_ratio_are_counted_apart():
    train = torch.tensor([-1.0, -torch.inf, torch.nan, -1.0])
    found = mismatch.metrics(mismatch.measure(train, torch.full((4,), -1.0), torch.ones(4)))
    assert found["mismatch/not_finite"] == 2.0
    assert found["mismatch/kl"] == 0.0
    empty = mismatch.metrics(mismatch.merge([]))
    assert math.isnan(empty["mismatch/kl"]) and empty.keys() == found.keys()
