"""Calls as text: Thought, Action and Action Input, after ReAct (arXiv:2210.03629)."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import override

from megatron_rl.environments.strict_json import decode
from megatron_rl.rollout.dialects.base import Call, Dialect, Message, Parsed, behind_thoughts

_ACTION = re.compile(r"^Action:[ \t]*(\S+)[ \t]*$", re.MULTILINE)
_INPUT = re.compile(r"^Action Input:[ \t]*", re.MULTILINE)
_FINAL = re.compile(r"^Final Answer:", re.MULTILINE)


class ReAct(Dialect):
    """One call a reply; a reply without an action is the answer."""

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
        """A tool's message is the user's: templates know no tools here."""
        shown = []
        for message in messages:
            if message["role"] == "tool":
                message = {"role": "user", "content": f"Observation: {message['content']}"}
            shown.append(message)
        return shown

    @override
    def _template_tells(self, messages: Sequence[Message], tools: Sequence) -> bool:
        return False  # a template would tell of its own way to call
