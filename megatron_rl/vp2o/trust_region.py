"""VP2O's geometric trust region: it limits how far an update moves a layer's experts, weighted by the router's gates.

The anchor is the state of the rollout engine: prototypes and routers at the last weight sync. The trust region compares the
policy with the anchor on tokens of the current rollout batch. In the paper the actors log their gates. A rollout engine reports
the chosen experts, but no gates over all experts, so the anchor's router recomputes the gates here. The inputs of this router
come from the forward pass that computes the old log-probs (or from the update's own forward pass, if there is no other). If
routes are replayed, the gates of policy and anchor cover the replayed experts.

A step is judged before it is taken (`trainer.preview`). So no copies are needed: a refused step leaves all parameters, the
optimizer and the random states unchanged, bit for bit.

For a comparison, the power iterations of both policy and anchor start from the anchor's prototypes. (The transform's iterations
start from a fixed vector.) With a fixed start, a small step can make the singular vector orthogonal to the start vector. The
iteration then converges to another direction, and the prototype jumps. Halving the step would not help.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import router_gating_linear
from torch import Tensor

from megatron_rl.algorithms.stein import barycenter_shift
from megatron_rl.config import VP2OConfig
from megatron_rl.data.packing import Batch
from megatron_rl.errors import UserError
from megatron_rl.metrics.reduce import Metrics, alike, mean
from megatron_rl.models.router import ReplayRouter
from megatron_rl.routing.passes import RouteObserver, Router
from megatron_rl.routing.replay import RouteSource, reference_routes
from megatron_rl.routing.table import NO_ROUTE, RouteTable, route_dtype
from megatron_rl.trainer.hooks import Stage, UpdateContext, UpdateHook
from megatron_rl.trainer.preview import StepPreview
from megatron_rl.trainer.trainer import Trainer
from megatron_rl.vp2o.expert_groups import ExpertLayer, Experts, stacked
from megatron_rl.vp2o.transform import Stein, of_layers

PARTS = 4
"""Number of parts in which the output projections of a layer are previewed. One part, with its moments and gradients, needs at
most the memory of one layer's gradients."""
TRACKING = 8
"""Number of power iterations from the anchor's prototypes to the prototypes of other weights. With fewer iterations, a rotation
among directions of nearly equal singular values has less effect on the shift."""
MOST_BACKTRACKS = 10
"""Largest number of times that a step is halved. If the step is still too large, the update is skipped."""
MOST_REFUSED = 16
"""Number of refused updates in a row after which the run ends, because it no longer learns."""


@dataclass
class _Anchor:
    start: Tensor
    """Prototypes of the engine's weights, [N, D_out]: start of the power iterations for other weights."""
    prototypes: Tensor
    """Prototypes [N, D_out] of the engine's weights after further power iterations from `start`."""
    router: list[Tensor]
    """Weight of the engine's router and, if it has one, its bias."""


@dataclass
class _Seen:
    """Probe tokens for one layer: this process's sample of the rollout batch's tokens, on which steps are judged."""

    hidden: Tensor
    """Router inputs of the probe tokens, [C, d]."""
    routes: Tensor
    """Replayed experts of the probe tokens, [C, k]; sentinels for tokens whose experts the router chooses."""
    gates: Tensor
    """Gates of the anchor's router for the probe tokens, [C, N]."""


@dataclass(frozen=True)
class Verdict:
    """Decision on a proposed step."""

    scale: float
    """Factor of the learning rate: 1, a power of 1/2, or 0 (the step is skipped)."""
    backtracks: int
    """Number of times the step was halved."""
    shifts: dict[int, float]
    """Barycenter shift of the proposed step (before halving), for each layer of this process's pipeline stage."""


@dataclass
class Probed:
    """Data of a micro-batch's probe tokens, which its first forward pass stores."""

    rows: Tensor = field(default_factory=lambda: torch.arange(0))
    """Rows of the probe tokens in the micro-batch, [C] int64."""
    hidden: dict[int, Tensor] = field(default_factory=dict)
    """{layer: router inputs [C, d]}."""


class Probe(RouteObserver):
    """Stores the router inputs of some evenly spaced counted tokens in the first forward pass of a micro-batch."""

    def __init__(self, table: RouteTable, tokens: int) -> None:
        """Create it. tokens: largest number of probe tokens."""
        self.found, self.first = table.left(Probed), not table.left(Probed).hidden
        if self.first:
            self.found.rows = table.evenly_spaced(tokens)

    def see_logits(self, layer: int, hidden: Tensor, logits: Tensor, router: Router) -> Tensor:
        """Store the router inputs of the probe tokens."""
        if self.first and layer not in self.found.hidden:
            self.found.hidden[layer] = hidden[self.found.rows]
        return logits


class TrustRegion(UpdateHook):
    """Stores the anchors of this process's layers, and decides how much of each step may be taken."""

    def __init__(self, config: VP2OConfig, stein: Stein, source: RouteSource = "none") -> None:
        """Create it. stein: the transform, attached before this hook. source: source of the routes that updates replay."""
        self.config = config
        self._stein = stein
        self._source: RouteSource = source
        self._maximum: Callable[[float], float]
        self._anchors: dict[int, _Anchor] = {}
        self._tables: list[RouteTable] = []
        """Route tables of the rollout batch."""
        self._probe_tokens = 0
        """Largest number of probe tokens per micro-batch."""
        self._seen: dict[int, _Seen] = {}
        self.verdict: Verdict | None = None
        """Decision on the last update; None if its gradients were not finite."""
        self._refused = 0
        """Number of updates refused in a row."""

    def attach(self, trainer: Trainer) -> None:
        """Store the function that computes a maximum over all ranks."""
        self._maximum = lambda value: max(trainer.ranks.gather(value))

    @property
    def experts(self) -> Experts:
        """Experts of the attached transform."""
        return self._stein.experts

    def weights_pushed(self) -> None:
        """Set the anchors of all layers to the current weights."""
        for number, layer in self.experts.layers.items():
            start = self.experts.prototypes(number)
            weights = self.experts.output_weights(layer.outputs)
            router = [p.detach().clone() for p in _parameters(layer.router)]
            self._anchors[number] = _Anchor(start, self._follow(layer, weights, start), router)

    def before_forward(self, batches: Sequence[Batch], stage: Stage, place: UpdateContext) -> None:
        """Prepare the probes: each micro-batch of the rollout batch stores router inputs in its first pass."""
        if not self._anchors:
            self.weights_pushed()
        every = [batch for update in place.rollout or [batches] for batch in update]
        self._tables = [batch.routes for batch in every if batch.routes is not None]
        self._probe_tokens = -(-self.config.probe_tokens // max(len(every), 1))
        self.verdict = None

    def observers(self, table: RouteTable, stage: Stage, place: UpdateContext) -> list[RouteObserver]:
        """Return the observer that stores the micro-batch's probe tokens."""
        return [Probe(table, self._probe_tokens)]

    @torch.no_grad()
    def after_pass(self, stage: Stage) -> None:
        """Compute the gates of the anchors' routers for the probe tokens."""
        tables, self._tables = self._tables, []
        self._seen = {}
        for number, anchor in self._anchors.items():
            probed = [(table, found) for table in tables if number in (found := table.left(Probed)).hidden]
            if probed:
                hidden = torch.cat([found.hidden[number] for _, found in probed])
                routes = torch.cat([self._routes(table, number)[found.rows] for table, found in probed])
                gates = _gates(self.experts.layers[number].router, hidden, anchor.router, routes)
                self._seen[number] = _Seen(hidden, routes, gates)

    def _routes(self, table: RouteTable, layer: int) -> Tensor:
        """Return the experts [T, k] that updates replay; sentinels for tokens whose experts are not replayed."""
        routes = None if self._source == "none" else reference_routes(table, self._source, layer)
        if routes is not None:
            return routes
        dtype, device = route_dtype(table.shape.experts), table.counted.device
        return torch.full((len(table.counted), table.shape.topk), NO_ROUTE[dtype], dtype=dtype, device=device)

    def before_step(self, preview: StepPreview) -> float:
        """Return the factor of the learning rate with which the step may be taken."""
        self.verdict = self.judge(preview)
        return self.verdict.scale

    def metrics(self) -> Metrics:
        """Return the decision on the step, and the shift of each layer."""
        verdict = self.verdict or Verdict(1.0, 0, {})
        return {
            "update/rejected": alike(float(verdict.scale == 0.0), across="sum"),
            "update/backtracks": alike(float(verdict.backtracks), across="sum"),
        } | of_layers({layer: {"shift": mean(shift, 1)} for layer, shift in verdict.shifts.items()})

    @torch.no_grad()
    def judge(self, preview: StepPreview) -> Verdict:
        """Decide how much of the proposed step may be taken; all processes get the same answer. Collective.

        Errors: UserError if the step is refused for the MOST_REFUSED-th time in a row. A refused step changes nothing, so the
        next step would probably be refused too.
        """
        first: dict[int, float] = {}
        limit = self.config.trust_region
        assert limit is not None, "this hook exists only if vp2o.trust_region is set"
        scale = 1.0
        for backtracks in range(MOST_BACKTRACKS + 1):
            shifts = self._shifts(preview, scale)
            first = first or shifts
            worst = max((s if math.isfinite(s) else math.inf for s in shifts.values()), default=0.0)
            if self._maximum(worst) <= limit:
                self._refused = 0
                return Verdict(scale, backtracks, first)
            if self.config.on_violation == "reject":
                break
            scale /= 2
        self._refused += 1
        if self._refused == MOST_REFUSED:
            remedy = "set vp2o.on_violation: backtrack," if self.config.on_violation == "reject" else "set"
            raise UserError(
                f"vp2o.trust_region: {MOST_REFUSED} updates in a row would have moved the experts of a layer by more than"
                f" {limit:g}, so they were left out; {remedy} a larger vp2o.trust_region or a smaller"
                " optimizer.lr"
            )
        return Verdict(0.0, backtracks, first)

    def _shifts(self, preview: StepPreview, scale: float) -> dict[int, float]:
        sums = []
        for number, seen in self._seen.items():
            layer, anchor = self.experts.layers[number], self._anchors[number]
            prototypes = self._prototypes_after(number, anchor, preview, scale)
            gates = _gates(layer.router, seen.hidden, preview.after(_parameters(layer.router), scale), seen.routes)
            shift = barycenter_shift(gates, prototypes, seen.gates, anchor.prototypes)
            sums.append(torch.stack([shift * len(gates), shift.new_tensor(len(gates))]))
        if not sums:
            return {}
        total = torch.stack(sums)
        dist.all_reduce(total, group=self.experts.token_group)
        shifts = zip(self._seen, total.tolist(), strict=True)
        return {
            number: shift / tokens for number, (shift, tokens) in shifts if tokens
        }  # no shift without tokens in the loss

    def _prototypes_after(self, number: int, anchor: _Anchor, preview: StepPreview, scale: float) -> Tensor:
        layer = self.experts.layers[number]
        parameters = list(dict.fromkeys(output.parameter for output in layer.outputs))
        size = -(-len(parameters) // PARTS)
        after = {}
        for first in range(0, len(parameters), size):
            some = parameters[first : first + size]
            after |= dict(zip(map(id, some), preview.after(some, scale), strict=True))
        idle = zip(layer.outputs, self._stein.idle(number), strict=True)
        outputs = stacked([one.data if still else one.of(after[id(one.parameter)]) for one, still in idle])
        return self._follow(layer, outputs.transpose(1, 2), anchor.start)

    def _follow(self, layer: ExpertLayer, weights: Tensor, start: Tensor) -> Tensor:
        return self.experts.prototypes_of(layer, weights, start[layer.mine], TRACKING)


def _parameters(router: ReplayRouter) -> list[torch.nn.Parameter]:
    return [router.weight] if router.bias is None else [router.weight, router.bias]


def _gates(router: ReplayRouter, hidden: Tensor, parameters: list[Tensor], routes: Tensor) -> Tensor:
    """Return the gates [C, N] of a router with the given parameters and inputs.

    For a replayed token, these are the gates of the replayed experts; for others, of the experts that the router chooses.
    """
    weight, *bias = parameters
    return router.gates(router_gating_linear(hidden, weight, bias[0] if bias else None, torch.float32), routes)
