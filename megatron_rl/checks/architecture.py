"""Checks of routers and teachers, which need the models' config.json and Megatron-Bridge."""

from __future__ import annotations

from types import SimpleNamespace

from transformers import PreTrainedConfig

from megatron_rl.checks.keys import check_teacher_keys
from megatron_rl.config import Config
from megatron_rl.config.plan import Kind
from megatron_rl.data.hub import check_folder
from megatron_rl.errors import UserError
from megatron_rl.models.bridges import make_bridge
from megatron_rl.models.families import architecture, expert_count, is_classifier
from megatron_rl.models.hf_folder import check_same_tokenizer
from megatron_rl.models.parallel_check import check_parallel, read_hf_config


def check_routers(config: Config, hf_config: PreTrainedConfig, kind: Kind) -> None:
    """Errors: UserError naming a key that does nothing with this model, or must not be set here."""
    for key in ("moe_aux_loss", "moe_z_loss", "moe_bias_update_rate"):
        if getattr(config.model, key) and not expert_count(hf_config):
            raise UserError(
                f"config: model.{key} = {getattr(config.model, key):g} does nothing: {architecture(hf_config)} has no experts;"
                " set it to 0"
            )
    if not config.model.moe_bias_update_rate:
        return
    key = f"model.moe_bias_update_rate = {config.model.moe_bias_update_rate:g}"
    if not make_bridge(hf_config).provider_bridge(SimpleNamespace(config=hf_config)).moe_router_enable_expert_bias:
        raise UserError(
            f"config: {key} does nothing: the routers of {architecture(hf_config)} have no biases of experts, as"
            " DeepSeek-V3's have; set it to 0, and model.moe_aux_loss above"
        )
    if kind == "train":
        raise UserError(
            f"config: {key}: biases that move change the policy apart from its loss, so that its ratio to the policy that"
            " sampled says less and less of what was learned; keep the balance that was found before, with 0"
        )
    if config.lora.rank:
        raise UserError(
            f"config: {key} with lora.rank: the biases are the model's own, and an adapter's folder has none; set one of the"
            " two to 0"
        )


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
