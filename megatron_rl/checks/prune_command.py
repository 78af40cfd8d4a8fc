"""Checks of the config section `prune`: components that this model lacks, and sizes that do not fit together after pruning."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from transformers import PreTrainedConfig

from megatron_rl.checks.refusals import Refusal, errors_of
from megatron_rl.compression.structured_pruning import Sizes, new_config
from megatron_rl.config import ModelConfig, ParallelConfig, PruneConfig
from megatron_rl.errors import UserError
from megatron_rl.models.families import architecture, family_of
from megatron_rl.models.parallel_check import check_parallel, read_hf_config
from megatron_rl.models.shape import Shape, linear_weights, whole_model


def sizes_of(prune: PruneConfig) -> Sizes:
    """Return the sizes of the pruned model that the config section asks for."""
    return Sizes(prune.layers, prune.heads, prune.width, prune.experts, prune.expert_width)


def pruned_model(
    prune: PruneConfig,
    model: ModelConfig,
    parallel: ParallelConfig,
    name: str,
    run_dir: Path,
    hf_config: PreTrainedConfig,
    world_size: int,
) -> Iterator[Refusal]:
    """Refuse a model that cannot be pruned as asked, an output folder in use, or a result that does not fit the layout."""
    source = Path(model.path)
    if quantized := getattr(hf_config, "quantization_config", None):
        raise UserError(
            f"model folder {source}: it is quantized ({quantized['quant_method']}); write unquantized weights first:"
            f" megatron-rl convert {source} CHECKPOINT, then megatron-rl convert CHECKPOINT FOLDER"
        )
    yield Refusal(
        (run_dir / "hf").resolve() == source.resolve() or any((run_dir / "checkpoints").glob("step_*")),
        f"name = {name}: prune would overwrite the folder hf of the run {run_dir}; set another name",
    )
    yield from _sizes(prune, hf_config)
    with tempfile.TemporaryDirectory() as folder:
        changed = json.loads((source / "config.json").read_text()) | new_config(source, sizes_of(prune), None)
        (Path(folder) / "config.json").write_text(json.dumps(changed))
        try:
            with errors_of("of the pruned model: section prune"):
                pruned = read_hf_config(folder)
                check_parallel(pruned, parallel, world_size)
        except UserError as error:
            raise UserError(str(error).replace(folder, str(source))) from None
    if prune.sparsity != "none":
        yield from _sparsity(prune, Shape.from_config(pruned))


def _sizes(prune: PruneConfig, hf_config: PreTrainedConfig) -> Iterator[Refusal]:
    shape, name = Shape.from_config(hf_config), architecture(hf_config)
    dense = len(shape.moe_layers) < shape.layers
    for key, missing, size, what, other in (
        ("layers", None, shape.layers, "layers", ""),
        ("heads", None, shape.heads, "query heads", ""),
        ("width", not dense and "dense MLP", shape.intermediate, "inner channels of an MLP", "use prune.expert_width"),
        (
            "experts",
            not shape.experts and "experts",
            shape.experts,
            "experts",
            "use prune.layers, heads or width",
        ),
        (
            "expert_width",
            not shape.experts and "experts",
            shape.expert_intermediate,
            "inner channels of an expert",
            "use prune.width",
        ),
    ):
        if (wanted := getattr(prune, key)) is not None:
            yield Refusal(missing, f"prune.{key} = {wanted}: {name} has no {missing}; {other}")
            yield Refusal(wanted > size, f"prune.{key} = {wanted}: the model has {size} {what}; use {size} or fewer")
    if prune.experts is not None:
        moe = family_of(hf_config).moe
        groups = getattr(hf_config, moe.groups) if moe and moe.groups else None
        key = f"prune.experts = {prune.experts}"
        yield Refusal(
            prune.experts < shape.topk, f"{key}: a token goes to {shape.topk} experts; use {shape.topk} or more"
        )
        yield Refusal(
            (groups or 1) > 1,
            f"{key}: config.json has {moe and moe.groups} = {groups}, and routing selects groups of neighboring"
            " experts; leave prune.experts out, and use prune.expert_width",
        )
    if prune.heads is not None:
        key = f"prune.heads = {prune.heads}"
        yield Refusal(shape.kv_lora, f"{key}: the heads of {name} share latent keys and values; leave prune.heads out")
        yield Refusal(
            family_of(hf_config).width_from_hidden,
            f"{key}: in {name}, the width of a head depends on the number of heads; leave prune.heads out",
        )
        of_group = shape.heads // shape.kv_heads
        yield Refusal(
            prune.heads % of_group,
            f"{key}: {of_group} query heads share a key-value head, and are removed together; use"
            f" {max(of_group, prune.heads // of_group * of_group)}",
        )


def _sparsity(prune: PruneConfig, shape: Shape) -> Iterator[Refusal]:
    """Refuse patterns that match nothing, and layers whose size N:M does not divide. shape: of the model to prune."""
    for pattern in prune.targets:
        yield Refusal(
            not linear_weights(shape, [pattern]),
            f"prune.targets: '{pattern}' matches no linear layer of attention, MLPs or experts; an example of a name"
            f" is {min(linear_weights(shape))}",
        )
    if prune.sparsity == "unstructured":
        return
    of, wanted = int(prune.sparsity.split(":")[1]), linear_weights(shape, prune.targets)
    for weight in filter(lambda weight: weight.is_matrix, whole_model(shape)):
        names = {weight.name.replace("*", str(i)) for i in range(weight.copies)}
        yield Refusal(
            names & wanted and weight.shape[1] % of,
            f"prune.sparsity = {prune.sparsity}: the {weight.shape[1]} inputs of {weight.name} are not a multiple of"
            f" {of}; name other layers in prune.targets",
        )
