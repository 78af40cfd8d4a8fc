"""Low-rank adapters on linear layers: LoRA (Hu et al. 2021) and DoRA (Liu et al. 2024), with Megatron-Bridge's modules.

A layer with weight W and an adapter of rank r computes W x + (alpha / r) B A x. A starts with random numbers and B with zeros,
so the initial model is unchanged. The seed and the layer's name determine A, so A is the same on every parallel layout.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.bridge.models.conversion.model_bridge import WeightConversionTask
from megatron.bridge.peft.adapter_wrapper import AdapterWrapper
from megatron.bridge.peft.dora import DoRA
from megatron.bridge.peft.dora_layers import DoRALinear
from megatron.bridge.peft.lora import LoRA
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from megatron_rl.config import LoRAConfig
from megatron_rl.models.freeze import EXPERTS, is_target
from megatron_rl.models.router import ReplayRouter, RouterAdapter

WRAPPED = ".to_wrap."
"""Part that Megatron-Bridge inserts into the name of a weight when the weight's layer gets an adapter."""


@dataclass(frozen=True)
class Adapter:
    """This rank's adapter of one layer, or of one expert in a grouped layer."""

    name: str
    """Name of the layer in the whole model (`models.freeze`), without `.weight`."""
    layer: AdapterWrapper | ReplayRouter
    weight: torch.nn.Parameter
    """This rank's part of the layer's weight, [out, in]."""
    row: int | None = None
    """Index of the expert, if one tensor holds the adapters of several experts."""

    @property
    def module(self) -> Any:
        """Module with `linear_in` (A) and `linear_out` (B)."""
        return self.layer.adapter

    @property
    def scale(self) -> float:
        """Factor alpha / rank, by which the product B A is multiplied."""
        return self.module.alpha / self.module.dim

    @property
    def group(self) -> dist.ProcessGroup | None:
        """Group of tensor-parallel ranks over which the adapter is split; None if each rank has all of it."""
        group = getattr(self.module, "tp_group", None)
        whole = isinstance(self.layer, ReplayRouter) or group is None or group.size() == 1
        return None if whole else group

    def down(self) -> Tensor:
        """Return A [r, in]: the parts of all ranks, concatenated. Collective over `group`."""
        weight = self._of(self.module.linear_in.weight)
        return _join(weight, self.group, 1 if self.module.input_is_parallel else 0)

    def up(self) -> Tensor:
        """Return B [out, r]: the parts of all ranks, concatenated. Collective over `group`."""
        return _join(self._of(self.module.linear_out.weight), self.group, 0)

    @property
    def is_expert(self) -> bool:
        """True if the adapter belongs to an expert. Each expert-parallel rank holds its own experts."""
        return EXPERTS in self.name

    @property
    def gated(self) -> bool:
        """True if the layer's weight stacks the gate projection and the up projection of a gated MLP."""
        return self.name.endswith(".linear_fc1") and bool(self.module.config.gated_linear_unit)

    @torch.no_grad()
    def set(self, down: Tensor, up: Tensor) -> None:
        """Set this rank's parts of A and B."""
        self._of(self.module.linear_in.weight).copy_(down)
        self._of(self.module.linear_out.weight).copy_(up)

    @property
    def magnitude(self) -> torch.nn.Parameter | None:
        """Row lengths [out] of DoRA; None for LoRA."""
        return self.module.weight_magnitude if isinstance(self.layer, DoRALinear) else None

    @torch.no_grad()
    def merged(self) -> Tensor:
        """Return this rank's weight with the adapter merged in, computed in fp32 and rounded once. Collective over `group`."""
        down, up = self.down(), self.up()
        if self.group is not None:  # this rank's columns of A or rows of B
            rank, size = self.group.rank(), self.group.size()
            if self.module.input_is_parallel:
                down = down.chunk(size, 1)[rank]
            else:
                up = up.chunk(size, 0)[rank]
        weight = self.weight.float() + self.scale * (up.float() @ down.float())
        if self.magnitude is not None:
            weight *= (self.magnitude.float() / weight.norm(dim=1)).unsqueeze(1)
        return weight.to(self.weight.dtype)

    def _of(self, weight: Tensor) -> Tensor:
        return weight.detach() if self.row is None else weight.detach()[self.row]


def _join(part: Tensor, group: dist.ProcessGroup | None, dim: int) -> Tensor:
    if group is None:
        return part
    parts = [torch.empty_like(part) for _ in range(group.size())]
    dist.all_gather(parts, part.contiguous(), group=group)
    return torch.cat(parts, dim)


def add_adapters(config: LoRAConfig, chunk: GPTModel, names: Mapping[str, str], *, seed: int) -> list[str]:
    """Add adapters to a chunk's target layers and freeze all other weights. Return the names of these layers.

    names: local name of each parameter -> its plain name in the whole model.
    """
    chunk.requires_grad_(False)
    options: dict[str, Any] = {"target_modules": ["*"], "dim": config.rank, "alpha": config.alpha}
    options |= {"dropout": config.dropout}
    if config.kind == "dora":
        peft: LoRA | DoRA = DoRA(**options)
    else:
        peft = LoRA(**options, share_expert_adapters=False)
    added = []
    for local, module in [*chunk.named_modules()]:
        own = [f"{local}.{name}" for name, weight in module.named_parameters(recurse=False) if weight.ndim == 2]
        if not any(is_target(names[name], config.targets) for name in own):
            continue
        prefix, _, leaf = local.rpartition(".")
        if isinstance(module, ReplayRouter):
            module.adapter = RouterAdapter(module, config.rank, config.alpha)
            wrapped: Any = module
        else:
            wrapped = peft.transform(module, leaf, prefix)
            setattr(chunk.get_submodule(prefix), leaf, wrapped)
        wrapped.adapter.to(module.get_parameter(own[0].rpartition(".")[2]).device)
        added += [names[name].removesuffix(".weight") for name in own]
    for adapter in adapters(chunk, names):
        _initialize(adapter, seed)
    return added


def adapters(chunk: torch.nn.Module, names: Mapping[str, str]) -> Iterator[Adapter]:
    """Yield the adapters of a chunk. names: as in `add_adapters`, collected before or after the adapters were added."""
    for local, module in chunk.named_modules():
        if isinstance(module, ReplayRouter) and module.adapter is not None:
            yield Adapter(names[f"{local}.weight"].removesuffix(".weight"), module, module.weight)
        elif isinstance(module, AdapterWrapper):
            grouped = module.adapter.get_submodule("linear_in").get_parameter("weight").ndim == 3
            weights = [
                (name, weight) for name, weight in module.to_wrap.named_parameters(recurse=False) if weight.ndim == 2
            ]
            for row, (name, weight) in enumerate(weights):
                whole = names.get(f"{local}.{name}") or names[f"{local}.to_wrap.{name}"]
                yield Adapter(whole.removesuffix(".weight"), module, weight, row if grouped else None)


@torch.no_grad()
def _initialize(adapter: Adapter, seed: int) -> None:
    """Initialize A like PEFT (uniform, Kaiming with a = sqrt 5) and B with zeros."""
    weight = adapter._of(adapter.module.linear_in.weight)
    group = adapter.group
    rank, size = (group.rank(), group.size()) if group is not None else (0, 1)
    dim = 1 if adapter.module.input_is_parallel else 0
    shape = [n * size if i == dim else n for i, n in enumerate(weight.shape)]
    digest = hashlib.sha256(f"{seed}/{adapter.name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    bound = 1 / math.sqrt(shape[1])
    whole = torch.empty(shape).uniform_(-bound, bound, generator=generator)
    weight.copy_(whole.chunk(size, dim)[rank])
    adapter._of(adapter.module.linear_out.weight).zero_()


@contextmanager
def adapters_off(chunks: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Turn the chunks' adapters off inside the block, so that the layers use only their frozen weights."""
    modules = [m for chunk in chunks for m in chunk.modules() if isinstance(m, AdapterWrapper | RouterAdapter)]
    for module in modules:
        module.disable_adapter_layers()
    try:
        yield
    finally:
        for module in modules:
            module.enable_adapter_layers()


def merged_tasks(tasks: Iterable[WeightConversionTask], found: Iterable[Adapter]) -> Iterator[WeightConversionTask]:
    """Yield a model's export tasks one at a time. The task of a weight with an adapter gets the merged weight.

    Collective over the tensor-parallel ranks.
    """
    by_weight = {id(adapter.weight): adapter for adapter in found}
    for task in tasks:
        name = task.global_param_name.replace(WRAPPED, ".")
        adapter = by_weight.get(id(task.param_weight))
        yield replace(task, global_param_name=name, param_weight=adapter.merged() if adapter else task.param_weight)
