"""Keys of a config that a command does nothing with: an experiment must not be one of a knob that nobody turns."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

from megatron_rl.config import Config
from megatron_rl.config_file import key_paths
from megatron_rl.launch.plan import Kind

_PREFERENCES = ["data.chosen_key", "data.rejected_key", "data.margin_key", "data.responses_key", "data.scores_key"]
_PREFERENCES += ["data.score_key", "data.label_key", "data.steps_key", "data.labels_key", "data.step_separator"]
_LOOKS = ["prune.*", "quantize.*"]
_OF_RL = ["algorithm.*", "critic.*", "rewards.*", "correction.*", "routing.*", "pruning.*", "vp2o.*", "sync.*", "hooks"]
_OF_RL += ["batch.samples_per_prompt", "batch.updates_per_step", "eval.samples", "eval.pass_at", "eval.greedy"]
_OF_RL += ["eval.unpruned", "precision.rollout", "data.rewards"]
_ENGINE = ["rollout.*"]
UNREAD: dict[str, list[str]] = {
    "train": [*_LOOKS, *_PREFERENCES, "sft.*", "reward_model.*", "dpo.*"],
    "sft": [*_LOOKS, *_PREFERENCES, *_OF_RL, *_ENGINE, "reward_model.*", "dpo.*"],
    "reward": [*_LOOKS, *_OF_RL, *_ENGINE, "sft.*", "dpo.*", "distillation.*"],
    "dpo": [*_LOOKS, *_OF_RL, *_ENGINE, "sft.*", "reward_model.*", "distillation.*"],
}
"""Patterns of the keys that what trains never reads. What only looks at a model takes the config of a run as it is."""
READ = ["rollout.program", "rollout.context_length", "rollout.max_new_tokens"]
"""Keys among these that all of them read."""


def unread(config: Config, kind: Kind) -> list[str]:
    """Keys of which the config has not the default, and that a run of this kind never reads."""
    patterns = UNREAD.get(kind, [])
    return [
        key for key in _changed(config) if key not in READ and any(fnmatchcase(key, pattern) for pattern in patterns)
    ]


def _changed(config: Config) -> Iterator[str]:
    default = Config()
    for key in key_paths():
        if _value(config, key) != _value(default, key):
            yield key


def _value(config: Config, key: str) -> Any:
    found: Any = config
    for part in key.split("."):
        found = getattr(found, part)
    return found
