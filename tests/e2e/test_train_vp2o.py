"""VP2O on the real stack, with an engine that keeps its weights for up to three steps, and dies in between."""

from __future__ import annotations

import json

import pytest
import yaml

from megatron_rl.cli import main
from megatron_rl.data.trajectory import file_of, load_trajectories
from megatron_rl.metrics.logger import read_json_lines
from tests.e2e.test_train import TIMEOUT, scheduler_of
from tests.program import Program

STEPS, LAYERS, MAX_AGE, KILLED_AFTER = 6, 2, 3, 4


@pytest.fixture(scope="module")
def finished(tmp_path_factory, tiny_model):
    """The folder of a finished run whose server was killed with -9 when its weights were a step old, and its lines."""
    folder = tmp_path_factory.mktemp("vp2o")
    config = {
        "name": "drifting",
        "steps": STEPS,
        "runs_dir": str(folder),
        "model": {"path": str(tiny_model("qwen3_moe", "--layers", str(LAYERS), "--tokenizer", "numbers"))},
        "data": {"task": "number_zigzag"},
        "batch": {"prompts_per_step": 4, "samples_per_prompt": 8, "tokens_per_micro_batch": 256},
        # A random model earns nothing: without the entropy its weights would not move.
        "algorithm": {"entropy_coefficient": 0.01},
        "vp2o": {"enabled": True, "neighbors": 2, "repulsion_scale": "relative", "trust_region": 2.0},
        "sync": {"refresh": {"when": "drift", "kl": 10.0, "ess": 0.01, "max_staleness": MAX_AGE, "tokens": 400}},
        "correction": {"bypass": True},
        "optimizer": {"lr": 1e-3},
        "precision": {"train": "fp32", "rollout": "fp32"},
        "rollout": {"max_new_tokens": 16, "context_length": 64, "record": True},
        "eval": {"prompts": 0},
        "logging": {"trackers": []},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    log, run_dir = folder / "log.txt", folder / "drifting"

    def lines() -> list[dict]:
        return [line for line in read_json_lines(run_dir / "metrics.jsonl") if line["step"] > 0]

    with Program("train", str(path), log=log) as program:
        program.until(lines, TIMEOUT, "its first step")
        victim = scheduler_of(program)
        assert victim is not None
        program.until(lambda: lines()[-1]["step"] >= KILLED_AFTER, TIMEOUT, f"step {KILLED_AFTER}")
        victim.kill()
        program.finish(TIMEOUT)
    return run_dir, lines()


def test_the_engine_keeps_its_weights_and_a_new_server_gets_the_newest(finished):
    """What is in the log is what is in the trajectories."""
    run_dir, lines = finished
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    versions = [int(line["step"] - line["sync/staleness"]) for line in lines]
    assert versions[:4] == [0, 0, 0, 3] and lines[-1]["rollout/restarts"] >= 1
    before = {"sync/refreshed": 0, "rollout/restarts": 0}
    for line, version, kept in zip(lines, versions, [0, *versions], strict=False):
        step, found = line["step"] - 1, set()
        for t in load_trajectories(file_of(run_dir / "rollouts", step, 0)):
            found |= {int(span.version) for span in t.weight_spans}
        restarted = line["rollout/restarts"] > before["rollout/restarts"]
        # A server that came back in the middle of a step has the weights of that step; what was done is kept.
        assert version == (step if before["sync/refreshed"] or restarted else kept)
        assert version in found and found <= ({kept, version} if restarted else {version})
        assert line["sync/refreshed"] == (line["sync/staleness"] == MAX_AGE)
        before = line


def test_drift_is_of_the_policy_after_the_step(finished):
    """Rollouts of the newest weights agree with the policy that learns from them, which then leaves them."""
    _, lines = finished
    for line in lines:
        assert 1e-7 < line["sync/kl"] < 1 and 0 < line["sync/ess"] < 1 - 1e-7
        fresh = line["sync/staleness"] == 1 and not line["rollout/restarts"]
        if fresh:
            assert line["mismatch/kl"] < 1e-6 and line["mismatch/abs_median"] <= 1e-4
    assert lines[2]["sync/kl"] > lines[0]["sync/kl"]
    assert lines[1]["mismatch/kl"] > 1e-6 and lines[2]["mismatch/kl"] > 1e-6


def test_what_vp2o_measures_is_in_the_log_and_the_report(finished, capsys):
    run_dir, lines = finished
    for line in lines:
        assert line["update/skipped"] == line["update/rejected"] == line["update/backtracks"] == 0
        for name in ("attraction", "repulsion", "overlap", "shift", "inactive_kernel", "neighbor_kernel"):
            layers = [line[f"vp2o/layer_{layer:02}/{name}"] for layer in range(LAYERS)]
            assert line[f"vp2o/{name}"] == pytest.approx(sum(layers) / LAYERS)
        assert line["vp2o/attraction"] > 0 and line["vp2o/repulsion"] > 0
        assert line["routing/entropy"] > 0 and line["routing/load_max"] >= 1 and line["routing/orthogonality"] > 0
    # The region is around the engine's weights: two steps from them are further than one.
    shifts = [line["vp2o/shift"] for line in lines]
    assert shifts[1] > shifts[0] > 0 and shifts[2] > shifts[0] and shifts[2] > shifts[3]
    assert main(["report", str(run_dir)]) == 0
    capsys.readouterr()
    page = (run_dir / "report.html").read_text()
    for title in ("Experts", "routing/entropy", "vp2o/overlap", "vp2o/shift", "Drift of the policy"):
        assert title in page


def test_old_rollouts_are_attributed_with_the_weights_that_sampled_them(finished, capsys):
    """The third step is the newest whose rollouts are of weights that are still there: the model's own."""
    run_dir, _ = finished
    assert main(["report", str(run_dir), "--attribute"]) == 0
    assert "Sources of the mismatch at step 2" in capsys.readouterr().out
    found = json.loads((run_dir / "attribution.json").read_text())
    assert found["kl"] < 1e-6
