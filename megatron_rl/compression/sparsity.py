"""Zeros for the weights of the trainer's model, layer after layer, by what enters each on calibration data.

A layer is looked at in a pass of its own, in which those before it have their zeros already. Statistics are sums over the
processes that hold parts of the same layer, and rows that tensor parallelism cuts are pruned whole, so that the result does not
depend on the layout.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from torch import Tensor

from megatron_rl.compression.calibration import Watched, layers_of, watch_experts, watching
from megatron_rl.config import PruneConfig
from megatron_rl.data.packing import Batch
from megatron_rl.distributed.parallel import process_group
from megatron_rl.models.shape import Shape, linear_weights
from megatron_rl.trainer.trainer import Trainer

# -- sparsity ------------------------------------------------------------------------------------------------------------
# Zeros among the weights of a linear layer y = W x, W [out, in]: which ones, and what becomes of the others.
# Every row is pruned alike: the paper of Wanda finds that better than one threshold for all of them, and rows that tensor
# parallelism gives to different processes need to know nothing of each other.


@dataclass(frozen=True)
class Pattern:
    """Which weights of a row may stay: `keep` of every `of` neighbors, or without these all but a share `ratio`."""

    keep: int | None = None
    of: int = 1
    ratio: float = 0.5

    def kept(self, scores: Tensor) -> Tensor:
        """Scores [out, in] -> bool: the highest that the pattern leaves. in is a multiple of `of`."""
        groups = scores.unflatten(1, (-1, self.of)) if self.keep is not None else scores.unsqueeze(1)
        size = groups.shape[-1]
        count = self.keep if self.keep is not None else size - int(self.ratio * size)
        places = groups.argsort(dim=-1, descending=True, stable=True)[..., :count]
        return torch.zeros_like(groups, dtype=torch.bool).scatter_(-1, places, True).flatten(1)


def magnitude(weight: Tensor, pattern: Pattern) -> Tensor:
    """The weights with the smallest ones zero."""
    return weight.where(pattern.kept(weight.abs()), 0)


def wanda(weight: Tensor, squares: Tensor, pattern: Pattern) -> Tensor:
    """The weights with those of the smallest |W| x norm of X zero (arXiv 2306.11695).

    squares: [in], sum of the squares of each input, in any unit. Without inputs it is `magnitude`.
    """
    norms = squares.sqrt() if squares.any() else torch.ones_like(squares)
    return weight.where(pattern.kept(weight.double().abs() * norms), 0)


def sparsegpt(weight: Tensor, gram: Tensor, pattern: Pattern, *, block: int = 128, damp: float = 0.01) -> Tensor:
    """The weights with those zero whose loss the others make up for best, and these changed so that they do (arXiv 2301.00774).

    Column after column, in order: a weight w_j that goes costs w_j^2 / (U_jj)^2, where U is the upper Cholesky factor of the
    inverse Hessian, and what it contributed is taken over by the weights behind it, so that ||W X - W' X|| is the smallest
    with those up to j as they are. gram: X X^T [in, in] in any unit, to whose diagonal damp times its mean is added. Without
    a pattern N:M the columns that a row loses are chosen in blocks. Without inputs it is `magnitude`.
    """
    if not gram.any():
        return magnitude(weight, pattern)
    hessian = gram.double() + damp * gram.diagonal().double().mean() * torch.eye(len(gram), device=gram.device)
    upper = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(hessian)), upper=True)
    rest = weight.to(torch.float64, copy=True)  # the caller's stay as they are, also those that are fp64
    size = pattern.of if pattern.keep is not None else block
    block = max(size, block // size * size)  # groups of neighbors are not torn
    for start in range(0, weight.shape[1], block):
        columns = range(start, min(start + block, weight.shape[1]))
        errors = rest.new_zeros(weight.shape[0], len(columns))
        for place, j in enumerate(columns):
            if place % size == 0:
                chosen = slice(j, min(j + size, columns.stop))
                kept = pattern.kept(rest[:, chosen].square() / upper.diagonal()[chosen].square())
            lost = rest[:, j].where(~kept[:, place % size], 0)
            errors[:, place] = lost / upper[j, j]
            rest[:, j : columns.stop] -= errors[:, place, None] * upper[j, j : columns.stop]
            rest[:, j] = rest[:, j].where(kept[:, place % size], 0)
        rest[:, columns.stop :] -= errors @ upper[columns.start : columns.stop, columns.stop :]
    return rest.to(weight.dtype)


# -- sparsify ------------------------------------------------------------------------------------------------------------


def pattern_of(config: PruneConfig) -> Pattern:
    """The pattern that prune.sparsity asks for."""
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
