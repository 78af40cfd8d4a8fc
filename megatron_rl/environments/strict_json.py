"""JSON as its standard (RFC 8259) has it, of texts by a model or a client: what Python's own reader lets pass is refused."""

from __future__ import annotations

import json
import math
import re
from typing import Any


def _number(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the number {text[:20]} is too large")
    return number


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no number")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the key {name[:40]!r} is there twice")
        found[name] = value
    return found


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_float=_number, parse_constant=_no_number)


_BLANKS = re.compile(r"[ \t\n\r]*")


def decode(text: str, at: int = 0) -> tuple[Any, int]:
    """The value that begins at a place of a text, and where what follows it begins; blanks around the value are left out.

    Errors: ValueError for what is no JSON: NaN and Infinity, numbers beyond fp64 (1e999), objects with a key twice, and nests
    that are too deep.
    """
    try:
        value, end = _DECODER.raw_decode(text, _behind_blanks(text, at))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return value, _behind_blanks(text, end)


def _behind_blanks(text: str, at: int) -> int:
    found = _BLANKS.match(text, at)
    return found.end() if found else at


def loads(text: str) -> Any:
    """The value that a text is. Errors: as of `decode`, and ValueError where something follows."""
    value, end = decode(text)
    if end < len(text):
        raise ValueError(f"something follows the JSON: {text[end : end + 20]!r}")
    return value
