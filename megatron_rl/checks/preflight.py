"""Checks before anything starts: first config keys that contradict each other, then folders and sizes.

`check_config` checks the config alone, without importing torch, so that users see such errors at once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, get_args

from megatron_rl.algorithms.correction_choice import Correction
from megatron_rl.algorithms.sampling_support import SamplingSupport
from megatron_rl.checks import key_rules, rl_rules
from megatron_rl.checks.refusals import Check, Refusal, Rule, refuse, refuse_idle
from megatron_rl.config import (
    OF_TOKENS,
    AlgorithmConfig,
    BatchConfig,
    Config,
    CorrectionConfig,
    CriticConfig,
    OptimizerConfig,
    RolloutConfig,
)
from megatron_rl.config.conditions import LEARNING
from megatron_rl.config.plan import OFFLINE, READ_ONLY, Kind, Plan, check_group, make_plan, total_updates
from megatron_rl.config.registry import check_name
from megatron_rl.errors import UserError
from megatron_rl.metrics.trackers import TRACKERS
from megatron_rl.servers.flags import check_extra_args
from megatron_rl.sync.transports import TRANSPORTS

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


ADVANTAGES = ("grpo", "dr_grpo", "rloo", "tilt", *OF_TOKENS)
LOSSES = ("ppo", "gspo", "reinforce", "cispo", "sapo")
PROGRAMS = ("single_turn", "agent", "openai_agent")
"""Built-in names of rollout.program."""

BOUNDS = {
    "truncate": "; set correction.high: 2.0",
    "mask": "; set correction.low: 0.5 and high: 2.0",
    "clip": "; set correction.low: 0.5 and high: 2.0",
}
"""{mode of the correction: remedy if its bounds are missing}."""


def correction_bounds(correction: CorrectionConfig) -> None:
    """Check the bounds of the correction. Errors: UserError if one is missing, or if they are in the wrong order."""
    try:
        Correction.of(correction)
    except ValueError as error:
        raise UserError(f"config: correction: {error}{BOUNDS.get(correction.mode, '')}") from None


def flags(rollout: RolloutConfig) -> None:
    """Check the flags of SGLang. Errors: UserError for flags that have their own config keys."""
    if not rollout.external:
        check_extra_args(rollout.server.extra_args, ())


def schedules(
    kind: Kind,
    steps: int,
    batch: BatchConfig,
    algorithm: AlgorithmConfig,
    critic: CriticConfig,
    optimizer: OptimizerConfig,
) -> Iterator[Refusal]:
    """Refuse several epochs without a rollout batch, and learning rate warmups that last for all updates."""
    yield Refusal(
        kind != "train" and batch.epochs > 1,
        f"batch.epochs = {batch.epochs} works only in reinforcement learning; for megatron-rl {kind}, increase steps"
        " instead, and set epochs: 1",
    )
    learners = [("optimizer", optimizer, total_updates(steps, batch, algorithm.advantage, critic, kind))]
    if kind == "train" and algorithm.advantage == "gae":
        learners.append(("critic.optimizer", critic.optimizer, steps * batch.updates))
    for key, own, updates in learners:
        decay_steps = own.decay_steps or updates
        yield Refusal(
            own.warmup_steps >= decay_steps,
            f"{key}.warmup_steps = {own.warmup_steps} is not below the {decay_steps} updates of the schedule; the"
            f" largest value is {decay_steps - 1}",
        )


ALL: tuple[Kind, ...] = get_args(Kind)
ASKING: tuple[Kind, ...] = ("train", "sample")
IDLE: dict[Kind, str] = {**dict.fromkeys(LEARNING, ""), "sample": "rewards.", "prune": "prune."}
"""{kind of run that refuses keys without effect: prefix of these keys}. Other kinds accept the config of any run."""
RULES: tuple[tuple[tuple[Kind, ...], Sequence[Rule | Check]], ...] = (
    (ALL, key_rules.SIZES),
    (("sample",), key_rules.NO_PUSH),
    (ASKING, (*key_rules.FLAGS, flags)),
    (("train",), rl_rules.ENGINE),
    (LEARNING, key_rules.START),
    (("dpo",), key_rules.PREFERENCES),
    (ASKING, key_rules.REWARDS),
    (LEARNING, key_rules.TEACHER),
    (("prune",), key_rules.PRUNE),
    (ALL, key_rules.EVALUATION),
    (("train",), (correction_bounds, *rl_rules.LEARNING)),
    (READ_ONLY, key_rules.NO_ADAPTERS),
    (LEARNING, (*key_rules.ADAPTERS, schedules, *key_rules.STEIN, *key_rules.MEMORY)),
)
"""(kinds of runs, rules of their keys), in the order in which the rules are checked."""


def preflight(config: Config, kind: Kind) -> tuple[PreTrainedConfig, Plan, SamplingSupport]:
    """Check the config alone, then the model folders, then the abilities of this machine.

    Errors: UserError that names the key or the file.
    """
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    plan, support = check_config(config, kind, world_size)
    from megatron_rl.checks.model_and_machine import check_models  # imports torch and Megatron, which takes seconds

    return check_models(config, kind, world_size), plan, support


def check_config(config: Config, kind: Kind, world_size: int) -> tuple[Plan, SamplingSupport]:
    """Check a config for this kind of run on `world_size` processes, without reading the models.

    Errors: UserError that names the key.
    """
    from_data = kind in OFFLINE
    # A demonstration or a comparison counts once, in a single update.
    batch = replace(config.batch, samples_per_prompt=1, updates_per_step=1) if from_data else config.batch
    plan = make_plan(batch, config.parallel, world_size)
    if kind == "train":
        check_group(config.batch, config.algorithm.advantage)
    support = SamplingSupport.from_config(config.rollout.sampling, config.pruning)
    if not from_data:
        check_name("rollout program", config.rollout.program, dict.fromkeys(PROGRAMS), "rollout.program")
    for name in config.logging.trackers:
        check_name("tracker", name, TRACKERS, "logging.trackers")
    check_name("weight transport", config.sync.transport, TRANSPORTS, "sync.transport")
    if kind == "train":
        check_name("loss", config.algorithm.loss, dict.fromkeys(LOSSES), "algorithm.loss")
        check_name("advantage", config.algorithm.advantage, dict.fromkeys(ADVANTAGES), "algorithm.advantage")
        for name in config.hooks:
            check_name("hook", name, {}, "hooks")
    check_keys(config, kind, world_size)
    return plan, support


def check_keys(config: Config, kind: Kind, world_size: int) -> None:
    """Check config keys for this kind of run. Errors: UserError for keys without effect, and for contradictions."""
    if kind in IDLE:
        refuse_idle(config, kind, IDLE[kind])
    checks = [check for kinds, of_kinds in RULES if kind in kinds for check in of_kinds]
    support = SamplingSupport.from_config(config.rollout.sampling, config.pruning)
    refuse(config, *checks, kind=kind, world_size=world_size, support=support, machine=None)


def check_demonstrations(config: Config, vocabulary: int | None = None) -> None:
    """Check rollout.demonstrations. Errors: UserError that names a key without effect or with an impossible value.

    vocabulary: number of tokens of the model, if it is known.
    """
    refuse_idle(config, "sample", "rollout.demonstrations.")
    if config.rollout.demonstrations.min_reward is not None:
        support = SamplingSupport.from_config(config.rollout.sampling, config.pruning)
        refuse(config, *key_rules.DEMONSTRATIONS, support=support, vocabulary=vocabulary)
