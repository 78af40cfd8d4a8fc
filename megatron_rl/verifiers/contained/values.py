"""Plain values over a pipe, as a line of JSON each; what is no plain value stays where it is and is named by a number."""

from __future__ import annotations

import builtins
import importlib
import json
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

MOST_BYTES = 2**24
"""Longest line that is read."""
TAG = "%"
STANDARD = {
    "Fraction": "fractions",
    "Decimal": "decimal",
    **dict.fromkeys(("date", "time", "datetime", "timedelta"), "datetime"),
    **dict.fromkeys(("deque", "Counter", "OrderedDict"), "collections"),
}
"""Classes of the standard library -> their module, which is imported where one comes."""
PLAIN: dict[str, Callable[[Any], Any]] = {
    "deque": list,
    "Counter": dict,
    "OrderedDict": dict,
    "timedelta": lambda gap: gap // gap.resolution,
}
"""The form of a value of theirs in a message, where it is not its text."""
PROGRAM = "program"
"""Module of what a program defines."""
CONTROL = ("StopIteration", "StopAsyncIteration", "GeneratorExit")
"""Exceptions that would end a loop of the other side without a word."""


class Gone(BaseException):
    """The other side has ended, or does not keep to the form. No test that expects an exception means this one."""


def send(stream: BinaryIO, message: Any) -> None:
    """Write a message of JSON's values. Errors: Gone where nobody reads."""
    try:
        stream.write(json.dumps(message).encode() + b"\n")
        stream.flush()
    except (OSError, ValueError, RecursionError) as error:
        raise Gone(str(error)) from None


def receive(stream: BinaryIO) -> dict[str, Any]:
    """Read a message. Errors: Gone where there is none."""
    line = stream.readline(MOST_BYTES)
    if not line.endswith(b"\n"):
        raise Gone("nothing more came, or too much")
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise Gone(str(error)) from None
    if not isinstance(found, dict):
        raise Gone("no message")
    return found


def encode(value: Any, keep: Callable[[Any], Any]) -> Any:
    """A value in JSON's. keep: what stands for one that is not plain.

    Subclasses are sent as what they derive from; lists, dictionaries and the like of a program's own class are not plain.
    """
    kind = type(value)
    if STANDARD.get(kind.__name__) == kind.__module__:
        return {TAG: kind.__name__, "v": encode(PLAIN.get(kind.__name__, str)(value), keep)}
    if kind.__module__ == PROGRAM and isinstance(value, list | tuple | set | frozenset | dict):
        return keep(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return {TAG: "int", "v": hex(value)} if abs(value) > 2**53 else int(value)
    if isinstance(value, float):
        return {TAG: "float", "v": repr(float(value))}
    if isinstance(value, str):
        return str(value)
    if isinstance(value, list):
        return [encode(item, keep) for item in value]
    for kind in (tuple, set, frozenset):
        if isinstance(value, kind):
            return {TAG: kind.__name__, "v": [encode(item, keep) for item in value]}
    if isinstance(value, dict):
        return {TAG: "dict", "v": [[encode(key, keep), encode(item, keep)] for key, item in value.items()]}
    if isinstance(value, bytes | bytearray):
        return {TAG: type(value).__name__, "v": value.hex()}
    if isinstance(value, complex):
        return {TAG: "complex", "v": str(complex(value))}
    if isinstance(value, range):
        return {TAG: "range", "v": [value.start, value.stop, value.step]}
    return keep(value)


def decode(found: Any, kept: Callable[[dict[str, Any]], Any]) -> Any:
    """The value that was encoded, of exactly the built-in types. kept: what an unknown tag is.

    Errors: Gone for another form.
    """
    if isinstance(found, list):
        return [decode(item, kept) for item in found]
    if not isinstance(found, dict):
        return found
    kind: Any = found.get(TAG)
    value: Any = found.get("v")
    try:
        if kind == "int":
            return int(value, 16)
        if kind in ("float", "complex"):
            return getattr(builtins, kind)(value)
        if kind in ("tuple", "set", "frozenset"):
            return getattr(builtins, kind)([decode(item, kept) for item in value])
        if kind == "dict":
            return {decode(key, kept): decode(item, kept) for key, item in value}
        if kind in ("bytes", "bytearray"):
            return getattr(builtins, kind).fromhex(value)
        if kind in STANDARD:
            made = getattr(importlib.import_module(STANDARD[kind]), kind)
            value = decode(value, kept)
            if kind == "timedelta":
                return made(microseconds=value)
            return made.fromisoformat(value) if hasattr(made, "fromisoformat") else made(value)
        if kind == "range":
            return range(*map(int, value))
    except (TypeError, ValueError, ArithmeticError) as error:
        raise Gone(str(error)) from None
    return kept(found)


def raised(error: BaseException, keep: Callable[[Any], Any]) -> dict[str, Any]:
    """The message for an exception: the names of its classes, and its arguments that are plain."""
    plain = [arg for arg in error.args if isinstance(arg, int | float | str)]
    return {"raises": [base.__name__ for base in type(error).__mro__], "args": [encode(arg, keep) for arg in plain]}


def exception(names: Sequence[str], known: dict[str, type[BaseException]]) -> type[BaseException]:
    """The class for the names of an exception's classes: one that is known or built in, or is made, and known from then on.

    That of an exit is always made, so that it is not taken for one of our own.
    """
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise Gone("an exception without a name")
    if not {*CONTROL}.isdisjoint(names):
        return RuntimeError
    for name in names:
        base = known.get(name) or getattr(builtins, name, None)
        if isinstance(base, type) and issubclass(base, Exception | SystemExit):
            break
    else:
        base = Exception
    made: Any = type(names[0], (base,), {})
    return base if base.__name__ == names[0] and base is not SystemExit else known.setdefault(names[0], made)
