"""Checks before anything starts: choices of the config that contradict each other, then folders and sizes.

What a config says by itself is looked at without torch, by `check_config`; so the program tells of it at once.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, get_args

from megatron_rl.algorithms.sampling_support import SamplingSupport
from megatron_rl.checks import engine_keys, learning_keys, model_keys
from megatron_rl.checks.rules import Check, refuse, refuse_idle
from megatron_rl.config import OF_TOKENS, Config
from megatron_rl.config.conditions import LEARNING
from megatron_rl.config.plan import OFFLINE, Kind, Plan, check_group, make_plan
from megatron_rl.config.registry import check_name
from megatron_rl.sync.transports import TRANSPORTS

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


ADVANTAGES = ("grpo", "dr_grpo", "rloo", "tilt", *OF_TOKENS)
LOSSES = ("ppo", "gspo", "reinforce", "cispo", "sapo")
PROGRAMS = ("single_turn", "agent", "openai_agent")
"""Built-in names of algorithm.advantage, algorithm.loss and rollout.program."""

ALL: tuple[Kind, ...] = get_args(Kind)
IDLE: dict[Kind, str] = {**dict.fromkeys(LEARNING, ""), "sample": "rewards.", "prune": "prune."}
"""Commands that refuse keys which do nothing -> how these begin. What only looks at a model takes a run's config as it is."""
RULES: dict[Check, tuple[Kind, ...]] = {
    engine_keys.sizes: ALL,
    engine_keys.flags: ALL,
    engine_keys.colocation: ALL,
    engine_keys.staleness: ("train",),
    engine_keys.dynamic_sampling: ("train",),
    engine_keys.over_sampling: ("train",),
    engine_keys.waits: ("train",),
    learning_keys.starts: LEARNING,
    learning_keys.preferences: ("dpo",),
    learning_keys.reward_parts: ("train", "sample"),
    learning_keys.teachers: LEARNING,
    learning_keys.pruned_parts: ("prune",),
    engine_keys.evaluations: ALL,
    learning_keys.advantages: ("train",),
    learning_keys.policy_loss: ("train",),
    learning_keys.corrections: ("train",),
    learning_keys.routes: ("train",),
    learning_keys.refresh: ("train",),
    learning_keys.on_policy: ("train",),
    model_keys.adapters: ALL,
    model_keys.unmerged_adapters: ("train",),
    learning_keys.schedules: LEARNING,
    learning_keys.stein: LEARNING,
    model_keys.memory_savers: LEARNING,
}
"""Rules of keys beside other keys, in the order in which they are looked at -> the commands that they are of."""


def preflight(config: Config, kind: Kind) -> tuple[PreTrainedConfig, Plan, SamplingSupport]:
    """Check the config by itself, the model folders, and what of both this machine can do.

    Errors: UserError naming the key or the file.
    """
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    plan, support = check_config(config, kind, world_size)
    from megatron_rl.checks.model_and_machine import check_models  # torch and Megatron, which take seconds to import

    return check_models(config, kind, world_size), plan, support


def check_config(config: Config, kind: Kind, world_size: int) -> tuple[Plan, SamplingSupport]:
    """Check what can be told of a config without its models, for a run of this kind on so many processes.

    Errors: UserError naming the key.
    """
    from_data = kind in OFFLINE
    # A demonstration, or a comparison, is one thing of one update.
    batch = replace(config.batch, samples_per_prompt=1, updates_per_step=1) if from_data else config.batch
    plan = make_plan(batch, config.parallel, world_size)
    if kind == "train":
        check_group(config.batch, config.algorithm.advantage)
    support = SamplingSupport.from_config(config.rollout.sampling, config.pruning)
    if not from_data:
        check_name("rollout program", config.rollout.program, dict.fromkeys(PROGRAMS), "rollout.program")
    check_name("weight transport", config.sync.transport, TRANSPORTS, "sync.transport")
    if kind == "train":
        check_name("loss", config.algorithm.loss, dict.fromkeys(LOSSES), "algorithm.loss")
        check_name("advantage", config.algorithm.advantage, dict.fromkeys(ADVANTAGES), "algorithm.advantage")
        for name in config.hooks:
            check_name("hook", name, {}, "hooks")
    check_keys(config, kind, world_size)
    return plan, support


def check_keys(config: Config, kind: Kind, world_size: int) -> None:
    """Errors: UserError for keys that do nothing, or contradict each other, in a run of this kind."""
    if kind in IDLE:
        refuse_idle(config, kind, IDLE[kind])
    checks = [check for check, kinds in RULES.items() if kind in kinds]
    refuse(config, *checks, kind=kind, world_size=world_size, machine=None)
