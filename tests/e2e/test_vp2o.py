"""VP2O on the real stack, with an engine that is refreshed when the policy has left it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import yaml

from megatron_rl.cli import main
from megatron_rl.metrics.logger import read_json_lines
from megatron_rl.rollout.record import file_of, load_trajectories

STEPS, LAYERS = 5, 2
LIMIT = 1e-5
"""Of the drift: far above what two engines of the same weights disagree by, far below what a step moves."""


@pytest.fixture(scope="module")
def finished(tmp_path_factory, tiny_model):
    """The folder of a finished run, and the lines of its steps."""
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
        "sync": {"refresh": {"when": "drift", "kl": LIMIT, "ess": 0.01, "max_age": 4}},
        "correction": {"bypass": True},
        "optimizer": {"lr": 1e-3},
        "precision": {"train": "fp32", "rollout": "fp32"},
        "rollout": {"max_new_tokens": 16, "context_length": 64, "record": True},
        "eval": {"prompts": 0},
        "logging": {"tensorboard": False},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "megatron_rl.cli", "train", str(path)]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=env, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    run = folder / "drifting"
    return run, [line for line in read_json_lines(run / "metrics.jsonl") if line["step"] > 0]


def test_the_engine_is_refreshed_when_the_policy_has_left_it(finished):
    """A step's rollouts show no drift where they are of the newest weights, and one step later they do."""
    run, lines = finished
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    for line in lines:
        stale = line["step"] % 2 == 0
        assert line["sync/age"] == 1 + stale and line["sync/refreshed"] == stale
        assert (line["sync/kl"] > LIMIT) == stale and (line["sync/ess"] < 1 - 1e-5) == stale
        if not stale:
            assert line["sync/kl"] < 1e-6 and line["mismatch/abs_median"] <= 1e-4
        version = str(line["step"] - line["sync/age"])
        trajectories = load_trajectories(file_of(run / "rollouts", line["step"] - 1, 0))
        assert {span.version for t in trajectories for span in t.weight_spans} == {version}
        assert len(trajectories) == 32


def test_what_vp2o_measures_is_in_the_log_and_the_report(finished, capsys):
    run, lines = finished
    for line in lines:
        assert line["update/skipped"] == line["update/undone"] == line["update/halvings"] == 0
        for name in ("attraction", "repulsion", "overlap", "shift", "stranger_kernel", "neighbor_kernel"):
            layers = [line[f"vp2o/layer_{layer:02}/{name}"] for layer in range(LAYERS)]
            assert line[f"vp2o/{name}"] == pytest.approx(sum(layers) / LAYERS)
        assert line["vp2o/attraction"] > 0 and line["vp2o/repulsion"] > 0
        assert line["routing/entropy"] > 0 and line["routing/load_max"] >= 1 and line["routing/orthogonality"] > 0
    # The region is around the engine's weights: two steps from them are further than one.
    shifts = [line["vp2o/shift"] for line in lines]
    assert shifts[1] > shifts[0] > 0 and shifts[1] > shifts[2] and shifts[3] > shifts[4]
    assert main(["report", str(run)]) == 0
    capsys.readouterr()
    page = (run / "report.html").read_text()
    for title in ("Experts", "Router entropy", "Overlap of prototypes", "Barycentre shift"):
        assert title in page
