"""Counts which experts are active, and which are together."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.algorithms.stein import coactivation_counts, coactivation_sums
from megatron_rl.routing.agreement import routing_log_probs
from megatron_rl.routing.memory import RouteTable
from megatron_rl.routing.passes import RouteObserver, Router


class Coactivation(dict[int, Tensor]):
    """[E, E] sums by layer over the counted tokens: of 1 where two experts are both active, or of their shares' product."""


class CountCoactivation(RouteObserver):
    """Counts in the first pass of a micro-batch."""

    def __init__(self, table: RouteTable, *, soft: bool = False) -> None:
        """soft: an expert is active to the degree of its share in the router's distribution over all experts."""
        self.table, self.soft = table, soft

    def see_logits(self, layer: int, hidden: Tensor, logits: Tensor, router: Router) -> Tensor:
        """Add up the shares of the counted tokens."""
        found = self.table.left(Coactivation)
        if self.soft and layer not in found:
            shares = routing_log_probs(logits.detach(), router.score_function).exp()
            found[layer] = coactivation_sums(shares, self.table.counted)
        return logits

    def see_choice(self, layer: int, own: Tensor, chosen: Tensor) -> None:
        """Count the pairs of experts of the counted tokens."""
        found = self.table.left(Coactivation)
        if not self.soft and layer not in found:
            found[layer] = coactivation_counts(chosen, self.table.shape.experts, self.table.counted)


class Active(dict[int, Tensor]):
    """[E] counted tokens of each expert by layer, in the micro-batch's last pass of an update."""


class CountActive(RouteObserver):
    """Counts in the pass of an update, whose experts may be others than those of the first pass."""

    def __init__(self, table: RouteTable) -> None:
        self.table = table

    def see_choice(self, layer: int, own: Tensor, chosen: Tensor) -> None:
        """Count the counted tokens of each expert."""
        tokens = self.table.counted.float()[:, None].expand(chosen.shape)
        none = torch.zeros(self.table.shape.experts, device=chosen.device)
        self.table.left(Active)[layer] = none.scatter_add_(0, chosen.flatten(), tokens.flatten())
