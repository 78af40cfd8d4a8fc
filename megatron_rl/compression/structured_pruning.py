"""Removes experts, inner channels, groups of heads or whole layers from the model in a Hugging Face folder.

The module works on files only: it reads, cuts and writes tensors one by one, and adapts config.json. The model's family
determines which dimension of a tensor consists of heads, channels or experts (`models.families`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from megatron_rl.errors import UserError
from megatron_rl.models.families import STACKS, Family, Moe, Stack, family_of, stack_of
from megatron_rl.models.hf_folder import check_weight_files, copy_metadata, read_weights, whole_folder, write_weights
from megatron_rl.models.parallel_check import read_hf_config
from megatron_rl.models.shape import Shape

REPORT = "prune.json"
"""Name of the file that lists the kept experts, channels, heads and layers. It lies next to the weights."""


@dataclass(frozen=True)
class Kept:
    """Components to keep, by their numbers in the original model. Components that are not named here are kept in full."""

    layers: list[int] | None = None
    groups: Mapping[int, list[int]] = field(default_factory=dict)
    """{layer: key-value heads to keep, together with their query heads}."""
    channels: Mapping[int, list[int]] = field(default_factory=dict)
    """{layer: inner channels of its dense MLP to keep}."""
    shared: Mapping[int, list[int]] = field(default_factory=dict)
    """{layer: inner channels to keep, of all its shared experts together}."""
    experts: Mapping[int, list[int]] = field(default_factory=dict)
    """{layer: experts to keep}."""
    expert_channels: Mapping[int, list[list[int]]] = field(default_factory=dict)
    """{layer: inner channels to keep in each expert}; the list also has entries for removed experts."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the pruned model; None if a size does not change."""

    layers: int | None = None
    heads: int | None = None
    width: int | None = None
    experts: int | None = None
    expert_width: int | None = None


def remove_parts(source: Path, out: Path, kept: Kept, sizes: Sizes) -> None:
    """Write the model of `source` with only the kept components. An incomplete folder is never named `out`.

    Errors: UserError for an unknown tensor, or a folder that cannot be written.
    """
    check_weight_files(source)
    config: Any = read_hf_config(source)
    with whole_folder(out, replace=True) as partial:
        copy_metadata(source, partial, config.dtype or torch.float32, new_config(source, sizes, kept.layers))
        write_weights(partial, cut(read_weights(source), config, kept))


def new_config(source: Path, sizes: Sizes, layers: list[int] | None) -> dict[str, Any]:
    """Return the keys of config.json that change, with their new values. layers: the layers to keep."""
    config = json.loads((source / "config.json").read_text())
    hf_config = read_hf_config(source)
    shape, moe = Shape.from_config(hf_config), family_of(hf_config).moe
    new: dict[str, Any] = {}
    if sizes.layers is not None:
        layers = list(range(sizes.layers)) if layers is None else layers
        new["num_hidden_layers"] = sizes.layers
        if isinstance(config.get("layer_types"), list):
            new["layer_types"] = [config["layer_types"][layer] for layer in layers]
        if moe:
            new |= moe.keep_layers(hf_config, layers)
    if config.get("num_nextn_predict_layers"):
        new["num_nextn_predict_layers"] = 0  # draft layers were trained with the whole model
    if sizes.heads is not None:
        of_group = shape.heads // shape.kv_heads
        new |= {"num_attention_heads": sizes.heads, "num_key_value_heads": sizes.heads // of_group}
        new["head_dim"] = shape.head_dim  # else it is derived from the number of heads
    if sizes.width is not None:
        new["intermediate_size"] = sizes.width
    if moe and sizes.experts is not None:
        new |= {key: sizes.experts for key in _written_as(moe.experts, hf_config) if key in config}
    if moe and sizes.expert_width is not None:
        new[moe.intermediate] = sizes.expert_width
    return new


def _written_as(key: str, config: PreTrainedConfig) -> set[str]:
    """Return the names that a config key can have in config.json, because transformers writes some keys under another name."""
    return {
        key,
        config.attribute_map.get(key, key),
        *(name for name, other in config.attribute_map.items() if other == key),
    }


_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(\w+)\.weight")


def cut(tensors: Iterator[tuple[str, Tensor]], config: PreTrainedConfig, kept: Kept) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the pruned model under their new names. tensors: all tensors of the original folder.

    Errors: UserError for an unknown tensor.
    """
    shape, family = Shape.from_config(config), family_of(config)
    numbers = {old: new for new, old in enumerate(range(shape.layers) if kept.layers is None else kept.layers)}
    for name, tensor in tensors:
        if (match := _LAYER.fullmatch(name)) is None:
            yield name, tensor
        elif name.endswith("rotary_emb.inv_freq"):  # a constant in old folders
            continue
        elif (layer := int(match[1])) in numbers:
            rest, part = _of_layer(match[2], tensor, layer, shape, family, kept)
            if part is not None:
                yield f"model.layers.{numbers[layer]}.{rest}", part


def _of_layer(
    name: str, tensor: Tensor, layer: int, shape: Shape, family: Family, kept: Kept
) -> tuple[str, Tensor | None]:
    """Return (new name, kept part) of a layer's tensor; the part is None if the tensor is removed."""
    experts, channels = kept.experts.get(layer), kept.expert_channels.get(layer)
    moe, module = family.moe or Moe(), ["", *name.split(".")][-2]
    if (match := _EXPERT.fullmatch(name)) and match[3] in moe.linears:
        expert = int(match[2])
        if experts is not None and expert not in experts:
            return name, None
        number = expert if experts is None else experts.index(expert)
        columns = moe.linears[match[3]].cut == "columns"
        part = _take(tensor, int(columns), None if channels is None else channels[expert])
        return f"{match[1]}.{number}.{match[3]}.weight", part
    if (found := stack_of(name)) and found[1] in ("", "_bias"):
        return name, _stacked(tensor, STACKS[found[0]], found[1] == "_bias", experts, channels)
    if name in (f"{moe.block}.{moe.router}.{of_router}" for of_router in moe.of_router):
        return name, _take(tensor, 0, experts)
    groups, of_group = kept.groups.get(layer), shape.heads // shape.kv_heads
    if family.sinks and name.endswith(f".{family.sinks}"):
        return name, _take(tensor, 0, _rows(groups, of_group))
    if linear := family.linears.get(module):
        places = {
            "queries": _rows(groups, of_group * shape.head_dim),
            "keys": _rows(groups, shape.head_dim),
            "channels": (kept.shared if f".{moe.shared_experts}." in name else kept.channels).get(layer),
            "latents": None,
        }[linear.of]
        if linear.cut == "columns" and name.endswith(".bias"):
            return name, tensor
        return name, _take(tensor, int(linear.cut == "columns"), places)
    if module.endswith("norm"):
        return name, tensor
    raise UserError(f"model: there is no rule how to cut tensor {name} of layer {layer}; the model cannot be pruned")


def _rows(groups: list[int] | None, width: int) -> list[int] | None:
    return None if groups is None else [group * width + row for group in groups for row in range(width)]


def _take(tensor: Tensor, dim: int, places: list[int] | None) -> Tensor:
    return tensor if places is None else tensor.index_select(dim, torch.tensor(places))


def _stacked(
    tensor: Tensor, stack: Stack, bias: bool, experts: list[int] | None, channels: list[list[int]] | None
) -> Tensor:
    chosen = range(len(tensor)) if experts is None else experts
    if channels is None or (stack.channels == "in" and bias):
        return tensor[list(chosen)]
    turns = (0, 1) if stack.by_turns else (0,)
    places = [[len(turns) * c + half for c in channels[e] for half in turns] for e in chosen]
    dim = 0 if stack.channels == "in" else -1
    return torch.stack([_take(tensor[e], dim, of_expert) for e, of_expert in zip(chosen, places, strict=True)])


def choose(
    importance: Mapping[str, Tensor], sizes: Sizes, shape: Shape, keep: Callable[[Tensor, int], list[int]]
) -> Kept:
    """Choose the components of a model to keep, from the importance that `compression.calibration` measured.

    keep: function (importance [n], count) -> indices to keep.
    """

    def each(name: str, count: int | None, of: list[int]) -> dict[int, list[int]]:
        return {} if count is None else {layer: keep(importance[name][layer], count) for layer in of}

    layers = None if sizes.layers is None else keep(importance["layers"], sizes.layers)
    every = list(range(shape.layers)) if layers is None else layers
    moe = [layer for layer in every if layer in shape.moe_layers]
    of_group = shape.heads // shape.kv_heads
    shared = None
    if sizes.expert_width is not None and shape.shared_intermediate:
        shared = shape.shared_intermediate // shape.expert_intermediate * sizes.expert_width
    inner = {}
    if (width := sizes.expert_width) is not None:
        inner = {layer: [keep(expert, width) for expert in importance["expert_width"][layer]] for layer in moe}
    return Kept(
        layers=layers,
        groups=each("heads", None if sizes.heads is None else sizes.heads // of_group, every),
        channels=each("width", sizes.width, [layer for layer in every if layer not in moe]),
        shared=each("shared", shared, moe),
        experts=each("experts", sizes.experts, moe),
        expert_channels=inner,
    )
