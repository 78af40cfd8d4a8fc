"""The experts of each MoE layer on this process, the process groups that share them, and their prototypes.

`algorithms.stein` explains what prototypes are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor

from megatron_rl.algorithms import stein
from megatron_rl.algorithms.stein import coactivation_counts, coactivation_sums
from megatron_rl.distributed.parallel import process_group
from megatron_rl.models.moe import OUTPUT, ExpertSlice, expert_slices, moe_layers
from megatron_rl.models.router import ReplayRouter
from megatron_rl.routing.passes import RouteObserver, Router
from megatron_rl.routing.table import RouteTable, routing_log_probs


@dataclass
class ExpertLayer:
    """The experts of one MoE layer that this process holds, and the layer's router."""

    router: ReplayRouter
    slices: dict[str, list[ExpertSlice]]
    """This rank's shard of the experts' weights, by parameter name."""
    experts: int
    """Number of experts of the layer on all ranks, N."""
    mine: slice
    """Range of this rank's experts among the layer's N experts."""
    start: Tensor
    """Start vector of the power iteration, [D_out], the same for all experts and on all ranks."""

    @property
    def outputs(self) -> list[ExpertSlice]:
        """Output projections of this rank's experts, each [D_out, D_in / expert_tensor]."""
        return self.slices[OUTPUT]


@dataclass(frozen=True)
class Exchange:
    """Communication plan for sums over experts: the partial sums that expert-parallel ranks exchange."""

    mine: slice
    """Range of this rank's experts among all experts."""
    sent: Tensor
    """Indices of the experts on other ranks for which this rank sends partial sums, ordered by rank."""
    places: Tensor
    """Index on this rank, from 0, of the expert to which each received row is added; rows are ordered by sending rank."""
    sends: list[int]
    """Number of rows sent to each rank."""
    receives: list[int]
    """Number of rows received from each rank."""
    anything: bool
    """True if any two ranks exchange partial sums."""


class Experts:
    """All MoE layers in this process's model chunks, and the process groups of their experts."""

    def __init__(self, chunks: Sequence[torch.nn.Module], power_iterations: int) -> None:
        self.layers = {number: _expert_layer(number, layer) for number, layer in moe_layers(chunks)}
        self.power_iterations = power_iterations
        self.expert_group = process_group(parallel_state.get_expert_model_parallel_group())
        self.slice_group = process_group(parallel_state.get_expert_tensor_parallel_group())
        self.replica_group = process_group(parallel_state.get_expert_data_parallel_group())
        self.token_group = process_group(parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True))
        """Ranks that hold different tokens: data-parallel, context-parallel and (with sequence parallelism) tensor-parallel
        ranks. Expert-parallel ranks are data-parallel ranks too."""
        self._prototypes: dict[int, Tensor] = {}

    def prototypes(self, number: int) -> Tensor:
        """Return the prototypes [N, D_out] of a layer's current weights. Collective, with the same result on all ranks."""
        if number not in self._prototypes:
            layer = self.layers[number]
            weights = self.output_weights(layer.outputs)
            start = layer.start.expand(len(weights), -1)
            self._prototypes[number] = self.prototypes_of(layer, weights, start, self.power_iterations)
        return self._prototypes[number]

    def prototypes_of(self, layer: ExpertLayer, weights: Tensor, start: Tensor, steps: int) -> Tensor:
        """Return the prototypes [N, D_out] after `steps` power iterations from `start` [n, D_out]. Collective.

        weights: [n, D_in, D_out], output projections of this rank's experts.
        """
        mine = stein.prototypes(weights, steps, start, all_reduce=self.over_slices)
        return self.gather(mine)

    def output_weights(self, outputs: list[ExpertSlice]) -> Tensor:
        """Return the output projections as one tensor [n, D_in, D_out] fp32."""
        return stacked([output.data for output in outputs]).transpose(1, 2)

    def weights_changed(self) -> None:
        """Discard the cached prototypes. Call it after an optimizer step."""
        self._prototypes = {}

    def exchange(self, taken: Tensor, mine: slice) -> Exchange:
        """Return the plan by which expert-parallel ranks exchange partial sums over experts.

        taken: [N, N] bool, True if the sum of expert i includes expert j.
        """
        ranks, me = self.expert_group.size(), self.expert_group.rank()
        # Dimensions: rank of i, place of i on its rank, rank of j.
        crossing = taken.view(len(taken), ranks, -1).any(-1).view(ranks, -1, ranks).cpu()
        crossing[range(ranks), :, range(ranks)] = False
        sent, received = crossing[:, :, me], crossing[me].t()  # [rank, place]
        return Exchange(
            mine,
            sent.flatten().nonzero()[:, 0].to(taken.device),
            received.nonzero()[:, 1].to(taken.device),
            sent.sum(1).tolist(),
            received.sum(1).tolist(),
            bool(crossing.any()),
        )

    def mix(self, own: Tensor, mixing: Tensor, exchange: Exchange) -> Tensor:
        """Return this rank's rows [n, C] of the product of mixing [N, N] and the rows of all experts [N, C]. Collective.

        own: [n, C], rows of this rank's experts. Ranks exchange only non-empty partial sums: one row for each expert whose sum
        includes an expert of another rank.
        """
        mine = exchange.mine
        mixed = mixing[mine, mine] @ own
        if not exchange.anything:
            return mixed
        sent = mixing[exchange.sent][:, mine] @ own
        received = own.new_empty(len(exchange.places), own.shape[1])
        dist.all_to_all_single(received, sent, exchange.receives, exchange.sends, group=self.expert_group)
        return mixed.index_add_(0, exchange.places, received)

    def gather(self, mine: Tensor) -> Tensor:
        """Gather the tensors [n, ...] of all expert-parallel ranks into one tensor [N, ...]."""
        ranks = self.expert_group.size()
        if ranks == 1:
            return mine
        parts = [torch.empty_like(mine) for _ in range(ranks)]
        dist.all_gather(parts, mine.contiguous(), group=self.expert_group)
        return torch.cat(parts)

    def over_slices(self, tensor: Tensor) -> Tensor:
        """Sum a tensor in place over the ranks that hold the other slices of the same experts."""
        if self.slice_group.size() > 1:
            dist.all_reduce(tensor, group=self.slice_group)
        return tensor


def _expert_layer(number: int, layer: MoELayer) -> ExpertLayer:
    router, experts = layer.router, layer.config.num_moe_experts
    assert isinstance(layer.experts, torch.nn.Module) and isinstance(router, ReplayRouter) and experts is not None
    slices = expert_slices(layer.experts)
    count = len(slices[OUTPUT])
    first = parallel_state.get_expert_model_parallel_rank() * count
    output = slices[OUTPUT][0].data
    start = torch.randn(output.shape[0], generator=torch.Generator().manual_seed(number))
    return ExpertLayer(router, slices, experts, slice(first, first + count), start.to(output.device))


def stacked(matrices: Sequence[Tensor]) -> Tensor:
    """Stack matrices to [n, ...] in fp32, without an intermediate copy."""
    result = torch.empty(len(matrices), *matrices[0].shape, device=matrices[0].device)
    for place, matrix in zip(result, matrices, strict=True):
        place.copy_(matrix)
    return result


# -- coactivation --------------------------------------------------------------------------------------------------------
# Counts of active experts, and of experts that are active on the same token.


class Coactivation(dict[int, Tensor]):
    """Co-activation of experts: {layer: [E, E] sums over the counted tokens}.

    A token adds 1 to each pair of its active experts. With soft co-activation, it adds to every pair of experts the product of
    their shares, which are the router's probabilities.
    """


class CountCoactivation(RouteObserver):
    """Counts how often two experts are active on the same token, in the first forward pass of a micro-batch."""

    def __init__(self, table: RouteTable, *, soft: bool = False) -> None:
        """Create it. soft: use each expert's probability among all experts as its share, instead of active (1) or not (0)."""
        self.table, self.soft = table, soft

    def see_logits(self, layer: int, hidden: Tensor, logits: Tensor, router: Router) -> Tensor:
        """Add the products of the experts' shares, summed over the counted tokens; only with soft co-activation."""
        found = self.table.left(Coactivation)
        if self.soft and layer not in found:
            shares = routing_log_probs(logits.detach(), router.score_function).exp()
            found[layer] = coactivation_sums(shares, self.table.counted)
        return logits

    def see_choice(self, layer: int, own: Tensor, chosen: Tensor) -> None:
        """Count the pairs of experts that are active on the same counted token; only without soft co-activation."""
        found = self.table.left(Coactivation)
        if not self.soft and layer not in found:
            found[layer] = coactivation_counts(chosen, self.table.shape.experts, self.table.counted)


class Active(dict[int, Tensor]):
    """Loads: {layer: [E] numbers of counted tokens of each expert}, from the micro-batch's last update pass."""


class CountActive(RouteObserver):
    """Counts each expert's tokens in an update's pass, which may use other experts than the micro-batch's first pass."""

    def __init__(self, table: RouteTable) -> None:
        self.table = table

    def see_choice(self, layer: int, own: Tensor, chosen: Tensor) -> None:
        """Count the counted tokens that each expert receives."""
        tokens = self.table.counted.float()[:, None].expand(chosen.shape)
        none = torch.zeros(self.table.shape.experts, device=chosen.device)
        self.table.left(Active)[layer] = none.scatter_add_(0, chosen.flatten(), tokens.flatten())
