"""Keys that a command does nothing with: named where they are away from their defaults, and by no command that reads them."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_rl.config import Config
from megatron_rl.config.conditions import changed, idle, unread, value_at, walk
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


CONDITIONED = {one.key: one.conditions for one in walk(Config()) if one.conditions}


def test_every_declaration_names_keys_that_are_there():
    assert [one.key for one in walk(Config())] and {one.key for one in walk(Config())} == set(key_paths())
    for key, conditions in CONDITIONED.items():
        for condition in conditions:
            for name in condition.keys:
                value_at(Config(), f"{key.rpartition('.')[0]}{name}" if name.startswith(".") else name)
    assert {"algorithm.lam", "critic.optimizer.lr", "vp2o.on_violation", "lora.alpha"} <= set(CONDITIONED)


@pytest.mark.parametrize(
    ("section", "kind", "problem"),
    [
        ({"algorithm": {"lam": 0.9}}, "train", "algorithm.lam = 0.9 does nothing with algorithm.advantage = grpo; set"),
        ({"algorithm": {"lam": 0.9}}, "sft", None),
        ({"algorithm": {"lam": 0.9, "advantage": "gae"}}, "train", None),
        ({"critic": {"optimizer": {"lr": 1.0}}}, "train", "critic.optimizer.lr = 1 does nothing with algorithm.adv"),
        (
            {"pruning": {"rho": 0.5}},
            "train",
            "pruning.rho = 0.5 does nothing without pruning.enabled or pruning.measure",
        ),
        ({"pruning": {"rho": 0.5, "measure": True}}, "train", None),
        (
            {"vp2o": {"enabled": True, "orthogonality": 0.0, "orthogonality_tokens": 9}},
            "train",
            "vp2o.orthogonality_tokens",
        ),
        ({"vp2o": {"enabled": True, "neighbors": 2}}, "train", None),
        (
            {"vp2o": {"enabled": True, "neighbors": 2, "attract_above": 0.5}},
            "train",
            "vp2o.neighbors = 2 does nothing be",
        ),
        (
            {"rewards": {"models": {"liked": {"path": "x", "step_aggregation": "mean"}}}},
            "sample",
            "rewards.models.liked.step_aggregation = mean does nothing without rewards.models.liked.steps; set rewards.mod",
        ),
        ({"rollout": {"demonstrations": {"min_reward": 0.0, "per_prompt": 2}}}, "sample", None),
    ],
)
def test_a_key_that_does_nothing_is_told_where_it_would_be_read(section, kind, problem):
    found = idle(build_config(section), kind)
    assert (found is None) == (problem is None)
    assert found is None or (found.startswith(problem) and "\n" not in found)


def test_changed_names_the_fields_that_are_away_from_their_defaults():
    config = build_config({"lora": {"alpha": 1.0, "rank": 2}})
    assert changed(config.lora) == ["rank", "alpha"]
    assert changed(Config().lora) == []


@pytest.mark.parametrize(
    ("kind", "suffix"), [("sft", "_sft"), ("dpo", "-dpo"), ("dpo", "_dpo"), ("reward", "reward"), ("train", "ppo")]
)
def test_our_own_configs_turn_no_such_knob(kind, suffix):
    """But for the engine's precision, which a file may share with the run behind it."""
    found = [path for path in CONFIGS.glob("*.yaml") if path.stem.endswith(suffix)]
    assert found
    for path in found:
        assert set(unread(load_config(path), kind)) <= {"precision.rollout"}, path
