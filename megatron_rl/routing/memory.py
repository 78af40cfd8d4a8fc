"""What the routers of one process know of a micro-batch: what was packed with it, and what one pass leaves for later ones."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from megatron_rl.ops.placement import upload
from megatron_rl.routing.table import RouteShape, evenly_spaced, has_route

Kind = TypeVar("Kind")


@dataclass
class Features:
    """What one router saw of C cached tokens when routes were recorded."""

    hidden: Tensor | None
    """[C, d] router input, where a predictor learns from it."""
    logits: Tensor
    """[C, E] fp32, without the predictor's bias."""
    bias: Tensor | None
    """[C, E] fp32: the predictor's at that time."""

    def to(self, device: torch.device) -> Features:
        """Move the features to a device."""
        hidden, bias = (None if t is None else upload(t, device) for t in (self.hidden, self.bias))
        return Features(hidden, upload(self.logits, device), bias)

    @property
    def predicted(self) -> Tensor:
        """[C, E]: logits of the distribution that the recorded routes stand for."""
        return self.logits if self.bias is None else self.logits + self.bias


@dataclass
class RouteTable:
    """Routes and features of one micro-batch: the T tokens that reach this process's routers, in their order."""

    shape: RouteShape
    counted: Tensor
    """[T] bool: tokens that metrics count, those whose prediction is in the loss."""
    cached: Tensor
    """[C] int64: rows whose features are stored."""
    engine: Tensor | None = None
    """[T, moe_layers, k] expert ids of the rollout engine, sentinels where it has none."""
    gates: Tensor | None = None
    """[T, moe_layers, k] fp32: the weights that the engine gave them, 0 in all slots where they are not known."""
    recorded: dict[int, Tensor] = field(default_factory=dict)
    """[T, k] ids by model layer, from the trainer's own recording pass."""
    features: dict[int, Features] = field(default_factory=dict)
    counted_rows: Tensor = field(default_factory=lambda: torch.arange(0))
    """[M] int64: those that are counted; as rows, because a GPU would be waited for to find them."""
    _left: dict[type, Any] = field(default_factory=dict)
    _evenly_spaced: dict[int, Tensor] = field(default_factory=dict)
    """What `evenly_spaced` answered, by budget: every layer asks."""

    def to(self, device: torch.device) -> RouteTable:
        """The same on `device`, to be called before the first pass."""
        moved = {k: upload(v, device) for k, v in vars(self).items() if isinstance(v, Tensor)}
        features = {layer: features.to(device) for layer, features in self.features.items()}
        return replace(self, **moved, features=features)

    def left(self, kind: type[Kind]) -> Kind:
        """What observers leave here for later passes, in an object of a class of their own: empty at first."""
        return self._left.setdefault(kind, kind())

    def evenly_spaced(self, budget: int) -> Tensor:
        """[C] int64: at most `budget` of the counted rows, evenly spaced."""
        if budget not in self._evenly_spaced:
            places = torch.from_numpy(evenly_spaced(len(self.counted_rows), budget))
            self._evenly_spaced[budget] = self.counted_rows[upload(places, self.counted_rows.device)]
        return self._evenly_spaced[budget]

    def engine_route(self, layer: int) -> Tensor | None:
        """[T, k] ids of the engine for a model layer."""
        return None if self.engine is None else self.engine[:, self.shape.moe_layers.index(layer)]

    def engine_gates(self, layer: int) -> Tensor | None:
        """[T, k] fp32 weights of the engine's experts in a model layer."""
        return None if self.gates is None else self.gates[:, self.shape.moe_layers.index(layer)]

    def counted_with_route(self, routes: Tensor) -> Tensor:
        """[T] bool: counted tokens for which routes [T, k] have any."""
        return self.counted & has_route(routes)
