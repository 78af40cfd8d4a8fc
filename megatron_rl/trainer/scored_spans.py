"""Losses of whole responses, or of places in them: what an update compares is scored on all ranks before it is learned.

A *unit* is what a loss has one score of: a response by the sum of its tokens' log-probs (DPO), a response by the value behind
its last token, or by the mean of the values behind all of them (reward models), a step by that behind it (process rewards).

The field `unit` gives each label its unit, numbered over the whole update. A loss is a function of the scores of all units; its
gradient at each score is that at each of the unit's labels (`objective.GivenGradients`).
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
"""Labels, counted from the first token of the response."""
Mark = Callable[[Comparison, int], tuple[Sequence, list[tuple[Places, float]]]]
"""A response of a comparison -> its sequence, and its units: the labels and the score of each."""
Loss = Callable[[dict[str, Tensor]], tuple[Tensor, Metrics]]
"""Sums of fields by name, each [units] fp64, and under `labels` their numbers -> (loss, differentiable in them; metrics)."""


@dataclass(frozen=True)
class ScoredSpans:
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
    def of(cls, comparisons: Iterable[Comparison], mark: Mark) -> ScoredSpans:
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

    def __init__(self, trainer: Trainer, table: ScoredSpans) -> None:
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


# -- reference -----------------------------------------------------------------------------------------------------------
# What the frozen reference says of an update's units: asked when it is needed, or for all of a run before it begins.


LOG_PROBS = "reference_log_probs"


class Reference:
    """Summed log-probs of units, [units] fp64 on the host. Its methods are collective."""

    def __init__(self, folder: str, file: Path, ranks: Ranks, *, precision: str) -> None:
        """folder: the model's; file: where what is computed before the run is kept, for one that resumes."""
        self._file, self._ranks = file, ranks
        self._model = ranks.main_does(lambda: _state_of(Path(folder))) + f" {precision}"
        self._known: dict[str, Tensor] = {}
        """Scores by the name of their folder and spans (`_name`)."""

    def __call__(self, table: ScoredSpans, passes: UnitPasses) -> Tensor:
        """Scores of the table's units; passes that were not computed before are made."""
        known = self._known.get(self._name(table)) if self._known else None
        return passes.sums(LOG_PROBS)[LOG_PROBS] if known is None else known

    def precompute(self, tables: Iterable[ScoredSpans], make: Callable[[], Trainer]) -> None:
        """Score all units of a run by the model, which then leaves the memory; those of the file are known already.

        make: builds it, for passes alone. Errors: UserError for a file that is damaged, or that cannot be written.
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
        """A digest of all that the log-probs depend on."""
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
        except Exception as error:  # a broken archive raises of any kind
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
    """Digest that tells a folder's weights from those that were written there before."""
    files = [(file.name, file.stat()) for file in sorted(folder.glob("*.safetensors"))]
    return f"{folder} " + " ".join(f"{name} {state.st_size} {state.st_mtime_ns}" for name, state in files)
