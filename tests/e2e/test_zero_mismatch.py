"""Training with precision.identical: no mismatch in any step, and with servers ahead of the trainer what updates make alone."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.program import forked

STEPS = 3


def train(folder: Path, model: Path, **sections: dict) -> list[dict]:
    """The steps' metrics of a run whose weights move whatever the rewards, by its entropy."""
    tree: dict = {
        "name": "zero",
        "seed": int(np.random.default_rng().integers(2**31)),
        "steps": STEPS,
        "runs_dir": str(folder / "runs"),
        "model": {"path": str(model)},
        "data": {"task": "number_sorting"},
        "batch": {"prompts_per_step": 4, "samples_per_prompt": 4, "tokens_per_micro_batch": 128},
        "algorithm": {"entropy_coefficient": 0.1},
        "optimizer": {"lr": 3e-3, "warmup_steps": 0},
        "precision": {"train": "fp32", "rollout": "fp32", "identical": True},
        "rollout": {"max_new_tokens": 12, "context_length": 64, "server": {"threads": 1, "max_total_tokens": 4096}},
        "sync": {"transport": "tensor"},
        "eval": {"prompts": 0},
        "logging": {"trackers": []},
    }
    for name, values in sections.items():
        tree[name] = {**tree.get(name, {}), **values}
    path = folder / "config.yaml"
    path.write_text(json.dumps(tree))
    forked("train", str(path))
    lines = map(json.loads, (folder / "runs" / "zero" / "metrics.jsonl").read_text().splitlines())
    steps = [line for line in lines if line.get("mismatch/kl") is not None]
    assert len(steps) == STEPS
    assert len({step["entropy"] for step in steps}) == STEPS, "nothing was learned, so that nothing could differ"
    return steps


@pytest.fixture(scope="module")
def model(tiny_model) -> Path:
    return tiny_model("qwen3_moe", "--layers", "2", "--topk", "3", "--tokenizer", "numbers")


def test_no_mismatch_in_any_step_of_two_updates_in_bf16(model, tmp_path):
    """After each push the engine has new weights; its samples are scored before the first update of their batch."""
    bf16 = {"train": "bf16", "rollout": "bf16"}
    for step in train(tmp_path, model, precision=bf16, batch={"updates_per_step": 2}):
        for name, value in (("kl", 0.0), ("abs_mean", 0.0), ("chi2", 0.0), ("ratio_max", 1.0), ("ratio_min", 1.0)):
            assert step[f"mismatch/{name}"] == value, (name, step["step"])


def test_pruning_keeps_it(model, tmp_path):
    """Both sides have the same safe set, at a temperature too."""
    sampling = {"max_new_tokens": 12, "sampling": {"temperature": 0.8}}
    for step in train(tmp_path, model, pruning={"enabled": True, "rho": 0.8}, rollout=sampling):
        assert step["mismatch/kl"] == 0.0 and step["mismatch/ratio_max"] == 1.0
        assert step["pruning/out_of_set"] == 0 and step["pruning/coverage"] < 1


def test_what_is_sampled_ahead_differs_by_the_updates_alone(model, tmp_path):
    """On a busy machine the servers may get to a batch that was asked for early when its step's own weights are there."""
    corrected = {"mode": "truncate", "high": 2.0}
    steps = train(tmp_path, model, rollout={"max_staleness": 2}, correction=corrected)
    ahead = [step for step in steps if step["rollout/staleness"] > 0]
    assert ahead and steps[0] not in ahead
    for step in steps:
        if step in ahead:
            assert step["mismatch/kl"] > 0 and step["mismatch/ratio_max"] > 1.0
        else:
            assert step["mismatch/kl"] == 0.0 and step["mismatch/ratio_max"] == 1.0
