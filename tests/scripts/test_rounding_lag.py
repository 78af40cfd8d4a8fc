"""examples/rounding_lag.py: what rounding to bf16 leaves of small changes, on weights made up here."""

from __future__ import annotations

import pytest
import torch

COUNT = 100_000


@pytest.fixture
def on_the_grid():
    """Weights in bf16's values between 1 and 2, where its step is 2^-7; and changes of a quarter step, either way."""
    seed = torch.seed()
    print(f"seed {seed}")
    weights = 1.25 + torch.rand(COUNT) / 2
    return weights.bfloat16().float(), torch.where(torch.rand(COUNT) < 0.5, 1, -1) * 2.0**-9


def test_a_change_below_half_a_step_is_not_seen(ablation, on_the_grid):
    before, change = on_the_grid
    found = ablation.lag(before, before + change, ablation.rounded(before + change, "nearest"))
    assert found["slope"] == pytest.approx(1) and found["cosine"] == pytest.approx(1)
    assert found["rms"] == pytest.approx(2.0**-9) == found["rms_of_the_way"]
    whole = before + 4 * change
    assert ablation.lag(before, whole, ablation.rounded(whole, "nearest"))["slope"] == 0


def test_stochastic_rounding_is_right_on_average(ablation, on_the_grid):
    """Its error is at most half a step of standard deviation, two changes: 6 of its standard errors are 0.04."""
    before, change = on_the_grid
    seen = ablation.rounded(before + change, "stochastic")
    assert torch.equal(seen, seen.bfloat16().float())
    assert float((seen - before - change).abs().max()) < 2.0**-7
    assert abs(ablation.lag(before, before + change, seen)["slope"]) < 0.04
    assert torch.equal(ablation.rounded(before, "stochastic"), before)
    assert torch.equal(ablation.rounded(-before, "stochastic"), -before)


def test_nothing_moved(ablation, on_the_grid):
    before, _ = on_the_grid
    assert ablation.lag(before, before, before) == dict.fromkeys(("slope", "cosine", "rms", "rms_of_the_way"), 0.0)


def test_lag_of_models(ablation, on_the_grid):
    """Of two modules one is on the grid and moves by a quarter step, the other does not move: all of the change is unseen."""
    before, change = on_the_grid
    old, new = (
        torch.nn.ParameterDict({"a": w.clone(), "b": torch.full((COUNT,), 0.1)}) for w in (before, before + change)
    )
    found = ablation.of_weights(old, new)
    assert found == pytest.approx({"slope": 1, "unseen": 1, "on_the_grid": 0.5})
