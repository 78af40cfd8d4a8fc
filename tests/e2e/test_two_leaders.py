"""Two data-parallel leaders ask one server at the same time: the same command twice samples the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_rl.data.trajectory import file_of, load_trajectories
from tests.program import forked

STEPS = 2


@pytest.fixture(scope="module")
def twice(tmp_path_factory, tiny_model) -> Path:
    """The folder of two runs of one command, first and second."""
    folder = tmp_path_factory.mktemp("two-leaders")
    config = {
        "steps": STEPS,
        "runs_dir": str(folder),
        "model": {"path": str(tiny_model("qwen3_moe", "--layers", "2", "--tokenizer", "numbers"))},
        "data": {"task": "number_sorting"},
        "batch": {"prompts_per_step": 6, "samples_per_prompt": 8, "updates_per_step": 1, "tokens_per_micro_batch": 256},
        # A random model earns nothing: without the entropy its weights would not move.
        "algorithm": {"entropy_coefficient": 0.01, "on_policy": True},
        "optimizer": {"lr": 1e-3},
        "precision": {"train": "fp32", "rollout": "fp32"},
        "rollout": {"max_new_tokens": 24, "context_length": 64, "record": True},
        "eval": {"prompts": 0},
        "logging": {"trackers": []},
    }
    path = folder / "config.yaml"
    path.write_text(json.dumps(config))
    for name in ("first", "second"):
        forked("train", str(path), "--name", name, ranks=2, timeout=400)
    return folder


@pytest.mark.timeout(900)  # its fixture starts four trainers and two servers
def test_the_same_command_twice_samples_the_same(twice):
    """Of the second step too, whose weights come from training on the first."""
    for step in range(STEPS):
        responses = {}
        for name in ("first", "second"):
            files = [file_of(twice / name / "rollouts", step, rank) for rank in range(2)]
            responses[name] = [t.tokens.tolist() for file in files for t in load_trajectories(file)]
        pairs = list(zip(responses["first"], responses["second"], strict=True))
        # Log-probs differ by 5e-7 between batches, so that a draw falls between two borders with a chance of 1e-6 at most: of
        # 1,152 one with a chance of 1e-3, three with one of 2e-10.
        different = sum(a != b for a, b in pairs)
        assert len(pairs) == 48 and different <= 2
        if different:
            break  # the weights of the next step have learned from other responses
