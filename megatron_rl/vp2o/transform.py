"""VP2O in training: replaces expert gradients by their Stein transform, layer by layer, for any parallel layout.

The transform uses the full gradients in Megatron's buffers after the backward pass. They contain the policy loss, the KL
penalty, the entropy bonus and the orthogonality loss, and attraction mixes all of them alike. (The gradient of a router's
auxiliary losses only reaches experts of earlier layers, through the hidden states.) To separate the losses, each would need
its own backward pass and gradient buffer.

Attraction is linear in the gradients, so it is applied to each process's own sums before the data-parallel reduction. At this
point every process still has all gradients of its experts; after the reduction, the distributed optimizer keeps only a shard.
Repulsion depends only on weights. It is added after the reduction, when gradients are means over tokens.

An expert without a token in the loss of an update (an idle expert) does not change, because the paper updates only active
experts (Section 3.1). Its gradient is dropped. Its weights and moments are restored from a copy after the step, which would
otherwise change them by momentum and weight decay.
"""

from __future__ import annotations

import logging
import math
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
from megatron_rl.models.moe import OUTPUT, ExpertSlice
from megatron_rl.routing.passes import RouteObserver, layer_name
from megatron_rl.routing.table import RouteTable
from megatron_rl.trainer.hooks import Stage, Step, UpdateContext, UpdateHook
from megatron_rl.trainer.preview import StepPreview, owned_ranges
from megatron_rl.trainer.trainer import Trainer
from megatron_rl.vp2o.expert_groups import Active, Coactivation, CountActive, CountCoactivation, Exchange, Experts
from megatron_rl.vp2o.orthogonality import GRADIENT, Orthogonality

log = logging.getLogger(__name__)

CHUNK = 1 << 22
"""Number of elements of one [experts, columns] buffer (16 MiB in fp32)."""
DAMPING = 0.01
"""Damping of the kernel's gradient. With damping, singular directions that power iterations could not separate hardly affect
the repulsion."""
ITERATIONS = 32
"""Largest number of iterations of the solver of the damped linear system."""


@dataclass
class _Interaction:
    """Attraction and repulsion between the experts of one layer, in one update."""

    coactivation: Tensor
    active: Tensor
    """True for experts with a token in the loss of this update, [N] bool."""
    attract: Tensor
    repel: Tensor
    kernel: Tensor
    mixing: Tensor
    metrics: dict[str, Metric] = field(default_factory=dict)


class Stein(UpdateHook):
    """Transforms the expert gradients of one trainer."""

    changes_gradients = True

    def __init__(self, config: VP2OConfig) -> None:
        self.config = config
        self.reads_outputs = bool(config.orthogonality)
        self.experts: Experts
        self.owned: dict[torch.nn.Parameter, slice] | None = None
        """Range of each flattened parameter's gradient that this process reduces (distributed optimizer); None: all of it."""
        self.clip = 0.0
        """Norm to which the optimizer clips gradients; 0: no clipping."""
        self._tables: list[RouteTable] = []
        self._own_tables: list[RouteTable] = []
        """Route tables of the micro-batches of this update."""
        self._interactions: dict[int, _Interaction] = {}
        self._still: list[tuple[Tensor, Tensor]] = []
        """(tensor that the step must not change, its copy) for each such tensor."""
        self._warned = False
        self._warned_orthogonality = False

    def attach(self, trainer: Trainer) -> None:
        """Find this process's experts and the ranges of gradients that it reduces."""
        self.experts = Experts(trainer.chunks, self.config.power_iterations)
        self.owned = owned_ranges(trainer.optimizer)
        self.clip = trainer.config.optimizer.clip_grad

    @property
    def interacts(self) -> bool:
        """True if experts attract or repel each other. If False, all experts, also idle ones, are updated as without VP2O."""
        return self.config.neighbors != 1 or bool(self.config.repulsion)

    def idle(self, number: int) -> list[bool]:
        """Return a flag for each of this rank's experts of a layer: True if this update must not change the expert."""
        found = self._interactions.get(number)
        count = len(self.experts.layers[number].outputs)
        if found is None or not self.interacts:
            return [False] * count
        return (~found.active[self.experts.layers[number].mine]).tolist()

    # -- one update, in this order ------------------------------------------------------------------------------------

    def before_forward(self, batches: Sequence[Batch], stage: Stage, place: UpdateContext) -> None:
        """Select the tables for co-activation: those of the rollout batch's micro-batches that have had a forward pass."""
        if stage == "update":
            found = (batch.routes for update in place.rollout or [batches] for batch in update)
            self._tables = [table for table in found if table is not None]
            self._own_tables = [batch.routes for batch in batches if batch.routes is not None]

    def observers(self, table: RouteTable, stage: Stage, place: UpdateContext) -> list[RouteObserver]:
        """Return the observers that count co-activation and, in an update, add the orthogonality loss."""
        found: list[RouteObserver] = [CountCoactivation(table, soft=self.config.coactivation == "soft")]
        if stage == "update":
            found.append(CountActive(table))
        if stage == "update" and self.config.orthogonality:
            found.append(Orthogonality(table, self.config, place.update + 1))
        return found

    @torch.no_grad()
    def after_backward(self) -> None:
        """Mix the gradients of co-active experts in this process's DDP buffers, before the reduction. Collective."""
        counts = self._counts()
        self._tables, self._own_tables = [], []
        for number, layer in self.experts.layers.items():
            found = self._interactions[number] = self._interact(number, *counts[number])
            stays = stein.untouched(found.mixing).tolist()
            if self.interacts and not all(stays):
                exchange = self.experts.exchange(found.attract > 0, layer.mine)
                for slices in layer.slices.values():
                    self._mix(slices, found.mixing, exchange, stays[layer.mine])

    @torch.no_grad()
    def after_reduction(self) -> None:
        """Add the repulsion, which is a gradient of the kernel, to the gradients of the output projections. Collective."""
        layers, replicas = self.experts.layers, self.experts.replica_group.size()
        of_outputs = {number: self._square(layer.outputs) for number, layer in layers.items()}
        attraction = {
            number: of_outputs[number]
            + self._square([one for name, slices in layer.slices.items() if name != OUTPUT for one in slices])
            for number, layer in layers.items()
        }
        for number, found in self._interactions.items():
            found.metrics |= self._figures(number, found) | {"attraction": derived(_root, attraction[number])}
        if not self.config.repulsion or not layers:
            return
        factors = {number: self._repulsion(number) for number in layers}
        squares = {n: _rank_two_square(*factors[n]) / replicas for n in layers}
        norms = self._norms([[of[n] for n in layers] for of in (of_outputs, attraction, squares)])
        for number, (outputs, whole, repulsion) in zip(layers, norms, strict=True):
            strength = self.config.repulsion
            if self.config.repulsion_scale == "relative":
                ratio = outputs / repulsion if repulsion else 0.0
                strength *= ratio if math.isfinite(ratio) else 0.0  # 0: no repulsion
            a, x, b, p = factors[number]
            for index, output in enumerate(layers[number].outputs):
                output.main_grad.addr_(x[index], a[index], alpha=strength).addr_(p[index], b[index], alpha=strength)
            dominates = self._dominates(number, strength * repulsion, whole)
            self._interactions[number].metrics |= {
                "repulsion": derived(_root, strength**2 * squares[number]),
                "repulsion_dominates": mean(float(dominates), 1),
            }

    def check(self, metrics: Metrics) -> None:
        """Warn once if the gradient of the orthogonality loss exceeds the gradient of all other losses."""
        if self._warned_orthogonality or not self.config.orthogonality:
            return
        for layer in self.experts.layers:
            metric = metrics.get(layer_name(layer, GRADIENT))
            share = metric.finish(*metric.parts) if metric else None
            if isinstance(share, float) and share > 1:
                self._warned_orthogonality = True
                bounded = self.config.orthogonality_form == "cosine"
                remedy = "" if bounded else ", or set vp2o.orthogonality_form: cosine"
                if self.experts.token_group.rank() == 0:
                    log.warning(
                        f"vp2o: at the outputs of layer {layer}'s experts the orthogonality loss has a gradient of"
                        f" {share:.3g} times the gradient of all other losses, so it dominates what the experts learn; lower"
                        f" vp2o.orthogonality{remedy} (this warning appears once; see routing/orthogonality_gradient)"
                    )
                return

    def before_step(self, preview: StepPreview) -> float:
        """Copy what must not change: the parameters, fp32 weights and moments of this process's idle experts."""
        found = [
            tensor
            for number, layer in self.experts.layers.items()
            for slices in layer.slices.values()
            for one, idle in zip(slices, self.idle(number), strict=True)
            if idle
            for tensor in preview.changes(one.parameter, one.place)
        ]
        self._still = [(tensor, tensor.clone()) for tensor in found]
        return 1.0

    @torch.no_grad()
    def after_step(self, step: Step) -> None:
        """Restore idle experts from their copies, and discard cached prototypes if the weights have changed."""
        for tensor, before in self._still:
            tensor.copy_(before)
        self._still = []
        if step.done:
            self.experts.weights_changed()

    def metrics(self) -> Metrics:
        """Return the metrics of each layer."""
        return of_layers({number: found.metrics for number, found in self._interactions.items()})

    # -- inside -------------------------------------------------------------------------------------------------------

    def _counts(self) -> dict[int, tuple[Tensor, Tensor]]:
        """Return {layer: (co-activation shares [N, N], True for active experts [N])} over all processes, with one reduction."""
        layers = self.experts.layers
        if not layers:
            return {}
        size, device = next(iter(layers.values())).experts, self._device
        nothing = torch.zeros(size, size, device=device)
        found = [(table, table.left(Coactivation)) for table in self._tables]
        counts = [sum((pairs[n] for _, pairs in found if n in pairs), start=nothing) for n in layers]
        seen = [table for table, pairs in found if any(n in pairs for n in layers)]
        tokens = sum((t.counted.sum() for t in seen), start=torch.zeros((), device=device))
        active = [table.left(Active) for table in self._own_tables]
        loads = [sum((of[n] for of in active if n in of), start=nothing[0]) for n in layers]
        parts = [torch.stack(counts), torch.stack(loads), tokens]
        flat = torch.cat([part.flatten() for part in parts]).double()
        dist.all_reduce(flat, group=self.experts.token_group)
        pairs, load, total = flat.split([part.numel() for part in parts])
        shares = (pairs / total.clamp(min=1)).float().view(-1, size, size)
        return dict(zip(layers, zip(shares, load.view(-1, size) > 0, strict=True), strict=True))

    def _interact(self, number: int, together: Tensor, active: Tensor) -> _Interaction:
        config = self.config
        temperature = 1.0 if config.temperature is None else config.temperature / len(together)
        neighbors, inactive = stein.neighborhood(len(together), config.neighbors, config.inactive_neighbors)
        attract = stein.attraction_mask(together, neighbors, config.attract_above)
        # If routers changed within the rollout batch, an active expert may have no counted tokens.
        itself = torch.eye(len(active), dtype=torch.bool, device=active.device)
        attract = (attract | itself) & active[:, None]
        repel = active[:, None] & stein.repulsion_mask(together, inactive, config.repel_below, attract=attract)
        kernel = stein.kernel(self.experts.prototypes(number), temperature)
        alpha = stein.neighbor_weights(attract)
        mixing = stein.mixing(alpha, kernel, config.attraction)
        return _Interaction(together, active, alpha, stein.neighbor_weights(repel), kernel, mixing)

    def _repulsion(self, number: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the factors (a, x, b, p) of the kernel's gradient a x^T + b p^T for each of this rank's experts."""
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

    def _norms(self, squares: list[list[float]]) -> list[list[float]]:
        parts = torch.tensor(squares, dtype=torch.float64).to(self._device)
        for group in (self.experts.expert_group, self.experts.slice_group, self.experts.replica_group):
            if group.size() > 1:
                dist.all_reduce(parts, group=group)
        return parts.sqrt().t().tolist()

    def _dominates(self, number: int, repulsion: float, attraction: float) -> bool:
        """Return True if a layer's repulsion is larger than its attraction or than the clipping norm. Warn the first time."""
        limits = {"the norm of its experts' gradients": attraction}
        if self.clip:
            limits["optimizer.clip_grad"] = self.clip
        name, limit = min(limits.items(), key=lambda item: item[1])
        dominates = repulsion > limit
        if dominates and not self._warned:
            self._warned = True
            if self.experts.token_group.rank() == 0:
                log.warning(
                    f"vp2o: the repulsion of layer {number} has a norm of {repulsion:.3g}, more than {name}, {limit:.3g},"
                    " so it dominates the updates of the experts; lower vp2o.repulsion, or set vp2o.repulsion_scale: relative"
                    " (this warning appears once; vp2o/repulsion_dominates counts the cases)"
                )
        return dominates

    @property
    def _device(self) -> torch.device:
        return next(iter(self.experts.layers.values())).start.device

    def _mix(self, slices: list[ExpertSlice], mixing: Tensor, exchange: Exchange, stays: list[bool]) -> None:
        """Replace each expert's gradient g_i of one parameter by sum_j mixing_ij g_j, some columns at a time."""
        flat = [one.main_grad.view(-1) for one in slices]
        columns = max(1, CHUNK // len(mixing))
        for first in range(0, flat[0].numel(), columns):
            place = slice(first, first + columns)
            own = torch.stack([gradient[place] for gradient in flat])
            mixed = self.experts.mix(own, mixing.to(own.dtype), exchange)
            for gradient, row, stay in zip(flat, mixed, stays, strict=True):
                if not stay:
                    gradient[place] = row

    def _square(self, slices: list[ExpertSlice]) -> float:
        """Return this process's share of the squared gradient norm of these slices; the shares of all processes add up."""
        parameters = {id(one.parameter): one.parameter for one in slices}.values()
        if self.owned is not None:
            return _square_of(_gradient(p).view(-1)[self.owned[p]] for p in parameters if p in self.owned)
        return _square_of(map(_gradient, parameters)) / self.experts.replica_group.size()

    def _figures(self, number: int, found: _Interaction) -> dict[str, Metric]:
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
    """Return one update's metrics under the names vp2o/layer_LL/NAME; vp2o/NAME merges all layers.

    Several updates of a step are averaged.
    """
    return {
        f"vp2o/layer_{layer:02}/{name}": replace(metric, across="mean", also=(f"vp2o/{name}",))
        for layer, metrics in layers.items()
        for name, metric in metrics.items()
    }


def _gradient(parameter: torch.nn.Parameter) -> Tensor:
    return parameter.main_grad  # pyright: ignore[reportAttributeAccessIssue] (DDP adds it)


def _root(square: float) -> float:
    return square**0.5


def _square_of(tensors: Iterable[Tensor]) -> float:
    return float(sum(tensor.norm().double() ** 2 for tensor in tensors))


def _rank_two_square(a: Tensor, x: Tensor, b: Tensor, p: Tensor) -> float:
    """Return the sum of the squared elements of a x^T + b p^T over the experts."""
    dot = partial(torch.einsum, "nd,nd->n")
    square = dot(a, a) * dot(x, x) + dot(b, b) * dot(p, p) + 2 * dot(a, b) * dot(x, p)
    return float(square.double().sum())
