"""Checks of adapters: keys that do nothing, layers that are not there, and what adapters cannot go with."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedConfig

from megatron_rl.config import FROM_ENGINE, Config, LoRAConfig
from megatron_rl.config.plan import Kind, expert_tensor_size
from megatron_rl.data.hub import check_folder
from megatron_rl.errors import UserError
from megatron_rl.models.adapters import EXPERTS, any_number, check_patterns, is_target
from megatron_rl.models.bridges import make_bridge
from megatron_rl.models.peft_folder import check_form, read_folder
from megatron_rl.models.precision import TRAIN
from megatron_rl.models.shape import Shape, parameter_names


def check_lora(config: Config, hf_config: PreTrainedConfig, kind: Kind) -> None:
    """Errors: UserError naming the key."""
    lora = config.lora
    if not lora.rank:
        return
    names = parameter_names(Shape.from_config(hf_config))
    targets = _targets(lora, names)
    _check_layout(config, targets)
    if lora.kind == "dora":
        _check_dora(config, targets, names)
    registry = make_bridge(hf_config).mapping_registry()
    for name in {any_number(name): name for name in targets}.values():
        check_form(registry, name.removesuffix(".weight"))
    for key, contradicts, why, remedy in (
        (
            f"model.freeze = {config.model.freeze}",
            bool(config.model.freeze),
            "adapters leave all weights as they are",
            "leave it out",
        ),
        (
            "model.keep_zeros",
            bool(config.model.keep_zeros),
            "what is merged adds B A to zeros too",
            "leave it out",
        ),
        (
            "vp2o.enabled",
            config.vp2o.enabled and kind == "train",
            "it transforms gradients of the experts' weights, which have none",
            "set it to false",
        ),
        (
            f"precision.train = {config.precision.train}",
            TRAIN[config.precision.train].block is not None,
            "the engine rounds the merged weights, and the trainer would round the model's own",
            "take bf16 or fp32",
        ),
        (
            f"lora.dropout = {lora.dropout:g} with algorithm.on_policy",
            lora.dropout > 0 and config.algorithm.on_policy and kind == "train",
            "an update's policy lacks a part of what sampled",
            "set it to 0",
        ),
    ):
        if contradicts:
            raise UserError(f"config: {key} with lora.rank = {lora.rank}: {why}; {remedy}, or set lora.rank: 0")
    if config.sync.adapters == "unmerged" and kind == "train":
        _check_unmerged(config, targets)
    if lora.path is not None:
        check_folder(lora.path, "config: lora.path")
        folder = read_folder(Path(lora.path))
        if bool(folder.settings.get("use_dora")) != (lora.kind == "dora"):
            found = "dora" if folder.settings.get("use_dora") else "lora"
            raise UserError(f"config: lora.path = {lora.path}: has adapters of kind {found}; set lora.kind: {found}")


def _targets(lora: LoRAConfig, names: set[str]) -> list[str]:
    """Names of the weights that get an adapter. Errors: UserError for patterns that choose none, or some layers alone."""
    chosen = sorted(name for name in names if is_target(name, lora.targets))
    if lora.targets != LoRAConfig().targets:  # the default is for all families
        linear = {name for name in names if is_target(name, ["*"])}
        for pattern in lora.targets:
            check_patterns([pattern], linear, key="lora.targets", all_may=True)
    if not chosen:
        raise UserError("config: lora.targets chooses no linear layer; leave it out to take attention and experts")
    others = {any_number(name): name for name in sorted(names - set(chosen), reverse=True)}
    for name in chosen:
        if other := others.get(any_number(name)):
            raise UserError(
                f"config: lora.targets has {name} and not {other}: checkpoints hold the adapters of all layers as one tensor;"
                " take the same linear layers in all of them"
            )
    return chosen


def _check_layout(config: Config, targets: list[str]) -> None:
    lora, parallel = config.lora, config.parallel
    experts = [name for name in targets if EXPERTS in name]
    if experts and expert_tensor_size(parallel) > 1:
        raise UserError(
            f"config: parallel.expert_tensor = {expert_tensor_size(parallel)} with an adapter of {experts[0]}: Megatron-Bridge"
            " computes such adapters wrongly; set it to 1, or leave experts out of lora.targets"
        )
    if parallel.tensor > 1 and (whole := [name for name in targets if name.endswith("_down_proj.weight")]):
        raise UserError(
            f"config: parallel.tensor = {parallel.tensor} with an adapter of {whole[0]}: Transformer Engine has that layer"
            " whole on every rank, and Megatron-Bridge would cut the adapter; leave *_down_proj out of lora.targets, or set"
            " parallel.tensor: 1"
        )
    if lora.rank % parallel.tensor:
        raise UserError(
            f"config: lora.rank = {lora.rank} is not divisible by parallel.tensor = {parallel.tensor}, over which A is cut;"
            f" take {-(-lora.rank // parallel.tensor) * parallel.tensor}"
        )


def _check_dora(config: Config, targets: list[str], names: set[str]) -> None:
    """Refuse what Megatron-Bridge's layer computes wrongly."""
    if config.parallel.tensor > 1:
        raise UserError(
            f"config: lora.kind = dora with parallel.tensor = {config.parallel.tensor}: Megatron-Bridge takes the length of"
            " a row from this rank's columns alone; set parallel.tensor: 1, or lora.kind: lora"
        )
    if wrong := [name for name in targets if EXPERTS in name or ".router." in name]:
        raise UserError(
            f"config: lora.kind = dora has no form for {wrong[0]}; take attention and dense layers alone: lora.targets:"
            " ['*.self_attention.linear_*', '*.mlp.linear_fc*'], or lora.kind: lora"
        )
    if biased := [name for name in targets if name.removesuffix("weight") + "bias" in names]:
        raise UserError(
            f"config: lora.kind = dora of {biased[0]}, whose layer has a bias, which Megatron-Bridge would scale too; leave it"
            " out of lora.targets, or take lora.kind: lora"
        )


def _check_unmerged(config: Config, targets: list[str]) -> None:
    """Refuse what SGLang does not serve beside a model."""
    for key, contradicts, why, remedy in (
        (
            "lora.targets",
            next((name for name in targets if EXPERTS in name or ".router." in name), None),
            "SGLang 0.5.23 dies of adapters of such layers",
            "take lora.targets: ['*.self_attention.linear_*']",
        ),
        (
            "routing.source = pr3",
            config.routing.source == "pr3",
            "the engine's predictors would not get what the trainer's have learned",
            "take pr2 or r3",
        ),
        (
            "rollout.record with routes of the engine",
            config.rollout.record and (config.rollout.routes or config.routing.source in FROM_ENGINE),
            "a record says whose routes it has by a digest of all weights",
            "set rollout.record: false",
        ),
        ("lora.kind = dora", config.lora.kind == "dora", "SGLang knows no lengths of rows", "set lora.kind: lora"),
        (
            "rollout.colocate",
            config.rollout.colocate,
            "servers lose their adapters when they sleep",
            "set rollout.colocate: false",
        ),
        (
            "precision.rollout = fp8",
            config.precision.rollout == "fp8",
            "the model's own weights would not be those that the trainer has",
            "set precision.rollout: bf16",
        ),
    ):
        if contradicts:
            what = f"{key} has {contradicts}" if isinstance(contradicts, str) else key
            raise UserError(f"config: sync.adapters = unmerged: {what}: {why}; {remedy}, or set sync.adapters: merged")
