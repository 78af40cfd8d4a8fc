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
    """Which sequence each of T packed tokens belongs to."""

    ids: Tensor
    """[T] int64: 0..count-1, -1 for padding."""
    count: int
    """Sequences, on all ranks of the context-parallel group alike."""
    all_reduce: AllReduce | None = None
    """None: every sequence is whole here."""
    counts: bool = True
    """Whether figures of whole sequences are counted here: on one rank of those that hold the parts."""

    @classmethod
    def of(cls, ids: Tensor) -> Segments:
        """Of ids alone, for sequences that are whole."""
        return cls(ids, int(ids.max()) + 1 if ids.numel() else 0)

    def local_sums(self, values: Tensor) -> Tensor:
        """[..., T] -> [..., count]: sums over the tokens that are here; padding counts for nothing."""
        places = torch.where(self.ids >= 0, self.ids, self.count)  # the last place is padding's
        rows = values.reshape(values.shape[:-1].numel(), values.shape[-1])
        found = [row.new_zeros(self.count + 1).index_add(0, places, row)[: self.count] for row in rows]
        return torch.stack(found).view(*values.shape[:-1], self.count)

    def sums(self, *values: Tensor) -> list[Tensor]:
        """[T] each -> [count] each: sums over whole sequences, with one reduction for all of them."""
        found = self.local_sums(torch.stack(values))
        return list(self.all_reduce(found) if self.all_reduce else found)

    def spread_out(self, per_sequence: Tensor, padding: float = 0.0) -> Tensor:
        """[count] -> [T]: to each token the value of its sequence, `padding` to padding."""
        return torch.cat([per_sequence, per_sequence.new_full((1,), padding)])[self.ids]

    def take(self, rows: Tensor) -> Segments:
        """Of the tokens `rows` [n] alone."""
        return replace(self, ids=self.ids[rows])
