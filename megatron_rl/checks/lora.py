"""Checks of adapters: refuses layers that do not exist, or that Megatron-Bridge, PEFT or SGLang does not support."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from transformers import PreTrainedConfig

from megatron_rl.checks.refusals import Refusal
from megatron_rl.config import LoRAConfig, ParallelConfig, PrecisionConfig, SyncConfig
from megatron_rl.config.plan import Kind, expert_tensor_size
from megatron_rl.data.hub import check_folder
from megatron_rl.errors import UserError
from megatron_rl.models.bridges import make_bridge
from megatron_rl.models.freeze import EXPERTS, any_number, check_patterns, is_target
from megatron_rl.models.peft_folder import check_form, read_folder
from megatron_rl.models.precision import TRAIN
from megatron_rl.models.shape import Shape, parameter_names


def adapted_layers(
    lora: LoRAConfig,
    parallel: ParallelConfig,
    precision: PrecisionConfig,
    sync: SyncConfig,
    hf_config: PreTrainedConfig,
    kind: Kind,
) -> Iterator[Refusal]:
    """Refuse layers that cannot have an adapter, and initial adapters that do not fit."""
    if not lora.rank:
        return
    names = parameter_names(Shape.from_config(hf_config))
    targets = _targets(lora, names)
    yield from _layout(lora, parallel, targets)
    if lora.kind == "dora":
        yield from _dora(parallel, targets, names)
    registry = make_bridge(hf_config).mapping_registry()
    for name in {any_number(name): name for name in targets}.values():
        check_form(registry, name.removesuffix(".weight"))
    yield Refusal(
        TRAIN[precision.train].block is not None,
        f"precision.train = {precision.train} with lora.rank = {lora.rank}: SGLang rounds the merged weights, but the"
        " trainer would round the base weights; use bf16 or fp32, or set lora.rank: 0",
    )
    unserved = next((name for name in targets if EXPERTS in name or ".router." in name), None)
    yield Refusal(
        sync.adapters == "unmerged" and kind == "train" and unserved,
        f"sync.adapters = unmerged: lora.targets has {unserved}: SGLang 0.5.23 crashes with adapters of such layers;"
        " use lora.targets: ['*.self_attention.linear_*'], or set sync.adapters: merged",
    )
    if lora.path is not None:
        check_folder(lora.path, "config: lora.path")
        found = "dora" if read_folder(Path(lora.path)).settings.get("use_dora") else "lora"
        yield Refusal(
            found != lora.kind,
            f"lora.path = {lora.path}: it has adapters of kind {found}; set lora.kind: {found}",
        )


def _targets(lora: LoRAConfig, names: set[str]) -> list[str]:
    """Return the names of the weights that get an adapter.

    Errors: UserError for patterns that match no layer, or match a linear layer only in some decoder layers.
    """
    chosen = sorted(name for name in names if is_target(name, lora.targets))
    if lora.targets != LoRAConfig().targets:  # the default is for all families
        linear = {name for name in names if is_target(name, ["*"])}
        for pattern in lora.targets:
            check_patterns([pattern], linear, key="lora.targets", all_may=True)
    if not chosen:
        raise UserError("config: lora.targets matches no linear layer; leave it out to adapt attention and experts")
    others = {any_number(name): name for name in sorted(names - set(chosen), reverse=True)}
    for name in chosen:
        if other := others.get(any_number(name)):
            raise UserError(
                f"config: lora.targets has {name} but not {other}: checkpoints store the adapters of all decoder"
                " layers as one tensor; use the same linear layers in all decoder layers"
            )
    return chosen


def _layout(lora: LoRAConfig, parallel: ParallelConfig, targets: list[str]) -> Iterator[Refusal]:
    of_experts = next((name for name in targets if EXPERTS in name), None)
    yield Refusal(
        of_experts and expert_tensor_size(parallel) > 1,
        f"parallel.expert_tensor = {expert_tensor_size(parallel)} with an adapter of {of_experts}: Megatron-Bridge"
        " computes such adapters incorrectly; set parallel.expert_tensor: 1, or leave experts out of lora.targets",
    )
    whole = next((name for name in targets if name.endswith("_down_proj.weight")), None)
    yield Refusal(
        parallel.tensor > 1 and whole,
        f"parallel.tensor = {parallel.tensor} with an adapter of {whole}: Transformer Engine keeps this layer whole on"
        " every rank, but Megatron-Bridge would split the adapter; leave *_down_proj out of lora.targets, or set"
        " parallel.tensor: 1",
    )
    yield Refusal(
        lora.rank % parallel.tensor,
        f"lora.rank = {lora.rank} is not divisible by parallel.tensor = {parallel.tensor}, over which A is split; use"
        f" {-(-lora.rank // parallel.tensor) * parallel.tensor}",
    )


def _dora(parallel: ParallelConfig, targets: list[str], names: set[str]) -> Iterator[Refusal]:
    """Refuse layouts and layers for which Megatron-Bridge computes DoRA incorrectly."""
    yield Refusal(
        parallel.tensor > 1,
        f"lora.kind = dora with parallel.tensor = {parallel.tensor}: Megatron-Bridge computes the norm of a row from"
        " this rank's columns only; set parallel.tensor: 1, or lora.kind: lora",
    )
    for name in targets:
        yield Refusal(
            EXPERTS in name or ".router." in name,
            f"lora.kind = dora does not support {name}; adapt only attention and dense layers (lora.targets:"
            " ['*.self_attention.linear_*', '*.mlp.linear_fc*']), or set lora.kind: lora",
        )
    for name in targets:
        yield Refusal(
            name.removesuffix("weight") + "bias" in names,
            f"lora.kind = dora with {name}: the layer has a bias, which Megatron-Bridge would scale too; leave it out"
            " of lora.targets, or set lora.kind: lora",
        )
