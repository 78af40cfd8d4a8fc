"""Which routes hold: recorded by the trainer, or sent along by the engine, and replayed in the passes that follow."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from megatron_rl.routing.memory import Features, RouteTable
from megatron_rl.routing.passes import RouteObserver, Router
from megatron_rl.routing.table import route_dtype

RouteSource = Literal["none", "r2", "r3", "pr2", "pr3"]
PREDICTING: tuple[RouteSource, ...] = ("pr2", "pr3")
FROM_ENGINE: tuple[RouteSource, ...] = ("r3", "pr3")


def reference_routes(table: RouteTable, source: RouteSource, layer: int) -> Tensor | None:
    """[T, k] ids that updates replay, or in free routing are compared with; None where there are none."""
    return table.engine_route(layer) if source in FROM_ENGINE else table.recorded.get(layer)


class ReplayRoutes(RouteObserver):
    """Sends tokens to the experts that `source` says."""

    def __init__(self, table: RouteTable, source: RouteSource) -> None:
        self.table = table
        self.source: RouteSource = source

    def replay(self, layer: int) -> Tensor | None:
        """Return the source's routes of a layer."""
        return reference_routes(self.table, self.source, layer)


class RecordRoutes(RouteObserver):
    """Keeps the experts of all tokens."""

    def __init__(self, table: RouteTable) -> None:
        self.table = table

    def see_choice(self, layer: int, own: Tensor, chosen: Tensor) -> None:
        """Keep the chosen experts."""
        self.table.recorded[layer] = chosen.to(route_dtype(self.table.shape.experts))


class RecordLogits(RouteObserver):
    """Keeps the logits of the cached tokens, from which later passes tell how far a router has moved."""

    def __init__(self, table: RouteTable) -> None:
        self.table = table

    def see_logits(self, layer: int, hidden: Tensor, logits: Tensor, router: Router) -> Tensor:
        """Keep the logits of the cached tokens."""
        self.table.features[layer] = Features(None, logits[self.table.cached], None)
        return logits
