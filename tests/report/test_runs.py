"""A run's log as data frames."""

from __future__ import annotations

import json
import math
import random
import sys

import pandas
import pytest

from megatron_rl import runs
from megatron_rl.errors import UserError


def write_lines(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def run(tmp_path):
    """A folder with its log, as {name: values of steps 0 to 4}."""
    values = {"reward/mean": [random.random() for _ in range(5)], "eval/score": [0.25, None, 0.5, None, 0.75]}
    values["routing/agreement"] = [None] * 5
    lines = [{"step": step} | {name: found[step] for name, found in values.items()} for step in range(5)]
    del lines[1]["eval/score"]
    write_lines(tmp_path / "metrics.jsonl", lines)
    return tmp_path, values


def test_metrics_have_a_row_for_each_step_and_a_column_for_each_metric(run):
    folder, values = run
    metrics, samples = runs.load(str(folder))
    assert [*metrics.index] == [*range(5)] and metrics.index.name == "step"
    assert [*metrics.columns] == [*values] and set(map(str, metrics.dtypes)) == {"float64"}
    for name, found in values.items():
        assert [None if math.isnan(value) else value for value in metrics[name]] == found
    assert metrics["eval/score"].dropna().index.tolist() == [0, 2, 4]
    assert isinstance(samples, pandas.DataFrame) and samples.empty


def test_samples_have_a_row_for_each_response(run):
    folder, _ = run
    lines = [
        {"step": 1, "prompt": "3 1 2", "response": "1 2 3", "reward": 1.0, "reward/correct": 1.0},
        {"step": 2, "prompt": "2 1", "response": "2 1", "reward": 0.0},
    ]
    write_lines(folder / "samples.jsonl", lines)
    samples = runs.load(folder).samples
    assert samples.groupby("step").reward.mean().to_dict() == {1: 1.0, 2: 0.0}
    assert samples["response"].tolist() == ["1 2 3", "2 1"] and math.isnan(samples["reward/correct"][1])


def test_a_run_that_is_still_being_written_is_read_up_to_its_last_whole_line(run):
    folder, _ = run
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "reward/me')
    assert runs.load(folder).metrics.index.tolist() == [*range(5)]


def test_a_run_that_has_not_logged_is_empty(tmp_path):
    (tmp_path / "config.yaml").write_text("name: new\n")
    metrics, samples = runs.load(tmp_path)
    assert metrics.empty and samples.empty and metrics.index.name == "step"


def test_a_folder_without_a_run_is_named(tmp_path):
    with pytest.raises(UserError, match=r"holds no run .*metrics\.jsonl"):
        runs.load(tmp_path)


def test_missing_pandas_is_named(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UserError, match="pip install pandas"):
        runs.load(run[0])
