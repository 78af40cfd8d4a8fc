"""Losses of whole responses, or of places in them: what an update compares is scored on all ranks before it is learned.

A *unit* is what a loss has one score of: a response by the sum of its tokens' log-probs (DPO), a response by the value behind
its last token, or by the mean of the values behind all of them (reward models), a step by that behind it (process rewards).

The field `unit` gives each label its unit, numbered over the whole update. A loss is a function of the scores of all units; its
gradient at each score is that at each of the unit's labels (`objective.GivenGradients`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.data.balance import plan_updates
from megatron_rl.data.packing import Batch
from megatron_rl.data.sequence import Sequence
from megatron_rl.environments.comparisons import Comparison
from megatron_rl.metrics.reduce import Metrics
from megatron_rl.trainer.objective import GivenGradients
from megatron_rl.trainer.trainer import Trainer, Update

Places = Items[int] | np.ndarray
"""Labels, counted from the first token of the response."""
Mark = Callable[[Comparison, int], tuple[Sequence, list[tuple[Places, float]]]]
"""A response of a comparison -> its sequence, and its units: the labels and the score of each."""
Loss = Callable[[dict[str, Tensor]], tuple[Tensor, Metrics]]
"""Sums of fields by name, each [units] fp64, and under `labels` their numbers -> (loss, differentiable in them; metrics)."""


@dataclass(frozen=True)
class Table:
    """The units of an update's comparisons, and what the data says of them; tensors are [units], on the host."""

    sequences: list[Sequence]
    """With their units marked; all of the update."""
    groups: Tensor
    """int64: the comparison that a unit belongs to."""
    scores: Tensor
    """fp64, higher is better."""
    margins: Tensor
    """fp64: by how much the better one of a pair is, NaN where nobody has said."""

    @property
    def best(self) -> Tensor:
        """[units] bool: whether no unit of the same comparison has a higher score."""
        lowest = torch.full((int(self.groups.max()) + 1,), -torch.inf, dtype=self.scores.dtype)
        return self.scores == lowest.scatter_reduce(0, self.groups, self.scores, "amax")[self.groups]

    @classmethod
    def of(cls, comparisons: Iterable[Comparison], mark: Mark) -> Table:
        """mark: says where the units of each response are."""
        sequences: list[Sequence] = []
        rows: list[tuple[int, float, float]] = []
        for group, comparison in enumerate(comparisons):
            margin = math.nan if comparison.margin is None else comparison.margin
            for index in range(len(comparison.sequences)):
                sequence, units = mark(comparison, index)
                numbered = [(len(rows) + i, places) for i, (places, _) in enumerate(units)]
                sequences.append(with_units(sequence, numbered))
                rows += [(group, score, margin) for _, score in units]
        values = torch.tensor(rows, dtype=torch.float64)
        return cls(sequences, values[:, 0].long(), values[:, 1], values[:, 2])


def with_units(sequence: Sequence, units: Iterable[tuple[int, Places]]) -> Sequence:
    """A copy of which the labels of some units count, and no others. units: (number, places of its labels)."""
    marked = replace(sequence, fields={})
    numbers = np.full(sequence.response_length, -1)
    for number, places in units:
        numbers[places] = number
    marked["unit"] = numbers
    marked["loss_mask"] = numbers >= 0
    return marked


def with_last_state(sequence: Sequence) -> Sequence:
    """A copy with one label more, whose value is that of the state behind the last token; label i's is that before it.

    The last token of a sequence is only predicted. Here it enters the model too, and predicts itself, which nobody asks for:
    the new label does not count.
    """
    tokens = np.concatenate([sequence.tokens, sequence.tokens[-1:]])
    mask = np.append(sequence["loss_mask"], False)
    return Sequence(tokens=tokens, prompt_length=sequence.prompt_length, fields={"loss_mask": mask})


class UnitPasses:
    """The sequences of one update, shared out over the ranks and packed. Collective, as are its methods."""

    def __init__(self, trainer: Trainer, table: Table) -> None:
        """table: the same on every process."""
        self._trainer, self._count, sequences = trainer, len(table.groups), table.sequences
        [shares] = plan_updates([s.inputs for s in sequences], updates=1, ranks=trainer.ranks.data_size)
        self.mine = [sequences[i] for i in shares[trainer.ranks.data_rank]]
        self.batches = trainer.pack(self.mine)

    def sums(self, *needs: str) -> dict[str, Tensor]:
        """Sum of each field over the labels of each unit, [units] fp64, and their number as `labels`, on every process.

        needs: fields that a pass computes (`Trainer.compute_fields`).
        """
        self._trainer.compute_fields(self.batches, frozenset(needs))
        found = torch.zeros(len(needs) + 1, self._count, dtype=torch.float64)
        for batch in self.batches if self._trainer.reports else []:
            counted = batch["unit"] >= 0
            unit = batch["unit"][counted].cpu().long()
            for row, name in zip(found, needs, strict=False):
                row.index_add_(0, unit, batch[name][counted].cpu().double())
            found[-1].index_add_(0, unit, torch.ones_like(unit, dtype=torch.float64))
        dist.all_reduce(found, group=self._trainer.ranks.world_group)
        return dict(zip([*needs, "labels"], found, strict=True))

    def learn(self, loss: Loss, learned: str, *others: str) -> tuple[Update, Metrics]:
        """One update by a loss of the sums of the field `learned`, and of others. -> (update, the loss's metrics)."""
        sums = self.sums(learned, *others)
        scores = sums[learned].requires_grad_()
        value, metrics = loss(sums | {learned: scores})
        (gradient,) = torch.autograd.grad(value, scores)
        give_gradients(self.batches, gradient)
        return self._trainer.update(self.batches, GivenGradients()), metrics


def give_gradients(batches: Items[Batch], gradient: Tensor) -> None:
    """Give each label of a unit the loss's gradient [units] at its score."""
    padded = torch.cat([gradient, gradient.new_zeros(1)]).float()  # the last is of labels without a unit, -1
    for batch in batches:
        batch.fields["loss_gradients"] = padded.to(batch.labels.device)[batch["unit"].long()]
