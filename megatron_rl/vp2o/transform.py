"""VP2O in training: expert gradients are replaced by their Stein transform, layer by layer, on any parallel layout.

Attraction is linear in the gradients, so it is applied to each process's own sums before the data-parallel reduction, where
every process still has all of its experts' gradients (afterwards the distributed optimizer keeps a shard). Repulsion depends on
weights alone and is added after the reduction, where gradients are means over tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megatron_rl.algorithms import stein
from megatron_rl.config import VP2OConfig
from megatron_rl.models.moe import OUTPUT, ExpertSlice, expert_slices, moe_layers
from megatron_rl.models.router import ReplayRouter
from megatron_rl.routing.replay import RouteTable

CHUNK = 1 << 22
"""Numbers of one [experts, columns] buffer: 16 MiB."""
DAMPING = 0.01
"""Of the kernel's gradient: what the power iterations could not tell apart does not decide where an expert is pushed."""
ITERATIONS = 32
"""Of its solve, at most."""
PREFIX = "vp2o/"


@dataclass
class ExpertLayer:
    """One MoE layer's experts as this process has them."""

    router: ReplayRouter
    slices: dict[str, list[ExpertSlice]]
    """This rank's experts, by parameter."""
    experts: int
    """In all, N."""
    mine: slice
    """Which of them are this rank's."""
    start: Tensor
    """[D_out]: where the power iteration starts, the same for all experts and on all ranks."""

    @property
    def outputs(self) -> list[ExpertSlice]:
        """Output projections, [D_out, D_in / expert_tensor] each."""
        return self.slices[OUTPUT]


@dataclass
class _Interaction:
    """Who attracts and repels whom in one layer, in one update."""

    coactivation: Tensor
    attract: Tensor
    repel: Tensor
    kernel: Tensor
    sums: dict[str, float] = field(default_factory=dict)
    """For the log; those of one process, to be added up."""


class Stein:
    """The transform of one trainer's expert gradients."""

    def __init__(self, config: VP2OConfig, chunks: list[torch.nn.Module]) -> None:
        self.config = config
        self.layers = {number: _expert_layer(number, layer) for number, layer in moe_layers(chunks)}
        self.expert_group = parallel_state.get_expert_model_parallel_group()
        self.slice_group = parallel_state.get_expert_tensor_parallel_group()
        self.replica_group = parallel_state.get_expert_data_parallel_group()
        self.token_group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
        """Tokens are spread over data, context and (by sequence parallelism) tensor ranks; expert ranks are data ranks."""
        self._tables: list[RouteTable] = []
        self._prototypes: dict[int, Tensor] = {}
        self._interactions: dict[int, _Interaction] = {}

    # -- one update, in this order ------------------------------------------------------------------------------------

    def begin(self, tables: Iterable[RouteTable]) -> None:
        """Before the forward. tables: of the whole rollout batch; those of its later updates count if they were scored."""
        self._tables = list(tables)

    @torch.no_grad()
    def attract(self) -> None:
        """Mix the gradients of co-active experts, in this process's DDP buffers, before they are reduced. Collective."""
        together = self._coactivation()
        self._tables = []
        for number, layer in self.layers.items():
            found = self._interactions[number] = self._interact(number, together[number])
            # The gradient of an idle expert comes from tokens that are not in the loss, if at all.
            idle = found.coactivation.diagonal() == 0
            mixing = found.kernel * torch.where(idle[:, None], torch.eye(layer.experts).to(idle.device), found.attract)
            stays = stein.untouched(mixing).tolist()
            if not all(stays):
                for slices in layer.slices.values():
                    self._mix(slices, mixing, layer.mine, stays[layer.mine])

    @torch.no_grad()
    def repel(self, owned: dict[torch.nn.Parameter, slice] | None) -> None:
        """Add the repulsion's gradient to those of the output projections, after the reduction. Collective.

        owned: which part of each flat parameter's gradient this process reduced (distributed optimizer); None: all.
        """
        for number, layer in self.layers.items():
            found = self._interactions[number]
            every = [one for slices in layer.slices.values() for one in slices]
            found.sums |= self._figures(number, found, self._square(every, owned))
        if not self.config.repulsion:
            return
        factors = {number: self._repulsion(number) for number in self.layers}
        squares = {n: _rank_two_square(*factors[n]) / self.replica_group.size() for n in self.layers}
        for number, strength in self._strengths(squares, owned).items():
            a, x, b, p = factors[number]
            for index, output in enumerate(self.layers[number].outputs):
                output.main_grad.addr_(x[index], a[index], alpha=strength).addr_(p[index], b[index], alpha=strength)
            self._interactions[number].sums["repulsion_square"] = strength**2 * squares[number]

    def sums(self) -> dict[str, float]:
        """vp2o/LAYER/NAME of the last update, to be added up over the processes."""
        return {f"{PREFIX}{n}/{k}": v for n, found in self._interactions.items() for k, v in found.sums.items()}

    # -- prototypes ---------------------------------------------------------------------------------------------------

    def prototypes(self, number: int) -> Tensor:
        """[N, D_out] of a layer's weights as they are, the same on all processes that have the layer. Collective."""
        if number not in self._prototypes:
            layer = self.layers[number]
            weights = self.output_weights(layer.outputs)
            start = layer.start.expand(len(weights), -1)
            self._prototypes[number] = self.prototypes_of(layer, weights, start, self.config.power_iterations)
        return self._prototypes[number]

    def prototypes_of(self, layer: ExpertLayer, weights: Tensor, start: Tensor, steps: int) -> Tensor:
        """[N, D_out] of this rank's output projections `weights` [n, D_in, D_out], iterated from `start` [n, D_out].

        Collective.
        """
        mine = stein.prototypes(weights, steps, start, all_reduce=self._over_slices)
        return self._gather_experts(mine)

    def output_weights(self, outputs: list[ExpertSlice]) -> Tensor:
        """[n, D_in, D_out] fp32."""
        return stacked([output.data for output in outputs]).transpose(1, 2)

    def weights_changed(self) -> None:
        """After an optimizer step."""
        self._prototypes = {}

    # -- inside -------------------------------------------------------------------------------------------------------

    def _coactivation(self) -> dict[int, Tensor]:
        """O by layer over the tokens of all processes: one reduction."""
        if not self.layers:
            return {}
        size, device = next(iter(self.layers.values())).experts, self._device
        nothing = torch.zeros(size, size, device=device)
        counts = [
            sum((t.coactivation[n] for t in self._tables if n in t.coactivation), start=nothing) for n in self.layers
        ]
        seen = [t for t in self._tables if any(n in t.coactivation for n in self.layers)]
        tokens = sum((t.counted.sum() for t in seen), start=torch.zeros((), device=device))
        flat = torch.cat([torch.stack(counts).flatten(), tokens.view(1)]).double()
        dist.all_reduce(flat, group=self.token_group)
        shares = (flat[:-1] / flat[-1].clamp(min=1)).float().view(-1, size, size)
        return dict(zip(self.layers, shares, strict=True))

    def _interact(self, number: int, together: Tensor) -> _Interaction:
        config = self.config
        temperature = 1.0 if config.temperature is None else config.temperature / len(together)
        attract = stein.attraction_mask(together, config.neighbors, config.attract_above)
        repel = stein.repulsion_mask(together, config.inactive_neighbors, config.repel_below, attract=attract)
        return _Interaction(
            together,
            stein.neighbor_weights(attract),
            stein.neighbor_weights(repel),
            stein.kernel(self.prototypes(number), temperature),
        )

    def _repulsion(self, number: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The factors of the kernel's gradient of this rank's experts."""
        layer, found = self.layers[number], self._interactions[number]
        return stein.kernel_gradient(
            self.output_weights(layer.outputs),
            self.prototypes(number),
            found.kernel,
            found.repel,
            damping=DAMPING,
            iterations=ITERATIONS,
            all_reduce=self._over_slices,
            experts=layer.mine,
        )

    def _strengths(self, squares: dict[int, float], owned: dict[torch.nn.Parameter, slice] | None) -> dict[int, float]:
        """What multiplies the repulsion of each layer. squares: this process's part of its squared norm."""
        weight = self.config.repulsion
        if self.config.repulsion_scale == "absolute" or not squares:
            return dict.fromkeys(squares, weight)
        attraction = [self._square(self.layers[n].outputs, owned) for n in squares]
        parts = torch.tensor([attraction, list(squares.values())], dtype=torch.float64).to(self._device)
        for group in (self.expert_group, self.slice_group, self.replica_group):
            if group.size() > 1:
                dist.all_reduce(parts, group=group)
        ratios = (parts[0] / parts[1]).sqrt().nan_to_num(0.0, posinf=0.0)  # 0: nobody is pushed
        return {n: weight * ratio for n, ratio in zip(squares, ratios.tolist(), strict=True)}

    @property
    def _device(self) -> torch.device:
        return next(iter(self.layers.values())).start.device

    def _mix(self, slices: list[ExpertSlice], mixing: Tensor, mine: slice, stays: list[bool]) -> None:
        """g_i <- sum_j mixing_ij g_j for one parameter, a chunk of its columns at a time."""
        flat = [one.main_grad.view(-1) for one in slices]
        columns = max(1, CHUNK // len(mixing))
        for first in range(0, flat[0].numel(), columns):
            place = slice(first, first + columns)
            own = torch.stack([gradient[place] for gradient in flat])
            mixed = self._scatter_experts(mixing[:, mine].to(own.dtype) @ own)
            for gradient, row, stay in zip(flat, mixed, stays, strict=True):
                if not stay:
                    gradient[place] = row

    def _scatter_experts(self, partial_sums: Tensor) -> Tensor:
        """[N, C] of each expert-parallel rank -> their sum's [n, C] rows of this rank's experts."""
        ranks = self.expert_group.size()
        if ranks == 1:
            return partial_sums
        parts = list(partial_sums.chunk(ranks))
        mine = torch.empty_like(parts[0])
        dist.reduce_scatter(mine, parts, group=self.expert_group)
        return mine

    def _gather_experts(self, mine: Tensor) -> Tensor:
        """[n, ...] of each expert-parallel rank -> [N, ...]."""
        ranks = self.expert_group.size()
        if ranks == 1:
            return mine
        parts = [torch.empty_like(mine) for _ in range(ranks)]
        dist.all_gather(parts, mine.contiguous(), group=self.expert_group)
        return torch.cat(parts)

    def _over_slices(self, tensor: Tensor) -> Tensor:
        if self.slice_group.size() > 1:
            dist.all_reduce(tensor, group=self.slice_group)
        return tensor

    def _square(self, slices: list[ExpertSlice], owned: dict[torch.nn.Parameter, slice] | None) -> float:
        """Squared norm of the gradients of these, of the part that this process counts: all processes' parts add up."""
        parameters = {id(one.parameter): one.parameter for one in slices}.values()
        if owned is not None:
            parts = [p.main_grad.view(-1)[owned[p]] for p in parameters if p in owned]
            return _square_of(parts)
        return _square_of(p.main_grad for p in parameters) / self.replica_group.size()

    def _figures(self, number: int, found: _Interaction, square: float) -> dict[str, float]:
        """What `vp2o_metrics` makes means of; those that all processes have alike come with their number."""
        p = self.prototypes(number)
        apart = ~torch.eye(len(p), dtype=torch.bool, device=p.device)
        similar = p @ p.t()
        pairs = {"overlap": apart, "neighbor_kernel": (found.attract > 0) & apart, "inactive_kernel": found.repel > 0}
        figures = {"attraction_square": square, "processes": 1.0}
        for name, mask in pairs.items():
            values = similar[mask]
            if len(values):
                figures[name] = float((values.abs() if name == "overlap" else values).mean())
        return figures


def _expert_layer(number: int, layer: torch.nn.Module) -> ExpertLayer:
    slices = expert_slices(layer.experts)
    count = len(slices[OUTPUT])
    first = parallel_state.get_expert_model_parallel_rank() * count
    output = slices[OUTPUT][0].data
    start = torch.randn(output.shape[0], generator=torch.Generator().manual_seed(number))
    experts = layer.config.num_moe_experts
    return ExpertLayer(layer.router, slices, experts, slice(first, first + count), start.to(output.device))


def stacked(matrices: Sequence[Tensor]) -> Tensor:
    """[n, ...] in fp32, with no other copy on the way."""
    result = torch.empty(len(matrices), *matrices[0].shape, device=matrices[0].device)
    for place, matrix in zip(result, matrices, strict=True):
        place.copy_(matrix)
    return result


def _square_of(tensors: Iterable[Tensor]) -> float:
    return float(sum(tensor.norm().double() ** 2 for tensor in tensors))


def _rank_two_square(a: Tensor, x: Tensor, b: Tensor, p: Tensor) -> float:
    """Sum of the squares of a x^T + b p^T over the experts."""
    dot = partial(torch.einsum, "nd,nd->n")
    square = dot(a, a) * dot(x, x) + dot(b, b) * dot(p, p) + 2 * dot(a, b) * dot(x, p)
    return float(square.double().sum())


def vp2o_metrics(updates: list[dict[str, float]]) -> dict[str, float]:
    """Figures of one step from the sums of its updates over all processes; means over updates, and over layers.

    vp2o/overlap: mean |cos| of two prototypes; /neighbor_kernel, /inactive_kernel: mean cos over the pairs that attract and
    repel; /attraction, /repulsion: norms of the two parts of the expert gradients, before clipping. Of a layer below
    vp2o/layer_LL/.
    """
    cells: dict[int, list[dict[str, float]]] = {}
    for sums in updates:
        found: dict[int, dict[str, float]] = {}
        for key, value in sums.items():
            if key.startswith(PREFIX):
                layer, name = key.removeprefix(PREFIX).split("/", 1)
                found.setdefault(int(layer), {})[name] = value
        for layer, one in found.items():
            cells.setdefault(layer, []).append(_layer_figures(one))
    metrics = {f"{PREFIX}{k}": v for k, v in _means([one for many in cells.values() for one in many]).items()}
    for layer, many in sorted(cells.items()):
        metrics |= {f"{PREFIX}layer_{layer:02}/{k}": v for k, v in _means(many).items()}
    return metrics


def _layer_figures(sums: dict[str, float]) -> dict[str, float]:
    squares = {k.removesuffix("_square"): v**0.5 for k, v in sums.items() if k.endswith("_square")}
    alike = {k: v for k, v in sums.items() if not k.endswith("_square") and k != "processes"}
    return squares | {k: v / sums["processes"] for k, v in alike.items()}


def _means(figures: list[dict[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for one in figures for name in one)
    values = {name: [one[name] for one in figures if name in one] for name in names}
    return {name: sum(found) / len(found) for name, found in values.items()}
