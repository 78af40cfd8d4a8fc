"""The tokens that a truncating sampler kept, as a mask of logits: the trainer's softmax is then over the same support."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class KeptTokens:
    """For each of T tokens the ids of the vocabulary that a truncating sampler kept (top-p, top-k)."""

    ids: torch.Tensor
    """[n] int64, those of the first token, then of the second, ..."""
    borders: torch.Tensor
    """[T + 1] int64: token t's are ids[borders[t] : borders[t + 1]]; none there: its whole vocabulary was kept."""

    def remove_others(self, logits: torch.Tensor, rows: torch.Tensor, first_column: int) -> None:
        """logits [m, V / tp] of tokens `rows`, the vocabulary's columns from first_column on: -inf outside the sets."""
        start, count = self.borders[rows], self.borders[rows + 1] - self.borders[rows]
        row = torch.arange(len(rows), device=rows.device).repeat_interleave(count)
        position = torch.arange(len(row), device=rows.device) + (start - count.cumsum(0) + count)[row]
        column = self.ids[position] - first_column
        here = (column >= 0) & (column < logits.shape[1])
        removed = (count > 0)[:, None].expand_as(logits).clone()
        removed[row[here], column[here]] = False
        logits.masked_fill_(removed, -torch.inf)

    def to(self, device: torch.device) -> KeptTokens:
        return KeptTokens(self.ids.to(device), self.borders.to(device))
