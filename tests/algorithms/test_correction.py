from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.algorithms.correction import (
    Correction,
    effective_sample_size,
    rollout_correction,
    token_weights,
)
from megatron_rl.algorithms.segments import Segments


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
    # Products 1 and 8; geometric means 1 and 2.
    close(weights("sequence", "mask", high=1.0), [[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    close(weights("sequence", "mask", low=8.0 - 1e-9), [[0.0, 0.0, 0.0], [8.0, 8.0, 8.0]])
    close(weights("geometric", "mask", high=1.5), [[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    close(weights("geometric", "mask", low=1.5), [[0.0, 0.0, 0.0], [2.0, 2.0, 2.0]])


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


@settings(max_examples=60)
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


@settings(max_examples=40)
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


# -- packed tokens -------------------------------------------------------------------------------------------------------

LOG_RATIOS = torch.tensor([2.0, 0.5, 9.0, 4.0, 1.0, 2.0, 7.0], dtype=torch.float64).log()
INSIDE = torch.tensor([1, 1, 0, 1, 1, 1, 0], dtype=torch.bool)
SEGMENTS = Segments.of(torch.tensor([0, 0, 0, 1, 1, 1, -1]))
"""The two rows from above, packed, with padding."""


def packed(**options):
    return token_weights(LOG_RATIOS, INSIDE, SEGMENTS, Correction(**options))


def test_no_mode_is_weight_one_and_zero_for_what_was_pruned():
    close(packed().weights, [1, 1, 0, 1, 1, 1, 0])
    pruned = LOG_RATIOS.clone()
    pruned[4] = -torch.inf
    close(token_weights(pruned, INSIDE, SEGMENTS, Correction()).weights, [1, 1, 0, 1, 0, 1, 0])
    whole = token_weights(pruned, INSIDE, SEGMENTS, Correction(level="sequence"))
    close(whole.weights, [1, 1, 0, 0, 0, 0, 0])
    # Clamping to a lower bound does not bring a pruned token back.
    clipped = token_weights(pruned, INSIDE, SEGMENTS, Correction(mode="clip", low=0.8, high=3.0))
    close(clipped.weights, [2, 0.8, 0, 3, 0, 2, 0])
    vetoed = token_weights(pruned, INSIDE, SEGMENTS, Correction(veto=1e-4))
    close(vetoed.weights, [1, 1, 0, 0, 0, 0, 0])
    assert vetoed.vetoed.tolist() == [False, False, False, True, True, True, False]


def test_without_a_mode_nothing_is_bounded_and_nothing_underflows():
    far = LOG_RATIOS - 500.0  # their sum is beyond exp in fp64, and no token is outside of a set
    found = token_weights(far, INSIDE, SEGMENTS, Correction(level="sequence"))
    close(found.weights, [1, 1, 0, 1, 1, 1, 0])
    assert not found.bounded.any() and not packed().bounded.any()
    assert packed(mode="truncate", high=1.5).bounded.tolist() == [True, False, False, True, False, True, False]


def test_rejection_by_hand():
    ln2 = math.log(2.0)
    # k1 of the tokens: ln2, ln2; 2 ln2, 0, ln2. k2: ln2^2 / 2 twice; 2 ln2^2, 0, ln2^2 / 2.
    close(packed(reject="abs_log_ratio", reject_level="token", reject_above=1.01 * ln2).weights, [1, 1, 0, 0, 1, 1, 0])
    close(
        packed(reject="abs_log_ratio", reject_level="sequence", reject_above=2.01 * ln2).weights, [1, 1, 0, 0, 0, 0, 0]
    )
    close(
        packed(reject="abs_log_ratio", reject_level="geometric", reject_above=1.01 * ln2).weights, [1, 1, 0, 1, 1, 1, 0]
    )
    close(packed(reject="k2", reject_level="geometric", reject_above=0.6 * ln2**2).weights, [1, 1, 0, 0, 0, 0, 0])
    # k3: 2 - 1 - ln2 = 0.307, 0.5 - 1 + ln2 = 0.193; 4 - 1 - 2 ln2 = 1.614, 0, 0.307.
    close(packed(reject="k3", reject_level="token", reject_above=0.25).weights, [0, 1, 0, 0, 1, 0, 0])
    found = packed(reject="k3", reject_level="sequence", reject_above=0.51)
    close(found.weights, [1, 1, 0, 0, 0, 0, 0])
    assert found.rejected.tolist() == [False, False, False, True, True, True, False]
    # Together with a mode: what stays has the mode's weight.
    both = packed(reject="k3", reject_level="token", reject_above=0.4, mode="truncate", high=1.5)
    close(both.weights, [1.5, 0.5, 0, 0, 1, 1.5, 0])


def test_a_pruned_token_is_rejected_by_every_statistic():
    pruned = LOG_RATIOS.clone()
    pruned[0] = -torch.inf
    for statistic in ("abs_log_ratio", "k2", "k3"):
        correction = Correction(reject=statistic, reject_level="sequence", reject_above=5.0)
        found = token_weights(pruned, INSIDE, SEGMENTS, correction)
        close(found.weights, [0, 0, 0, 1, 1, 1, 0])


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**31),
    level=st.sampled_from(["token", "sequence", "geometric"]),
    reject_level=st.sampled_from(["token", "sequence", "geometric"]),
    reject=st.sampled_from(["none", "abs_log_ratio", "k2", "k3"]),
    veto=st.sampled_from([None, 0.2]),
)
def test_sequences_that_are_cut_over_ranks(seed, level, reject_level, reject, veto):
    """Two halves of every sequence with the sums over both give what the whole gives."""
    draw = torch.Generator().manual_seed(seed)
    segments = Segments.of(torch.tensor([0] * 6 + [1] * 8 + [2] * 4 + [-1] * 2))
    log_ratios = 0.7 * torch.randn(20, generator=draw, dtype=torch.float64)
    mask = (torch.rand(20, generator=draw) < 0.7) & (segments.ids >= 0)
    options = {"level": level, "mode": "mask", "low": 0.6, "high": 2.5, "veto": veto}
    correction = Correction(**options, reject=reject, reject_level=reject_level, reject_above=0.4)
    whole = token_weights(log_ratios, mask, segments, correction).weights
    halves = [torch.arange(0, 20, 2), torch.arange(1, 20, 2)]
    partial: list[torch.Tensor] = []

    def keep(sums):
        partial.append(sums.clone())
        return sums

    def one_half(rows, all_reduce):
        half = replace(segments.take(rows), all_reduce=all_reduce)
        return token_weights(log_ratios[rows], mask[rows], half, correction).weights

    for rows in halves:
        one_half(rows, keep)
    for rows in halves:
        found = one_half(rows, lambda sums: partial[0] + partial[1])
        torch.testing.assert_close(found, whole[rows])
    assert bool(partial) != correction.per_token


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "mask", "low": 2.0, "high": 0.5}, "low = 2 is above high = 0.5"),
        ({"reject": "k4"}, "reject 'k4': choose none, abs_log_ratio, k2 or k3"),
        ({"reject": "k3"}, "needs reject_above"),
        ({"reject_level": "word"}, "reject_level 'word'"),
    ],
)
def test_bad_corrections(options, message):
    with pytest.raises(ValueError, match=message):
        Correction(**options)
