"""Routing replay as a hook of the trainer: routes are recorded, replayed and measured in every pass."""

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
    """Selects whose choice of experts is used in each pass, and measures it."""

    def __init__(self, source: RouteSource, *, gates: bool = False, give_up_below: float = 0.0) -> None:
        """Create it. gates, give_up_below: with r3, `routing.replay_gates` and `routing.give_up_below`."""
        self.source: RouteSource = source
        self.gates, self.give_up_below = gates, give_up_below
        self._counts = False
        """True if this process's tokens count; each token counts once per copy of the model."""
        self._without_route = 0
        """Number of tokens without a route in the current pass."""

    def attach(self, trainer: Trainer) -> None:
        """Store whether this process's tokens count."""
        self._counts = trainer.reports

    def before_forward(self, batches: Sequence[Batch], stage: Stage, place: UpdateContext) -> None:
        """Count the tokens for which the engine returned no experts."""
        self._without_route = sum(batch.without_route for batch in batches)

    def metrics(self) -> Metrics:
        """Return the number of tokens that were routed freely although the engine's routes should be replayed."""
        if self.source not in FROM_ENGINE:
            return {}
        return {"routing/fallback_tokens": total(self._without_route if self._counts else 0)}

    def observers(self, table: RouteTable, stage: Stage, place: UpdateContext) -> list[RouteObserver]:
        """Return the observers that replay, record and measure in this pass."""
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
