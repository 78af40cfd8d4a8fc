"""When the engine is refreshed: the drift by enumeration, limits, hysteresis and age."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from megatron_rl.config import RefreshConfig
from megatron_rl.data.sequence import Sequence
from megatron_rl.rollout.refresh import Drift, RefreshSchedule, drift_of, drift_sample, drift_sums, measure

SMALL, LARGE = Drift(kl=1e-4, ess=0.999), Drift(kl=0.02, ess=0.99)


def schedule(**settings) -> RefreshSchedule:
    return RefreshSchedule(RefreshConfig(when="drift", kl=0.01, ess=0.9, hysteresis=0.5, max_staleness=4, **settings))


def test_drift_of_all_tokens_of_two_distributions():
    """Tokens as often as the engine draws them: the estimate is the divergence."""
    engine = torch.tensor([1, 2, 3, 4], dtype=torch.float64) / 10
    policy = torch.tensor([0.2, 0.1, 0.4, 0.3], dtype=torch.float64)
    ratios = (policy / engine).log().repeat_interleave((10 * engine).round().long())
    for alpha in (1.0, 0.5):
        found = drift_of(drift_sums(ratios[:3], alpha) + drift_sums(ratios[3:], alpha))  # sums add up over processes
        weights = (policy / engine) ** alpha
        assert found.kl == pytest.approx(float((engine * (engine / policy).log()).sum()))
        assert found.ess == pytest.approx(float((engine * weights).sum() ** 2 / (engine * weights**2).sum()))


def test_drift_of_nothing_and_of_the_impossible():
    assert drift_of(torch.zeros(5, dtype=torch.float64)) == Drift(0.0, 1.0)
    pruned = drift_of(drift_sums(torch.tensor([0.5, -torch.inf]), 1.0))
    assert pruned.kl == pytest.approx(math.expm1(0.5) - 0.5) and pruned.ess == pytest.approx(0.5)
    assert drift_of(drift_sums(torch.tensor([-torch.inf] * 3), 1.0)) == Drift(0.0, 0.0)
    far = drift_of(drift_sums(torch.tensor([0.0, -1e4, 1e4]), 1.0))
    assert math.isfinite(far.kl) and far.ess == pytest.approx(1 / 3)
    nothing = drift_of(drift_sums(torch.tensor([0.0, torch.nan]), 1.0))
    assert schedule().due(nothing, age=1, confined=False), "what is no number is not within its limits"


def of_lengths(*lengths: int) -> list[Sequence]:
    return [
        Sequence(tokens=np.full(length, i, np.int32), prompt_length=1, fields={}) for i, length in enumerate(lengths)
    ]


@pytest.mark.parametrize("length", [900, 1024, 9000])
def test_the_drift_of_long_responses_is_of_several(length):
    """However long they are, no one response speaks for all of a rank's."""
    config = RefreshConfig(when="drift")
    samples = of_lengths(*[length] * 40)
    places = [int(sample.tokens[0]) for sample in drift_sample(samples, config)]
    assert places == [0, 6, 11, 17, 22, 28, 33, 39], "evenly spaced, from the first to the last"
    assert drift_sample(samples[:3], config) == samples[:3], "there are no more"
    assert drift_sample([], config) == []


def test_the_drift_of_short_responses_is_of_a_number_of_tokens():
    rng = np.random.default_rng(seed := int(np.random.SeedSequence().entropy % 2**32))
    print(f"seed {seed}")
    samples = of_lengths(*rng.integers(2, 60, 200).tolist())
    config = RefreshConfig(when="drift", tokens=1024, sequences=8)
    total = sum(len(s.tokens) for s in samples)
    found = drift_sample(samples, config)
    assert len(found) == min(200, 200 * 1024 // total)
    assert drift_sample(samples, RefreshConfig(when="drift", tokens=total)) == samples


def test_always():
    every = RefreshSchedule(RefreshConfig())
    assert all(every.due(None, age=1, confined=False) for _ in range(3))
    assert measure(None, [], RefreshConfig()) is None, "nothing is scored where nothing asks for it"


def test_either_limit_refreshes():
    assert not schedule().due(SMALL, age=1, confined=False)
    assert schedule().due(LARGE, age=1, confined=False)
    assert schedule().due(Drift(kl=1e-4, ess=0.89), age=1, confined=False)


def test_once_begun_it_goes_on_until_the_drift_is_calm():
    one = schedule()
    between = Drift(kl=0.007, ess=0.999)
    assert not one.due(between, age=1, confined=False)
    assert one.due(LARGE, age=2, confined=False)
    assert one.due(between, age=1, confined=False), "the drift is below its limit, and not yet calm"
    assert one.due(Drift(kl=1e-4, ess=0.94), age=1, confined=False), "the sample size is not yet calm"
    assert not one.due(SMALL, age=1, confined=False)
    assert not one.due(between, age=1, confined=False), "hysteresis again: the limit itself counts"


def test_age_and_the_trust_region_refresh_without_drift():
    one = schedule()
    assert [one.due(SMALL, age=age, confined=False) for age in (1, 2, 3, 4)] == [False, False, False, True]
    assert one.due(SMALL, age=1, confined=True)
    assert not one.refreshing
