"""The routing ablation's plan, what it counts as done, and its table, from logs made up here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "routing_ablation.py"


def write_log(folder: Path, steps: int, scale: float) -> None:
    """Agreement falls by `scale` percent a step; eval at both ends."""
    folder.mkdir(parents=True)
    lines = [{"step": 0, "eval/score": 0.25, "eval/greedy": 0.5}]
    for step in range(1, steps + 1):
        lines.append(
            {
                "step": step,
                "eval/score": 0.75 if step == steps else None,
                "eval/greedy": 1.0,
                "routing/agreement": 1 - 0.01 * scale * step,
                "routing/update_4/agreement": 1 - 0.02 * scale * step,
                "routing/kl": 1e-6 * scale,
                "loss/clip_fraction": 0.125,
                "loss/ratio_tail": 0.0,
                "mismatch/kl": 2e-6,
                "mismatch/ratio_max": 1.5,
            }
        )
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_the_plan(ablation):
    default, full = (ablation.make_plan(full=full) for full in (False, True))
    methods = {"GRPO", "GSPO", "R2", "Pr2", "R3", "Pr3"}
    for off in (2, 4, 8):
        seeds = {m: [p.seed for p in default if (p.method, p.off) == (m, off)] for m in methods}
        assert set(map(tuple, seeds.values())) == {(0, 1, 2) if off == 4 else (0,)}
        assert {p.method for p in full if p.off == off} >= methods
    assert sum(p.method in methods for p in full) == 6 * 3 * 3
    assert len({p.name for p in full}) == len(full) and {p.name for p in default} < {p.name for p in full}


def test_results_are_of_the_runs_that_are_done(ablation, tmp_path, capsys):
    for method, scale in (("grpo", 2.0), ("r2", 1.0)):
        for seed in (0, 1):
            write_log(tmp_path / "runs" / f"{method}-off4-seed{seed}", 8, scale + seed)
    write_log(tmp_path / "runs" / "pr2-off4-seed0", 5, 1.0)  # stopped
    ablation.write_results(tmp_path / "runs", tmp_path / "out", 8, {"r2-off4-seed0": 2.0, "pr2-off4-seed0": 9.0})
    found = json.loads((tmp_path / "out" / "routing-ablation.json").read_text())
    assert sorted(found["runs"]) == ["grpo-off4-seed0", "grpo-off4-seed1", "r2-off4-seed0", "r2-off4-seed1"]
    assert found["minutes"] == 2.0
    figures = found["runs"]["r2-off4-seed0"]["figures"]
    assert figures["eval/score"] == 0.75 and figures["before"] == 0.25
    assert figures["routing/agreement"] == pytest.approx(1 - 0.01 * 5.5)  # steps 3 to 8
    assert figures["last/agreement"] == pytest.approx(1 - 0.02 * 5.5) and figures["routing/kl"] == pytest.approx(1.0)
    rows = (tmp_path / "out" / "routing-ablation.md").read_text().splitlines()
    [r2] = [row for row in rows if row.startswith("| 4 | R2 |")]
    assert r2.startswith("| 4 | R2 | 2 | 0.750 ± 0.000 | 1.000 ± 0.000 | 0.9175 ± 0.0389 |")
    [difference] = [row for row in rows if row.startswith("| 4 | R2 - GRPO |")]  # the seeds' own spread is gone
    assert difference.startswith("| 4 | R2 - GRPO | 2 | +0.000 ± 0.000 | +0.000 ± 0.000 | +0.0550 ± 0.0000 |")
    assert not [row for row in rows if "Pr2" in row]
    assert (tmp_path / "out" / "routing-off4-agreement.svg").exists()
    capsys.readouterr()


def test_a_run_that_does_not_exist_is_named():
    command = [sys.executable, str(SCRIPT), "--only", "r2-off4-seed0", "r2-off5-seed0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2 and "no run is called r2-off5-seed0; there are grpo-off4-seed0" in done.stderr
