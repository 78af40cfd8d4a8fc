"""Coefficient of the KL to the reference: constant, or adapted to keep the KL at a target (`algorithm.kl.target`)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from megatron_rl.algorithms.kl import AdaptiveController, FixedController
from megatron_rl.config import KLConfig
from megatron_rl.metrics.reduce import Metrics, figures, maximum, merge
from megatron_rl.trainer.trainer import Update


class KLControl:
    """KL coefficient of a run, the same on all processes; an adaptive coefficient changes after each step."""

    def __init__(self, config: KLConfig) -> None:
        adaptive = config.coefficient > 0 and config.target is not None
        self._uses = config.coefficient > 0
        self._controller = (
            AdaptiveController(config.coefficient, config.target, config.horizon)
            if adaptive and config.target is not None
            else FixedController(config.coefficient)
        )

    @property
    def value(self) -> float:
        """KL coefficient of the next step."""
        return self._controller.value

    def update(self, updates: Sequence[Update], responses: int) -> Metrics:
        """Adapt the coefficient to the measured KL of the policy that sampled the responses. Return this step's coefficient.

        updates: updates of the first epoch, which contain each response once. responses: number of sampled responses.
        """
        if not self._uses:
            return {}
        had = self.value
        measured = figures(merge(update.metrics for update in updates)).get("kl/sampled", math.nan)
        if math.isfinite(measured):  # NaN if only the critic has learned, or if no token counted
            self._controller.update(measured, responses)
        return {"kl/coefficient": maximum(had)}

    def state_dict(self) -> dict[str, float]:
        """Return the state of the controller for a checkpoint."""
        return self._controller.state_dict()

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore the saved state. If the saved run had no KL, keep the coefficient of the config."""
        if state["value"] > 0:
            self._controller.load_state_dict(state)
