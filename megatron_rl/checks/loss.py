"""Checks of the policy loss, of how often a step learns from its responses, and of learning-rate schedules."""

from __future__ import annotations

from transformers import PreTrainedConfig

from megatron_rl.checks.keys import check_teacher_keys
from megatron_rl.config import PREDICTING, AlgorithmConfig, Config, OptimizerConfig
from megatron_rl.config.plan import READ_ONLY, Kind, total_updates
from megatron_rl.data.hub import check_folder
from megatron_rl.errors import UserError
from megatron_rl.models.hf_folder import check_same_tokenizer
from megatron_rl.models.parallel_check import check_parallel, is_classifier, read_hf_config


def check_loss(config: Config) -> None:
    """Refuse keys of the loss and of epochs that do nothing, or contradict others, in RL. Errors: UserError."""
    algorithm, batch, default = config.algorithm, config.batch, AlgorithmConfig()
    taus = (algorithm.tau_pos, algorithm.tau_neg) != (default.tau_pos, default.tau_neg)
    for refused, problem in (
        (
            taus and algorithm.loss != "sapo",
            (
                f"algorithm.tau_pos and tau_neg are of the loss sapo, and algorithm.loss is {algorithm.loss}; leave them out,"
                " or set loss: sapo"
            ),
        ),
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


def check_teacher(config: Config, hf_config: PreTrainedConfig, kind: Kind, world_size: int) -> None:
    """Errors: UserError naming a key that does nothing here, or a folder that cannot be used."""
    check_teacher_keys(config, kind)
    settings = config.distillation
    if settings.teacher is None:
        return
    check_folder(settings.teacher, "config: distillation.teacher")
    teacher = read_hf_config(settings.teacher)
    if is_classifier(teacher):
        raise UserError(
            f"config: distillation.teacher = {settings.teacher}: has a head of one number; give a language model's folder"
        )
    check_same_tokenizer(config.model.path, settings.teacher, "distillation.teacher")
    _check_features(config, hf_config, teacher)
    try:
        check_parallel(teacher, config.parallel, world_size)
    except UserError as error:
        raise UserError(f"{error} (of distillation.teacher)") from None
    if settings.placement == "loss" and config.parallel.tensor > 1 and teacher.vocab_size != hf_config.vocab_size:
        raise UserError(
            f"config: distillation.teacher = {settings.teacher}: has embeddings of {teacher.vocab_size} tokens and the model"
            f" {hf_config.vocab_size}, which parallel.tensor = {config.parallel.tensor} cuts at different tokens; set"
            " parallel.tensor: 1" + (", or placement: advantage" if kind == "train" else "")
        )


def _check_features(config: Config, hf_config: PreTrainedConfig, teacher: PreTrainedConfig) -> None:
    """Errors: UserError for layers that are not there, or cannot be compared."""
    settings = config.distillation
    if not settings.feature_layers:
        return
    what = f"config: distillation.feature_layers = {[list(pair) for pair in settings.feature_layers]}:"
    if settings.placement == "advantage":
        raise UserError(f"{what} placement = advantage has no loss of layers; set placement: loss")
    if not settings.feature_coefficient:
        raise UserError(f"{what} with feature_coefficient = 0 they teach nothing; leave one of them out")
    if config.parallel.pipeline > 1:
        raise UserError(
            f"{what} the layers of a pair may lie on different stages of parallel.pipeline = {config.parallel.pipeline}; set"
            " it to 1"
        )
    for side, name, found in ((0, "model.path", hf_config), (1, "distillation.teacher", teacher)):
        layers: int = found.num_hidden_layers
        if gone := [pair[side] for pair in settings.feature_layers if pair[side] >= layers]:
            raise UserError(f"{what} {name} has layers 0 to {layers - 1}, and not {gone[0]}")
    if hf_config.hidden_size != teacher.hidden_size:
        raise UserError(
            f"{what} the model's hidden size is {hf_config.hidden_size} and the teacher's {teacher.hidden_size}; take a teacher"
            " of the same, or leave feature_layers out"
        )
