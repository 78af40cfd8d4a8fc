"""Tables of expert ids as they travel: one byte an id (two from 256 experts on), and a sentinel for "no route"."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import numpy as np
import torch

NO_ROUTE = {torch.uint8: 255, torch.int16: -1}
"""Sentinel by dtype; a token without a route has it in all its slots."""


def route_dtype(experts: int) -> torch.dtype:
    """uint8 while 255 is free to be the sentinel (ids 0..254), int16 above."""
    return torch.uint8 if experts <= 255 else torch.int16


def has_route(routes: torch.Tensor) -> torch.Tensor:
    """`[..., k]` ids -> `[...]` bool."""
    return routes[..., 0] != NO_ROUTE[routes.dtype]


@dataclass(frozen=True)
class RouteShape:
    """What a model's routes look like."""

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
        """Whether [tokens, moe_layers, topk] ids can be replayed in this model. Errors: ValueError saying why not."""
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
    """Whether a row of [..., k] ids has one of them twice."""
    # Columns are compared in pairs: for a handful of them a tenth of the time of sorting each row.
    columns = np.ascontiguousarray(routes.reshape(-1, routes.shape[-1]).T)
    return any((one == other).any() for one, other in combinations(columns, 2))


def evenly_spaced(count: int, budget: int) -> np.ndarray:
    """At most `budget` of the positions 0..count-1, evenly spaced from the first to the last (Pr2, Appendix E.1)."""
    if count <= budget:
        return np.arange(count)
    return np.linspace(0, count - 1, budget).round().astype(np.int64)
