"""The VP2O ablation's plan and its table, from logs made up here."""

from __future__ import annotations

import json

import pytest

from megatron_rl.config import key_paths


def test_the_plan(ablation):
    plan = ablation.make_plan()
    assert len({p.name for p in plan}) == len(plan) == 3 * len(ablation.METHODS)
    assert [p.method for p in plan[: len(ablation.METHODS)]] == list(ablation.METHODS), "seeds are outermost"
    assert set(ablation.COMMON).union(*ablation.METHODS.values()) <= key_paths().keys()


def test_parts_are_alone_and_vp2o_is_all_of_them(ablation):
    assert ablation.METHODS["GRPO"] == {}
    off = {key: ablation.COMMON[key] for key in ("vp2o.neighbors", "vp2o.repulsion", "vp2o.orthogonality")}
    assert off == {"vp2o.neighbors": 1, "vp2o.repulsion": 0, "vp2o.orthogonality": 0}
    parts = [ablation.METHODS[name] for name in list(ablation.METHODS) if "VP2O" not in name]
    together = {}
    for part in parts:
        assert not together.keys() & part.keys()
        together |= part
    assert together == ablation.METHODS["VP2O"]


def test_results_are_of_the_runs_that_are_done(ablation, tmp_path, capsys):
    for method, scores in (("grpo", (0.5, 0.75)), ("vp2o", (0.25, 0.5))):
        for seed, score in enumerate(scores):
            folder = tmp_path / "runs" / f"{method}-seed{seed}"
            folder.mkdir(parents=True)
            evaluation = {"eval/greedy": 0.5, "eval/pass@8": 0.875, "eval/response_length": 6.0}
            lines = [{"step": 0, "eval/score": 0.125, "eval/distinct@8": 1.0} | evaluation]
            for step in range(1, 9):
                line = {"step": step, "entropy": step / 8, "sync/refreshed": float(step % 2 == 0), "sync/kl": 0.25}
                if step % 4 == 0:
                    line |= {"eval/score": score * step / 8, "eval/distinct@8": 2.0} | evaluation
                if method == "vp2o":
                    line |= {"update/backtracks": 1.0, "vp2o/repulsion": 0.5}
                lines.append(line)
            (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "runs" / "attraction-seed0").mkdir()
    (tmp_path / "runs" / "attraction-seed0" / "metrics.jsonl").write_text('{"step": 3, "eval/score": 0.5}\n')  # stopped
    ablation.write_results(tmp_path / "runs", tmp_path / "out", 8, {"vp2o-seed0": 2.0, "attraction-seed0": 9.0})
    found = json.loads((tmp_path / "out" / "vp2o-ablation.json").read_text())
    assert sorted(found["runs"]) == ["grpo-seed0", "grpo-seed1", "vp2o-seed0", "vp2o-seed1"] and found["minutes"] == 2.0
    figures = found["runs"]["vp2o-seed1"]["figures"]
    assert (figures["before"], figures["score"], figures["distinct"], figures["pass"]) == (0.125, 0.5, 2.0, 0.875)
    assert figures["different"] == pytest.approx(2.0 / (0.5 * 8))
    assert figures["entropy"] == pytest.approx((7 + 8) / 16), "of the last quarter"
    assert (figures["backtracks"], figures["undone"], figures["refreshes"]) == (8, 0, 4)
    assert figures["vp2o/repulsion"] == 0.5 and found["runs"]["grpo-seed0"]["figures"]["vp2o/repulsion"] is None
    rows = (tmp_path / "out" / "vp2o-ablation.md").read_text().splitlines()
    [grpo] = [row for row in rows if row.startswith("| GRPO |")]
    assert grpo.startswith("| GRPO | 2 | 0.125 ± 0.000 | 0.625 ± 0.177 |")
    assert not [row for row in rows if row.startswith("| attraction |")]
    picture = (tmp_path / "out" / "vp2o-ablation.svg").read_text()
    assert "VP2O" in picture and "Prototype overlap" in picture and "NaN" not in picture
    capsys.readouterr()
