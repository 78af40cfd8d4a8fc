"""Scores that a judge has given, so that it is not asked the same twice, also by a run that goes on."""

from __future__ import annotations

import json
import logging
from collections import OrderedDict
from pathlib import Path

log = logging.getLogger(__name__)


class Judgements:
    """At most `limit` scores by the digests of what was asked; those that were used the longest ago make room.

    In a folder they are lines of a file for each data-parallel rank, of which all are read at the start. What cannot be read is
    asked anew.
    """

    def __init__(self, limit: int, folder: Path | None, name: str, data_rank: int) -> None:
        self._limit, self._scores = limit, OrderedDict[str, float]()
        self._own = folder / f"{name}.rank{data_rank}.jsonl" if folder and limit else None
        self._lines = 0
        """Lines of this process's file."""
        for file in sorted(folder.glob(f"{name}.rank*.jsonl")) if folder and limit else ():
            found = _read(file)
            self._scores.update(found)
            self._lines += len(found) if file == self._own else 0
        self._shrink()

    def get(self, key: str) -> float | None:
        """The score, or None where nobody has asked."""
        if key in self._scores:
            self._scores.move_to_end(key)
        return self._scores.get(key)

    def add(self, found: dict[str, float]) -> None:
        """Keep scores, on disk too where there is a folder."""
        self._scores.update(found)
        self._shrink()
        if self._own is None or not found:
            return
        self._lines += len(found)
        anew = self._lines > 2 * self._limit
        rows = self._scores if anew else found
        text = "".join(json.dumps([key, score]) + "\n" for key, score in rows.items())
        try:
            self._own.parent.mkdir(parents=True, exist_ok=True)
            if anew:
                temporary = self._own.with_name(self._own.name + ".tmp")
                temporary.write_text(text)
                temporary.replace(self._own)
                self._lines = len(rows)
            else:
                with open(self._own, "a") as file:
                    file.write(text)
        except OSError as error:
            log.warning(f"{self._own}: {error.strerror}: a run that goes on will ask the judge again")

    def _shrink(self) -> None:
        while len(self._scores) > self._limit:
            self._scores.popitem(last=False)


def _read(file: Path) -> dict[str, float]:
    found = {}
    for line in file.read_text(errors="replace").splitlines():
        try:
            key, score = json.loads(line)
        except (ValueError, TypeError, RecursionError):  # a line that a process could not finish
            continue
        if isinstance(key, str) and isinstance(score, int | float) and 0 <= score <= 1:
            found[key] = float(score)
    return found
