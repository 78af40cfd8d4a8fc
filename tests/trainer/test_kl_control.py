"""The KL's coefficient over the steps of a run: Ziegler's rule by hand, and what no step may move it by."""

from __future__ import annotations

import math
import random

import pytest

from megatron_rl.config import KLConfig
from megatron_rl.metrics.reduce import Metrics, figures, ratio
from megatron_rl.trainer.kl_control import KLControl
from megatron_rl.trainer.trainer import Update


def update(kl: float, tokens: int) -> Update:
    metrics: Metrics = {"kl/reference": ratio(kl * tokens, tokens)}
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
