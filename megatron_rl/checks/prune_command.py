"""Checks of the section prune: what cannot be removed from a model, and what would not fit together afterwards."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from transformers import PreTrainedConfig

from megatron_rl.checks.keys import check_prune_keys
from megatron_rl.compression.structured_pruning import Sizes, new_config
from megatron_rl.config import Config, PruneConfig
from megatron_rl.errors import UserError
from megatron_rl.models.families import architecture, family_of
from megatron_rl.models.parallel_check import check_parallel, read_hf_config
from megatron_rl.models.shape import Shape, linear_weights, whole_model


def sizes_of(prune: PruneConfig) -> Sizes:
    """The sizes that the section asks for."""
    return Sizes(prune.layers, prune.heads, prune.width, prune.experts, prune.expert_width)


def check_prune(config: Config, hf_config: PreTrainedConfig, world_size: int) -> None:
    """Errors: UserError naming the key of what cannot be removed, or the folder that cannot be pruned or written."""
    prune, source = config.prune, Path(config.model.path)
    check_prune_keys(config)
    if quantized := getattr(hf_config, "quantization_config", None):
        raise UserError(
            f"model folder {source}: is quantized ({quantized['quant_method']}); write plain weights first: megatron-rl"
            f" convert {source} CHECKPOINT, then megatron-rl convert CHECKPOINT FOLDER"
        )
    if (config.run_dir / "hf").resolve() == source.resolve() or any((config.run_dir / "checkpoints").glob("step_*")):
        raise UserError(
            f"config: name = {config.name}: prune would write over the hf folder of the run {config.run_dir}; set another name"
        )
    _check_sizes(prune, hf_config)
    _check_routing(config)
    sizes = sizes_of(prune)
    with tempfile.TemporaryDirectory() as folder:  # the pruned model has to be one that could be trained here
        changed = json.loads((source / "config.json").read_text()) | new_config(source, sizes, None)
        (Path(folder) / "config.json").write_text(json.dumps(changed))
        try:
            pruned = read_hf_config(folder)
            check_parallel(pruned, config.parallel, world_size)
        except UserError as error:
            raise UserError(f"{str(error).replace(folder, str(source))} (of the pruned model: section prune)") from None
    _check_sparsity(prune, pruned)


def _check_sizes(prune: PruneConfig, hf_config: PreTrainedConfig) -> None:
    shape, name = Shape.from_config(hf_config), architecture(hf_config)
    dense = len(shape.moe_layers) < shape.layers

    def refuse(key: str, why: str, remedy: str) -> None:
        raise UserError(f"config: prune.{key} = {getattr(prune, key)}: {why}; {remedy}")

    for key, there, size, what, other in (
        ("layers", True, shape.layers, "layers", ""),
        ("heads", True, shape.heads, "query heads", ""),
        ("width", dense, shape.intermediate, "inner channels of an MLP", "take prune.expert_width"),
        ("experts", shape.experts, shape.experts, "experts", "take prune.layers, heads or width"),
        ("expert_width", shape.experts, shape.expert_intermediate, "inner channels of an expert", "take prune.width"),
    ):
        if (wanted := getattr(prune, key)) is None:
            continue
        if not there:
            refuse(key, f"{name} has no {'dense MLP' if key == 'width' else 'experts'}", other)
        if wanted > size:
            refuse(key, f"the model has {size} {what}", f"take {size} or fewer")
    if prune.experts is not None and prune.experts < shape.topk:
        refuse("experts", f"a token goes to {shape.topk}", f"take {shape.topk} or more")
    moe = family_of(hf_config).moe
    groups = getattr(hf_config, moe.groups) if moe and moe.groups else None
    if moe and prune.experts is not None and (groups or 1) > 1:
        refuse(
            "experts",
            f"config.json has {moe.groups} = {groups}, and a token chooses among groups of neighboring experts",
            "leave it out, and take prune.expert_width",
        )
    if prune.heads is None:
        return
    if shape.kv_lora:
        refuse("heads", f"the heads of {name} share latent keys and values", "leave it out")
    if family_of(hf_config).width_from_hidden:
        refuse("heads", f"a head's width follows from the number of heads in {name}", "leave it out")
    if prune.heads % (of_group := shape.heads // shape.kv_heads):
        refuse(
            "heads",
            f"{of_group} query heads share a key-value head, and go with it",
            f"take {max(of_group, prune.heads // of_group * of_group)}",
        )


def _check_sparsity(prune: PruneConfig, hf_config: PreTrainedConfig) -> None:
    """hf_config: of the model that gets zeros."""
    default = PruneConfig()
    for key, idle, why in (
        ("method", prune.sparsity == "none", "without prune.sparsity"),
        ("targets", prune.sparsity == "none", "without prune.sparsity"),
        ("ratio", prune.sparsity != "unstructured", "is of prune.sparsity: unstructured"),
    ):
        if idle and getattr(prune, key) != getattr(default, key):
            raise UserError(f"config: prune.{key} does nothing {why}; leave it out, or set prune.sparsity")
    if prune.sparsity == "none":
        return
    shape = Shape.from_config(hf_config)
    for pattern in prune.targets:
        if not linear_weights(shape, [pattern]):
            raise UserError(
                f"config: prune.targets: '{pattern}' matches no linear layer of attention, MLPs or experts; names are such as"
                f" {min(linear_weights(shape))}"
            )
    if prune.sparsity == "unstructured":
        return
    keep, of = map(int, prune.sparsity.split(":"))
    if keep >= of:
        raise UserError(
            f"config: prune.sparsity = {prune.sparsity} leaves all {of} of {of} weights; take fewer, such as 2:4"
        )
    wanted = linear_weights(shape, prune.targets)
    for weight in whole_model(shape):
        names = {weight.name.replace("*", str(i)) for i in range(weight.copies)}
        if names & wanted and weight.shape[1] % of:
            raise UserError(
                f"config: prune.sparsity = {prune.sparsity}: the {weight.shape[1]} inputs of {weight.name} are no multiple of"
                f" {of}; name others in prune.targets"
            )


def _check_routing(config: Config) -> None:
    if config.prune.experts is None:
        return
    if config.model.moe_router_fusion:
        raise UserError(
            "config: prune.experts with model.moe_router_fusion: the fused router does not tell its choice; set it to false"
        )
    if config.model.moe_dispatcher != "alltoall":
        raise UserError(
            f"config: prune.experts needs what each expert of a token puts out, which model.moe_dispatcher ="
            f" {config.model.moe_dispatcher} adds up on the way; use alltoall"
        )
