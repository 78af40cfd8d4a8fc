"""Calls as Qwen and Hermes models write them: <tool_call>{"name": ..., "arguments": {...}}</tool_call>."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import override

from megatron_rl.rollout.dialects.base import Call, Dialect, Message, Parsed

BEGIN, END = "<tool_call>", "</tool_call>"
RESULT = "<tool_response>\n{}\n</tool_response>"


class Qwen(Dialect):
    """Qwen's dialect, which is that of the Hermes models; for every ChatML tokenizer."""

    instruction = (
        "You may call functions to answer the user.\n\nFunction signatures, in <tools></tools>:\n<tools>\n{tools}\n</tools>\n\n"
        "For each call give a JSON object with the function's name and arguments in <tool_call></tool_call>:\n<tool_call>\n"
        '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
    )

    @override
    def parse_text(self, text: str) -> Parsed:
        text = text.rpartition("</think>")[2]
        pieces = re.split(f"({BEGIN}|{END})", text)
        calls, inside = [], False
        for mark in pieces[1::2]:
            if (mark == BEGIN) == inside:
                return Parsed(malformed=f"{BEGIN} and {END} do not match")
            inside = not inside
        if inside:
            return Parsed(malformed=f"a {BEGIN} without {END}")
        for body in pieces[2::4]:
            try:
                call = json.loads(body)
            except (ValueError, RecursionError) as error:
                return Parsed(malformed=f"the call is not JSON ({error})")
            if not isinstance(call, dict) or not isinstance(call.get("name"), str):
                return Parsed(malformed='the call is no JSON object with a "name"')
            arguments = call.get("arguments", {})
            if not isinstance(arguments, dict):
                return Parsed(malformed='the "arguments" of the call are no JSON object')
            calls.append(Call(call["name"], arguments))
        return Parsed(calls) if calls else Parsed(final=text.strip())

    @override
    def call_text(self, call: Call) -> str:
        body = json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False)
        return f"{BEGIN}\n{body}\n{END}"

    @override
    def result_messages(self, messages: Sequence[Message]) -> list[Message]:
        """Where the template does not wrap a tool's message, it is the user's, wrapped."""
        if "<tool_response>" in self._template([{"role": "user", "content": "?"}, {"role": "tool", "content": "."}]):
            return list(messages)
        wrapped: list[Message] = []
        for message in messages:
            if message["role"] != "tool":
                wrapped.append(message)
                continue
            text = RESULT.format(message["content"])
            if wrapped and wrapped[-1].get("results"):
                wrapped[-1] = {**wrapped[-1], "content": f"{wrapped[-1]['content']}\n{text}"}
            else:
                wrapped.append({"role": "user", "content": text, "results": True})
        return [{key: value for key, value in message.items() if key != "results"} for message in wrapped]
