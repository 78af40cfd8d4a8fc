"""The scripts that are an `Ablation`: their plans, and tables and picture from logs made up here."""

from __future__ import annotations

import importlib
import json
import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_rl.checks.preflight import preflight
from megatron_rl.config.load import load_config
from megatron_rl.report.charts import SERIES
from tests.weights import classifier

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SCRIPTS = (
    "noise_floor",
    "routing_replay",
    "vp2o_stability",
    "vp2o_diversity",
    "smollm2_ablation",
    "all_cures",
    "zero_mismatch",
    "reward_hacking",
)


@pytest.fixture(params=SCRIPTS)
def of_script(request, monkeypatch):
    """The ablation of a script, imported as if it were started from its folder."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    before = set(sys.modules)
    found = importlib.import_module(request.param).ABLATION
    yield found
    for name in set(sys.modules) - before:
        if (EXAMPLES / f"{name}.py").exists():
            del sys.modules[name]


def test_every_run_has_a_config_of_its_own(of_script, tiny_model, tmp_path):
    """Names and settings are valid, arms differ from each other, seeds are outermost, and pairs are of arms that exist.

    "Valid" is what a run checks before it starts, with a model of another size.
    """
    runs = of_script.runs()
    assert [arm for arm, seed in runs.values() if seed == 0] == list(of_script.arms)
    assert list(runs.values()) == sorted(runs.values(), key=lambda run: run[1])
    flags = importlib.import_module("ablations").flags
    model = tiny_model("qwen3_moe", "--layers", "2", "--experts", "16", "--tokenizer", "numbers")
    reward_model = classifier(Path(model), tmp_path / "reward" / "hf", 0)
    configs = []
    for arm in of_script.arms.values():
        settings = {
            key: reward_model if value == "RUNS/reward/hf" else value for key, value in (of_script.common | arm).items()
        }
        config = load_config(EXAMPLES.parent / of_script.config, flags(settings | {"model.path": model}))
        preflight(config, "train")
        configs.append((config, settings.get("model.path")))
    assert all(a != b for i, a in enumerate(configs) for b in configs[:i])
    assert {name for pair in of_script.differences for name in pair} <= of_script.arms.keys()
    pictured = of_script.pictured or of_script.arms
    assert set(pictured) <= of_script.arms.keys()
    assert not of_script.panels or len(pictured) <= len(SERIES)
    assert (EXAMPLES / f"{of_script.name}.sh").read_text().endswith(f'examples/{of_script.name}.py "$@"\n')


def test_results_are_of_the_runs_that_are_done(of_script, tmp_path, capsys):
    """Means with their spread, differences seed by seed with their standard error; of a run that was stopped nothing."""
    names = list(of_script.arms)
    two = names[0], names[1]
    of_script = replace(
        of_script,
        seeds=3,
        differences=[two],
        of_one_seed=(),
        pictured=(),
        figures=lambda folder: figures_of(of_script, folder),
    )
    runs = {of: name for name, of in of_script.runs().items()}
    for (arm, seed), value in {(two[0], 0): 0.5, (two[0], 1): 0.75, (two[1], 0): 0.25, (two[1], 1): 0.25}.items():
        write_log(tmp_path / "runs" / runs[arm, seed], value, of_script)
    (stopped := tmp_path / "runs" / runs[names[2], 0]).mkdir()
    (stopped / "metrics.jsonl").write_text('{"step": 3, "eval/score": 0.5}\n')
    of_script.write_results(tmp_path / "runs", tmp_path / "out", 8, {runs[two[0], 0]: 2.0, stopped.name: 9.0})
    found = json.loads((tmp_path / "out" / f"{of_script.stem}.json").read_text())
    assert len(found["runs"]) == 4 and found["minutes"] == 2.0
    rows = (tmp_path / "out" / f"{of_script.stem}.md").read_text().splitlines()
    [first] = [row for row in rows if row.startswith(f"| {two[0]} | 2 |")]
    assert "0.62" in first and " ± 0.177" in first  # mean 0.625, standard deviation 0.177
    [difference] = [row for row in rows if row.startswith(f"| {two[0]} - {two[1]} | 2 |")]
    assert "+0.37" in difference and " ± 0.125" in difference  # of 0.25 and 0.5: 0.375, standard error 0.125
    assert not [row for row in rows if row.startswith(f"| {names[2]} |")]
    picture = (tmp_path / "out" / f"{of_script.stem}.svg").read_text()
    assert "NaN" not in picture and len(picture) > 5000
    capsys.readouterr()


def test_figures_come_out_of_a_log_and_are_none_where_it_has_none(of_script, tmp_path):
    """All columns, from a log with evaluations and with nothing else but what every run has."""
    lines = []
    for step in range(9):
        line = {"step": step, "reward/mean": step / 8, "entropy": 1.0, "update/grad_norm": 0.5, "mismatch/kl": 0.25}
        if step % 4 == 0:
            line |= {"eval/score": step / 8, "eval/greedy": 0.5}
            line |= {name: 0.5 for name in of_script.columns if name.startswith("eval/")}
            line |= {panel.metric: 0.5 for panel in of_script.panels if panel.metric.startswith("eval/")}
            line |= {name.removeprefix("at/"): 0.5 for name in of_script.columns if name.startswith("at/")}
        lines.append(line)
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = of_script.figures(tmp_path)
    assert found.keys() >= of_script.columns.keys()
    assert found.get("score", found.get("eval/score")) in (1.0, 0.5) and found["entropy"] == 1.0


def figures_of(ablation, folder):
    """One value in all columns."""
    score = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["value"]
    return dict.fromkeys(ablation.columns, score)


def write_log(folder, value, ablation):
    folder.mkdir(parents=True)
    panels = {panel.metric: value for panel in ablation.panels}
    lines = [{"step": step, "value": value, **panels} for step in range(9)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_arms_are_compared_where_a_score_is_passed_first(monkeypatch):
    """vp2o_diversity.py: read between the two evaluations around it; nothing of a run that does not come so far."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    at_score = importlib.import_module("vp2o_diversity").at_score
    score = random.uniform(0.01, 1)
    scores = (1.0, 1.0, 0.0, 1.0, 0.0, 1.0)
    evaluated = [{"step": 25 * i, "eval/score": x, "other": 3 - 2 * x} for i, x in enumerate(scores)]
    assert at_score(evaluated, "step", score) == pytest.approx(50 + 25 * score)
    assert at_score(evaluated, "other", score) == pytest.approx(3 - 2 * score)
    assert at_score(evaluated[:1], "step", score) is None and at_score(evaluated, "step", 1.1) is None
