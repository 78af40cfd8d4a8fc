"""Tasks of the field: rows of their public sets by path or name, and rows like them, generated, where none is given."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, override

from megatron_rl.config import DataConfig
from megatron_rl.environments.files import HubTask, Row, RowTask, read_file, read_hub
from megatron_rl.errors import UserError

log = logging.getLogger(__name__)

GENERATED = 2000
"""Rows that are generated where data.options.size does not say how many; one in ten is held out."""


class PublicSet(RowTask):
    """Rows of data.path: a .jsonl or .parquet file, or a data set by name or folder; without data.path generated ones.

    options: size, of the generated rows; subset, split and eval_split as of task hub; eval_subset, of data.eval_path.
    """

    known_options: tuple[str, ...] = (*HubTask.known_options, "eval_subset", "size")
    generates = True

    def __init__(self, data: DataConfig, demonstrations: bool = False):
        size = data.options.get("size", GENERATED)
        if not isinstance(size, int) or size < 1:
            raise UserError(f"config: data.options.size = {size!r} is no number of rows")
        self.size = size
        super().__init__(data, demonstrations)

    def generate(self, rng: random.Random) -> dict[str, Any]:
        """A row in the form of the public set."""
        raise NotImplementedError

    def convert(self, row: dict[str, Any]) -> dict[str, Any]:
        """A row of the public set, or of another form that is known, with the columns that the config names.

        Errors: ValueError saying what is wrong with it.
        """
        raise NotImplementedError

    def _read(self, path: str, key: str, subset: str, split: str) -> Iterator[Row]:
        """subset: the option that names it."""
        if _is_file(path):
            return read_file(path, key)
        return read_hub(path, key, self.data.options.get(subset), split)

    @override
    def _training_rows(self) -> Iterator[Row]:
        if self.path:
            return self._read(self.path, "data.path", "subset", self.data.options.get("split", "train"))
        log.warning("data: task %s has no data.path: %d generated rows", self.name, self.size)
        name = f"{self.name}:{self.data.seed}"
        return (
            (f"{name}:{number}", self.generate(random.Random(f"{name}/{number}")), "") for number in range(self.size)
        )

    @override
    def _held_out_rows(self) -> Iterator[Row] | None:
        split = self.data.options.get("eval_split")
        if self.data.eval_path:
            return self._read(self.data.eval_path, "data.eval_path", "eval_subset", split or "test")
        return (
            self._read(self.path, "data.path", "subset", split)
            if split and self.path and not _is_file(self.path)
            else None
        )

    @override
    def _prepared(self, row: dict[str, Any], where: str) -> dict[str, Any] | None:
        prepared = super()._prepared(row, where)
        return None if prepared is None else self.convert(prepared)


def _is_file(path: str) -> bool:
    """Whether it is one file, and not a data set with splits."""
    return Path(path).suffix in (".jsonl", ".parquet")
