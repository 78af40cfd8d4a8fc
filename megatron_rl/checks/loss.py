"""Checks of the policy loss, of how often a step learns from its responses, and of learning-rate schedules."""

from __future__ import annotations

from megatron_rl.config import PREDICTING, AlgorithmConfig, Config, OptimizerConfig
from megatron_rl.config.plan import READ_ONLY, Kind, total_updates
from megatron_rl.errors import UserError


def check_loss(config: Config) -> None:
    """Refuse keys of the loss and of epochs that do nothing, or contradict others, in RL. Errors: UserError."""
    algorithm, batch = config.algorithm, config.batch
    for refused, problem in (
        (
            algorithm.aggregation == "sequence_sum" and config.correction.denominator == "weights",
            (
                "correction.denominator = weights divides by a sum of weights, and algorithm.aggregation = sequence_sum by a"
                " constant; set denominator: kept_sequences or sampled, or aggregation: token_mean"
            ),
        ),
        (
            algorithm.target_kl is not None and batch.updates == 1,
            (
                "algorithm.target_kl does nothing with one update a step, which is always done; set batch.epochs or"
                " batch.updates_per_step to 2 or more, or target_kl: null"
            ),
        ),
        (
            config.routing.source in PREDICTING and batch.epochs > 1,
            (
                f"batch.epochs = {batch.epochs} with routing.source = {config.routing.source}: predictors anticipate the"
                " routers of the one update that learns from a response; set epochs: 1, or routing.source: r2 or r3"
            ),
        ),
    ):
        if refused:
            raise UserError(f"config: {problem}")


def check_schedules(config: Config, kind: Kind) -> None:
    """Refuse a warm-up that leaves nothing of the updates, and epochs of what has no rollout batch. Errors: UserError."""
    if kind in READ_ONLY:
        return
    if kind != "train" and config.batch.epochs > 1:
        raise UserError(
            f"config: batch.epochs = {config.batch.epochs} is of reinforcement learning, and megatron-rl {kind} goes through"
            " its data by steps; raise steps instead, and set epochs: 1"
        )
    _check_warmup(config.optimizer, total_updates(config, kind))
    if kind == "train" and config.algorithm.advantage == "gae":
        _check_warmup(config.critic.optimizer, config.steps * config.batch.updates, "critic.optimizer")


def _check_warmup(config: OptimizerConfig, updates: int, key: str = "optimizer") -> None:
    """Errors: UserError where the warm-up leaves nothing of a run of so many updates. key: the section's."""
    decay_steps = config.decay_steps or updates
    if config.warmup_steps >= decay_steps:
        raise UserError(
            f"config: {key}.warmup_steps = {config.warmup_steps} leaves nothing of the {decay_steps} updates to train;"
            f" the largest is {decay_steps - 1}"
        )


def loss_hints(algorithm: AlgorithmConfig) -> list[str]:
    """Lines for the start of a run whose loss has settings that are another loss's."""
    hints = []
    clips = [clip for clip in (algorithm.clip_low, algorithm.clip_high) if clip is not None]
    if algorithm.loss == "gspo" and max(clips, default=0.0) >= LOOSE_OF_SEQUENCES:
        hints.append(
            "algorithm.loss: gspo clips the ratio of whole sequences, which hardly ever reaches clip_low ="
            f" {algorithm.clip_low}, clip_high = {algorithm.clip_high}, bounds for tokens; GSPO's own are 3e-4 and 4e-4"
        )
    if algorithm.loss in ("gspo", "sapo") and algorithm.aggregation != "sequence_mean":
        hints.append(
            f"algorithm.loss: {algorithm.loss} with aggregation: {algorithm.aggregation}: its paper takes the mean over"
            " sequences of each one's mean (sequence_mean)"
        )
    return hints


LOOSE_OF_SEQUENCES = 0.05
"""Bound of a sequence's ratio, a geometric mean over its tokens, from which on it is taken for one of tokens."""


# -- teacher checks ------------------------------------------------------------------------------------------------------
# Checks of distillation: keys that do nothing, and a teacher that the model cannot learn from.
