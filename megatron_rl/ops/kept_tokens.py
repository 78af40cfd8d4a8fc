"""The tokens that a truncating sampler kept, as a mask of logits: the trainer's softmax is then over the same support."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_rl.ops.placement import upload


@dataclass(frozen=True)
class KeptTokens:
    """For each of T tokens the ids of the vocabulary that a truncating sampler kept (top-p, top-k)."""

    ids: torch.Tensor
    """[n] int64, those of the first token, then of the second, ..."""
    borders: torch.Tensor
    """[T + 1] int64: token t's are ids[borders[t] : borders[t + 1]]; none there: its whole vocabulary was kept."""
    tokens: torch.Tensor
    """[n] int64: the token of each id."""

    @classmethod
    def of(cls, ids: torch.Tensor, borders: torch.Tensor) -> KeptTokens:
        """The sets that `borders` cuts out of `ids`; a GPU would be waited for, so make them on the host."""
        each = torch.arange(len(borders) - 1, device=borders.device)
        return cls(ids, borders, each.repeat_interleave(borders.diff()))

    def remove_others(self, logits: torch.Tensor, rows: torch.Tensor, first_column: int) -> None:
        """Logits [m, V / tp] of tokens `rows`, the vocabulary's columns from first_column on: -inf outside the sets.

        All ids are looked at, those of other rows too: how many there are of some rows, a GPU would be waited for.
        """
        count, width = logits.shape
        places = self.borders.new_full((len(self.borders) - 1,), count)
        row = places.index_copy(0, rows, torch.arange(count, device=rows.device))[self.tokens]
        column = self.ids - first_column
        here = (row < count) & (column >= 0) & (column < width)
        cells = torch.where(here, row * width + column, count * width)  # the last one is for those that are not here
        kept = torch.zeros(count * width + 1, dtype=torch.bool, device=rows.device).index_fill_(0, cells, True)
        truncated = self.borders[rows + 1] > self.borders[rows]
        logits.masked_fill_(truncated[:, None] & ~kept[:-1].view(count, width), -torch.inf)

    def to(self, device: torch.device) -> KeptTokens:
        """The same on `device`, without waiting for it."""
        return KeptTokens(upload(self.ids, device), upload(self.borders, device), upload(self.tokens, device))
