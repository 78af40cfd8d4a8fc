"""Tables of expert ids as they travel: one byte an id (two from 256 experts on), and a sentinel for "no route"."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from megatron_rl.config.route_cost import id_bytes
from megatron_rl.ops.device import upload

NO_ROUTE = {torch.uint8: 255, torch.int16: -1}
"""Sentinel by dtype; a token without a route has it in all its slots."""


def route_dtype(experts: int) -> torch.dtype:
    """uint8 while 255 is free to be the sentinel (ids 0..254), int16 above."""
    return torch.uint8 if id_bytes(experts) == 1 else torch.int16


def has_route(routes: torch.Tensor) -> torch.Tensor:
    """`[..., k]` ids -> `[...]` bool."""
    return routes[..., 0] != NO_ROUTE[routes.dtype]


@dataclass(frozen=True)
class RouteShape:
    """Shape of a model's routes."""

    moe_layers: tuple[int, ...]
    """Model layers (from 0) that have experts: the columns of a table."""
    experts: int
    topk: int

    @property
    def dtype(self) -> np.dtype:
        """Type of a table's expert ids."""
        return np.dtype(np.uint8 if route_dtype(self.experts) == torch.uint8 else np.int16)

    def empty(self, tokens: int) -> np.ndarray:
        """[tokens, moe_layers, topk] of sentinels."""
        sentinel = NO_ROUTE[route_dtype(self.experts)]
        return np.full((tokens, len(self.moe_layers), self.topk), sentinel, self.dtype)

    def check(self, routes: np.ndarray, tokens: int) -> None:
        """Check that [tokens, moe_layers, topk] ids can be replayed in this model.

        Errors: ValueError saying why not.
        """
        wanted = (tokens, len(self.moe_layers), self.topk)
        if routes.shape != wanted:
            names = ("input tokens", "MoE layers", "experts a token")
            name, found, expected = next(
                (triple for triple in zip(names, routes.shape, wanted, strict=False) if triple[1] != triple[2]),
                ("dimensions", routes.ndim, 3),
            )
            raise ValueError(f"routes have {found} {name}, the model wants {expected}")
        if routes.dtype != self.dtype:
            raise ValueError(f"routes are {routes.dtype}, those of {self.experts} experts are {self.dtype}")
        missing = routes == NO_ROUTE[route_dtype(self.experts)]
        if (missing.any(-1) != missing.all(-1)).any():
            raise ValueError("routes have a token with a part of its experts alone")
        wrong = ~missing & ((routes < 0) | (routes >= self.experts))
        if wrong.any():
            raise ValueError(f"routes name expert {routes[wrong][0]}, the model has {self.experts}")
        if names_one_twice(routes[~missing[..., 0]]):
            raise ValueError("routes name an expert twice for one token")


def names_one_twice(routes: np.ndarray) -> bool:
    """True if a row of [..., k] ids has one of them twice."""
    # Columns are compared in pairs: for a handful of them a tenth of the time of sorting each row.
    columns = np.ascontiguousarray(routes.reshape(-1, routes.shape[-1]).T)
    return any((one == other).any() for one, other in combinations(columns, 2))


def evenly_spaced(count: int, budget: int) -> np.ndarray:
    """At most `budget` of the positions 0..count-1, evenly spaced from the first to the last (Pr2, Appendix E.1)."""
    if count <= budget:
        return np.arange(count)
    return np.linspace(0, count - 1, budget).round().astype(np.int64)


# -- memory --------------------------------------------------------------------------------------------------------------
# What the routers of one process know of a micro-batch: what was packed with it, and what one pass leaves for later ones.


Kind = TypeVar("Kind")


@dataclass
class Features:
    """Inputs and logits that one router saw for C cached tokens when routes were recorded."""

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
    """Cache of `evenly_spaced` by budget: every layer asks."""

    def to(self, device: torch.device) -> RouteTable:
        """The same on `device`, to be called before the first pass."""
        moved = {k: upload(v, device) for k, v in vars(self).items() if isinstance(v, Tensor)}
        features = {layer: features.to(device) for layer, features in self.features.items()}
        return replace(self, **moved, features=features)

    def left(self, kind: type[Kind]) -> Kind:
        """Object of a class of their own that observers leave here for later passes: empty at first."""
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


# -- agreement -----------------------------------------------------------------------------------------------------------
# How far two routes of the same tokens are apart: sets of experts, and distributions over them.


def deviations(a: Tensor, b: Tensor) -> Tensor:
    """Slots of each token in which two sets of k experts differ: `[T, k]`, `[T, k]` -> `[T]` int64 in 0..k.

    The order within a set does not matter; a set names no expert twice. Errors: ValueError for different shapes.
    """
    if a.shape != b.shape or a.dim() != 2:
        raise ValueError(f"routes of shapes {tuple(a.shape)} and {tuple(b.shape)}: two [T, k] are compared")
    found = (a.long()[:, :, None] == b.long()[:, None, :]).any(-1)
    return (~found).sum(-1)


def topk_agreement(a: Tensor, b: Tensor) -> Tensor:
    """Mean over tokens of |A and B| / k, a scalar in 0..1 (Pr2, Section 5.4). a, b: `[T, k]` expert ids, any order."""
    return 1 - deviations(a, b).double().mean() / a.shape[1]


def deviation_counts(a: Tensor, b: Tensor, counted: Tensor) -> Tensor:
    """`[k + 1]` int64: tokens whose sets differ in 0, 1, ..., k slots, of those that `counted` `[T]` bool names.

    Without a step that would wait for a GPU, as choosing rows or torch.bincount would.
    """
    counts = counted.new_zeros(a.shape[1] + 1, dtype=torch.int64)
    return counts.index_add_(0, deviations(a, b), counted.long())


def routing_log_probs(logits: Tensor, score_function: str = "softmax") -> Tensor:
    """The distribution over experts behind router logits, `[..., E]` -> `[..., E]` fp32 (fp64 stays), as logarithms.

    softmax: log-softmax, whether the model takes its top-k before or after it. sigmoid (DeepSeek-V3): the scores over
    their sum, which is how the model weights its experts; its bias for selection belongs to no distribution.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if score_function == "sigmoid":
        logits = torch.nn.functional.logsigmoid(logits)
    elif score_function != "softmax":
        raise ValueError(f"score_function = {score_function!r}: softmax or sigmoid")
    return logits.log_softmax(-1)


def route_kl(current: Tensor, recorded: Tensor, score_function: str = "softmax") -> Tensor:
    """KL(current || recorded) of each token, `[T]` in nats; both `[T, E]` router logits."""
    return kl_divergence(*(routing_log_probs(z, score_function) for z in (current, recorded)))


def kl_divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p || q) over the last dimension, in nats."""
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def total_variation(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Half the sum of |p - q| over the last dimension: the soft router staleness of Pr2, Appendix B.2."""
    return (log_p.exp() - log_q.exp()).abs().sum(-1) / 2
