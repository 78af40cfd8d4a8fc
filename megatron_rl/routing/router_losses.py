"""The tokens that this process's routers balance in one pass of a micro-batch, and what the losses of the routers were."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from megatron_rl.metrics.reduce import Metrics
from megatron_rl.routing.metrics import of_layers, per_token


@dataclass
class RouterLosses:
    """One micro-batch's. Padding is routed too, as its neighbors are, and is left out of losses and loads."""

    real: Tensor
    """[T] bool: the tokens of this process's routers that are no padding."""
    weight: float
    """Factor of a sum over tokens in the backward, beside the objective's sum."""
    _sums: dict[str, dict[int, Tensor]] = field(default_factory=dict)
    """Sum of the terms of these tokens, by name and model layer."""

    def see(self, name: str, layer: int, terms: Tensor) -> Tensor:
        """Sum of the terms [T] of tokens that are no padding, of a layer from 0. Recomputation sees them again."""
        total = (terms * self.real).sum()
        self._sums.setdefault(name, {})[layer] = total.detach()
        return total

    def metrics(self, update: int) -> Metrics:
        """Mean over tokens of each loss by layer; update: number in the rollout batch, from 1."""
        found: Metrics = {}
        tokens = self.real.sum()
        for name, layers in self._sums.items():
            found |= of_layers(name, {layer: per_token(total, tokens) for layer, total in layers.items()}, update)
        return found
