"""Tables of expert ids: one byte per id (two bytes from 256 experts on), with a sentinel for "no route"."""

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
"""Sentinel by dtype. A token without a route has the sentinel in all its slots."""


def route_dtype(experts: int) -> torch.dtype:
    """Return uint8 if 255 is free for the sentinel (ids 0..254), else int16."""
    return torch.uint8 if id_bytes(experts) == 1 else torch.int16


def has_route(routes: torch.Tensor) -> torch.Tensor:
    """Return `[...]` bool: True for tokens that have a route, from ids `[..., k]`."""
    return routes[..., 0] != NO_ROUTE[routes.dtype]


@dataclass(frozen=True)
class RouteShape:
    """Shape of a model's routes."""

    moe_layers: tuple[int, ...]
    """Model layers (from 0) that have experts, in the order of a table's columns."""
    experts: int
    """Number of experts per layer."""
    topk: int
    """Number of experts per token."""

    @property
    def dtype(self) -> np.dtype:
        """Dtype of a table's expert ids."""
        return np.dtype(np.uint8 if route_dtype(self.experts) == torch.uint8 else np.int16)

    def empty(self, tokens: int) -> np.ndarray:
        """Return a table [tokens, moe_layers, topk] of sentinels."""
        sentinel = NO_ROUTE[route_dtype(self.experts)]
        return np.full((tokens, len(self.moe_layers), self.topk), sentinel, self.dtype)

    def check(self, routes: np.ndarray, tokens: int) -> None:
        """Check that the model can replay ids [tokens, moe_layers, topk]. Errors: ValueError with the reason."""
        wanted = (tokens, len(self.moe_layers), self.topk)
        if routes.shape != wanted:
            names = ("input tokens", "MoE layers", "experts a token")
            name, found, expected = next(
                (triple for triple in zip(names, routes.shape, wanted, strict=False) if triple[1] != triple[2]),
                ("dimensions", routes.ndim, 3),
            )
            raise ValueError(f"routes have {found} {name}, the model wants {expected}")
        if routes.dtype != self.dtype:
            raise ValueError(f"routes are {routes.dtype}, but {self.experts} experts need {self.dtype}")
        missing = routes == NO_ROUTE[route_dtype(self.experts)]
        if (missing.any(-1) != missing.all(-1)).any():
            raise ValueError("routes have a token with only a part of its experts")
        wrong = ~missing & ((routes < 0) | (routes >= self.experts))
        if wrong.any():
            raise ValueError(f"routes name expert {routes[wrong][0]}, the model has {self.experts}")
        if names_one_twice(routes[~missing[..., 0]]):
            raise ValueError("routes name an expert twice for one token")


def names_one_twice(routes: np.ndarray) -> bool:
    """Return True if any row of ids [..., k] contains an id twice."""
    # Comparing pairs of columns takes a tenth of the time of sorting each row, if there are few columns.
    columns = np.ascontiguousarray(routes.reshape(-1, routes.shape[-1]).T)
    return any((one == other).any() for one, other in combinations(columns, 2))


def evenly_spaced(count: int, budget: int) -> np.ndarray:
    """Return at most `budget` of the positions 0..count-1, evenly spaced from first to last (Pr2, Appendix E.1)."""
    if count <= budget:
        return np.arange(count)
    return np.linspace(0, count - 1, budget).round().astype(np.int64)


# -- memory --------------------------------------------------------------------------------------------------------------
# Data of a micro-batch for the routers of one process: what was packed with it, and what one pass stores for later passes.


Kind = TypeVar("Kind")


@dataclass
class Features:
    """Inputs and logits of one router for C cached tokens, at the time when routes were recorded."""

    hidden: Tensor | None
    """[C, d] router input, if a predictor learns from it."""
    logits: Tensor
    """[C, E] fp32 router logits, without the predictor's bias."""
    bias: Tensor | None
    """[C, E] fp32 bias of the predictor at recording time."""

    def to(self, device: torch.device) -> Features:
        """Return a copy of the features on a device."""
        hidden, bias = (None if t is None else upload(t, device) for t in (self.hidden, self.bias))
        return Features(hidden, upload(self.logits, device), bias)

    @property
    def predicted(self) -> Tensor:
        """Router logits [C, E] including the bias: they define the distribution of the recorded routes."""
        return self.logits if self.bias is None else self.logits + self.bias


@dataclass
class RouteTable:
    """Routes and features of one micro-batch, for the T tokens that reach this process's routers, in their order."""

    shape: RouteShape
    """Shape of the model's routes."""
    counted: Tensor
    """[T] bool: tokens included in metrics: those whose next-token prediction is in the loss."""
    cached: Tensor
    """[C] int64: rows whose features are stored."""
    engine: Tensor | None = None
    """[T, moe_layers, k] expert ids of the rollout engine, with sentinels for tokens without a route."""
    gates: Tensor | None = None
    """[T, moe_layers, k] fp32 weights that the engine gave its experts; 0 in all slots of a token if they are not known."""
    recorded: dict[int, Tensor] = field(default_factory=dict)
    """Model layer -> [T, k] ids from the trainer's own recording pass."""
    features: dict[int, Features] = field(default_factory=dict)
    """Features of the cached tokens by model layer."""
    counted_rows: Tensor = field(default_factory=lambda: torch.arange(0))
    """[M] int64: rows of the counted tokens, stored because computing them would make the host wait for the GPU."""
    _left: dict[type, Any] = field(default_factory=dict)
    _evenly_spaced: dict[int, Tensor] = field(default_factory=dict)
    """Cache of `evenly_spaced` by budget, because every layer calls it."""

    def to(self, device: torch.device) -> RouteTable:
        """Copy to `device`. Call it before the first pass."""
        moved = {k: upload(v, device) for k, v in vars(self).items() if isinstance(v, Tensor)}
        features = {layer: features.to(device) for layer, features in self.features.items()}
        return replace(self, **moved, features=features)

    def left(self, kind: type[Kind]) -> Kind:
        """Return the object of class `kind` in which observers store data for later passes; it is created on first use."""
        return self._left.setdefault(kind, kind())

    def evenly_spaced(self, budget: int) -> Tensor:
        """Return at most `budget` of the counted rows, evenly spaced: int64."""
        if budget not in self._evenly_spaced:
            places = torch.from_numpy(evenly_spaced(len(self.counted_rows), budget))
            self._evenly_spaced[budget] = self.counted_rows[upload(places, self.counted_rows.device)]
        return self._evenly_spaced[budget]

    def engine_route(self, layer: int) -> Tensor | None:
        """Return the engine's ids [T, k] for a model layer, or None."""
        return None if self.engine is None else self.engine[:, self.shape.moe_layers.index(layer)]

    def engine_gates(self, layer: int) -> Tensor | None:
        """Return the fp32 weights [T, k] of the engine's experts in a model layer, or None."""
        return None if self.gates is None else self.gates[:, self.shape.moe_layers.index(layer)]

    def counted_with_route(self, routes: Tensor) -> Tensor:
        """Return [T] bool: True for counted tokens that have a route in `routes` [T, k]."""
        return self.counted & has_route(routes)


# -- agreement -----------------------------------------------------------------------------------------------------------
# Distance between two routes of the same tokens: between sets of experts, and between distributions over experts.


def deviations(a: Tensor, b: Tensor) -> Tensor:
    """Return the number of slots in which two sets of k experts differ: `[T, k]`, `[T, k]` -> `[T]` int64 in 0..k.

    The order within a set does not matter; a set must not contain an expert twice. Errors: ValueError if shapes differ.
    """
    if a.shape != b.shape or a.dim() != 2:
        raise ValueError(f"routes of shapes {tuple(a.shape)} and {tuple(b.shape)}: both must be the same [T, k]")
    found = (a.long()[:, :, None] == b.long()[:, None, :]).any(-1)
    return (~found).sum(-1)


def topk_agreement(a: Tensor, b: Tensor) -> Tensor:
    """Return the mean over tokens of |A and B| / k, in 0..1 (Pr2, Section 5.4). a, b: `[T, k]` expert ids in any order."""
    return 1 - deviations(a, b).double().mean() / a.shape[1]


def deviation_counts(a: Tensor, b: Tensor, counted: Tensor) -> Tensor:
    """Return `[k + 1]` int64: number of counted tokens whose sets differ in 0, 1, ..., k slots. counted: `[T]` bool.

    No operation waits for a GPU; selecting rows or torch.bincount would wait.
    """
    counts = counted.new_zeros(a.shape[1] + 1, dtype=torch.int64)
    return counts.index_add_(0, deviations(a, b), counted.long())


def routing_log_probs(logits: Tensor, score_function: str = "softmax") -> Tensor:
    """Return the log of the router's distribution over experts: logits `[..., E]` -> `[..., E]` fp32 (fp64 for fp64).

    softmax: log-softmax over all experts, even if the model takes its top-k before the softmax. sigmoid (DeepSeek-V3): the
    scores divided by their sum, as in the model's expert weights; the bias that selects experts is not part of it.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if score_function == "sigmoid":
        logits = torch.nn.functional.logsigmoid(logits)
    elif score_function != "softmax":
        raise ValueError(f"score_function = {score_function!r}: must be softmax or sigmoid")
    return logits.log_softmax(-1)


def route_kl(current: Tensor, recorded: Tensor, score_function: str = "softmax") -> Tensor:
    """Return KL(current || recorded) of each token, `[T]` in nats. Both arguments are `[T, E]` router logits."""
    return kl_divergence(*(routing_log_probs(z, score_function) for z in (current, recorded)))


def kl_divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return KL(p || q) over the last dimension, in nats."""
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def total_variation(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return half the sum of |p - q| over the last dimension: the soft router staleness of Pr2, Appendix B.2."""
    return (log_p.exp() - log_q.exp()).abs().sum(-1) / 2
