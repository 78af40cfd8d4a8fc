"""Route replay: the trainer's recorded routes, or the routes that the engine sent, are used again in later passes."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from megatron_rl.config import FROM_ENGINE
from megatron_rl.metrics.reduce import Metrics, derived
from megatron_rl.routing.passes import RouteObserver, Router, of_layers, share
from megatron_rl.routing.table import Features, RouteTable, has_route, route_dtype, routing_log_probs

RouteSource = Literal["none", "r2", "r3", "pr2", "pr3"]
"""Source of the replayed routes, as in `routing.source`."""


def reference_routes(table: RouteTable, source: RouteSource, layer: int) -> Tensor | None:
    """Return the expert ids [T, k] that updates replay, or that metrics compare with in free routing; None if missing."""
    return table.engine_route(layer) if source in FROM_ENGINE else table.recorded.get(layer)


class ReplayRoutes(RouteObserver):
    """Sends tokens to the experts of the route source."""

    def __init__(self, table: RouteTable, source: RouteSource) -> None:
        self.table = table
        self.source: RouteSource = source

    def replay(self, layer: int) -> Tensor | None:
        """Return the source's routes of a layer."""
        return reference_routes(self.table, self.source, layer)


class ReplayGates(ReplayRoutes):
    """Replays the engine's experts with the weights that the engine gave them."""

    def gates(self, layer: int) -> Tensor | None:
        """Return the engine's weights of a layer."""
        return self.table.engine_gates(layer)


def give_up(routes: Tensor, own: Tensor, log_probs: Tensor, below: float) -> tuple[Tensor, Tensor]:
    """Replace replayed experts whose router probability is very small; return routes [T, k] and bool mask of replacements.

    An expert is replaced if its probability is below `below` times the smallest probability among the router's own choice `own`
    [T, k]. The replacement is the likeliest expert of `own` that the token does not have yet, so the token keeps k different
    experts. log_probs: [T, E] of the router. This follows prime-rl (pull request 2703), which uses the same ratio.
    """
    replayed, of_own = log_probs.gather(1, routes), log_probs.gather(1, own)
    lost = replayed < of_own.amin(1, keepdim=True) + math.log(below)
    kept = torch.where(lost, -1, routes)
    own = own.gather(1, of_own.sort(dim=1, descending=True, stable=True).indices)
    had = (own[:, :, None] == kept[:, None, :]).any(-1)
    free = own.gather(1, had.int().sort(dim=1, stable=True).indices)  # missing experts first, likeliest first
    places = (lost.cumsum(1) - 1).clamp(min=0)
    return torch.where(lost, free.gather(1, places), routes), lost


class ReplayLikely(RouteObserver):
    """Replays the routes of `replayed`, but replaces engine experts whose router probability is very small (`give_up`).

    If an expert of a token is replaced in a layer, the token uses the router's own weights in this layer, because the engine's
    weights belong to another set of experts.
    """

    def __init__(self, replayed: ReplayRoutes, below: float, update: int) -> None:
        """below: threshold above 0, as a fraction of the smallest probability in the router's own choice (`give_up`).

        update: number of the update, from 1, for the name of the metric.
        """
        self.replayed, self.below, self.update = replayed, below, update
        self._routes: dict[int, Tensor] = {}
        """Layer -> [T, k] ids, as decided in the first forward: recomputation must not decide again."""
        self._whole: dict[int, Tensor] = {}
        """Layer -> [T] bool: True if no expert of the token was replaced."""
        self._counts: dict[int, tuple[Tensor, Tensor]] = {}
        """Layer -> number of replaced experts of the counted tokens, and number of all experts of these tokens' routes."""

    def see_logits(self, layer: int, hidden: Tensor, logits: Tensor, router: Router) -> Tensor:
        """Replace unlikely experts in the layer's routes and store the result; return the logits unchanged."""
        routes = self.replayed.replay(layer)
        if routes is None or layer in self._routes:
            return logits
        known = has_route(routes)
        own = router.choice(logits)
        log_probs = routing_log_probs(logits.detach(), router.score_function)
        found, lost = give_up(torch.where(known[:, None], routes.long(), own), own, log_probs, self.below)
        self._routes[layer] = torch.where(known[:, None], found.to(routes.dtype), routes)
        self._whole[layer] = ~lost.any(1)
        counted = self.replayed.table.counted_with_route(routes)
        self._counts[layer] = (lost & counted[:, None]).sum(), counted.sum() * routes.shape[1]
        return logits

    def replay(self, layer: int) -> Tensor | None:
        """Return the routes, in which unlikely experts are replaced."""
        return self._routes.get(layer)

    def gates(self, layer: int) -> Tensor | None:
        """Return the replayed weights of the tokens that keep all their experts."""
        gates = self.replayed.gates(layer)
        return None if gates is None else torch.where(self._whole[layer][:, None], gates, 0.0)

    def metrics(self) -> Metrics:
        """Return the share of replaced experts for each layer."""
        return of_layers("given_up", {n: derived(share, *c) for n, c in self._counts.items()}, self.update)


class RecordRoutes(RouteObserver):
    """Stores the experts of all tokens."""

    def __init__(self, table: RouteTable) -> None:
        self.table = table

    def see_choice(self, layer: int, own: Tensor, chosen: Tensor) -> None:
        """Store the chosen experts."""
        self.table.recorded[layer] = chosen.to(route_dtype(self.table.shape.experts))


class RecordLogits(RouteObserver):
    """Stores logits of the tokens in `RouteTable.cached`, so that later passes can measure how far a router has moved."""

    def __init__(self, table: RouteTable) -> None:
        self.table = table

    def see_logits(self, layer: int, hidden: Tensor, logits: Tensor, router: Router) -> Tensor:
        """Store the logits of the cached tokens."""
        self.table.features[layer] = Features(None, logits[self.table.cached], None)
        return logits
