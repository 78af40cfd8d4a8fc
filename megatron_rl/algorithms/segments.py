"""Sums within the sequences of a packed batch, whose tokens lie behind each other (and may be spread over ranks)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

AllReduce = Callable[[Tensor], Tensor]
"""Sum of a tensor over the ranks that hold the other parts of the same sequences (context parallelism), without gradient."""


@dataclass(frozen=True)
class Segments:
    """The sequence of each of T packed tokens."""

    ids: Tensor
    """[T] int64: 0..count-1, -1 for padding."""
    count: int
    """Number of sequences, the same on all ranks of the context-parallel group."""
    all_reduce: AllReduce | None = None
    """Sum over the ranks that hold the other parts; None: every sequence is whole here."""
    counts: bool = True
    """True if figures of whole sequences are counted here: on one rank of those that hold the parts."""

    @classmethod
    def of(cls, ids: Tensor) -> Segments:
        """Segments from ids alone, for sequences that are whole."""
        return cls(ids, int(ids.max()) + 1 if ids.numel() else 0)

    def local_sums(self, values: Tensor) -> Tensor:
        """Sums of values [..., T] over the tokens that are here, by sequence [..., count]; padding counts for nothing."""
        places = torch.where(self.ids >= 0, self.ids, self.count)  # the last place is padding's
        rows = values.reshape(values.shape[:-1].numel(), values.shape[-1])
        found = [row.new_zeros(self.count + 1).index_add(0, places, row)[: self.count] for row in rows]
        return torch.stack(found).view(*values.shape[:-1], self.count)

    def sums(self, *values: Tensor) -> list[Tensor]:
        """Sums [count] of each of the values [T] over whole sequences, with one reduction for all of them."""
        found = self.local_sums(torch.stack(values))
        return list(self.all_reduce(found) if self.all_reduce else found)

    def spread_out(self, per_sequence: Tensor, padding: float = 0.0) -> Tensor:
        """Values [T] that give each token that of its sequence [count], and `padding` to padding."""
        return torch.cat([per_sequence, per_sequence.new_full((1,), padding)])[self.ids]

    def take(self, rows: Tensor) -> Segments:
        """Segments of the tokens `rows` [n] alone."""
        return replace(self, ids=self.ids[rows])
