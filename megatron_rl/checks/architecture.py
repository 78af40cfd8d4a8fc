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
from megatron_rl.models.families import architecture, expert_count, is_classifier
from megatron_rl.models.hf_folder import check_same_tokenizer
from megatron_rl.models.parallel_check import check_parallel, read_hf_config


def routers(
    model: ModelConfig, lora: LoRAConfig, routing: RoutingConfig, hf_config: PreTrainedConfig, kind: Kind
) -> Iterator[Refusal]:
    """Refuse router settings that have no effect on this model, or that this kind of run must not set."""
    name = architecture(hf_config)
    yield Refusal(
        kind == "train" and routing.source != "none" and not expert_count(hf_config),
        f"routing.source = {routing.source}, but {name} is a dense model; set it to none",
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
        f"{key} does nothing: the routers of {name} have no expert biases like DeepSeek-V3's; set it to 0, and use"
        " model.moe_aux_loss",
    )
    yield Refusal(
        kind == "train",
        f"{key}: bias updates would change the policy without its loss, so that the ratio to the sampling policy would"
        " no longer measure what was learned; set it to 0, which keeps the load balance of earlier training",
    )
    yield Refusal(
        lora.rank,
        f"{key} with lora.rank: the biases belong to the model, and adapters cannot store them; set one of the two to"
        " 0",
    )


def teacher_folder(
    distillation: DistillationConfig,
    model: ModelConfig,
    parallel: ParallelConfig,
    hf_config: PreTrainedConfig,
    kind: Kind,
    world_size: int,
) -> Iterator[Refusal]:
    """Refuse a teacher from which the model cannot be distilled."""
    if distillation.teacher is None:
        return
    check_folder(distillation.teacher, "config: distillation.teacher")
    teacher = read_hf_config(distillation.teacher)
    named = f"distillation.teacher = {distillation.teacher}"
    yield Refusal(
        is_classifier(teacher),
        f"{named}: the model has a head with a single output; give the folder of a language model",
    )
    check_same_tokenizer(model.path, distillation.teacher, "distillation.teacher")
    if distillation.feature_layers:
        yield from _features(distillation, parallel, hf_config, teacher)
    with errors_of("of distillation.teacher"):
        check_parallel(teacher, parallel, world_size)
    yield Refusal(
        distillation.placement == "loss" and parallel.tensor > 1 and teacher.vocab_size != hf_config.vocab_size,
        f"{named}: it has embeddings of {teacher.vocab_size} tokens and the model of {hf_config.vocab_size}, so"
        f" parallel.tensor = {parallel.tensor} would split them differently; set parallel.tensor: 1"
        + (", or placement: advantage" if kind == "train" else ""),
    )


def _features(
    distillation: DistillationConfig, parallel: ParallelConfig, hf_config: PreTrainedConfig, teacher: PreTrainedConfig
) -> Iterator[Refusal]:
    what = f"distillation.feature_layers = {[list(pair) for pair in distillation.feature_layers]}:"
    yield Refusal(
        distillation.placement == "advantage",
        f"{what} placement = advantage cannot use them; set placement: loss",
    )
    yield Refusal(
        not distillation.feature_coefficient,
        f"{what} with feature_coefficient = 0 they have no effect; leave one of them out",
    )
    yield Refusal(
        parallel.pipeline > 1,
        f"{what} the two layers of a pair can be on different stages of parallel.pipeline = {parallel.pipeline}; set"
        " it to 1",
    )
    for side, name, found in ((0, "model.path", hf_config), (1, "distillation.teacher", teacher)):
        layers: int = found.num_hidden_layers
        for pair in distillation.feature_layers:
            yield Refusal(
                pair[side] >= layers,
                f"{what} {name} has layers 0 to {layers - 1}, but not {pair[side]}; use a smaller number",
            )
    yield Refusal(
        hf_config.hidden_size != teacher.hidden_size,
        f"{what} the model's hidden size is {hf_config.hidden_size} and the teacher's {teacher.hidden_size}; use a"
        " teacher with the same hidden size, or leave feature_layers out",
    )
