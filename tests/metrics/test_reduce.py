"""Typed metrics: whatever way values are split over micro-batches and ranks, the figure is that of all of them."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest
import torch

from megatron_rl.metrics import reduce


def busiest(load) -> float:
    return float(load.max() / load.mean())


def declared(values: np.ndarray, loads: np.ndarray) -> reduce.Metrics:
    """As code declares them: tensors and plain numbers mixed."""
    tensor = torch.from_numpy(values)
    return {
        "mean": reduce.mean(tensor.sum(), len(values)),
        "ratio": reduce.ratio(float(values.sum()), tensor.square().sum()),
        "total": reduce.total(len(values)),
        "max": reduce.maximum(tensor.max()),
        "min": reduce.minimum(float(values.min())),
        "busiest": reduce.derived(busiest, torch.from_numpy(loads)),
    }


def test_any_split_has_the_figures_of_the_whole():
    rng = np.random.default_rng()
    for _ in range(20):
        values, parts = rng.normal(size=rng.integers(2, 40)), int(rng.integers(1, 6))
        cuts = np.sort(rng.integers(1, len(values), parts - 1)) if parts > 1 else []
        pieces = [piece for piece in np.split(values, cuts) if len(piece)]
        loads = [rng.integers(0, 9, 4).astype(float) + 1 for _ in pieces]
        merged = reduce.merge(reduce.on_host([declared(v, w) for v, w in zip(pieces, loads, strict=True)]))
        merged = pickle.loads(pickle.dumps(merged))  # as between ranks
        found = reduce.figures(merged)
        assert found == pytest.approx(
            {
                "mean": values.mean(),
                "ratio": values.sum() / (values**2).sum(),
                "total": len(values),
                "max": values.max(),
                "min": values.min(),
                "busiest": busiest(sum(loads)),
            },
            rel=1e-9,
            abs=1e-12,
        )


def test_tensors_merge_on_the_device_as_on_the_host():
    values = np.random.default_rng().normal(size=12)
    pieces = [declared(values[:5], np.ones(4)), declared(values[5:], np.ones(4))]
    first = reduce.figures(*reduce.on_host([reduce.merge(pieces)]))
    second = reduce.figures(reduce.merge(reduce.on_host(pieces)))
    assert first == pytest.approx(second, rel=1e-12)


def test_a_name_has_one_reduction_and_may_be_missing_in_a_part():
    one, other = {"x": reduce.total(1.0)}, {"x": reduce.maximum(2.0)}
    with pytest.raises(ValueError, match="metric x: sum and max"):
        reduce.merge([one, other])
    assert reduce.figures(reduce.merge([one, {}, {"y": reduce.mean(3.0, 0)}])) == {"x": 1.0, "y": 0.0}
    assert math.isnan(reduce.figures({"z": reduce.ratio(1.0, 0)})["z"])
