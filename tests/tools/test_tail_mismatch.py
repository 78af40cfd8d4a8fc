"""examples/tail_mismatch.py: its classes and its table, on log-probs made up here."""

from __future__ import annotations

import numpy as np
import pytest


@pytest.fixture
def rng():
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print(f"seed {seed}")
    return np.random.default_rng(seed)


def test_a_floor_shows_in_the_classes_that_lie_below_it(ablation, rng):
    """An engine that gives no token less than 1e-8: a bias below, none above; what was sampled is a class of its own."""
    exact = np.log(10 ** rng.uniform(-14, -1, (40, 101)))
    noise = rng.uniform(-0.01, 0.01, exact.shape)
    engine = np.maximum(exact + noise, np.log(1e-8))
    engine[:, -1] = exact[:, -1] + 0.25
    found = ablation.by_class(engine, exact)
    assert list(found) == ["p<1e-12", "p<1e-09", "p<1e-06", "p<0.001", "p<1", "sampled"]
    assert sum(one["tokens"] for name, one in found.items() if name != "sampled") == 4000
    below, above = found["p<1e-12"], found["p<0.001"]
    assert below["mean"] > np.log(1e-8 / 1e-12) - 0.01 and below["largest_ratio"] > 1e4 * 0.99
    assert abs(above["mean"]) <= 0.01 and above["abs_p99"] <= 0.01 and above["largest_ratio"] <= np.exp(0.0101)
    assert found["sampled"] == pytest.approx(
        {"mean": 0.25, "error": 0, "abs_median": 0.25, "abs_p99": 0.25, "largest_ratio": np.exp(0.25), "tokens": 40}
    )


def test_the_table_has_a_row_for_each_class(ablation, rng):
    one = ablation.statistics_of(rng.normal(0, 1, 1000))
    text = ablation.table({"a model": {"bf16": {"p<1": one, "sampled": one}, "fp8": {"sampled": one}}})
    rows = text.splitlines()
    assert len(rows) == 5 and all(row.count("|") == rows[0].count("|") for row in rows)
    assert rows[2].startswith("| a model | bf16 | p<1 | 1,000 | ")
