"""Dialects with calls in plain text: Qwen and Hermes (<tool_call>{"name": ..., "arguments": {...}}</tool_call>), and ReAct."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any, override

from megatron_rl.dialects.base import Call, Dialect, Message, Parsed, behind_thoughts
from megatron_rl.errors import UserError
from megatron_rl.tasks.openai_messages import decode

BEGIN, END = "<tool_call>", "</tool_call>"
RESULT = "<tool_response>\n{}\n</tool_response>"


def _call(call: Any) -> Call:
    """Convert a parsed JSON value to a call. Errors: TypeError, in the words that the model gets to read."""
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        raise TypeError('the call is no JSON object with a "name"')
    others = [key for key in call if key != "name"]
    given = [key for key in ("arguments", "parameters") if key in call]  # Llama models say "parameters"
    if len(given) == 2 or (others and not given):
        raise TypeError(f'the call has {" and ".join(map(repr, others))[:80]} where it should have "arguments" alone')
    arguments = call[given[0]] if given else {}
    if not isinstance(arguments, dict):
        raise TypeError(f'the "{given[0]}" of the call are no JSON object')
    return Call(call["name"], arguments)


def _unmatched(rest: str) -> str | None:
    """Return the problem with the tags in `rest`, the text after the first <tool_call>; None if the tags match."""
    inside, ended, _ = rest.partition(END)
    if BEGIN in inside:
        return f"{BEGIN} and {END} do not match"
    return None if ended else f"a {BEGIN} without {END}"


class Qwen(Dialect):
    """Qwen's dialect, which Hermes models use too. It works for every ChatML tokenizer."""

    instruction = (
        "You may call functions to answer the user.\n\nFunction signatures, in <tools></tools>:\n<tools>\n{tools}\n</tools>\n\n"
        "For each call give a JSON object with the function's name and arguments in <tool_call></tool_call>:\n<tool_call>\n"
        '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
    )

    @override
    def parse_text(self, text: str) -> Parsed:
        rest = behind_thoughts(text, BEGIN)
        calls, said = [], []
        while True:
            before, begun, rest = rest.partition(BEGIN)
            if END in before:
                return Parsed(malformed=f"{BEGIN} and {END} do not match")
            said.append(before.strip())
            if not begun:
                break
            try:
                call, end = decode(rest)
                if not rest.startswith(END, end):
                    raise ValueError(f"something follows it: {rest[end : end + 20]!r}")
                calls.append(_call(call))
            except ValueError as error:
                return Parsed(malformed=_unmatched(rest) or f"the call is not JSON ({error})")
            except TypeError as error:
                return Parsed(malformed=str(error))
            rest = rest[end + len(END) :]
        if not calls:
            return Parsed(final=before.strip())
        if said[0].startswith("<think>"):  # thinking without an end
            said[0] = ""
        return Parsed(calls, said="\n".join(filter(None, said)))

    @override
    def call_text(self, call: Call) -> str:
        body = json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False)
        return f"{BEGIN}\n{body}\n{END}"

    @override
    def thought_text(self, thought: str) -> str:
        thought = thought.strip("\n")
        return f"<think>\n{thought}\n</think>\n\n"

    @override
    def reply_of(self, message: Message) -> list[int]:
        """Return the tokens of a reply as `Dialect.reply_of` does.

        If the template's generation prompt has started the thinking already, the reply continues it.
        """
        text, begun = self.message_text(message), self._begun
        if begun and "</think>" not in text:
            text = self.thought_text("") + text
        if begun and text.startswith("<think>"):
            text = text.removeprefix(begun) if text.startswith(begun) else text.removeprefix("<think>").lstrip("\n")
        return self.reply(text)

    @cached_property
    def _begun(self) -> str:
        """`<think>` and the blanks after it, if the template's generation prompt ends with this tag; '' otherwise."""
        asked = self._template([{"role": "user", "content": "?"}])
        return asked[asked.rfind("<think>") :] if asked.rstrip().endswith("<think>") else ""

    @cached_property
    def _wraps(self) -> bool:
        """True if the template wraps a tool's message in <tool_response> tags.

        Some templates raise an exception for such a message.
        """
        asked = [{"role": "user", "content": "?"}, {"role": "tool", "content": "."}]
        try:
            return "<tool_response>" in self._template(asked)
        except UserError:
            return False

    @override
    def result_messages(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages. If the template does not wrap tools' messages, they become wrapped user messages."""
        if self._wraps:
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


# -- react ---------------------------------------------------------------------------------------------------------------
# Calls as text: Thought, Action and Action Input, after ReAct (arXiv:2210.03629).


_ACTION = re.compile(r"^Action:[ \t]*(\S+)[ \t]*$", re.MULTILINE)
_INPUT = re.compile(r"^Action Input:[ \t]*", re.MULTILINE)
_FINAL = re.compile(r"^Final Answer:", re.MULTILINE)


class ReAct(Dialect):
    """ReAct's dialect: one call per reply; a reply without an action is the answer."""

    instruction = (
        "You may use tools:\n{tools}\n\nTo use one, end your reply with\nThought: why\nAction: the tool's name\n"
        "Action Input: its arguments as a JSON object\n\nIts result follows as Observation. When you know the answer, reply\n"
        "Thought: why\nFinal Answer: the answer"
    )

    @override
    def parse_text(self, text: str) -> Parsed:
        text = behind_thoughts(text, _INPUT.pattern)
        if final := _FINAL.search(text):
            if _ACTION.search(text):
                return Parsed(malformed="an Action and a Final Answer in one reply")
            return Parsed(final=text[final.end() :].strip())
        actions = list(_ACTION.finditer(text))
        if not actions:
            if re.search(r"^Action", text, re.MULTILINE):
                return Parsed(malformed="an Action needs the form 'Action: NAME'")
            return Parsed(final=text.strip())
        if len(actions) > 1:
            return Parsed(malformed="more than one Action in a reply")
        found = _INPUT.search(text, actions[0].end())
        if not found:
            return Parsed(malformed="an Action without 'Action Input:'")
        given = text[found.end() :]
        if re.search(r"^Observation:", given, re.MULTILINE):
            return Parsed(malformed="an Observation is the tool's to give: end the reply after Action Input")
        try:
            arguments, end = decode(given)
        except ValueError as error:
            return Parsed(malformed=f"the Action Input is not JSON ({error})")
        if not isinstance(arguments, dict):
            return Parsed(malformed="the Action Input is no JSON object")
        if given[end:].strip():
            return Parsed(malformed="something follows the Action Input")
        return Parsed([Call(actions[0][1], arguments)], said=text[: actions[0].start()].strip())

    @override
    def call_text(self, call: Call) -> str:
        return f"Action: {call.name}\nAction Input: {json.dumps(call.arguments, ensure_ascii=False)}"

    @override
    def result_messages(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages. Tools' messages become user messages, because ReAct does not use the template's tool format."""
        shown = []
        for message in messages:
            if message["role"] == "tool":
                message = {"role": "user", "content": f"Observation: {message['content']}"}
            shown.append(message)
        return shown

    @override
    def _template_tells(self, messages: Sequence[Message], tools: Sequence) -> bool:
        return False  # a template would describe its own form of calls
