"""How evenly routers use their experts: entropy of their distributions, and tokens of each expert."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from megatron_rl.metrics.reduce import Metrics, derived
from megatron_rl.routing.agreement import routing_log_probs
from megatron_rl.routing.memory import RouteTable
from megatron_rl.routing.metrics import of_layers, per_token
from megatron_rl.routing.passes import RouteObserver, Router


class RouterEntropy(RouteObserver):
    """Measures the entropy of the routers' distributions, in nats, over the counted tokens."""

    def __init__(self, table: RouteTable, update: int) -> None:
        self.table, self.update = table, update
        self._sums: dict[int, Tensor] = {}

    def see_logits(self, layer: int, hidden: Tensor, logits: Tensor, router: Router) -> Tensor:
        """Sum the entropies of the counted tokens."""
        if layer not in self._sums:
            log_probs = routing_log_probs(logits.detach(), router.score_function)
            self._sums[layer] = -torch.where(self.table.counted, (log_probs.exp() * log_probs).sum(-1), 0.0).sum()
        return logits

    def metrics(self) -> Metrics:
        """Return the entropy by layer."""
        tokens = len(self.table.counted_rows)
        return of_layers("entropy", {layer: per_token(s, tokens) for layer, s in self._sums.items()}, self.update)


class Load(dict[int, Tensor]):
    """[E] counted tokens by layer of each expert."""


def active_experts(load: np.ndarray) -> float | None:
    """Share of the experts that had a token."""
    return float((load > 0).mean()) if load.any() else None


def load_max(load: np.ndarray) -> float | None:
    """Tokens of the busiest expert, as a multiple of the mean."""
    return float(load.max() / load.mean()) if load.any() else None


class ExpertLoad(RouteObserver):
    """Counts the tokens of each expert in the first pass of a micro-batch."""

    def __init__(self, table: RouteTable, update: int) -> None:
        self.table, self.update = table, update

    def see_choice(self, layer: int, own: Tensor, chosen: Tensor) -> None:
        """Count the tokens of each expert."""
        found = self.table.left(Load)
        if layer not in found:
            tokens = self.table.counted.float()[:, None].expand(chosen.shape)
            load = torch.zeros(self.table.shape.experts, device=chosen.device)
            found[layer] = load.scatter_add_(0, chosen.flatten(), tokens.flatten())

    def metrics(self) -> Metrics:
        """Return the share of active experts and the largest load by layer."""
        found: Metrics = {}
        for name, figure in {"active_experts": active_experts, "load_max": load_max}.items():
            # Loads of several layers or updates are not to be added up.
            loads = self.table.left(Load).items()
            of = {layer: replace(derived(figure, load), across="mean") for layer, load in loads}
            found |= of_layers(name, of, self.update)
        return found
