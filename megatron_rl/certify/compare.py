"""Two recordings of the same tokens, compared value by value: pure functions on tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch
from megatron_rl_plugin.trace import EMBEDDING, FINAL_NORM, OF_LAYER
from torch import Tensor

from megatron_rl.algorithms.correction import divergence

Place = tuple[int | None, str]
"""Layer from 0, None outside of the layers, and operator."""
LOG_PROBS = "log-probs"


@dataclass
class Recorded:
    """Values that one side computed for one sequence of n tokens, in R rows."""

    tokens: Tensor
    """[n] int64."""
    log_probs: Tensor
    """[n] fp32: of each token, given those before it; NaN where the side did not say."""
    positions: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    """[R] int64: row r is of the token at positions[r]. A position may come twice, where it was computed again."""
    values: dict[Place, Tensor] = field(default_factory=dict)
    """[R, m] by place."""


Recording = Mapping[int, Recorded]
"""Sequence number -> its recorded values."""


@dataclass
class Difference:
    """How far two sides are apart in one place."""

    rows: int = 0
    """Rows that both have."""
    unequal: int = 0
    """Number of these with an unequal value."""
    largest: float = 0.0
    """Largest absolute difference."""

    def add(self, left: Tensor, right: Tensor) -> None:
        """Count the rows [r, m] of both sides. Equal are equal values, two NaNs among them; 0 and -0 are."""
        left, right = left.double(), right.double()
        unequal = (left != right) & ~(left.isnan() & right.isnan())
        self.rows += len(left)
        self.unequal += int(unequal.any(1).sum())
        if unequal.any():
            largest = float((left - right)[unequal].abs().max())
            self.largest = max(self.largest, largest) if largest == largest else float("inf")


@dataclass
class Comparison:
    """Two sides over all sequences that both have."""

    sequences: int = 0
    tokens: int = 0
    """Positions of which both sides have a row, or a log-prob."""
    otherwise: int = 0
    """Sequences of which the sides have other tokens from some token on, behind which nothing is compared."""
    places: dict[Place, Difference] = field(default_factory=dict)
    """In the order in which they are computed."""
    log_probs: Difference = field(default_factory=Difference)
    kl: float = 0.0
    """k3 estimate of KL(right || left), nats per token."""
    left_alone: list[Place] = field(default_factory=list)
    """Places that the other side does not have, or has in another form,"""
    right_alone: list[Place] = field(default_factory=list)
    """and the same of the right side."""

    @property
    def equal(self) -> bool:
        """True if both are equal to the last bit, wherever they were compared; False where they were not."""
        differences = [self.log_probs, *self.places.values()]
        return self.tokens > 0 and not self.otherwise and not any(one.unequal for one in differences)

    @property
    def first(self) -> Place | None:
        """The first unequal place in the order in which they are computed; None: there is none."""
        found = next((place for place, one in self.places.items() if one.unequal), None)
        return found or ((None, LOG_PROBS) if self.log_probs.unequal else None)


def order_of(place: Place) -> tuple[float, int]:
    """Sort key of a place: places come in the order in which they are computed."""
    layer, operator = place
    if layer is None:
        return {EMBEDDING: -1.0, FINAL_NORM: float("inf")}[operator], 0
    return float(layer), OF_LAYER.index(operator)


def compare(left: Recording, right: Recording) -> Comparison:
    """Each row and each log-prob of `left` with that of `right` of the same token of the same sequence.

    Of a row, or log-prob, all tokens up to its own have to be the same on both sides. A position that was computed twice is
    compared each time on the left, and stands on the right as it was computed last.
    """
    found = Comparison()
    divergences = []
    places: dict[Place, Difference] = {}
    for number in sorted(left.keys() & right.keys()):
        one, other = left[number], right[number]
        common = common_prefix(one.tokens, other.tokens)
        found.sequences += 1
        found.otherwise += common < max(len(one.tokens), len(other.tokens))
        mine, theirs = matching_rows(one.positions, other.positions, common)
        for place in one.values.keys() & other.values.keys():
            a, b = one.values[place], other.values[place]
            if a.shape[1] == b.shape[1]:
                places.setdefault(place, Difference()).add(a[mine], b[theirs])
        a, b = one.log_probs[:common], other.log_probs[:common]
        known = ~(a.isnan() | b.isnan())
        found.log_probs.add(a[known][:, None], b[known][:, None])
        divergences.append(_k3(a[known], b[known]))
        found.tokens += max(int(known.sum()), len(one.positions[mine].unique()))
    found.places = {place: places[place] for place in sorted(places, key=order_of)}
    found.left_alone, found.right_alone = (_without(side.values(), places) for side in (left, right))
    if divergences and (total := torch.cat(divergences)).numel():
        found.kl = float(total.mean())
    return found


def without_log_probs(one: Recorded) -> Recorded:
    """The same rows, where log-probs are of another distribution."""
    return replace(one, log_probs=torch.full_like(one.log_probs, torch.nan))


def common_prefix(left: Tensor, right: Tensor) -> int:
    """How many tokens at the beginning are the same; [n] and [m]."""
    shorter = min(len(left), len(right))
    unequal = (left[:shorter] != right[:shorter]).nonzero()
    return int(unequal[0]) if len(unequal) else shorter


def matching_rows(left: Tensor, right: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Rows of both sides, by their positions [R] and [S], that are of the same position below `length`: int64 [r] each."""
    last = {int(position): row for row, position in enumerate(right)}
    pairs = [(row, last[int(p)]) for row, p in enumerate(left) if int(p) < length and int(p) in last]
    mine, theirs = torch.tensor(pairs, dtype=torch.int64).view(-1, 2).unbind(1)
    return mine, theirs


def _k3(left: Tensor, right: Tensor) -> Tensor:
    """k3 estimate of each token [n]; tokens whose log-probs are not finite are left out."""
    d = left.double() - right.double()
    return divergence(d[d.isfinite()], "k3")


def _without(side: Iterable[Recorded], shared: Mapping[Place, Difference]) -> list[Place]:
    return sorted({place for one in side for place in one.values} - shared.keys(), key=order_of)
