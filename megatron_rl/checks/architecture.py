"""Checks of routers and teachers, which need the models' config.json and Megatron-Bridge."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

from transformers import PreTrainedConfig

from megatron_rl.checks.refusals import Refusal, errors_of
from megatron_rl.config import DistillationConfig, LoRAConfig, ModelConfig, ParallelConfig, RoutingConfig
from megatron_rl.config.plan import Kind
from megatron_rl.data.hub import check_folder
from megatron_rl.models.bridges import make_bridge
from megatron_rl.models.families import architecture, is_classifier
from megatron_rl.models.hf_folder import check_same_tokenizer
from megatron_rl.models.parallel_check import check_parallel, expert_count, read_hf_config


def routers(
    model: ModelConfig, lora: LoRAConfig, routing: RoutingConfig, hf_config: PreTrainedConfig, kind: Kind
) -> Iterator[Refusal]:
    """Refuse what does nothing with the routers of this model, or must not be set here."""
    name = architecture(hf_config)
    yield Refusal(
        kind == "train" and routing.source != "none" and not expert_count(hf_config),
        f"routing.source = {routing.source}, but {name} is dense; use none",
    )
    for key in ("moe_aux_loss", "moe_z_loss", "moe_bias_update_rate"):
        yield Refusal(
            getattr(model, key) and not expert_count(hf_config),
            f"model.{key} = {getattr(model, key):g} does nothing: {name} has no experts; set it to 0",
        )
    if not model.moe_bias_update_rate:
        return
    key = f"model.moe_bias_update_rate = {model.moe_bias_update_rate:g}"
    yield Refusal(
        not make_bridge(hf_config).provider_bridge(SimpleNamespace(config=hf_config)).moe_router_enable_expert_bias,
        f"{key} does nothing: the routers of {name} have no biases of experts, as"
        " DeepSeek-V3's have; set it to 0, and model.moe_aux_loss above",
    )
    yield Refusal(
        kind == "train",
        f"{key}: biases that move change the policy apart from its loss, so that its ratio to the policy that"
        " sampled says less and less of what was learned; keep the balance that was found before, with 0",
    )
    yield Refusal(
        lora.rank,
        f"{key} with lora.rank: the biases are the model's own, and an adapter's folder has none; set one of the"
        " two to 0",
    )


def teacher_folder(
    distillation: DistillationConfig,
    model: ModelConfig,
    parallel: ParallelConfig,
    hf_config: PreTrainedConfig,
    kind: Kind,
    world_size: int,
) -> Iterator[Refusal]:
    """Refuse a teacher that the model cannot learn from."""
    if distillation.teacher is None:
        return
    check_folder(distillation.teacher, "config: distillation.teacher")
    teacher = read_hf_config(distillation.teacher)
    named = f"distillation.teacher = {distillation.teacher}"
    yield Refusal(is_classifier(teacher), f"{named}: has a head of one number; give a language model's folder")
    check_same_tokenizer(model.path, distillation.teacher, "distillation.teacher")
    if distillation.feature_layers:
        yield from _features(distillation, parallel, hf_config, teacher)
    with errors_of("of distillation.teacher"):
        check_parallel(teacher, parallel, world_size)
    yield Refusal(
        distillation.placement == "loss" and parallel.tensor > 1 and teacher.vocab_size != hf_config.vocab_size,
        f"{named}: has embeddings of {teacher.vocab_size} tokens and the model"
        f" {hf_config.vocab_size}, which parallel.tensor = {parallel.tensor} cuts at different tokens; set"
        " parallel.tensor: 1" + (", or placement: advantage" if kind == "train" else ""),
    )


def _features(
    distillation: DistillationConfig, parallel: ParallelConfig, hf_config: PreTrainedConfig, teacher: PreTrainedConfig
) -> Iterator[Refusal]:
    what = f"distillation.feature_layers = {[list(pair) for pair in distillation.feature_layers]}:"
    yield Refusal(
        distillation.placement == "advantage",
        f"{what} placement = advantage has no loss of layers; set placement: loss",
    )
    yield Refusal(
        not distillation.feature_coefficient,
        f"{what} with feature_coefficient = 0 they teach nothing; leave one of them out",
    )
    yield Refusal(
        parallel.pipeline > 1,
        f"{what} the layers of a pair may lie on different stages of parallel.pipeline = {parallel.pipeline}; set it to 1",
    )
    for side, name, found in ((0, "model.path", hf_config), (1, "distillation.teacher", teacher)):
        layers: int = found.num_hidden_layers
        for pair in distillation.feature_layers:
            yield Refusal(pair[side] >= layers, f"{what} {name} has layers 0 to {layers - 1}, and not {pair[side]}")
    yield Refusal(
        hf_config.hidden_size != teacher.hidden_size,
        f"{what} the model's hidden size is {hf_config.hidden_size} and the teacher's {teacher.hidden_size}; take a teacher"
        " of the same, or leave feature_layers out",
    )
