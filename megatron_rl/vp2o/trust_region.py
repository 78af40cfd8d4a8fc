"""VP2O's geometric trust region: how far an update would move what the experts of a layer stand for, seen by its router.

The anchor is what the rollout engine has: prototypes when its weights were pushed, and the gates of the first tokens after
that. A step is looked at before it is taken (`trainer.preview`), so that refusing it leaves every parameter, the optimizer and
random states as they are, to the bit, and needs no copy of them.

Both sides of a comparison iterate from the anchor's prototypes. From the fixed start that the transform's have, a prototype
swings through another direction where a small step takes the singular vector past a right angle to that start; halved steps
would stay before that point for good.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
from megatron_rl.routing.memory import RouteTable
from megatron_rl.routing.passes import RouteObserver, Router
from megatron_rl.trainer.hooks import Place, Stage, UpdateHook
from megatron_rl.trainer.preview import StepPreview
from megatron_rl.trainer.trainer import Trainer
from megatron_rl.vp2o.experts import ExpertLayer, Experts, stacked
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
    hidden: Tensor | None = None
    """[C, d] router inputs of this process's probe tokens; None until the first pass."""
    gates: Tensor | None = None
    """[C, N]"""


@dataclass(frozen=True)
class Verdict:
    """What became of a proposed step."""

    scale: float
    """Factor of the learning rate: 1, a power of 1/2, or 0, which leaves the step out."""
    backtracks: int
    shifts: dict[int, float]
    """Barycenter shift by layer of this process's pipeline stage, of the step as it was proposed."""


class Probe(RouteObserver):
    """Keeps what routers see of some evenly spaced counted tokens."""

    def __init__(self, table: RouteTable, tokens: int) -> None:
        """tokens: at most so many."""
        self.table, self.tokens = table, tokens
        self.hidden: dict[int, Tensor] = {}
        """Router inputs [C, d] by layer."""

    def see_logits(self, layer: int, hidden: Tensor, logits: Tensor, router: Router) -> Tensor:
        """Keep the router inputs of the chosen tokens."""
        if layer not in self.hidden:
            self.hidden[layer] = hidden[self.table.evenly_spaced(self.tokens)]
        return logits


class TrustRegion(UpdateHook):
    """Anchors of all layers of this process, and the judgement of steps."""

    def __init__(self, config: VP2OConfig, stein: Stein) -> None:
        """stein: attached before."""
        self.config = config
        self._stein = stein
        self._maximum: Callable[[float], float]
        self._device: torch.device
        self._anchors: dict[int, _Anchor] = {}
        self._probes: list[Probe] = []
        self._probe_tokens = 0
        """Most tokens of one micro-batch that are probed; 0: none."""
        self.verdict: Verdict | None = None
        """What became of the last update; None where its gradients were not finite."""
        self._refused = 0
        """Updates refused one after the other."""

    def attach(self, trainer: Trainer) -> None:
        """Take what is needed of the ranks."""
        self._maximum = lambda value: max(trainer.ranks.gather(value))
        self._device = trainer.ranks.device

    @property
    def experts(self) -> Experts:
        """The experts of the attached transform."""
        return self._stein.experts

    def weights_pushed(self) -> None:
        """Anchor all layers at the weights as they are."""
        for number, layer in self.experts.layers.items():
            start = self.experts.prototypes(number)
            weights = self.experts.output_weights(layer.outputs)
            self._anchors[number] = _Anchor(start, self._follow(layer, weights, start))

    def before_forward(self, batches: Sequence[Batch], stage: Stage, place: Place) -> None:
        """Routers keep what they see, where the anchor has not seen anything yet."""
        if not self._anchors:
            self.weights_pushed()
        blind = any(anchor.gates is None for anchor in self._anchors.values())
        self._probe_tokens = -(-self.config.probe_tokens // max(len(batches), 1)) if blind else 0
        self._probes, self.verdict = [], None

    def observers(self, table: RouteTable, stage: Stage, place: Place) -> list[RouteObserver]:
        """Return the probe of the micro-batch, where the anchor has not seen any tokens."""
        found: list[Probe] = [Probe(table, self._probe_tokens)] if self._probe_tokens else []
        self._probes += found
        return [*found]

    @torch.no_grad()
    def after_pass(self, stage: Stage) -> None:
        """Give anchors the gates of the tokens that probes have seen."""
        probes, self._probes = [probe.hidden for probe in self._probes if probe.hidden], []
        if not probes:
            return
        tokens = torch.tensor([sum(len(next(iter(hidden.values()))) for hidden in probes)], device=self._device)
        dist.all_reduce(tokens, group=self.experts.token_group)
        if not int(tokens):  # no token of the loss on any process: the next pass may have some
            return
        for number, anchor in self._anchors.items():
            seen = [hidden[number] for hidden in probes if number in hidden]
            if anchor.gates is None and seen:
                router = self.experts.layers[number].router
                anchor.hidden = torch.cat(seen)
                anchor.gates = _gates(router, anchor.hidden, [p.detach() for p in _parameters(router)])

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
        """Mean over the probe tokens of all processes, by layer."""
        sums = []
        seen = [number for number, anchor in self._anchors.items() if anchor.gates is not None]
        for number in seen:  # none before the first token of the loss
            layer, anchor = self.experts.layers[number], self._anchors[number]
            assert anchor.hidden is not None and anchor.gates is not None
            prototypes = self._prototypes_after(layer, anchor, preview, scale)
            gates = _gates(layer.router, anchor.hidden, preview.after(_parameters(layer.router), scale))
            shift = barycenter_shift(gates, prototypes, anchor.gates, anchor.prototypes)
            sums.append(torch.stack([shift * len(gates), shift.new_tensor(len(gates))]))
        if not sums:
            return {}
        total = torch.stack(sums)
        dist.all_reduce(total, group=self.experts.token_group)
        return dict(zip(seen, (total[:, 0] / total[:, 1].clamp(min=1)).tolist(), strict=True))

    def _prototypes_after(self, layer: ExpertLayer, anchor: _Anchor, preview: StepPreview, scale: float) -> Tensor:
        parameters = list(dict.fromkeys(output.parameter for output in layer.outputs))
        size = -(-len(parameters) // PARTS)
        after = {}
        for first in range(0, len(parameters), size):
            some = parameters[first : first + size]
            after |= dict(zip(map(id, some), preview.after(some, scale), strict=True))
        outputs = stacked([output.of(after[id(output.parameter)]) for output in layer.outputs])
        return self._follow(layer, outputs.transpose(1, 2), anchor.start)

    def _follow(self, layer: ExpertLayer, weights: Tensor, start: Tensor) -> Tensor:
        return self.experts.prototypes_of(layer, weights, start[layer.mine], TRACKING)


def _parameters(router: ReplayRouter) -> list[torch.nn.Parameter]:
    """Weight and, where it has one, bias."""
    return [router.weight] if router.bias is None else [router.weight, router.bias]


def _gates(router: ReplayRouter, hidden: Tensor, parameters: list[Tensor]) -> Tensor:
    """[C, N] weights with which a router of these parameters would send these inputs to their experts."""
    weight, *bias = parameters
    return router.gates(router_gating_linear(hidden, weight, bias[0] if bias else None, torch.float32))
