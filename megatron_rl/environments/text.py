"""A text as tokens, with the bytes of it that each of them stands for: what bits per byte are counted by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_rl.environments.chat import end_of_turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NO_TEXT = -1
"""Bytes of a token that stands for no text, such as the end-of-sequence token."""


def encode_text(
    tokenizer: PreTrainedTokenizerBase, text: str, end: Sequence[int] | None = None
) -> tuple[list[int], list[int]]:
    """Tokens [n] of a demonstration after its prompt, or of a text to learn, and the bytes [n] of text of each.

    end: tokens that close them; by default the one with which the chat template ends a turn, without a template the end of
    sequence. A tokenizer that does not tell where its tokens come from (one without a `fast` form) leaves the bytes of all of
    them NO_TEXT. Errors: ValueError for half a surrogate pair.
    """
    check_text(text)
    last = end_of_turn(tokenizer) if end is None else list(end)
    if not tokenizer.is_fast:
        tokens = list(tokenizer.encode(text, add_special_tokens=False)) + last
        return tokens, [NO_TEXT] * len(tokens)
    found: Any = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return found["input_ids"] + last, bytes_of(text, found["offset_mapping"]) + [NO_TEXT] * len(last)


def check_text(value: Any) -> None:
    """Look at all texts in a value. Errors: ValueError for half a surrogate pair, which JSON may bring and no text has."""
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            half = f"half a surrogate pair ({value[error.start]!a})"
            raise ValueError(f"{half} is no text: surrogates not allowed") from None
    elif isinstance(value, Mapping):
        for key, one in value.items():
            check_text(key)
            check_text(one)
    elif isinstance(value, list | tuple | set):
        for one in value:
            check_text(one)


def bytes_of(text: str, spans: list[tuple[int, int]]) -> list[int]:
    """UTF-8 bytes of the text that each token stands for, whose sum is the text's.

    spans: first character and end of each token. A character of several tokens counts at the last of them, and what lies
    between two tokens, as blanks that a tokenizer drops, at the later one.
    """
    if not spans:
        return []
    first, end = np.asarray(spans).T
    borders = np.concatenate([[0], np.minimum(end[:-1], first[1:]), [len(text)]])
    points = np.frombuffer(text.encode("utf-32-le"), "<u4")
    widths = 1 + (points >= 0x80) + (points >= 0x800) + (points >= 0x10000)
    before = np.concatenate([[0], np.cumsum(widths)])  # bytes in front of each character
    return np.diff(before[np.maximum.accumulate(borders)]).tolist()
