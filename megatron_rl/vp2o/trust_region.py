"""VP2O's geometric trust region: how far an update would move what the experts of a layer stand for, seen by its router.

The anchor is what the rollout engine has: prototypes and routers when its weights were pushed. Both are compared with the
policy's on tokens of the rollout batch that is being trained. The paper's actors log their gates with it; an engine tells its
routes at most, so the anchor's router is asked for the gates of the inputs that routers had in the pass of the old policy (or,
without one, in the update's own forward). Where routes are replayed, gates are over the replayed experts on both sides.

A step is looked at before it is taken (`trainer.preview`), so that refusing it leaves every parameter, the optimizer and random
states as they are, to the bit, and needs no copy of them.

Both sides of a comparison iterate from the anchor's prototypes. From the fixed start that the transform's have, a prototype
swings through another direction where a small step takes the singular vector past a right angle to that start; halved steps
would stay before that point for good.
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
"""Parts in which the output projections of a layer are previewed: with moments and gradients at most one layer's gradients."""
TRACKING = 8
"""Power iterations from the anchor's prototypes to those of other weights. The fewer they are, the less it counts that a
prototype turns among directions that its weights hardly prefer to one another."""
MOST_BACKTRACKS = 10
"""After which an update is left out: it began beyond the limit."""
MOST_REFUSED = 16
"""Updates in a row, after which a run that learns nothing ends."""


@dataclass
class _Anchor:
    start: Tensor
    """[N, D_out]: prototypes of the weights that the engine has, from which those of other weights are iterated."""
    prototypes: Tensor
    """[N, D_out]: of the engine's weights, iterated from there as well."""
    router: list[Tensor]
    """Weight and, where it has one, bias of the engine's router."""


@dataclass
class _Seen:
    """This process's probe tokens of the rollout batch, in one layer."""

    hidden: Tensor
    """[C, d] router inputs."""
    routes: Tensor
    """[C, k] replayed experts, sentinels where the router chooses."""
    gates: Tensor
    """[C, N] of the anchor's router."""


@dataclass(frozen=True)
class Verdict:
    """Decision on a proposed step."""

    scale: float
    """Factor of the learning rate: 1, a power of 1/2, or 0, which leaves the step out."""
    backtracks: int
    shifts: dict[int, float]
    """Barycenter shift by layer of this process's pipeline stage, of the step as it was proposed."""


@dataclass
class Probed:
    """Values that the first pass of a micro-batch leaves for its probe tokens."""

    rows: Tensor = field(default_factory=lambda: torch.arange(0))
    """[C] int64: which they are."""
    hidden: dict[int, Tensor] = field(default_factory=dict)
    """Router inputs [C, d] by layer."""


class Probe(RouteObserver):
    """Keeps what routers see of some evenly spaced counted tokens, in the first pass of a micro-batch."""

    def __init__(self, table: RouteTable, tokens: int) -> None:
        """tokens: at most so many."""
        self.found, self.first = table.left(Probed), not table.left(Probed).hidden
        if self.first:
            self.found.rows = table.evenly_spaced(tokens)

    def see_logits(self, layer: int, hidden: Tensor, logits: Tensor, router: Router) -> Tensor:
        """Keep the router inputs of the chosen tokens."""
        if self.first and layer not in self.found.hidden:
            self.found.hidden[layer] = hidden[self.found.rows]
        return logits


class TrustRegion(UpdateHook):
    """Anchors of all layers of this process, and the judgment of steps."""

    def __init__(self, config: VP2OConfig, stein: Stein, source: RouteSource = "none") -> None:
        """stein: attached before. source: of the routes that updates replay."""
        self.config = config
        self._stein = stein
        self._source: RouteSource = source
        self._maximum: Callable[[float], float]
        self._anchors: dict[int, _Anchor] = {}
        self._tables: list[RouteTable] = []
        """Route tables of the rollout batch."""
        self._probe_tokens = 0
        """Most tokens of one micro-batch that are probed."""
        self._seen: dict[int, _Seen] = {}
        self.verdict: Verdict | None = None
        """Decision on the last update; None where its gradients were not finite."""
        self._refused = 0
        """Updates refused one after the other."""

    def attach(self, trainer: Trainer) -> None:
        """Take what is needed of the ranks."""
        self._maximum = lambda value: max(trainer.ranks.gather(value))

    @property
    def experts(self) -> Experts:
        """The experts of the attached transform."""
        return self._stein.experts

    def weights_pushed(self) -> None:
        """Anchor all layers at the weights as they are."""
        for number, layer in self.experts.layers.items():
            start = self.experts.prototypes(number)
            weights = self.experts.output_weights(layer.outputs)
            router = [p.detach().clone() for p in _parameters(layer.router)]
            self._anchors[number] = _Anchor(start, self._follow(layer, weights, start), router)

    def before_forward(self, batches: Sequence[Batch], stage: Stage, place: UpdateContext) -> None:
        """Routers keep what they see of the rollout batch, each micro-batch in its first pass."""
        if not self._anchors:
            self.weights_pushed()
        every = [batch for update in place.rollout or [batches] for batch in update]
        self._tables = [batch.routes for batch in every if batch.routes is not None]
        self._probe_tokens = -(-self.config.probe_tokens // max(len(every), 1))
        self.verdict = None

    def observers(self, table: RouteTable, stage: Stage, place: UpdateContext) -> list[RouteObserver]:
        """Return the probe of the micro-batch."""
        return [Probe(table, self._probe_tokens)]

    @torch.no_grad()
    def after_pass(self, stage: Stage) -> None:
        """Give the anchors' routers the tokens that probes have seen."""
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
        """[T, k] experts that updates replay, sentinels where they do not."""
        routes = None if self._source == "none" else reference_routes(table, self._source, layer)
        if routes is not None:
            return routes
        dtype, device = route_dtype(table.shape.experts), table.counted.device
        return torch.full((len(table.counted), table.shape.topk), NO_ROUTE[dtype], dtype=dtype, device=device)

    def before_step(self, preview: StepPreview) -> float:
        """Return the share of the learning rate at which the step may be taken."""
        self.verdict = self.judge(preview)
        return self.verdict.scale

    def metrics(self) -> Metrics:
        """Return what became of the step, and the shift by layer."""
        verdict = self.verdict or Verdict(1.0, 0, {})
        return {
            "update/rejected": alike(float(verdict.scale == 0.0), across="sum"),
            "update/backtracks": alike(float(verdict.backtracks), across="sum"),
        } | of_layers({layer: {"shift": mean(shift, 1)} for layer, shift in verdict.shifts.items()})

    @torch.no_grad()
    def judge(self, preview: StepPreview) -> Verdict:
        """How much of the step that is about to be taken may be taken: the same answer on all processes. Collective.

        Errors: UserError where it is nothing for the MOST_REFUSED-th time in a row: what is refused changes nothing, so that
        the next step is likely to be refused as well.
        """
        first: dict[int, float] = {}
        limit = self.config.trust_region
        assert limit is not None, "without one there is no trust region"
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
                f" {limit:g}, and were left out; {remedy} a larger vp2o.trust_region or a smaller"
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
        }  # none without a token of the loss

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
    """[C, N] weights with which a router of these parameters would send these inputs to their experts, replayed or its own."""
    weight, *bias = parameters
    return router.gates(router_gating_linear(hidden, weight, bias[0] if bias else None, torch.float32), routes)
