"""Value-by-value comparison of two recordings of the same tokens. All functions are pure and work on tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch
from megatron_rl_plugin.trace import EMBEDDING, FINAL_NORM, OF_LAYER
from torch import Tensor

from megatron_rl.algorithms.correction import divergence

Place = tuple[int | None, str]
"""Layer (counted from 0; None outside of the layers) and operator whose output was recorded."""
LOG_PROBS = "log-probs"
"""Name of the log-probs in a `Place`."""


@dataclass
class Recorded:
    """Operator outputs (R rows) and log-probs of one sequence of n tokens, as recorded in the engine or in the trainer."""

    tokens: Tensor
    """Token ids, [n] int64."""
    log_probs: Tensor
    """Log-prob of each token given the tokens before it, [n] fp32; NaN if it was not computed."""
    positions: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    """Positions of the rows in the sequence, [R] int64. A position occurs twice if its token was computed again."""
    values: dict[Place, Tensor] = field(default_factory=dict)
    """{place: recorded values [R, m]}."""


Recording = Mapping[int, Recorded]
"""{sequence number: its recorded values}."""


@dataclass
class Difference:
    """Difference between the two recordings in one place."""

    rows: int = 0
    """Number of rows that both recordings have."""
    unequal: int = 0
    """Number of rows with an unequal value."""
    largest: float = 0.0
    """Largest absolute difference."""

    def add(self, left: Tensor, right: Tensor) -> None:
        """Add rows [r, m] of both recordings. Two NaNs count as equal, and so do 0 and -0."""
        left, right = left.double(), right.double()
        unequal = (left != right) & ~(left.isnan() & right.isnan())
        self.rows += len(left)
        self.unequal += int(unequal.any(1).sum())
        if unequal.any():
            largest = float((left - right)[unequal].abs().max())
            self.largest = max(self.largest, largest) if largest == largest else float("inf")


@dataclass
class Comparison:
    """Comparison of two recordings, left and right, over all sequences that both have."""

    sequences: int = 0
    """Number of compared sequences."""
    tokens: int = 0
    """Number of positions for which both recordings have a row or a log-prob."""
    otherwise: int = 0
    """Number of sequences whose tokens differ. Nothing is compared after the first different token."""
    places: dict[Place, Difference] = field(default_factory=dict)
    """Differences by place, in the order in which the places are computed."""
    log_probs: Difference = field(default_factory=Difference)
    """Difference of the log-probs."""
    kl: float = 0.0
    """k3 estimate of KL(right || left), in nats per token."""
    left_alone: list[Place] = field(default_factory=list)
    """Places of the left recording that the right one lacks or has in another shape."""
    right_alone: list[Place] = field(default_factory=list)
    """Places of the right recording that the left one lacks or has in another shape."""

    @property
    def equal(self) -> bool:
        """True if all compared values are equal to the last bit; False if nothing was compared or tokens differ."""
        differences = [self.log_probs, *self.places.values()]
        return self.tokens > 0 and not self.otherwise and not any(one.unequal for one in differences)

    @property
    def first(self) -> Place | None:
        """First unequal place in the order of computation; None if all places are equal."""
        found = next((place for place, one in self.places.items() if one.unequal), None)
        return found or ((None, LOG_PROBS) if self.log_probs.unequal else None)


def order_of(place: Place) -> tuple[float, int]:
    """Return the sort key that puts places into the order in which they are computed."""
    layer, operator = place
    if layer is None:
        return {EMBEDDING: -1.0, FINAL_NORM: float("inf")}[operator], 0
    return float(layer), OF_LAYER.index(operator)


def compare(left: Recording, right: Recording) -> Comparison:
    """Compare each row and each log-prob of `left` with `right`, for the same token of the same sequence.

    A row or log-prob is compared only if all tokens up to its own are equal in both recordings. If a position was computed
    twice, each computation in `left` is compared with the last computation in `right`.
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
    """Return the recording with all log-probs set to NaN (not compared), because they belong to another distribution."""
    return replace(one, log_probs=torch.full_like(one.log_probs, torch.nan))


def common_prefix(left: Tensor, right: Tensor) -> int:
    """Return the number of equal tokens at the beginning of two token tensors [n] and [m]."""
    shorter = min(len(left), len(right))
    unequal = (left[:shorter] != right[:shorter]).nonzero()
    return int(unequal[0]) if len(unequal) else shorter


def matching_rows(left: Tensor, right: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Return the indices of rows in both recordings that have the same position, below `length`: int64 [r] each.

    left, right: positions [R] and [S] of the rows.
    """
    last = {int(position): row for row, position in enumerate(right)}
    pairs = [(row, last[int(p)]) for row, p in enumerate(left) if int(p) < length and int(p) in last]
    mine, theirs = torch.tensor(pairs, dtype=torch.int64).view(-1, 2).unbind(1)
    return mine, theirs


def _k3(left: Tensor, right: Tensor) -> Tensor:
    """Return the k3 estimate of the KL for each token whose log-probs are finite."""
    d = left.double() - right.double()
    return divergence(d[d.isfinite()], "k3")


def _without(side: Iterable[Recorded], shared: Mapping[Place, Difference]) -> list[Place]:
    return sorted({place for one in side for place in one.values} - shared.keys(), key=order_of)
