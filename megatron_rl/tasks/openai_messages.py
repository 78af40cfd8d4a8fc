"""Parses and validates messages in the OpenAI API's format, from data files and agents, and brings tool calls into one form."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

# -- strict json ---------------------------------------------------------------------------------------------------------
# JSON as in its standard (RFC 8259), in texts of a model or a client. Python's own reader accepts more than the standard.


def _number(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the number {text[:20]} is too large")
    return number


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is not a number")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the key {name[:40]!r} occurs twice")
        found[name] = value
    return found


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_float=_number, parse_constant=_no_number)


_BLANKS = re.compile(r"[ \t\n\r]*")


def decode(text: str, at: int = 0) -> tuple[Any, int]:
    """Decode the JSON value at index `at` of a text. Returns (value, index after the value and any blanks).

    Errors: ValueError for invalid JSON. This includes NaN and Infinity, numbers beyond fp64 (1e999), objects with a repeated
    key, and too deep nesting.
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
    """Decode a text that is one JSON value. Errors: ValueError as in `decode`, and if more text follows the value."""
    value, end = decode(text)
    if end < len(text):
        raise ValueError(f"text follows the JSON: {text[end : end + 20]!r}")
    return value


# -- messages ------------------------------------------------------------------------------------------------------------


Message = dict[str, Any]
"""A message: role, content (text), and optionally tool_calls (of an assistant), reasoning_content (the assistant's thinking),
weight: 0 (if the message is not trained on), name (of the tool that a result comes from, if known)."""
Schema = dict[str, Any]
"""Description of a tool, for chat templates and the OpenAI API: `{"type": "function", "function": {"name": ..., "parameters":
...}}`."""
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Field names that published data files use for an assistant's thinking before the answer."""
ROLES = {"developer": "system", "function": "tool", "ipython": "tool"}
"""{other name of a role: name used here}."""
HEEDED = {
    "system": frozenset({"role", "content"}),
    "tool": frozenset({"role", "content", "name", "tool_call_id"}),
    "assistant": frozenset({"role", "content", "tool_calls", "function_call", "weight", *THOUGHTS}),
}
"""Message fields that are used, by role. A role that is not listed has the fields of `system`."""


class Struct(dict):
    """A nested value of a table (parquet, a data set).

    The table stores null for a field that this row lacks but other rows have.
    """


def structs(value: Any) -> Any:
    """Return a table's value with all nested values converted to `Struct`."""
    if isinstance(value, Mapping):
        return Struct((key, structs(one)) for key, one in value.items())
    return [structs(one) for one in value] if isinstance(value, list) else value


def written(value: Any, keep: frozenset[str] = frozenset()) -> Any:
    """Return a value without the nulls that a table has added. keep: fields whose null may come from the author of the data."""
    if isinstance(value, Struct):
        return {key: written(one) for key, one in value.items() if one is not None or key in keep}
    return [written(one) for one in value] if isinstance(value, list) else value


def parse_schemas(value: Any) -> list[Schema]:
    """Parse the tool schemas of a row. value: a list of schemas, a list of JSON texts, or one JSON text. Errors: ValueError."""
    found, schemas = [], _json(value, "a list of schemas")
    if not isinstance(schemas, list):
        raise ValueError("it is not a list of schemas")
    for number, one in enumerate(schemas, 1):
        one = written(_json(one, f"{number}"))
        if isinstance(one, dict) and "function" not in one and isinstance(one.get("name"), str):
            one = {"type": "function", "function": one}
        function = one.get("function") if isinstance(one, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(f"{number} is not a schema of a function with a name")
        found.append(one)
    return found


def _json(value: Any, what: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return loads(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{what} is not JSON ({error})") from None


def parse_call(call: Any, schemas: Sequence[Schema] = ()) -> tuple[str, dict[str, Any]]:
    """Return (name, arguments) of an element of `tool_calls`. Errors: ValueError with the problem.

    schemas: schemas of the tools. If the call comes from a table, null is kept as the value of an argument only if the tool
    requires this argument and accepts null.
    """
    try:
        name, arguments = call["function"]["name"], call["function"].get("arguments") or {}
        arguments = loads(arguments) if isinstance(arguments, str) else arguments
        if not isinstance(name, str):
            raise TypeError
    except (TypeError, KeyError, AttributeError, ValueError, RecursionError):
        raise ValueError("a call in tool_calls needs a function with a name and arguments that are JSON") from None
    if not isinstance(arguments, dict):
        raise ValueError(f"the arguments of {name} are no JSON object")
    return name, written(arguments, _nullable(schemas, name))


def _nullable(schemas: Sequence[Schema], name: str) -> frozenset[str]:
    functions = [schema["function"] for schema in schemas if schema["function"]["name"] == name]
    match functions:
        case [{"parameters": {"properties": dict(fields), "required": list(required)}}, *_]:
            return frozenset(key for key in required if isinstance(key, str) and _takes_null(fields.get(key)))
    return frozenset()


def _takes_null(schema: Any) -> bool:
    if not isinstance(schema, dict):
        return False
    kind, alternatives = schema.get("type"), schema.get("anyOf", schema.get("oneOf"))
    return (
        kind == "null"
        or (isinstance(kind, list) and "null" in kind)
        or schema.get("nullable") is True
        or (isinstance(alternatives, list) and any(map(_takes_null, alternatives)))
    )


def parse_messages(messages: Any, *, strict: bool = True, schemas: Sequence[Schema] = ()) -> list[Message]:
    """Parse messages and keep the fields that are used. Errors: ValueError with the problem of the first invalid message.

    strict: raise an error if a non-empty field of a message would be lost. If False, unused fields and the assistant's thinking
    are ignored; this is meant for requests from API clients. schemas: schemas of the tools, as in `parse_call`.
    """
    if not isinstance(messages, list):
        raise ValueError("it must be a list of messages")
    found, asked = [], list[tuple[Any, str]]()
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError("a message needs a role and content")
        role = str(ROLES.get(message["role"], message["role"]))
        message = {key: value for key, value in message.items() if not _absent(value) or key == "content"}
        if "function_call" in message:  # form of the API before it had tools
            if strict and "tool_calls" in message:
                raise ValueError("a message has both function_call and tool_calls")
            message.setdefault("tool_calls", [{"function": message["function_call"]}])
        content, calls = message.get("content"), message.get("tool_calls") or []
        if isinstance(content, list) and strict:
            content = _joined(content, role) if content else None
        if not isinstance(calls, list):
            raise ValueError("tool_calls of a message must be a list")
        if not isinstance(content, str) and not (content is None and calls):
            raise ValueError(f"the content of a message of role {role} is not text")
        one: Message = {"role": role, "content": content or ""}
        if calls and (role == "assistant" or not strict):
            parsed = [parse_call(call, schemas) for call in calls]
            one["tool_calls"] = [{"type": "function", "function": {"name": n, "arguments": a}} for n, a in parsed]
            asked = [(call.get("id"), name) for call, (name, _) in zip(calls, parsed, strict=True)]
        if role == "tool" and (name := _answering(message, asked)):
            one["name"] = name
        found.append(one | (_more(message, role) if strict else {}))
    return found


def _more(message: Message, role: str) -> Message:
    """Return the optional fields of a message: reasoning_content, and a weight of 0.

    Errors: ValueError for a field that would be lost.
    """
    heeded = HEEDED.get(role, HEEDED["system"])
    if lost := [key for key in message if key not in heeded]:
        raise ValueError(f"a message of role {role} has '{lost[0]}', which the model would not be shown; leave it out")
    found: Message = {}
    thoughts = {key: message[key] for key in THOUGHTS if key in message}
    for key, thought in thoughts.items():
        if not isinstance(thought, str):
            raise ValueError(f"'{key}' of a message is not text")
        if found.setdefault("reasoning_content", thought) != thought:
            raise ValueError(f"'{key}' and '{next(iter(thoughts))}' of a message differ")
    weight = message.get("weight", 1)
    if not isinstance(weight, bool | int | float) or weight not in (0, 1):
        raise ValueError(f"the weight of a message is {weight!r:.60}, neither 0 nor 1")
    return found if weight else {**found, "weight": 0}


def _absent(value: Any) -> bool:
    """Return True for an empty field. Tables and the API's own objects write null into unused fields."""
    if isinstance(value, Mapping):
        return all(map(_absent, value.values()))
    return value is None or (isinstance(value, str | list) and not value)


def _joined(parts: list[Any], role: str) -> str:
    """Join the parts of a message's content into one text. Errors: ValueError for a part that is not text."""
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ValueError(
                f"the content of a message of role {role} has a part of type {kind!r:.60}: only text is supported"
            )
    return "".join(part["text"] for part in parts)


def _answering(message: Mapping[str, Any], asked: list[tuple[Any, str]]) -> str | None:
    """Return the name of the tool that gave a result: found by the id of the call, else by the order of the calls.

    asked: (id, name) of each call without a result so far. The call that this result answers is removed from the list.
    """
    wanted = message.get("tool_call_id")
    for place, (number, name) in enumerate(asked):
        if wanted is None or number in (None, wanted):
            del asked[place]
            return name
    name = message.get("name")
    return name if isinstance(name, str) else None
