"""Counts which experts are active together."""

from __future__ import annotations

from torch import Tensor

from megatron_rl.algorithms.stein import coactivation_counts
from megatron_rl.routing.memory import RouteTable
from megatron_rl.routing.passes import RouteObserver


class Coactivation(dict[int, Tensor]):
    """[E, E] counted tokens by layer on which two experts are both active."""


class CountCoactivation(RouteObserver):
    """Counts in the first pass of a micro-batch."""

    def __init__(self, table: RouteTable) -> None:
        self.table = table

    def see_choice(self, layer: int, own: Tensor, chosen: Tensor) -> None:
        """Count the pairs of experts of the counted tokens."""
        found = self.table.left(Coactivation)
        if layer not in found:
            found[layer] = coactivation_counts(chosen, self.table.shape.experts, self.table.counted)
