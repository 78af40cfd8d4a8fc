"""Messages in the OpenAI API's form, as data files and agents bring them: checked, and with calls in one form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_rl.environments.strict_json import loads

Message = dict[str, Any]
"""role, content (text) and, where an assistant calls, tool_calls; a tool's has its name where that is known."""


def parse_call(call: Any) -> tuple[str, dict[str, Any]]:
    """Name and arguments of an element of `tool_calls`. Errors: ValueError saying what is wrong with it."""
    try:
        name, arguments = call["function"]["name"], call["function"].get("arguments") or {}
        arguments = loads(arguments) if isinstance(arguments, str) else arguments
    except (TypeError, KeyError, AttributeError, ValueError):
        raise ValueError("a call of tool_calls has a function with a name and arguments that are JSON") from None
    if not isinstance(arguments, dict):
        raise ValueError(f"the arguments of {name} are no JSON object")
    return str(name), arguments


def parse_messages(messages: Any) -> list[Message]:
    """The messages with what counts of them. Errors: ValueError saying what is wrong with the first that does not fit."""
    if not isinstance(messages, list):
        raise ValueError("a list of messages is wanted")
    found, asked = [], list[tuple[Any, str]]()
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError("a message has a role and content")
        content, calls = message.get("content"), message.get("tool_calls") or []
        if not isinstance(calls, list):
            raise ValueError("tool_calls of a message is a list")
        if not isinstance(content, str) and not (content is None and calls):
            raise ValueError(f"the content of a message of role {message['role']} is no text")
        one: Message = {"role": message["role"], "content": content or ""}
        if calls:
            parsed = [parse_call(call) for call in calls]
            one["tool_calls"] = [{"type": "function", "function": {"name": n, "arguments": a}} for n, a in parsed]
            asked = [(call.get("id"), name) for call, (name, _) in zip(calls, parsed, strict=True)]
        if one["role"] == "tool" and (name := _answering(message, asked)):
            one["name"] = name
        found.append(one)
    return found


def _answering(message: Mapping[str, Any], asked: list[tuple[Any, str]]) -> str | None:
    """The tool whose result a message is: by the call's id, else in the calls' order.

    asked: id and name of calls that wait for their results; the one that has it is taken out.
    """
    wanted = message.get("tool_call_id")
    for place, (number, name) in enumerate(asked):
        if wanted is None or number in (None, wanted):
            del asked[place]
            return name
    name = message.get("name")
    return name if isinstance(name, str) else None
