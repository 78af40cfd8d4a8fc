"""What the frozen reference says of an update's units: asked when it is needed, or for all of a run before it begins."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megatron_rl.errors import UserError
from megatron_rl.models.parallel_check import one_line
from megatron_rl.trainer.parallel import Ranks
from megatron_rl.trainer.trainer import Trainer
from megatron_rl.trainer.units import Table, UnitPasses

LOG_PROBS = "reference_log_probs"


class Reference:
    """Summed log-probs of units, [units] fp64 on the host. Its methods are collective."""

    def __init__(self, folder: str, file: Path, ranks: Ranks, *, precision: str) -> None:
        """folder: the model's; file: where what is computed before the run is kept, for one that resumes."""
        self._file, self._ranks = file, ranks
        self._model = ranks.main_does(lambda: _state_of(Path(folder))) + f" {precision}"
        self._known: dict[str, Tensor] = {}
        """By what they are of (`_name`)."""

    def __call__(self, table: Table, passes: UnitPasses) -> Tensor:
        """Of the table's units, whose passes are asked where they were not computed before."""
        known = self._known.get(self._name(table)) if self._known else None
        return passes.sums(LOG_PROBS)[LOG_PROBS] if known is None else known

    def precompute(self, tables: Iterable[Table], make: Callable[[], Trainer]) -> None:
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

    def _name(self, table: Table) -> str:
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
    """What tells a folder's weights from those that were written there before."""
    files = [(file.name, file.stat()) for file in sorted(folder.glob("*.safetensors"))]
    return f"{folder} " + " ".join(f"{name} {state.st_size} {state.st_mtime_ns}" for name, state in files)
