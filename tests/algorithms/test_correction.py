from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.algorithms.correction import effective_sample_size, rollout_correction


def from_ratios(ratios, rollout=-1.0):
    ratios = torch.tensor(ratios, dtype=torch.float64)
    rollout_log_probs = torch.full_like(ratios, rollout)
    return rollout_log_probs + ratios.log(), rollout_log_probs


MASK = torch.tensor([[1, 1, 0], [1, 1, 1]], dtype=torch.bool)
TRAIN, ROLLOUT = from_ratios([[2.0, 0.5, 100.0], [4.0, 1.0, 2.0]])


def weights(level, mode, **bounds):
    return rollout_correction(TRAIN, ROLLOUT, MASK, level=level, mode=mode, **bounds).weights


def close(actual, expected):
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64))


def test_token_level_by_hand():
    close(weights("token", "truncate", high=3.0), [[2.0, 0.5, 0.0], [3.0, 1.0, 2.0]])
    close(weights("token", "mask", low=0.8, high=3.0), [[2.0, 0.0, 0.0], [0.0, 1.0, 2.0]])
    close(weights("token", "clip", low=0.8, high=3.0), [[2.0, 0.8, 0.0], [3.0, 1.0, 2.0]])


def test_sequence_level_is_the_product_of_the_ratios():
    close(weights("sequence", "truncate", high=3.0), [[1.0, 1.0, 0.0], [3.0, 3.0, 3.0]])
    close(weights("sequence", "mask", low=0.5, high=3.0), [[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    close(weights("sequence", "clip", low=2.5, high=100.0), [[2.5, 2.5, 0.0], [8.0, 8.0, 8.0]])


def test_geometric_level_is_their_geometric_mean():
    close(weights("geometric", "truncate", high=3.0), [[1.0, 1.0, 0.0], [2.0, 2.0, 2.0]])
    close(weights("geometric", "mask", low=1.5, high=3.0), [[0.0, 0.0, 0.0], [2.0, 2.0, 2.0]])


def test_bounds_are_inclusive_and_may_be_one_sided():
    close(weights("token", "mask", high=2.0), [[2.0, 0.5, 0.0], [0.0, 1.0, 2.0]])
    close(weights("token", "mask", low=2.0), [[2.0, 0.0, 0.0], [4.0, 0.0, 2.0]])


def test_veto_drops_the_row_by_one_masked_in_token():
    train, rollout = from_ratios([[1.0, 5e-5, 1.0], [1.0, 2e-4, 1.0], [1.0, 1.0, 1e-9]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 1], [1, 1, 0]], dtype=torch.bool)
    result = rollout_correction(train, rollout, mask, level="token", mode="truncate", high=2.0, veto=1e-4)
    assert result.keep.tolist() == [False, True, True]
    close(result.weights, [[0.0, 0.0, 0.0], [1.0, 2e-4, 1.0], [1.0, 1.0, 0.0]])
    assert float(result.metrics["correction/veto_fraction"]) == pytest.approx(1 / 3)
    without = rollout_correction(train, rollout, mask, level="token", mode="truncate", high=2.0)
    assert without.keep.all()


def test_a_pruned_token_has_ratio_zero_and_falls_to_the_veto():
    train, rollout = from_ratios([[1.0, 1.0]])
    train[0, 1] = -torch.inf
    mask = torch.ones(1, 2, dtype=torch.bool)
    close(rollout_correction(train, rollout, mask, level="token", mode="truncate", high=2.0).weights, [[1.0, 0.0]])
    close(rollout_correction(train, rollout, mask, level="sequence", mode="truncate", high=2.0).weights, [[0.0, 0.0]])
    vetoed = rollout_correction(train, rollout, mask, level="token", mode="truncate", high=2.0, veto=1e-4)
    assert not vetoed.keep[0]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    level=st.sampled_from(["token", "sequence", "geometric"]),
    mode=st.sampled_from(["truncate", "mask", "clip"]),
    veto=st.sampled_from([None, 0.3]),
)
def test_against_loops_in_numpy(seed, level, mode, veto):
    rng = np.random.default_rng(seed)
    rollout = -rng.random((5, 6)) * 3
    train = rollout + rng.normal(size=(5, 6)) * 0.7
    mask = rng.random((5, 6)) < 0.6
    low, high = 0.6, 1.9
    result = rollout_correction(
        *(torch.tensor(np.where(mask, x, np.nan)) for x in (train, rollout)),
        torch.tensor(mask),
        level=level,
        mode=mode,
        low=low,
        high=high,
        veto=veto,
    )
    for i in range(5):
        d = (train - rollout)[i][mask[i]]
        kept = veto is None or not (np.exp(d) < veto).any()
        assert bool(result.keep[i]) == kept
        for j in range(6):
            expected = 0.0
            if mask[i, j] and kept:
                r = {"token": train[i, j] - rollout[i, j], "sequence": d.sum(), "geometric": d.mean()}[level]
                r = math.exp(r)
                choices = {
                    "truncate": min(r, high),
                    "mask": r if low <= r <= high else 0.0,
                    "clip": min(max(r, low), high),
                }
                expected = choices[mode]
            assert float(result.weights[i, j]) == pytest.approx(expected, rel=1e-9)


def test_weights_carry_no_gradient_and_empty_masks_are_zeros():
    train = TRAIN.clone().requires_grad_()
    result = rollout_correction(
        train, ROLLOUT, torch.zeros_like(MASK), level="geometric", mode="truncate", high=2.0, veto=0.1
    )
    assert not result.weights.requires_grad
    assert not result.weights.any() and result.keep.all()
    assert all(torch.isfinite(value) for value in result.metrics.values())


def test_metrics():
    result = rollout_correction(TRAIN, ROLLOUT, MASK, level="token", mode="truncate", high=3.0)
    metrics = {name: float(value) for name, value in result.metrics.items()}
    assert metrics["correction/bounded_fraction"] == pytest.approx(1 / 5)
    assert metrics["correction/weight_mean"] == pytest.approx((2 + 0.5 + 3 + 1 + 2) / 5)
    assert metrics["correction/ratio_max"] == pytest.approx(4.0)
    assert metrics["correction/ratio_min"] == pytest.approx(0.5)
    r = np.array([2, 0.5, 4, 1, 2])
    assert metrics["correction/ess"] == pytest.approx(r.sum() ** 2 / (r**2).sum() / 5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"level": "token", "mode": "truncate"}, "needs high"),
        ({"level": "token", "mode": "mask"}, "needs low, high or both"),
        ({"level": "word", "mode": "truncate", "high": 2.0}, "level 'word'"),
        ({"level": "token", "mode": "drop", "high": 2.0}, "mode 'drop'"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        rollout_correction(TRAIN, ROLLOUT, MASK, **options)


def test_log_probs_that_are_no_numbers_are_named():
    rollout = ROLLOUT.clone()
    rollout[1, 2] = -torch.inf
    with pytest.raises(ValueError, match="row 1, token 2"):
        rollout_correction(TRAIN, rollout, MASK, level="token", mode="truncate", high=2.0)
    rollout[1, 2] = 0.0
    rollout[0, 2] = torch.nan  # masked out: counts for nothing
    rollout_correction(TRAIN, rollout, MASK, level="token", mode="truncate", high=2.0)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), alpha=st.sampled_from([0.0, 0.5, 1.0, 2.0]))
def test_effective_sample_size_is_its_definition(seed, alpha):
    d = np.random.default_rng(seed).normal(size=17)
    w = np.exp(d) ** alpha
    assert float(effective_sample_size(torch.tensor(d), alpha=alpha)) == pytest.approx(w.sum() ** 2 / (w**2).sum())


def test_effective_sample_size_at_the_edges():
    assert float(effective_sample_size(torch.zeros(6))) == pytest.approx(6.0)
    assert float(effective_sample_size(torch.tensor([900.0, 0.0, 0.0]))) == pytest.approx(1.0)
    assert float(effective_sample_size(torch.tensor([900.0, 900.0, -torch.inf]))) == pytest.approx(2.0)
    assert float(effective_sample_size(torch.tensor([]))) == 0.0
    assert float(effective_sample_size(torch.tensor([-torch.inf]))) == 0.0
    assert float(effective_sample_size(torch.zeros(4, 5), alpha=0.3)) == pytest.approx(20.0)
