"""Prunes weights of the trainer's model to zero, layer by layer, based on each layer's inputs on calibration data.

Each layer has its own forward pass, in which the earlier layers are pruned already. Statistics are summed over the processes
that hold shards of the same layer. Rows that tensor parallelism splits are gathered before they are pruned. So the result does
not depend on the layout.
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
# Choice of the weights of a linear layer y = W x, W [out, in], that become zero, and the changes of the other weights.
# Every row gets the same share of zeros. Wanda's paper finds this better than one threshold for all rows, and rows on
# different tensor-parallel processes can be pruned independently.


@dataclass(frozen=True)
class Pattern:
    """Pattern of the weights that stay in a row: `keep` of every `of` neighbors, or a share 1 - `ratio` of the row."""

    keep: int | None = None
    of: int = 1
    ratio: float = 0.5

    def kept(self, scores: Tensor) -> Tensor:
        """Return a mask [out, in] of the weights to keep: those with the highest scores. `in` has to be a multiple of `of`."""
        groups = scores.unflatten(1, (-1, self.of)) if self.keep is not None else scores.unsqueeze(1)
        size = groups.shape[-1]
        count = self.keep if self.keep is not None else size - int(self.ratio * size)
        places = groups.argsort(dim=-1, descending=True, stable=True)[..., :count]
        return torch.zeros_like(groups, dtype=torch.bool).scatter_(-1, places, True).flatten(1)


def magnitude(weight: Tensor, pattern: Pattern) -> Tensor:
    """Return the weights with the smallest magnitudes set to zero."""
    return weight.where(pattern.kept(weight.abs()), 0)


def wanda(weight: Tensor, squares: Tensor, pattern: Pattern) -> Tensor:
    """Return the weights with zeros where |W| x norm of X is smallest (arXiv 2306.11695).

    squares: [in], sum of squares of each input, in any unit. If all are zero, the function prunes like `magnitude`.
    """
    norms = squares.sqrt() if squares.any() else torch.ones_like(squares)
    return weight.where(pattern.kept(weight.double().abs() * norms), 0)


def sparsegpt(weight: Tensor, gram: Tensor, pattern: Pattern, *, block: int = 128, damp: float = 0.01) -> Tensor:
    """Return pruned weights whose remaining weights compensate for the zeros (arXiv 2301.00774).

    Columns are processed in order. Setting w_j to zero costs w_j^2 / (U_jj)^2, where U is the upper Cholesky factor of the
    inverse Hessian. The later weights in the row compensate for the lost w_j, such that ||W X - W' X|| is minimal with the
    weights up to j fixed. gram: X X^T [in, in] in any unit; damp times the mean of its diagonal is added to the diagonal.
    Without an N:M pattern, the zeros of a row are chosen block by block. If gram is all zero, the function prunes like
    `magnitude`.
    """
    if not gram.any():
        return magnitude(weight, pattern)
    hessian = gram.double() + damp * gram.diagonal().double().mean() * torch.eye(len(gram), device=gram.device)
    upper = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(hessian)), upper=True)
    rest = weight.to(torch.float64, copy=True)  # a copy, also of fp64 weights
    size = pattern.of if pattern.keep is not None else block
    block = max(size, block // size * size)  # do not split groups of neighbors
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
    """Return the pattern that prune.sparsity names."""
    if config.sparsity == "unstructured":
        return Pattern(ratio=config.ratio)
    keep, of = map(int, config.sparsity.split(":"))
    return Pattern(keep, of)


@torch.no_grad()
def sparsify(trainer: Trainer, batches: list[Batch], shape: Shape, config: PruneConfig) -> None:
    """Prune the weights of config.targets in place. batches: calibration data of this data-parallel rank. Collective."""
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
    """Add hooks that record the inputs of a transformer layer's linear layers."""

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
    """A Megatron linear layer, or this process's shard of one, with statistics of its inputs."""

    def __init__(self, module: Any, expert: bool, *, gram: bool) -> None:
        """Create it. gram: collect X X^T [in, in] instead of only its diagonal."""
        self.module, self.expert = module, expert
        self._gram = gram
        self._sum: Tensor | None = None

    def add(self, rows: Tensor) -> None:
        """Add inputs [n, in] to the statistics. If the layer is sharded by columns, `rows` has only this process's columns."""
        rows = self._whole(rows).float()
        found = (rows.t() @ rows if self._gram else rows.square().sum(0)).double()
        self._sum = found if self._sum is None else self._sum + found

    def prune(self, method: str, pattern: Pattern) -> None:
        """Prune the weight and clear the statistics. Collective over the processes that hold the layer."""
        weight = self._whole(self.module.weight)
        if method == "magnitude":
            pruned = magnitude(weight, pattern)
        else:
            size = weight.shape[1]
            nothing = weight.new_zeros((size, size) if self._gram else (size,), dtype=torch.float64)
            found = nothing if self._sum is None else self._sum
            # If all tensor-parallel ranks have seen the same rows, the rows count several times: only ratios matter.
            dist.all_reduce(found, group=self._group())
            pruned = (sparsegpt if self._gram else wanda)(weight, found, pattern)
        own = self.module.weight.shape[1]
        rank = self._tensor_group().rank() if own < weight.shape[1] else 0
        self.module.weight.copy_(pruned[:, rank * own : (rank + 1) * own])
        self._sum = None

    def _whole(self, part: Tensor) -> Tensor:
        """Return all columns of inputs or of the weight, gathered from the tensor-parallel ranks if they are split."""
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
