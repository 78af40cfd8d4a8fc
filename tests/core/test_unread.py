"""Keys that a command does nothing with: named where they are away from their defaults, and by no command that reads them."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from megatron_rl.checks.keys import READ, UNREAD, unread
from megatron_rl.config import Config
from megatron_rl.config.load import build_config, key_paths, load_config

CONFIGS = Path(__file__).parents[2] / "configs"
FAR = {
    "algorithm": {"aggregation": "sequence_mean", "kl": {"coefficient": 0.5}},
    "batch": {"samples_per_prompt": 4, "prompts_per_step": 7},
    "rollout": {"max_new_tokens": 8, "context_length": 99, "server": {"threads": 1}, "sampling": {"temperature": 0.5}},
    "rewards": {"models": {"helpful": {"path": "x"}}},
    "dpo": {"beta": 0.5},
    "sft": {"label_smoothing": 0.1},
    "reward_model": {"center": 0.5},
    "quantize": {"keep_layers": [0]},
    "data": {"chosen_key": "good", "path": "x"},
    "distillation": {"temperature": 2.0},
    "optimizer": {"lr": 1.0},
}
IN_RL = ["algorithm.aggregation", "algorithm.kl.coefficient", "batch.samples_per_prompt", "rewards.models"]
IN_RL += ["rollout.sampling.temperature", "rollout.server.threads"]


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        (
            "train",
            ["data.chosen_key", "dpo.beta", "quantize.keep_layers", "reward_model.center", "sft.label_smoothing"],
        ),
        ("sft", ["data.chosen_key", "dpo.beta", "quantize.keep_layers", "reward_model.center", *IN_RL]),
        ("reward", ["distillation.temperature", "dpo.beta", "quantize.keep_layers", "sft.label_smoothing", *IN_RL]),
        (
            "dpo",
            ["distillation.temperature", "quantize.keep_layers", "reward_model.center", "sft.label_smoothing", *IN_RL],
        ),
        *((kind, []) for kind in ("prune", "score", "quantize", "sample")),
    ],
)
def test_keys_that_are_set_and_not_read_are_named(kind, wanted):
    assert sorted(unread(build_config(FAR), kind)) == sorted(wanted)
    assert unread(Config(), kind) == []
    back = {
        "algorithm": {"aggregation": "token_mean"},
        "batch": {"samples_per_prompt": Config().batch.samples_per_prompt},
    }
    assert unread(build_config(back), kind) == [], "a default that is written down turns no knob either"


def test_every_pattern_is_of_some_key():
    for kind, patterns in UNREAD.items():
        for pattern in [*patterns, *READ]:
            assert any(fnmatchcase(key, pattern) for key in key_paths()), f"{kind}: {pattern}"


@pytest.mark.parametrize(
    ("kind", "suffix"), [("sft", "_sft"), ("dpo", "-dpo"), ("dpo", "_dpo"), ("reward", "reward"), ("train", "ppo")]
)
def test_our_own_configs_turn_no_such_knob(kind, suffix):
    """But for the engine's precision, which a file may share with the run behind it."""
    found = [path for path in CONFIGS.glob("*.yaml") if path.stem.endswith(suffix)]
    assert found
    for path in found:
        assert set(unread(load_config(path), kind)) <= {"precision.rollout"}, path
