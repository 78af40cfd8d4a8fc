"""The weight of the KL to the reference: fixed, or moved to keep the KL at a target (`algorithm.kl.target`)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from megatron_rl.algorithms.kl import AdaptiveController, FixedController
from megatron_rl.config import KLConfig
from megatron_rl.metrics.reduce import Metrics, figures, maximum, merge
from megatron_rl.trainer.trainer import Update


class KLControl:
    """The coefficient of a run, the same on all processes; it moves after a step."""

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
        """The coefficient of the step that comes."""
        return self._controller.value

    def update(self, updates: Sequence[Update], responses: int) -> Metrics:
        """Move the coefficient by the KL of the policy that sampled so many responses. -> the coefficient that the step had.

        updates: those of the first epoch, which have each response once.
        """
        if not self._uses:
            return {}
        had = self.value
        measured = figures(merge(update.metrics for update in updates)).get("kl/sampled", math.nan)
        if math.isfinite(measured):  # not where the critic alone has learned, or nothing counted
            self._controller.update(measured, responses)
        return {"kl/coefficient": maximum(had)}

    def state_dict(self) -> dict[str, float]:
        """For a checkpoint."""
        return self._controller.state_dict()

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on where it was saved; from the config's where the run had no KL until then."""
        if state["value"] > 0:
            self._controller.load_state_dict(state)
