"""Zeros for the weights of the trainer's model, layer after layer, by what enters each on calibration data.

A layer is looked at in a pass of its own, in which those before it have their zeros already. Statistics are sums over the
processes that hold parts of the same layer, and rows that tensor parallelism cuts are pruned whole, so that the result does not
depend on the layout.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from torch import Tensor

from megatron_rl.algorithms.sparsity import Pattern, magnitude, sparsegpt, wanda
from megatron_rl.config import PruneConfig
from megatron_rl.data.packing import Batch
from megatron_rl.models.sizes import Shape, linear_weights
from megatron_rl.trainer.calibration import Watched, layers_of, watch_experts, watching
from megatron_rl.trainer.parallel import process_group
from megatron_rl.trainer.trainer import Trainer


def pattern_of(config: PruneConfig) -> Pattern:
    """What prune.sparsity asks for."""
    if config.sparsity == "unstructured":
        return Pattern(ratio=config.ratio)
    keep, of = map(int, config.sparsity.split(":"))
    return Pattern(keep, of)


@torch.no_grad()
def sparsify(trainer: Trainer, batches: list[Batch], shape: Shape, config: PruneConfig) -> None:
    """Prune the weights of config.targets in place. batches: this data-parallel rank's. Collective."""
    pattern, wanted = pattern_of(config), linear_weights(shape, config.targets)
    named = {id(p): name for names in trainer.model.parameter_names(trainer.chunks) for name, p in names.items()}
    of_layer: dict[int, list[Linear]] = defaultdict(list)
    layers = {layer.layer_number - 1: layer for chunk in trainer.chunks for layer in layers_of(chunk)}
    for number, layer in layers.items():
        for module in layer.modules():
            name = named.get(id(getattr(module, "weight", None)), "")
            if name in wanted:
                of_layer[number].append(Linear(module, ".mlp.experts." in name, gram=config.method == "sparsegpt"))
    for number in range(shape.layers):
        mine = of_layer[number]
        if config.method != "magnitude":
            with watching(trainer, batches) as (watched, stack):
                look_at(layers.get(number), mine, watched, stack)
                trainer.compute_log_probs(batches, hooks=[])
        for linear in mine:
            linear.prune(config.method, pattern)


def look_at(layer: Any, linears: Sequence[Linear], watched: Watched, stack: ExitStack) -> None:
    """Hook what enters the linear layers of one transformer layer."""

    def see(linear: Linear) -> Callable[..., None]:
        return lambda module, args: linear.add(watched.rows(args[0]))

    by_module = {id(linear.module): linear for linear in linears if linear.expert}
    for linear in linears:
        if not linear.expert:
            stack.callback(linear.module.register_forward_pre_hook(see(linear)).remove)

    def see_experts(rows: Tensor, counts: list[int], modules: Sequence[Any]) -> None:
        for part, module in zip(rows.split(counts), modules, strict=True):
            if id(module) in by_module:
                by_module[id(module)].add(part)

    if by_module:
        watch_experts(layer.mlp.experts, see_experts, stack)


class Linear:
    """A linear layer of Megatron, or this process's part of one, and what has entered it."""

    def __init__(self, module: Any, expert: bool, *, gram: bool) -> None:
        """gram: keep X X^T [in, in], and not its diagonal alone."""
        self.module, self.expert = module, expert
        self._gram = gram
        self._sum: Tensor | None = None

    def add(self, rows: Tensor) -> None:
        """Inputs [n, in], or this process's columns of them."""
        rows = self._whole(rows).float()
        found = (rows.t() @ rows if self._gram else rows.square().sum(0)).double()
        self._sum = found if self._sum is None else self._sum + found

    def prune(self, method: str, pattern: Pattern) -> None:
        """Give the weight its zeros, and forget what has entered. Collective over the processes of the layer."""
        weight = self._whole(self.module.weight)
        if method == "magnitude":
            pruned = magnitude(weight, pattern)
        else:
            size = weight.shape[1]
            nothing = weight.new_zeros((size, size) if self._gram else (size,), dtype=torch.float64)
            found = nothing if self._sum is None else self._sum
            # Where all tensor-parallel ranks have seen the same rows they count several times: only ratios matter.
            dist.all_reduce(found, group=self._group())
            pruned = (sparsegpt if self._gram else wanda)(weight, found, pattern)
        own = self.module.weight.shape[1]
        rank = self._tensor_group().rank() if own < weight.shape[1] else 0
        self.module.weight.copy_(pruned[:, rank * own : (rank + 1) * own])
        self._sum = None

    def _whole(self, part: Tensor) -> Tensor:
        """All columns of a row of inputs, or of the weight."""
        if not isinstance(self.module, RowParallelLinear) or self._tensor_group().size() == 1:
            return part
        return gather_from_tensor_model_parallel_region(part.contiguous(), group=self._tensor_group())

    def _tensor_group(self) -> dist.ProcessGroup:
        if self.expert:
            return process_group(parallel_state.get_expert_tensor_parallel_group())
        return process_group(parallel_state.get_tensor_model_parallel_group())

    def _group(self) -> dist.ProcessGroup:
        if self.expert:
            return process_group(parallel_state.get_expert_data_parallel_group())
        return process_group(parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True))
