"""The critic of PPO: a second model on the same ranks, which learns the values of states."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.data.packing import Batch, Labels
from megatron_rl.data.sequence import Sequence
from megatron_rl.metrics.reduce import Metrics, merge
from megatron_rl.trainer.objective import CriticLoss
from megatron_rl.trainer.scored_spans import with_last_state
from megatron_rl.trainer.trainer import Trainer


@dataclass(frozen=True)
class StateValues:
    """State values of some sequences, in host memory."""

    before: Tensor
    """Values of the states before each label, [L]; the sequences are concatenated."""
    last: Tensor
    """Value of the state after the last token of each sequence, [B]."""


class Critic:
    """Computes the values of a step's sequences and learns from their returns. All methods are collective."""

    def __init__(self, trainer: Trainer, clip: float | None) -> None:
        """Create the critic. trainer: trainer of a model with a value head. clip: see `losses.value_terms`."""
        self.trainer, self._objective = trainer, CriticLoss(clip)
        self._passes: list[tuple[Labels, list[Batch]]] = []
        self._measured: list[Metrics] = []

    def score(self, rollout: Items[Items[Sequence]]) -> list[StateValues]:
        """Compute the state values of this rank's sequences with the current weights; return one entry per update."""
        self._passes, self._measured, found = [], [], []
        for sequences in rollout:
            closed = [with_last_state(sequence) for sequence in sequences]
            labels, batches = Labels(closed), self.trainer.pack(closed)
            self.trainer.compute_fields(batches, frozenset({"values"}))
            values = everywhere(self.trainer, labels, batches, "values")
            for batch in batches:
                batch.fields.setdefault("values", torch.zeros_like(batch["advantages"]))  # stage without head
            self._passes.append((labels, batches))
            ends = labels.ends()
            found.append(StateValues(values[~ends], values[ends]))
        return found

    def update(self, index: int, returns: Tensor) -> None:
        """Train the critic on the targets `returns` [L] of update `index`."""
        labels, batches = self._passes[index]
        padded = returns.new_zeros(labels.count)
        padded[~labels.ends()] = returns
        labels.give(batches, "returns", padded)
        metrics = self.trainer.update(batches, self._objective).metrics
        self._measured.append({name.replace("update/", "critic/", 1): metric for name, metric in metrics.items()})

    def metrics(self) -> Metrics:
        """Return the metrics of this step's critic updates, merged over the ranks; empty on every rank except 0."""
        return merge(self._measured) if self.trainer.ranks.rank == 0 else {}


def everywhere(trainer: Trainer, labels: Labels, batches: Items[Batch], name: str) -> Tensor:
    """Return the values of the field `name`, [L] fp32 in host memory, on every process that holds a part of this model copy.

    On entry, only processes of the last pipeline stage have the field.
    """
    reports = trainer.reports
    found = labels.collect(batches, [batch.fields.get(name) if reports else None for batch in batches])
    dist.all_reduce(found, group=trainer.ranks.copy_group)  # context-parallel ranks have different labels
    return found
