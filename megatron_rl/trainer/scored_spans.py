"""Losses over whole responses or spans of them. All ranks first score everything that an update compares, then train.

A *unit* is a set of labels that gets one score in the loss. Examples of a unit's score:

- DPO: the sum of the log-probs of a response's tokens.
- Reward model: the value after the last token of a response, or the mean of the values after all of its tokens.
- Process reward model: the value after the last token of a step.

The field `unit` stores the number of each label's unit, counted over the whole update. A loss is a function of the scores of
all units. The gradient of the loss with respect to a unit's score is also its gradient at each label of the unit
(`objective.GivenGradients`).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.data.balance import plan_updates
from megatron_rl.data.packing import Batch
from megatron_rl.data.sequence import Sequence
from megatron_rl.distributed.parallel import Ranks
from megatron_rl.errors import UserError
from megatron_rl.metrics.reduce import Metrics
from megatron_rl.models.parallel_check import one_line
from megatron_rl.tasks.preferences import Comparison
from megatron_rl.trainer.objective import GivenGradients
from megatron_rl.trainer.trainer import Trainer, Update

Places = Items[int] | np.ndarray
"""Positions of labels, counted from the first token of the response."""
Mark = Callable[[Comparison, int], tuple[Sequence, list[tuple[Places, float]]]]
"""(comparison, index of a response) -> (sequence of the response, [(positions of a unit's labels, score in the data), ...])."""
Loss = Callable[[dict[str, Tensor]], tuple[Tensor, Metrics]]
"""Function ({field: its sum over each unit, "labels": each unit's label count}, all [units] fp64) -> (differentiable loss,
metrics)."""


@dataclass(frozen=True)
class ScoredSpans:
    """Units of an update's comparisons, with their scores and margins in the data. Tensors are [units], in host memory."""

    sequences: list[Sequence]
    """All sequences of the update, with their units marked."""
    groups: Tensor
    """Index of the comparison that each unit belongs to, int64."""
    scores: Tensor
    """Scores of the units in the data, fp64; higher is better."""
    margins: Tensor
    """Margin of each unit's comparison in the data (preferred response over the other), fp64; NaN if the data has none."""

    @property
    def best(self) -> Tensor:
        """Mask of the units with the highest score in their comparison, [units] bool; ties are all True."""
        lowest = torch.full((int(self.groups.max()) + 1,), -torch.inf, dtype=self.scores.dtype)
        return self.scores == lowest.scatter_reduce(0, self.groups, self.scores, "amax")[self.groups]

    @classmethod
    def of(cls, comparisons: Iterable[Comparison], mark: Mark) -> ScoredSpans:
        """Build the units of the comparisons. mark: function that returns the units of each response."""
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
    """Return a copy of a sequence in which only the labels of `units` count in the loss. units: (number, label positions)."""
    marked = replace(sequence, fields={})
    numbers = np.full(sequence.response_length, -1)
    for number, places in units:
        numbers[places] = number
    marked["unit"] = numbers
    marked["loss_mask"] = numbers >= 0
    return marked


def with_last_state(sequence: Sequence) -> Sequence:
    """Return a copy with one more label, so that the model computes a value for the state after the last token.

    The value of label i belongs to the state before token i. A model only predicts the last token of a sequence and never reads
    it as input. The copy repeats the last token, so that the model reads it. The new label has a loss mask of False.
    """
    tokens = np.concatenate([sequence.tokens, sequence.tokens[-1:]])
    mask = np.append(sequence["loss_mask"], False)
    return Sequence(tokens=tokens, prompt_length=sequence.prompt_length, fields={"loss_mask": mask})


class UnitPasses:
    """Forward and backward passes over an update's sequences, distributed over the ranks and packed. Methods are collective."""

    def __init__(self, trainer: Trainer, table: ScoredSpans) -> None:
        """Distribute and pack the sequences. table: the units of the update, the same on every process."""
        self._trainer, self._count, sequences = trainer, len(table.groups), table.sequences
        [shares] = plan_updates([s.inputs for s in sequences], updates=1, ranks=trainer.ranks.data_size)
        self.mine = [sequences[i] for i in shares[trainer.ranks.data_rank]]
        self.batches = trainer.pack(self.mine)

    def sums(self, *needs: str) -> dict[str, Tensor]:
        """Return the sum of each field over the labels of each unit, [units] fp64, and the label counts as `labels`.

        Every process gets the same sums. needs: fields, which a forward pass computes (`Trainer.compute_fields`).
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
        """Run one update. Return (update, metrics of the loss).

        The loss is a function of the sums of the fields `learned` and `others` over each unit. Gradients flow only through the
        sums of `learned`.
        """
        sums = self.sums(learned, *others)
        scores = sums[learned].requires_grad_()
        value, metrics = loss(sums | {learned: scores})
        (gradient,) = torch.autograd.grad(value, scores)
        give_gradients(self.batches, gradient)
        return self._trainer.update(self.batches, GivenGradients()), metrics


def give_gradients(batches: Items[Batch], gradient: Tensor) -> None:
    """Set the field `loss_gradients` of each label to the loss's gradient [units] at the score of the label's unit."""
    padded = torch.cat([gradient, gradient.new_zeros(1)]).float()  # label without a unit: -1, the last entry
    for batch in batches:
        batch.fields["loss_gradients"] = padded.to(batch.labels.device)[batch["unit"].long()]


# -- reference -----------------------------------------------------------------------------------------------------------
# Scores of the frozen reference: computed for each update when it needs them, or for all updates before the run begins.


LOG_PROBS = "reference_log_probs"


class Reference:
    """Summed log-probs of units under the reference model, [units] fp64 in host memory. The methods are collective."""

    def __init__(self, folder: str, file: Path, ranks: Ranks, *, precision: str) -> None:
        """Set up the reference. folder: folder of the model. file: stores the scores, so that a resumed run can read them."""
        self._file, self._ranks = file, ranks
        self._model = ranks.main_does(lambda: _state_of(Path(folder))) + f" {precision}"
        self._known: dict[str, Tensor] = {}
        """Precomputed scores by the digest of model, tokens and units (`_name`)."""

    def __call__(self, table: ScoredSpans, passes: UnitPasses) -> Tensor:
        """Return the scores of the table's units. If they are not precomputed, run a forward pass."""
        known = self._known.get(self._name(table)) if self._known else None
        return passes.sums(LOG_PROBS)[LOG_PROBS] if known is None else known

    def precompute(self, tables: Iterable[ScoredSpans], make: Callable[[], Trainer]) -> None:
        """Score all units of a run, and write the scores to the file. Units that the file already contains are skipped.

        make: builds the model, for forward passes only; its memory is freed at the end. Errors: UserError if the file is
        damaged or cannot be written.
        """
        self._known = self._ranks.main_does(self._read)
        missing = {name: table for table in tables if (name := self._name(table)) not in self._known}
        if not missing:
            return
        model = make()
        for name, table in missing.items():
            self._known[name] = UnitPasses(model, table).sums("old_log_probs")["old_log_probs"]
        self._ranks.main_does(self._write)

    def _name(self, table: ScoredSpans) -> str:
        """Return a digest of everything that the log-probs depend on."""
        digest = hashlib.sha256(self._model.encode())
        for sequence in table.sequences:
            digest.update(sequence.tokens.tobytes() + sequence["unit"].tobytes())
        return digest.hexdigest()

    def _read(self) -> dict[str, Tensor]:
        if not self._file.is_file():
            return {}
        try:
            with np.load(self._file) as found:
                return {name: torch.from_numpy(found[name]) for name in found.files}
        except Exception as error:  # numpy raises many types of errors for a broken archive
            what = f"{type(error).__name__}: {one_line(error)}"
            raise UserError(f"{self._file}: damaged ({what}); remove it to have it computed again") from None

    def _write(self) -> None:
        partial = self._file.with_suffix(".partial.npz")
        try:
            np.savez(partial, allow_pickle=False, **{name: values.numpy() for name, values in self._known.items()})
            partial.replace(self._file)
        except OSError as error:
            raise UserError(f"{self._file}: could not be written ({error.strerror or error})") from None


def _state_of(folder: Path) -> str:
    """Return a text that changes when the weight files in the folder change."""
    files = [(file.name, file.stat()) for file in sorted(folder.glob("*.safetensors"))]
    return f"{folder} " + " ".join(f"{name} {state.st_size} {state.st_mtime_ns}" for name, state in files)
