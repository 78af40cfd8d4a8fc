"""Hook for routing replay: routes are recorded, replayed and measured in every forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_rl.config import FROM_ENGINE, PREDICTING
from megatron_rl.data.packing import Batch
from megatron_rl.metrics.reduce import Metrics, total
from megatron_rl.routing.measure import EngineAgreement, ExpertLoad, RouteAgreement, RouteDistance, RouterEntropy
from megatron_rl.routing.passes import RouteObserver
from megatron_rl.routing.replay import (
    RecordLogits,
    RecordRoutes,
    ReplayGates,
    ReplayLikely,
    ReplayRoutes,
    RouteSource,
)
from megatron_rl.routing.table import RouteTable
from megatron_rl.trainer.hooks import Stage, UpdateContext, UpdateHook

if TYPE_CHECKING:
    from megatron_rl.trainer.trainer import Trainer


class RoutingReplay(UpdateHook):
    """Selects the source of the experts in each forward pass (for example the engine's routes), and measures the routes."""

    def __init__(self, source: RouteSource, *, gates: bool = False, give_up_below: float = 0.0) -> None:
        """Create it. With source r3, gates and give_up_below are `routing.replay_gates` and `routing.give_up_below`."""
        self.source: RouteSource = source
        self.gates, self.give_up_below = gates, give_up_below
        self._counts = False
        """True if this process reports its token counts. Each token is reported by only one process of a model copy."""
        self._without_route = 0
        """Number of tokens in the current pass for which the engine returned no route."""

    def attach(self, trainer: Trainer) -> None:
        """Store whether this process reports its token counts."""
        self._counts = trainer.reports

    def before_forward(self, batches: Sequence[Batch], stage: Stage, place: UpdateContext) -> None:
        """Count the tokens for which the engine returned no route."""
        self._without_route = sum(batch.without_route for batch in batches)

    def metrics(self) -> Metrics:
        """Return the number of tokens whose routes should be replayed but were chosen by the trainer's router."""
        if self.source not in FROM_ENGINE:
            return {}
        return {"routing/fallback_tokens": total(self._without_route if self._counts else 0)}

    def observers(self, table: RouteTable, stage: Stage, place: UpdateContext) -> list[RouteObserver]:
        """Return the observers that replay, record and measure routes in this pass."""
        update, from_engine = place.update + 1, self.source in FROM_ENGINE
        found: list[RouteObserver] = [EngineAgreement(table, update), ExpertLoad(table, update)]
        if from_engine or (stage == "update" and self.source != "none"):
            found.append(self._replay(table, update))
        if stage == "update":
            measures = [RouteAgreement(table, self.source, update), RouteDistance(table, update)]
            return [*found, *measures, RouterEntropy(table, update)]
        if not from_engine or table.engine is None:
            found.append(RecordRoutes(table))
        if self.source not in PREDICTING:  # predictors keep more
            found.append(RecordLogits(table))
        return found

    def _replay(self, table: RouteTable, update: int) -> RouteObserver:
        replayed = (ReplayGates if self.gates else ReplayRoutes)(table, self.source)
        return ReplayLikely(replayed, self.give_up_below, update) if self.give_up_below else replayed
