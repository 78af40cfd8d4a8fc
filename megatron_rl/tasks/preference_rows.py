"""Preferences read from rows of data: pairs, lists, scores, labels, or scored steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from difflib import get_close_matches
from itertools import combinations
from typing import Any, override

from megatron_rl.config import DataConfig
from megatron_rl.errors import UserError
from megatron_rl.tasks.openai_messages import Message
from megatron_rl.tasks.preferences import Judged, Kind, Preference, Response, Step
from megatron_rl.tasks.rows import MISSING, FileTask, HubTask, RowTask, as_text, get, messages_of
from megatron_rl.tasks.task import Prompt

COLUMNS: dict[Kind, tuple[str, ...]] = {
    "pair": ("chosen_key", "rejected_key"),
    "list": ("responses_key",),
    "steps": ("steps_key",),
    "point": ("score_key",),
    "label": ("label_key",),
}
"""Config keys of the columns that identify each kind. If a row has columns of several kinds, it is of the first of these
kinds."""
BESIDES: dict[Kind, tuple[str, ...]] = {
    "pair": (),
    "list": (),
    "steps": ("labels_key",),
    "point": ("response_key",),
    "label": ("response_key",),
}
"""Config keys of the columns that each kind needs in addition to `COLUMNS` and the prompt."""


class PreferenceRows(RowTask):
    """A task whose rows hold a prompt and a preference. All rows are of one kind, and need no answer."""

    def __init__(self, data: DataConfig, demonstrations: bool = False):
        self._first: tuple[Kind, str] | None = None
        """Kind and location of the first row with a preference."""
        super().__init__(data, demonstrations)

    @override
    def _needed(self, row: dict[str, Any]) -> list[str]:
        kind = self._kind_of(row) or (self._first[0] if self._first else self._meant(row))
        if kind is None:
            names = ", ".join(map(self._names, COLUMNS))
            raise ValueError(f"it has none of the columns of preferences ({names}): set data.chosen_key, for example")
        wanted = [*COLUMNS[kind], *BESIDES[kind]]
        return wanted if kind == "pair" and self._conversations(row) else ["prompt_key", *wanted]

    @override
    def _prompt(self, where: str, row: dict[str, Any]) -> Prompt:
        kind = self._kind_of(row)
        assert kind is not None  # the row has the columns that are needed
        first, there = self._first = self._first or (kind, where)
        if kind != first:
            raise UserError(
                f"data: {where} is a {kind} ({self._names(kind)}), but {there} is a {first} ({self._names(first)}): give rows"
                " of one kind, or drop the others with data.prepare"
            )
        if kind == "pair" and (talks := self._conversations(row)):
            row = row | dict(zip(self._columns("prompt_key", *COLUMNS["pair"]), _parted(*talks), strict=True))
        read = {
            "pair": self._pair,
            "list": self._list,
            "steps": self._steps,
            "point": self._point,
            "label": self._label,
        }
        return replace(super()._prompt(where, row), preference=read[kind](row))

    # -- kinds --------------------------------------------------------------------------------------------------------

    def _kind_of(self, row: dict[str, Any]) -> Kind | None:
        """Return the kind of a row. Columns without a value are ignored, because in a data set every row has all columns."""
        for kind, keys in COLUMNS.items():
            if any(get(row, name) not in (MISSING, None) for name in self._columns(*keys)):
                return kind
        return None

    def _meant(self, row: dict[str, Any]) -> Kind | None:
        """Return the kind that a row probably has, if its column is misspelled or has no value."""
        others = row.keys() - self._columns("prompt_key", "response_key", "answer_key")
        for kind, keys in COLUMNS.items():
            if any(get_close_matches(name, others) for name in self._columns(*keys)):
                return kind
        return None

    def _columns(self, *keys: str) -> list[str]:
        return [getattr(self.data, key) for key in keys]

    def _names(self, kind: Kind) -> str:
        return ", ".join(f"'{name}'" for name in self._columns(*COLUMNS[kind]))

    def _pair(self, row: dict[str, Any]) -> Preference:
        names = self._columns(*COLUMNS["pair"])
        chosen, rejected = (self._response(row, get(row, name), f"'{name}'") for name in names)
        if chosen == rejected:
            raise ValueError(f"'{names[0]}' and '{names[1]}' are equal")
        stated = get(row, self.data.margin_key)
        margin = None if stated in (MISSING, None) else _number(stated, f"'{self.data.margin_key}'")
        if margin is not None and margin < 0:
            raise ValueError(f"'{self.data.margin_key}' is {margin:g}: the chosen response would be the worse one")
        return Preference("pair", (Judged(chosen, 1.0), Judged(rejected, 0.0)), margin)

    def _list(self, row: dict[str, Any]) -> Preference:
        name, of_scores = self._columns("responses_key", "scores_key")
        values = self._elements(row, name)
        responses = [self._response(row, value, f"'{name}' {i}") for i, value in enumerate(values, 1)]
        if len(responses) < 2:
            raise ValueError(f"'{name}' has a single response, so there is nothing to compare")
        scores = [-float(place) for place in range(1, len(responses) + 1)]
        if get(row, of_scores) not in (MISSING, None):
            scores = self._numbers(row, of_scores, len(responses), name)
            if len(set(scores)) == 1:
                raise ValueError(f"'{of_scores}' are all equal, so there is nothing to compare")
        for (i, (one, a)), (j, (other, b)) in combinations(enumerate(zip(responses, scores, strict=True), 1), 2):
            if one == other and a != b:
                raise ValueError(f"'{name}' {i} and {j} are equal, but one is better than the other")
        return Preference("list", tuple(map(Judged, responses, scores)))

    def _steps(self, row: dict[str, Any]) -> Preference:
        name, of_labels = self._columns("steps_key", "labels_key")
        texts, end = self._elements(row, name), self.data.step_separator
        for i, text in enumerate(texts, 1):
            if not isinstance(text, str):
                raise ValueError(f"'{name}' {i} is not text")
            if not text.strip():
                raise ValueError(f"'{name}' {i} is empty")
        scores = self._numbers(row, of_labels, len(texts), name)
        ended = [text if text.endswith(end) else text + end for text in texts]
        judged = Judged("".join(ended), min(scores), steps=tuple(map(Step, ended, scores)))
        return Preference("steps", (judged,))

    def _point(self, row: dict[str, Any]) -> Preference:
        response, score = self._columns("response_key", "score_key")
        judged = Judged(
            self._response(row, get(row, response), f"'{response}'"), _number(get(row, score), f"'{score}'")
        )
        return Preference("point", (judged,))

    def _label(self, row: dict[str, Any]) -> Preference:
        response, name = self._columns("response_key", "label_key")
        label = get(row, name)
        if not isinstance(label, bool | int | float) or label not in (0, 1):
            raise ValueError(f"'{name}' is {label!r:.60}, neither true or false nor 1 or 0")
        return Preference("label", (Judged(self._response(row, get(row, response), f"'{response}'"), float(label)),))

    # -- values -------------------------------------------------------------------------------------------------------

    def _conversations(self, row: dict[str, Any]) -> list[list[Message]]:
        """Return both conversations of a pair (chosen, rejected) if they are whole, including the prompt; else []."""
        names = self._columns(*COLUMNS["pair"])
        if not all(isinstance(side := get(row, name), list) and side for name in names):
            return []
        talks = [self._value(row, name, self._tools(row)) for name in names]
        whole = all(talk[0]["role"] != "assistant" for talk in talks)
        asked = all(any(message["role"] == "user" for message in talk) for talk in talks)  # after a greeting
        return talks if whole or (asked and get(row, self.data.prompt_key) in (MISSING, None)) else []

    def _response(self, row: dict[str, Any], value: Any, name: str) -> Response:
        """Return a response. A conversation of one plain message is returned as text, which every rollout program accepts."""
        if isinstance(value, list):
            value = messages_of(value, name, self._tools(row))
            if value and value[0]["role"] != "assistant":
                raise ValueError(f"{name} does not begin with a message of the assistant")
            if value and value[-1]["role"] != "assistant":
                raise ValueError(f"{name} does not end with a message of the assistant")
            if len(value) == 1 and value[0].keys() == {"role", "content"}:
                value = value[0]["content"]
            elif value and all(message.get("weight") == 0 for message in value if message["role"] == "assistant"):
                raise ValueError(f"{name} has nothing to learn: all its weights are 0")
        elif value is not None:
            value = as_text(value, name)
        if not value or (isinstance(value, str) and not value.strip()):
            raise ValueError(f"{name} is empty")
        return value

    def _elements(self, row: dict[str, Any], name: str) -> list[Any]:
        value = get(row, name)
        if not isinstance(value, list):
            raise ValueError(f"'{name}' is not a list")
        return value

    def _numbers(self, row: dict[str, Any], name: str, count: int, of: str) -> list[float]:
        values = self._elements(row, name)
        if len(values) != count:
            raise ValueError(f"'{name}' has {len(values)} values for the {count} of '{of}'")
        return [_number(value, f"'{name}' {i}") for i, value in enumerate(values, 1)]


def _number(value: Any, name: str) -> float:
    """Convert a value to a float. Errors: ValueError naming the column if it is not a finite number."""
    number = math.nan
    if isinstance(value, bool | int | float):
        with suppress(OverflowError):  # an integer beyond the range of floats
            number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{name} is {value!r:.60}, not a finite number")
    return number


def _parted(chosen: Sequence[Message], rejected: Sequence[Message]) -> list[list[Message]]:
    """Split two conversations into their shared prompt and both replies. The prompt ends at the last shared user message.

    Errors: ValueError if they share no user message.
    """
    end = 0
    for place, (one, other) in enumerate(zip(chosen, rejected, strict=False), 1):
        if one != other:
            break
        end = place if one["role"] == "user" else end
    if not end:
        raise ValueError("the two conversations have no beginning in common that ends with a message of the user")
    return [list(chosen[:end]), list(chosen[end:]), list(rejected[end:])]


class FilePreferences(PreferenceRows, FileTask):
    """Preferences from a .jsonl or .parquet file."""


class HubPreferences(PreferenceRows, HubTask):
    """Preferences from a Hugging Face data set."""
