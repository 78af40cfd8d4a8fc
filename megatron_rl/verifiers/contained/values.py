"""Sends plain values over a pipe, one line of JSON each. Other values are not sent; a number represents them."""

from __future__ import annotations

import builtins
import importlib
import json
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

MOST_BYTES = 2**24
"""Largest length in bytes of a line."""
TAG = "%"
STANDARD = {
    "Fraction": "fractions",
    "Decimal": "decimal",
    **dict.fromkeys(("date", "time", "datetime", "timedelta"), "datetime"),
    **dict.fromkeys(("deque", "Counter", "OrderedDict"), "collections"),
}
"""{class of the standard library: its module}. The module is imported when a value of the class arrives."""
PLAIN: dict[str, Callable[[Any], Any]] = {
    "deque": list,
    "Counter": dict,
    "OrderedDict": dict,
    "timedelta": lambda gap: gap // gap.resolution,
}
"""{class: function that converts a value to its form in a message}, for classes that are not sent as text."""
PROGRAM = "program"
"""Name of the module to which a program's definitions belong."""
CONTROL = ("StopIteration", "StopAsyncIteration", "GeneratorExit")
"""Exceptions that would silently end a loop in the other container."""


class Gone(BaseException):
    """Raised if the other container has ended or sends invalid data. Tests that expect an exception must not catch this one."""


def send(stream: BinaryIO, message: Any) -> None:
    """Write a message of JSON values. Errors: Gone if the receiver has ended."""
    try:
        stream.write(json.dumps(message).encode() + b"\n")
        stream.flush()
    except (OSError, ValueError, RecursionError) as error:
        raise Gone(str(error)) from None


def receive(stream: BinaryIO) -> dict[str, Any]:
    """Read a message. Errors: Gone if none arrives."""
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
    """Encode a value as JSON values. keep: function that returns the JSON form of a value that is not plain.

    Subclasses are encoded as their built-in base class. Containers of a program's own class are not plain.
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
    """Decode a value to exactly the built-in types. kept: function that returns the value of an unknown tag.

    Errors: Gone for invalid data.
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
    """Return the message that describes an exception: the names of its classes, and its plain arguments."""
    plain = [arg for arg in error.args if isinstance(arg, int | float | str)]
    return {"raises": [base.__name__ for base in type(error).__mro__], "args": [encode(arg, keep) for arg in plain]}


def exception(names: Sequence[str], known: dict[str, type[BaseException]]) -> type[BaseException]:
    """Return the exception class for the given class names: a known one, a built-in one, or a new one.

    New classes are added to `known`. SystemExit always gets a new class, so that it cannot end this process.
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
