"""VP2O in training: expert gradients are replaced by their Stein transform, layer by layer, on any parallel layout.

Attraction is linear in the gradients, so it is applied to each process's own sums before the data-parallel reduction, where
every process still has all of its experts' gradients (afterwards the distributed optimizer keeps a shard). Repulsion depends on
weights alone and is added after the reduction, where gradients are means over tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.algorithms import stein
from megatron_rl.config import VP2OConfig
from megatron_rl.data.packing import Batch
from megatron_rl.metrics.reduce import Metric, Metrics, derived, mean
from megatron_rl.models.moe import ExpertSlice
from megatron_rl.routing.memory import RouteTable
from megatron_rl.routing.passes import RouteObserver
from megatron_rl.trainer.hooks import Place, Stage, Step, UpdateHook
from megatron_rl.trainer.preview import owned_ranges
from megatron_rl.trainer.trainer import Trainer
from megatron_rl.vp2o.coactivation import Coactivation, CountCoactivation
from megatron_rl.vp2o.experts import Experts
from megatron_rl.vp2o.orthogonality import Orthogonality

CHUNK = 1 << 22
"""Numbers of one [experts, columns] buffer: 16 MiB."""
DAMPING = 0.01
"""Damping of the kernel's gradient: what power iterations could not tell apart does not decide where an expert is pushed."""
ITERATIONS = 32
"""Most iterations of the damped solve."""


@dataclass
class _Interaction:
    """Who attracts and repels whom in one layer, in one update."""

    coactivation: Tensor
    attract: Tensor
    repel: Tensor
    kernel: Tensor
    metrics: dict[str, Metric] = field(default_factory=dict)


class Stein(UpdateHook):
    """The transform of one trainer's expert gradients."""

    changes_gradients = True

    def __init__(self, config: VP2OConfig) -> None:
        self.config = config
        self.reads_outputs = bool(config.orthogonality)
        self.experts: Experts
        self.owned: dict[torch.nn.Parameter, slice] | None = None
        """Which part of each flat parameter's gradient this process reduces (distributed optimizer); None: all."""
        self._tables: list[RouteTable] = []
        self._interactions: dict[int, _Interaction] = {}

    def attach(self, trainer: Trainer) -> None:
        """Find the experts and the gradients of this process."""
        self.experts = Experts(trainer.chunks, self.config.power_iterations)
        self.owned = owned_ranges(trainer.optimizer)

    # -- one update, in this order ------------------------------------------------------------------------------------

    def before_forward(self, batches: Sequence[Batch], stage: Stage, place: Place) -> None:
        """Co-activation is of the whole rollout batch; the micro-batches of later updates count if they had a pass before."""
        if stage == "update":
            found = (batch.routes for update in place.rollout or [batches] for batch in update)
            self._tables = [table for table in found if table is not None]

    def observers(self, table: RouteTable, stage: Stage, place: Place) -> list[RouteObserver]:
        """Return the counts of co-activation and, in an update, the orthogonality loss."""
        found: list[RouteObserver] = [CountCoactivation(table)]
        if stage == "update" and self.config.orthogonality:
            options = (self.config.orthogonality, self.config.orthogonality_tokens, place.update + 1)
            found.append(Orthogonality(table, *options))
        return found

    @torch.no_grad()
    def after_backward(self) -> None:
        """Mix the gradients of co-active experts, in this process's DDP buffers, before they are reduced. Collective."""
        together = self._coactivation()
        self._tables = []
        for number, layer in self.experts.layers.items():
            found = self._interactions[number] = self._interact(number, together[number])
            # The gradient of an idle expert comes from tokens that are not in the loss, if at all.
            idle = found.coactivation.diagonal() == 0
            mixing = found.kernel * torch.where(idle[:, None], torch.eye(layer.experts).to(idle.device), found.attract)
            stays = stein.untouched(mixing).tolist()
            if not all(stays):
                for slices in layer.slices.values():
                    self._mix(slices, mixing, layer.mine, stays[layer.mine])

    @torch.no_grad()
    def after_reduction(self) -> None:
        """Add the repulsion's gradient to those of the output projections. Collective."""
        for number, layer in self.experts.layers.items():
            found = self._interactions[number]
            every = [one for slices in layer.slices.values() for one in slices]
            found.metrics |= self._figures(number, found) | {"attraction": derived(_root, self._square(every))}
        if not self.config.repulsion:
            return
        layers, replicas = self.experts.layers, self.experts.replica_group.size()
        factors = {number: self._repulsion(number) for number in layers}
        squares = {n: _rank_two_square(*factors[n]) / replicas for n in layers}
        for number, strength in self._strengths(squares).items():
            a, x, b, p = factors[number]
            for index, output in enumerate(layers[number].outputs):
                output.main_grad.addr_(x[index], a[index], alpha=strength).addr_(p[index], b[index], alpha=strength)
            self._interactions[number].metrics["repulsion"] = derived(_root, strength**2 * squares[number])

    def after_step(self, step: Step) -> None:
        """Forget the prototypes of weights that have changed."""
        if step.done:
            self.experts.weights_changed()

    def metrics(self) -> Metrics:
        """Return what was measured of each layer."""
        return of_layers({number: found.metrics for number, found in self._interactions.items()})

    # -- inside -------------------------------------------------------------------------------------------------------

    def _coactivation(self) -> dict[int, Tensor]:
        """O by layer over the tokens of all processes: one reduction."""
        layers = self.experts.layers
        if not layers:
            return {}
        size, device = next(iter(layers.values())).experts, self._device
        nothing = torch.zeros(size, size, device=device)
        found = [(table, table.left(Coactivation)) for table in self._tables]
        counts = [sum((pairs[n] for _, pairs in found if n in pairs), start=nothing) for n in layers]
        seen = [table for table, pairs in found if any(n in pairs for n in layers)]
        tokens = sum((t.counted.sum() for t in seen), start=torch.zeros((), device=device))
        flat = torch.cat([torch.stack(counts).flatten(), tokens.view(1)]).double()
        dist.all_reduce(flat, group=self.experts.token_group)
        shares = (flat[:-1] / flat[-1].clamp(min=1)).float().view(-1, size, size)
        return dict(zip(layers, shares, strict=True))

    def _interact(self, number: int, together: Tensor) -> _Interaction:
        config = self.config
        temperature = 1.0 if config.temperature is None else config.temperature / len(together)
        attract = stein.attraction_mask(together, config.neighbors, config.attract_above)
        repel = stein.repulsion_mask(together, config.inactive_neighbors, config.repel_below, attract=attract)
        return _Interaction(
            together,
            stein.neighbor_weights(attract),
            stein.neighbor_weights(repel),
            stein.kernel(self.experts.prototypes(number), temperature),
        )

    def _repulsion(self, number: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The factors of the kernel's gradient of this rank's experts."""
        layer, found = self.experts.layers[number], self._interactions[number]
        return stein.kernel_gradient(
            self.experts.output_weights(layer.outputs),
            self.experts.prototypes(number),
            found.kernel,
            found.repel,
            damping=DAMPING,
            iterations=ITERATIONS,
            all_reduce=self.experts.over_slices,
            experts=layer.mine,
        )

    def _strengths(self, squares: dict[int, float]) -> dict[int, float]:
        """What multiplies the repulsion of each layer. squares: this process's part of its squared norm."""
        weight = self.config.repulsion
        if self.config.repulsion_scale == "absolute" or not squares:
            return dict.fromkeys(squares, weight)
        attraction = [self._square(self.experts.layers[n].outputs) for n in squares]
        parts = torch.tensor([attraction, list(squares.values())], dtype=torch.float64).to(self._device)
        for group in (self.experts.expert_group, self.experts.slice_group, self.experts.replica_group):
            if group.size() > 1:
                dist.all_reduce(parts, group=group)
        ratios = (parts[0] / parts[1]).sqrt().nan_to_num(0.0, posinf=0.0)  # 0: nobody is pushed
        return {n: weight * ratio for n, ratio in zip(squares, ratios.tolist(), strict=True)}

    @property
    def _device(self) -> torch.device:
        return next(iter(self.experts.layers.values())).start.device

    def _mix(self, slices: list[ExpertSlice], mixing: Tensor, mine: slice, stays: list[bool]) -> None:
        """g_i <- sum_j mixing_ij g_j for one parameter, a chunk of its columns at a time."""
        flat = [one.main_grad.view(-1) for one in slices]
        columns = max(1, CHUNK // len(mixing))
        for first in range(0, flat[0].numel(), columns):
            place = slice(first, first + columns)
            own = torch.stack([gradient[place] for gradient in flat])
            mixed = self.experts.scatter(mixing[:, mine].to(own.dtype) @ own)
            for gradient, row, stay in zip(flat, mixed, stays, strict=True):
                if not stay:
                    gradient[place] = row

    def _square(self, slices: list[ExpertSlice]) -> float:
        """Squared norm of the gradients of these, of the part that this process counts: all processes' parts add up."""
        parameters = {id(one.parameter): one.parameter for one in slices}.values()
        if self.owned is not None:
            return _square_of(_gradient(p).view(-1)[self.owned[p]] for p in parameters if p in self.owned)
        return _square_of(map(_gradient, parameters)) / self.experts.replica_group.size()

    def _figures(self, number: int, found: _Interaction) -> dict[str, Metric]:
        """Means over pairs of experts, which all processes have alike."""
        p = self.experts.prototypes(number)
        apart = ~torch.eye(len(p), dtype=torch.bool, device=p.device)
        similar = p @ p.t()
        pairs = {
            "overlap": similar.abs()[apart],
            "neighbor_kernel": similar[(found.attract > 0) & apart],
            "inactive_kernel": similar[found.repel > 0],
        }
        return {name: mean(float(values.mean()), 1) for name, values in pairs.items() if len(values)}


def of_layers(layers: Mapping[int, Mapping[str, Metric]]) -> Metrics:
    """vp2o/layer_LL/NAME of one update, which count for vp2o/NAME; of several the means."""
    return {
        f"vp2o/layer_{layer:02}/{name}": replace(metric, across="mean", also=(f"vp2o/{name}",))
        for layer, metrics in layers.items()
        for name, metric in metrics.items()
    }


def _gradient(parameter: torch.nn.Parameter) -> Tensor:
    """The buffer that Megatron's DDP gives a parameter."""
    return parameter.main_grad  # pyright: ignore[reportAttributeAccessIssue] (DDP adds it)


def _root(square: float) -> float:
    return square**0.5


def _square_of(tensors: Iterable[Tensor]) -> float:
    return float(sum(tensor.norm().double() ** 2 for tensor in tensors))


def _rank_two_square(a: Tensor, x: Tensor, b: Tensor, p: Tensor) -> float:
    """Sum of the squares of a x^T + b p^T over the experts."""
    dot = partial(torch.einsum, "nd,nd->n")
    square = dot(a, a) * dot(x, x) + dot(b, b) * dot(p, p) + 2 * dot(a, b) * dot(x, p)
    return float(square.double().sum())
