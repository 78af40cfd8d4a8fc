"""A value of each label, out of packed micro-batches and back: for what looks along whole sequences, as advantages do."""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np
import torch
from torch import Tensor

from megatron_rl.data.packing import Batch
from megatron_rl.data.sequence import FIELDS, Sequence


class Labels:
    """All labels of some sequences behind each other, [L], and where micro-batches have them."""

    def __init__(self, sequences: Items[Sequence]) -> None:
        self.lengths = torch.tensor([s.response_length for s in sequences], dtype=torch.long)
        self._starts = self.lengths.cumsum(0) - self.lengths
        self._prompts = torch.tensor([s.prompt_length for s in sequences], dtype=torch.long)
        self.count = int(self.lengths.sum())
        self._sequences = sequences

    def of(self, name: str) -> Tensor:
        """[L] values of a field, as the sequences have them."""
        parts = [sequence[name] for sequence in self._sequences]
        return torch.from_numpy(np.concatenate([np.zeros(0, FIELDS[name].dtype), *parts]))

    def ends(self) -> Tensor:
        """[L] bool: the last label of each sequence, of which each has one."""
        found = torch.zeros(self.count, dtype=torch.bool)
        found[self._starts + self.lengths - 1] = True
        return found

    def places(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """(tokens of a batch that is packed from the sequences and predict a label [n], the labels [n]); on the host."""
        ids, positions = batch.segments.ids.cpu(), batch.position_ids[0].cpu()
        tokens = (ids >= 0).nonzero()[:, 0]
        sequence = torch.tensor(batch.samples, dtype=torch.long)[ids[tokens]]
        label = positions[tokens] - self._prompts[sequence] + 1
        inside = label >= 0
        return tokens[inside], (self._starts[sequence] + label)[inside]

    def collect(self, batches: Items[Batch], values: Items[Tensor | None]) -> Tensor:
        """[L] fp32 on the host, of values [T] of each batch; 0 where this process has none."""
        found = torch.zeros(self.count)
        for batch, of_batch in zip(batches, values, strict=True):
            if of_batch is not None:
                tokens, labels = self.places(batch)
                found[labels] = of_batch.detach().float().cpu()[tokens]
        return found

    def give(self, batches: Items[Batch], name: str, values: Tensor) -> None:
        """Set a field of the batches to values [L]."""
        for batch in batches:
            tokens, labels = self.places(batch)
            declared = FIELDS[name]
            field = torch.full(batch.mask.shape, declared.default, dtype=torch.float32)
            field[tokens] = values[labels].float()
            batch.fields[name] = field.to(batch.mask.device)

    def rows(self, values: Tensor) -> Tensor:
        """Values [L] as one row for each sequence, [B, T], with zeros behind its end."""
        longest = int(self.lengths.max()) if len(self.lengths) else 0
        rows = values.new_zeros(len(self.lengths), longest)
        rows[self._inside(longest)] = values
        return rows

    def flat(self, rows: Tensor) -> Tensor:
        """[B, T] -> [L]."""
        return rows[self._inside(rows.shape[1])]

    def _inside(self, longest: int) -> Tensor:
        return torch.arange(longest) < self.lengths[:, None]
