"""A Hugging Face folder with parts of the model left out: experts, inner channels, groups of heads, whole layers.

Files alone: one tensor is read, cut and written after the other, and config.json follows. The weights on disk are, by family:
an expert a tensor each (`experts.N.gate_proj`, Mixtral's `experts.N.w1`), and all experts of a layer in one for gpt-oss
(`experts.gate_up_proj` [E, d, 2 F], gate and up by turns, and `experts.down_proj` [E, F, d]).
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

from megatron_rl.errors import UserError
from megatron_rl.models.hf_folder import check_weight_files, copy_metadata, read_weights, whole_folder, write_weights
from megatron_rl.models.parallel_check import read_hf_config
from megatron_rl.models.shape import Shape

REPORT = "prune.json"
"""Name of the file beside the weights that says which parts were kept."""


@dataclass(frozen=True)
class Kept:
    """Parts that stay, by their numbers in the model as it was; parts that are not named here stay whole."""

    layers: list[int] | None = None
    groups: Mapping[int, list[int]] = field(default_factory=dict)
    """Layer -> key-value heads that stay with their query heads."""
    channels: Mapping[int, list[int]] = field(default_factory=dict)
    """Layer -> inner channels of its dense MLP."""
    shared: Mapping[int, list[int]] = field(default_factory=dict)
    """Layer -> inner channels of all its shared experts together."""
    experts: Mapping[int, list[int]] = field(default_factory=dict)
    """Layer -> experts."""
    expert_channels: Mapping[int, list[list[int]]] = field(default_factory=dict)
    """Layer -> inner channels of each expert, of those that go too."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the pruned model; None: as they are."""

    layers: int | None = None
    heads: int | None = None
    width: int | None = None
    experts: int | None = None
    expert_width: int | None = None


def remove_parts(source: Path, out: Path, kept: Kept, sizes: Sizes) -> None:
    """Write the model of `source` with what is kept alone; `out` appears under its name when it is complete.

    Errors: UserError for a tensor that is not known, or a folder that cannot be written.
    """
    check_weight_files(source)
    config: Any = read_hf_config(source)
    shape = Shape.from_config(config)
    with whole_folder(out, replace=True) as partial:
        copy_metadata(source, partial, config.dtype or torch.float32, new_config(source, sizes, kept.layers))
        write_weights(partial, cut(read_weights(source), shape, kept))


def new_config(source: Path, sizes: Sizes, layers: list[int] | None) -> dict[str, Any]:
    """Keys of config.json that change. layers: those that stay."""
    config = json.loads((source / "config.json").read_text())
    shape = Shape.from_config(read_hf_config(source))
    new: dict[str, Any] = {}
    if sizes.layers is not None:
        layers = list(range(sizes.layers)) if layers is None else layers
        new["num_hidden_layers"] = sizes.layers
        if isinstance(config.get("layer_types"), list):
            new["layer_types"] = [config["layer_types"][layer] for layer in layers]
        if "first_k_dense_replace" in config:
            new["first_k_dense_replace"] = sum(layer < config["first_k_dense_replace"] for layer in layers)
    if config.get("num_nextn_predict_layers"):
        new["num_nextn_predict_layers"] = 0  # draft layers, which learned to follow the whole model
    if sizes.heads is not None:
        of_group = shape.heads // shape.kv_heads
        new |= {"num_attention_heads": sizes.heads, "num_key_value_heads": sizes.heads // of_group}
        new["head_dim"] = shape.head_dim  # else it is read off the number of heads
    if sizes.width is not None:
        new["intermediate_size"] = sizes.width
    if sizes.experts is not None:
        new |= {name: sizes.experts for name in EXPERT_COUNTS if name in config}
    if sizes.expert_width is not None:
        new["moe_intermediate_size" if "moe_intermediate_size" in config else "intermediate_size"] = sizes.expert_width
    return new


EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"((?:mlp|block_sparse_moe)\.experts)\.(\d+)\.(\w+)\.weight")
_INNER = re.compile(r"mlp\.(shared_experts\.)?(gate|up|down)_proj\.(weight|bias)")
_HEADS = re.compile(r"self_attn\.([qkvo])_proj\.(weight|bias)|self_attn\.(sinks)")
_ROUTER = re.compile(r"(mlp|block_sparse_moe)\.(gate|router)\.(weight|bias|e_score_correction_bias)")
_STACKED = re.compile(r"mlp\.experts\.(gate_up|down)_proj(_bias)?")
_WHOLE = re.compile(r"(input|post_attention)_layernorm\.weight|self_attn\.(q|k|kv_a|q_a)_(norm|layernorm)\.weight")
_LATENT = re.compile(r"self_attn\.(q_a|q_b|kv_b|kv_a)_proj(_with_mqa)?\.(weight|bias)")


def cut(tensors: Iterator[tuple[str, Tensor]], shape: Shape, kept: Kept) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a folder -> those of the pruned model, under their new names.

    Errors: UserError for a tensor that is not known.
    """
    numbers = {old: new for new, old in enumerate(range(shape.layers) if kept.layers is None else kept.layers)}
    for name, tensor in tensors:
        if (match := _LAYER.fullmatch(name)) is None:
            yield name, tensor
        elif name.endswith("rotary_emb.inv_freq"):  # of old folders: a constant
            continue
        elif (layer := int(match[1])) in numbers:
            rest, part = _of_layer(match[2], tensor, layer, shape, kept)
            if part is not None:
                yield f"model.layers.{numbers[layer]}.{rest}", part


def _of_layer(name: str, tensor: Tensor, layer: int, shape: Shape, kept: Kept) -> tuple[str, Tensor | None]:
    """Name and part of a tensor of one layer; None: it goes."""
    experts, channels = kept.experts.get(layer), kept.expert_channels.get(layer)
    if match := _EXPERT.fullmatch(name):
        expert = int(match[2])
        if experts is not None and expert not in experts:
            return name, None
        number = expert if experts is None else experts.index(expert)
        down = match[3] in ("down_proj", "w2")
        return f"{match[1]}.{number}.{match[3]}.weight", _take(
            tensor, int(down), None if channels is None else channels[expert]
        )
    if match := _STACKED.fullmatch(name):
        return name, _stacked(tensor, match[1] == "down", bool(match[2]), experts, channels)
    if _ROUTER.fullmatch(name):
        return name, _take(tensor, 0, experts)
    if match := _INNER.fullmatch(name):
        inner = (kept.shared if match[1] else kept.channels).get(layer)
        if match[2] == "down":
            return name, tensor if match[3] == "bias" else _take(tensor, 1, inner)
        return name, _take(tensor, 0, inner)
    if match := _HEADS.fullmatch(name):
        groups = kept.groups.get(layer)
        if groups is None or (match[1] == "o" and match[2] == "bias"):
            return name, tensor
        of_group = shape.heads // shape.kv_heads
        width = of_group if match[3] else shape.head_dim * (1 if match[1] in ("k", "v") else of_group)
        rows = [group * width + row for group in groups for row in range(width)]
        return name, _take(tensor, int(match[1] == "o"), rows)
    if _WHOLE.fullmatch(name) or _LATENT.fullmatch(name):
        return name, tensor
    raise UserError(f"model: there is no rule how to cut tensor {name} of layer {layer}; it cannot be pruned")


def _take(tensor: Tensor, dim: int, places: list[int] | None) -> Tensor:
    return tensor if places is None else tensor.index_select(dim, torch.tensor(places))


def _stacked(
    tensor: Tensor, down: bool, bias: bool, experts: list[int] | None, channels: list[list[int]] | None
) -> Tensor:
    chosen = range(len(tensor)) if experts is None else experts
    if channels is None or (down and bias):
        return tensor[list(chosen)]
    if down:
        return torch.stack([tensor[e][channels[e]] for e in chosen])
    by_turns = [[2 * c + half for c in channels[e] for half in (0, 1)] for e in chosen]
    return torch.stack([tensor[e][..., places] for e, places in zip(chosen, by_turns, strict=True)])


def choose(
    importance: Mapping[str, Tensor], sizes: Sizes, shape: Shape, keep: Callable[[Tensor, int], list[int]]
) -> Kept:
    """Choose the parts of a model that stay, by what `trainer.calibration` found.

    keep: importance [n], how many -> their places.
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
