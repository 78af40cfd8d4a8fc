"""Sums over each sequence of a packed batch. Sequences follow one another and may be split over ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

AllReduce = Callable[[Tensor], Tensor]
"""Function that sums a tensor over the context-parallel ranks of the same sequences, without gradient."""


@dataclass(frozen=True)
class Segments:
    """Assignment of T packed tokens to sequences."""

    ids: Tensor
    """Index of each token's sequence, 0..count-1, [T] int64; -1 for padding."""
    count: int
    """Number of sequences, the same on all ranks of the context-parallel group."""
    all_reduce: AllReduce | None = None
    """Function that sums over the ranks that hold other parts of the sequences; None if this rank holds whole sequences."""
    counts: bool = True
    """True on the one rank of the context-parallel group that reports metrics of whole sequences."""

    @classmethod
    def of(cls, ids: Tensor) -> Segments:
        """Build segments from ids [T] on a rank that holds every sequence whole."""
        return cls(ids, int(ids.max()) + 1 if ids.numel() else 0)

    def local_sums(self, values: Tensor) -> Tensor:
        """Sum values [..., T] over this rank's tokens of each sequence -> [..., count]. Padding is left out."""
        places = torch.where(self.ids >= 0, self.ids, self.count)  # the last place is for padding
        rows = values.reshape(values.shape[:-1].numel(), values.shape[-1])
        found = [row.new_zeros(self.count + 1).index_add(0, places, row)[: self.count] for row in rows]
        return torch.stack(found).view(*values.shape[:-1], self.count)

    def sums(self, *values: Tensor) -> list[Tensor]:
        """Sum each of the values [T] over whole sequences -> a list of [count], with one reduction for all of them."""
        found = self.local_sums(torch.stack(values))
        return list(self.all_reduce(found) if self.all_reduce else found)

    def spread_out(self, per_sequence: Tensor, padding: float = 0.0) -> Tensor:
        """Return, for each token, the value of its sequence, [T]. per_sequence: [count]. Padding tokens get `padding`."""
        return torch.cat([per_sequence, per_sequence.new_full((1,), padding)])[self.ids]

    def take(self, rows: Tensor) -> Segments:
        """Return the segments of the tokens `rows` [n] only."""
        return replace(self, ids=self.ids[rows])
