"""examples/tail_mismatch.py: its classes and its table, on log-probs made up here."""

from __future__ import annotations

import numpy as np
import pytest


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
    assert below["bias"] > np.log(1e-8 / 1e-12) - 0.01 and below["abs_max"] >= below["abs"] >= below["bias"]
    assert abs(above["bias"]) <= 0.0101 and above["abs_p99"] <= above["abs_max"] <= 0.0101
    sizes = dict.fromkeys(("bias", "abs", "abs_median", "abs_p99", "abs_max"), 0.25)
    assert found["sampled"] == pytest.approx(sizes | {"tokens": 40})


def test_table_and_picture_have_each_class(ablation, rng, tmp_path):
    one = ablation.statistics_of(rng.normal(0, 1, 1000))
    found = {"a model": {"bf16": {"p<1e-06": one, "p<1": one, "sampled": one}, "fp8": {"p<1": one, "sampled": one}}}
    text = ablation.table(found)
    rows = text.splitlines()
    assert len(rows) == 7 and all(row.count("|") == rows[0].count("|") for row in rows)
    assert rows[2].startswith("| a model | bf16 | p<1e-06 | 1,000 | ")
    path = tmp_path / "a.svg"
    ablation.write_probability(ablation.panels(found), path, title="A title")
    picture = path.read_text()
    assert all(text in picture for text in ("a model, bf16", "a model, fp8", "&lt; 1e-06"))
