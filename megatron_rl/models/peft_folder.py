"""Adapters in the format of Hugging Face's PEFT: adapter_config.json and adapter_model.safetensors.

In PEFT's format, each projection and each expert is a layer of its own. Megatron fuses some of them (q, k and v; gate and up)
with one adapter over the fused rows. All parts of a fused layer share its A, and its B is split by rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
from megatron.bridge.models.conversion.param_mapping import split_qkv_weights
from megatron.core import parallel_state
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_rl.config import LoRAConfig
from megatron_rl.data.hub import as_folder, as_id, hub_id
from megatron_rl.errors import UserError
from megatron_rl.models.adapters import Adapter
from megatron_rl.models.bridges import make_bridge
from megatron_rl.models.freeze import any_number, is_target
from megatron_rl.models.hf_folder import copy_metadata, read_weights, whole_folder, write_weights
from megatron_rl.models.parallel_check import read_hf_config
from megatron_rl.models.shape import Shape, parameter_names

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
A, B, MAGNITUDE = ".lora_A.weight", ".lora_B.weight", ".lora_magnitude_vector"
SCORE = "score.weight"
HEAD = PREFIX + SCORE
CHANGES_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Prefixes of the init_lora_weights values with which PEFT moves a part of the model's weights into a new adapter. The B A of
such an adapter does not fit the original model. PEFT can convert it (path_initial_model_for_weight_conversion)."""


@dataclass(frozen=True)
class LowRank:
    """A low-rank update of one layer: scale x B A."""

    down: Tensor
    """Matrix A, [r, in]."""
    up: Tensor
    """Matrix B, [out, r]."""
    magnitude: Tensor | None = None
    """Row lengths of DoRA, [out]; None for LoRA."""

    def merged(self, weight: Tensor, scale: float) -> Tensor:
        """Return the layer's weight [out, in] plus the update, computed in fp32 and rounded once."""
        merged = weight.float() + scale * (self.up.float() @ self.down.float())
        if self.magnitude is not None:
            merged *= (self.magnitude.float() / merged.norm(dim=1)).unsqueeze(1)
        return merged.to(weight.dtype)


# -- names -------------------------------------------------------------------------------------------------------------


def check_form(registry: MegatronMappingRegistry, name: str) -> list[str]:
    """Return the names of the Hugging Face layers that form a Megatron layer: q, k and v; gate and up; or a single one.

    Errors: UserError for a layer that PEFT's format cannot represent.
    """
    mapping = registry.megatron_to_hf_lookup(f"{name}.weight")
    hf_param: Any = mapping.hf_param if mapping else ""
    parts = [hf_param]
    for fused in (("q", "k", "v"), ("gate", "up")):
        if isinstance(hf_param, Mapping) and set(hf_param) == set(fused):
            parts = [hf_param[part] for part in fused]
    if not all(isinstance(part, str) and part.endswith(".weight") for part in parts):
        raise UserError(
            f"config: lora.targets has {name}: PEFT's format has no adapters for {hf_param or 'such layers'}, which hold all"
            " experts of a layer in one tensor; use only *.self_attention.linear_*"
        )
    return [part.removesuffix(".weight") for part in parts]


def adapted_modules(path: str, targets: Sequence[str]) -> list[str]:
    """Return the last name parts (such as q_proj) of the Hugging Face layers that get adapters.

    path: model folder. targets: lora.targets.
    """
    hf_config = read_hf_config(path)
    registry, layers = make_bridge(hf_config).mapping_registry(), set()
    names = parameter_names(Shape.from_config(hf_config))
    for name in {any_number(name): name for name in names if is_target(name, targets)}.values():
        layers |= {layer.rpartition(".")[2] for layer in check_form(registry, name.removesuffix(".weight"))}
    return sorted(layers)


def hf_layers(registry: MegatronMappingRegistry, config: Any, name: str, rows: int) -> list[tuple[str, Tensor]]:
    """Return (Hugging Face layer, indices [n] of its rows in the fused weight) for each part of a Megatron layer.

    Errors: see check_form.
    """
    layers, every = check_form(registry, name), torch.arange(rows)
    if len(layers) == 3:
        parts = [part.flatten() for part in split_qkv_weights(config, every.view(-1, 1), feature_dim=1)]
    else:
        parts = every.chunk(len(layers))
    return [*zip(layers, parts, strict=True)]


# -- from and to the model ---------------------------------------------------------------------------------------------


def gather(adapters: Iterable[Adapter]) -> dict[str, LowRank]:
    """Return all adapters of the model on rank 0, unsplit and in host memory, by layer name. Collective."""
    mine: dict[str, LowRank] = {}
    for adapter in adapters:
        down, up, magnitude = adapter.down(), adapter.up(), adapter.magnitude
        if adapter.gated and adapter.group is not None:  # each rank has parts of gate and up
            halves = [part.chunk(2) for part in up.chunk(adapter.group.size())]
            up = torch.cat([torch.cat(half) for half in zip(*halves, strict=True)])
        if _is_ours(adapter):
            host = [None if t is None else t.detach().cpu().clone() for t in (down, up, magnitude)]
            mine[adapter.name] = LowRank(*host)  # pyright: ignore[reportArgumentType]: the first two are there
    parts: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(mine, parts)
    return {name: found for part in parts or [] for name, found in sorted(part.items())}


def _is_ours(adapter: Adapter) -> bool:
    """Return True if this rank contributes the adapter to `gather`. Exactly one of the ranks with this adapter does so."""
    if adapter.is_expert:
        return parallel_state.get_expert_data_parallel_rank() == 0
    first_copy = parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
    return first_copy and parallel_state.get_tensor_model_parallel_rank() == 0


def to_peft(found: Mapping[str, LowRank], registry: MegatronMappingRegistry, config: Any) -> dict[str, Tensor]:
    """Return the tensors of an adapter_model.safetensors file."""
    tensors = {}
    for name, low_rank in found.items():
        for layer, rows in hf_layers(registry, config, name, len(low_rank.up)):
            tensors[f"{PREFIX}{layer}{A}"] = low_rank.down.clone()
            tensors[f"{PREFIX}{layer}{B}"] = low_rank.up[rows].contiguous()
            if low_rank.magnitude is not None:
                tensors[f"{PREFIX}{layer}{MAGNITUDE}"] = low_rank.magnitude[rows].contiguous()
    return tensors


def write_folder(folder: Path, tensors: dict[str, Tensor], lora: LoRAConfig, base: Path) -> None:
    """Write a folder in PEFT's format. base: folder of the model. Errors: OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    layers = {name.removeprefix(PREFIX).removesuffix(A) for name in tensors if name.endswith(A)}
    base_id = as_id(str(base))
    # The folder may be read from another working directory, so a path is made absolute.
    named, _, revision = base_id.partition("@") if base_id != str(base) else (str(base.resolve()), "", "")
    settings = {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if HEAD in tensors else "CAUSAL_LM",
        "base_model_name_or_path": named,
        "revision": revision or None,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": _target_modules(layers, base),
        "modules_to_save": ["score"] if HEAD in tensors else None,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_dora": lora.kind == "dora",
        "use_rslora": False,
        "inference_mode": True,
        "init_lora_weights": True,
    }
    try:
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    except SafetensorError as error:  # the disk is full
        raise OSError(*error.args) from None
    (folder / CONFIG).write_text(json.dumps(settings, indent=2) + "\n")


def _target_modules(layers: set[str], base: Path) -> list[str]:
    """Return the last parts of the layers' names, or full names if other layers have the same last part."""
    last = {layer.rpartition(".")[2] for layer in layers}
    others = {name.removesuffix(".weight") for name in _names(base) if name.endswith(".weight")} - layers
    return sorted(layers if any(other.rpartition(".")[2] in last for other in others) else last)


def _names(folder: Path) -> Iterator[str]:
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            yield from opened.keys()


# -- reading -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PeftFolder:
    """Contents of an adapter folder, by the names of Hugging Face's layers."""

    path: Path
    settings: dict[str, Any]
    layers: dict[str, LowRank]
    score: Tensor | None
    """Weight of a reward model's head, [1, hidden]; None without one."""

    def scale(self, layer: str) -> float:
        """Return the factor by which B A is multiplied in a layer."""
        rank = self.layers[layer].down.shape[0]
        alpha = float(self.settings.get("lora_alpha", 8))
        return alpha / rank**0.5 if self.settings.get("use_rslora") else alpha / rank


def read_folder(folder: Path) -> PeftFolder:
    """Read an adapter folder. Errors: UserError that names what is missing, damaged or not supported."""
    try:
        settings = json.loads((folder / CONFIG).read_text())
        with safe_open(folder / WEIGHTS, "pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (no mapping)
    except FileNotFoundError as error:
        raise UserError(f"adapter folder {folder}: {Path(error.filename or '').name} is missing") from None
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(f"adapter folder {folder}: damaged ({' '.join(str(error).split())[:200]})") from None
    for key, supported in (
        ("peft_type", ("LORA",)),
        ("bias", ("none", None)),
        ("fan_in_fan_out", (False, None)),
        ("alpha_pattern", ({}, None)),
        ("modules_to_save", ([], ["score"], None)),
    ):
        if (value := settings.get(key)) not in supported:
            raise UserError(f"adapter folder {folder}: {key} = {value} is not supported; only {supported[0]} is")
    start = str(settings.get("init_lora_weights")).lower()
    if start.startswith(CHANGES_THE_BASE):
        raise UserError(
            f"adapter folder {folder}: init_lora_weights = {start} has changed the weights of its model; save it with PEFT's"
            " path_initial_model_for_weight_conversion, which makes a plain adapter"
        )
    score = tensors.pop(HEAD, None)
    layers = {}
    for name in sorted(tensors):
        layer = name.removeprefix(PREFIX)
        if name.endswith(A) and name.removesuffix(A) + B in tensors:
            key = name.removesuffix(A)
            layers[layer.removesuffix(A)] = LowRank(tensors[name], tensors[key + B], tensors.get(key + MAGNITUDE))
        elif not name.endswith((B, MAGNITUDE)):
            raise UserError(f"adapter folder {folder}: tensor {name} is not supported: it is neither LoRA's nor DoRA's")
    if not layers:
        raise UserError(f"adapter folder {folder}: {WEIGHTS} has no adapters")
    return PeftFolder(folder, settings, layers, score)


def fill(adapters: Iterable[Adapter], folder: PeftFolder, registry: MegatronMappingRegistry, config: Any) -> list[str]:
    """Fill a model's adapters from a folder; adapters without an entry stay unchanged. Return the layers that were used.

    If the folder's layers for q, k and v (or gate and up) do not share one A, the fused layer's adapter needs at least the sum
    of their ranks as its rank. Errors: UserError if an adapter's rank is too small.
    """
    taken = []
    for adapter in adapters:
        group = adapter.group
        rank, size = (group.rank(), group.size()) if group is not None else (0, 1)
        down, up = adapter.down(), adapter.up()
        layers = hf_layers(registry, config, adapter.name, len(up))
        found = [(folder.layers[layer], folder.scale(layer), rows) for layer, rows in layers if layer in folder.layers]
        if not found:
            continue
        taken += [layer for layer, _ in layers if layer in folder.layers]
        shared = all(torch.equal(part.down, found[0][0].down) for part, *_ in found)
        parts = found[:1] if shared else found
        wanted = sum(part.down.shape[0] for part, *_ in parts)
        if wanted > adapter.module.dim:
            raise UserError(
                f"config: lora.rank = {adapter.module.dim} is too small for lora.path = {folder.path}: {adapter.name} needs"
                f" {wanted}" + ("" if shared else ", because the layers that it fuses have different A's")
            )
        up.zero_()
        start = 0
        for part, scale, rows in found:
            ranks = part.down.shape[0]
            down[start : start + ranks] = part.down.to(down)
            up[rows, start : start + ranks] = (part.up.float() * (scale / adapter.scale)).to(up)
            start += 0 if shared else ranks
        if adapter.gated and size > 1:
            up = torch.cat(
                [torch.cat(halves) for halves in zip(*(half.chunk(size) for half in up.chunk(2)), strict=True)]
            )
        adapter.set(down.chunk(size, 1 if adapter.module.input_is_parallel else 0)[rank], up.chunk(size)[rank])
        if adapter.magnitude is not None:
            for part, _, rows in found:
                if part.magnitude is not None:
                    adapter.magnitude.data[rows] = part.magnitude.to(adapter.magnitude)
    return taken


# -- merging -----------------------------------------------------------------------------------------------------------


def _base_of(folder: Path, settings: Mapping[str, Any]) -> Path:
    """Return the model folder that the adapter's settings name by its path or by its Hugging Face id. Errors: UserError."""
    named, revision = settings.get("base_model_name_or_path") or "", settings.get("revision")
    if named and not Path(named).exists() and hub_id(named) is not None:
        try:
            return Path(as_folder(f"{named}@{revision}" if revision else named, "its model"))
        except UserError as error:
            raise UserError(f"adapter folder {folder}: {error}; name the model's folder with --base") from None
    return Path(named)


def merge_folder(folder: Path, out: Path, base: Path | None = None, metadata: Path | None = None) -> None:
    """Merge adapters into the weights of their model, and write the result as a Hugging Face folder.

    folder: adapter folder. base: model folder; by default, the model that the adapter folder names. metadata: folder from which
    config.json and tokenizer are copied. Errors: UserError.
    """
    adapter = read_folder(folder)
    base = base or _base_of(folder, adapter.settings)
    if not (base / "config.json").is_file():
        raise UserError(
            f"adapter folder {folder}: belongs to the model {base}, which does not exist; give its folder with --base"
        )
    if "quantization_config" in json.loads((base / "config.json").read_text()):
        raise UserError(f"adapter folder {folder}: its model {base} is quantized; adapters need unquantized weights")
    left = set(adapter.layers)

    def merged() -> Iterator[tuple[str, Tensor]]:
        for name, weight in read_weights(base):
            layer = name.removesuffix(".weight")
            if name == "lm_head.weight" and adapter.score is not None:
                continue
            if layer in adapter.layers:
                left.discard(layer)
                fits = (adapter.layers[layer].up.shape[0], adapter.layers[layer].down.shape[1])
                if fits != weight.shape:
                    wrong = f"its {layer} fits a weight of {list(fits)}, but the model {base} has {list(weight.shape)}"
                    raise UserError(f"adapter folder {folder}: {wrong}; give another --base")
                yield name, adapter.layers[layer].merged(weight, adapter.scale(layer))
            else:
                yield name, weight
        if adapter.score is not None:
            yield SCORE, adapter.score

    config = json.loads((base / "config.json").read_text())
    dtype = getattr(torch, config.get("dtype") or config.get("torch_dtype") or "float32")
    with whole_folder(out) as partial:
        copy_metadata(metadata or base, partial, dtype)
        write_weights(partial, merged())
        if left:
            raise UserError(
                f"adapter folder {folder}: {sorted(left)[0]} is not a layer of the model {base}; give another --base"
            )
