"""Checks of distillation: keys that do nothing, and a teacher that the model cannot learn from."""

from __future__ import annotations

from transformers import PreTrainedConfig

from megatron_rl.config import Config, DistillationConfig
from megatron_rl.errors import UserError
from megatron_rl.launch.plan import Kind
from megatron_rl.models.hf_folder import check_local_folder, check_same_tokenizer
from megatron_rl.models.parallel_check import check_parallel, is_classifier, read_hf_config


def check_teacher(config: Config, hf_config: PreTrainedConfig, kind: Kind, world_size: int) -> None:
    """Errors: UserError naming a key that does nothing here, or a folder that cannot be used."""
    settings, default = config.distillation, DistillationConfig()
    if not config.teaches:
        for key in vars(default):
            if getattr(settings, key) != getattr(default, key):
                raise UserError(
                    f"config: distillation.{key} does nothing without a teacher; set distillation.teacher, or leave it out"
                )
        return
    if kind not in ("sft", "train"):
        raise UserError(
            f"config: a teacher is of megatron-rl sft and train, and {kind} has none; leave distillation out"
        )
    _check_choices(settings, kind)
    if kind == "train":
        _check_advantages(config)
    if settings.recorded and config.data.tokens_key is None:
        raise UserError(
            "config: distillation.recorded learns what a teacher said of recorded tokens, and data.tokens_key: null leaves"
            " them out; set tokens_key: response_tokens"
        )
    if settings.teacher is None:
        return
    check_local_folder(settings.teacher, "distillation.teacher")
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


def _check_choices(settings: DistillationConfig, kind: Kind) -> None:
    default = DistillationConfig()
    sources = {
        "teacher": settings.teacher is not None,
        "address": settings.address is not None,
        "recorded": settings.recorded,
    }
    if len(given := [f"distillation.{name}" for name, there in sources.items() if there]) > 1:
        raise UserError(f"config: {given[0]} and {given[1]} are both given; leave one of them out")
    if not settings.coefficient and not settings.feature_layers:
        raise UserError("config: distillation.coefficient = 0: the teacher would teach nothing; leave distillation out")
    for key in ("feature_loss", "feature_coefficient"):
        if not settings.feature_layers and getattr(settings, key) != getattr(default, key):
            raise UserError(
                f"config: distillation.{key} does nothing without distillation.feature_layers; leave it out"
            )
    for key, contradicts, why, remedy in (
        (
            "placement = advantage",
            settings.placement == "advantage" and kind == "sft",
            "demonstrations have no advantages",
            "set it to loss",
        ),
        (
            "recorded",
            settings.recorded and kind == "train",
            "a record is of demonstrations, and train learns from what the model samples",
            "set distillation.teacher",
        ),
        *(
            (
                f"{key} = {getattr(settings, key)}",
                settings.recorded and wrong,
                "recorded log-probs are those of temperature 1, and of a part of the tokens",
                remedy,
            )
            for key, wrong, remedy in (
                ("temperature", settings.temperature != 1.0, "leave it out, or set distillation.teacher"),
                ("direction", settings.direction == "jensen_shannon", "set it to forward or reverse"),
            )
        ),
        (
            "address",
            settings.address is not None and settings.placement == "loss",
            "a server tells the log-probs of sampled tokens alone, and the loss asks for whole distributions",
            "set placement: advantage" if kind == "train" else "set distillation.teacher",
        ),
        *(
            (
                f"{key} = {getattr(settings, key)}",
                settings.placement == "advantage" and getattr(settings, key) != getattr(default, key),
                "placement = advantage looks at the log-probs of the sampled tokens as they are",
                "leave it out, or set placement: loss",
            )
            for key in ("direction", "mix", "temperature")
        ),
        (
            f"feature_layers = {[list(pair) for pair in settings.feature_layers]}",
            bool(settings.feature_layers) and settings.teacher is None,
            "only a model beside this one has layers to look at",
            "set distillation.teacher",
        ),
        (
            f"mix = {settings.mix}",
            settings.mix != default.mix and settings.direction != "jensen_shannon",
            f"direction = {settings.direction} has no mixture",
            "leave it out, or set direction: jensen_shannon",
        ),
    ):
        if contradicts:
            raise UserError(f"config: distillation.{key}: {why}; {remedy}")


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


def _check_advantages(config: Config) -> None:
    """Refuse what would be left out of the advantages, or compared with something else, without a word."""
    settings, algorithm, sampling = config.distillation, config.algorithm, config.rollout.sampling
    shaped = {
        "algorithm.entropy_reward": algorithm.entropy_reward > 0,
        "algorithm.kl.placement = reward": algorithm.kl.coefficient > 0 and algorithm.kl.placement == "reward",
    }
    for key, given in shaped.items():
        if given and not settings.task_coefficient:
            raise UserError(
                f"config: {key} with distillation.task_coefficient = 0: it is a part of the rewards, of which nothing counts;"
                " set task_coefficient, or leave it out"
            )
    cut = sampling.top_p < 1 or sampling.top_k > 0 or sampling.tail_floor is not None or config.pruning.enabled
    if settings.placement == "advantage" and (sampling.temperature != 1 or cut):
        raise UserError(
            "config: distillation.placement = advantage compares the teacher's log-probs, at temperature 1 over the whole"
            " vocabulary, with those of what is sampled from; set rollout.sampling.temperature: 1 and neither top_p, top_k nor"
            " pruning, or placement: loss"
        )
