"""Base of all dialects: tokens of prompts and of the text between turns. Sampled tokens are never rendered again."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self

from transformers import PreTrainedTokenizerBase

from megatron_rl.errors import UserError
from megatron_rl.tasks.chat import (
    PLACE,
    check_generation_prompt,
    check_shown,
    end_of_sequence,
    end_of_turn,
    render,
    render_prompt,
)
from megatron_rl.tasks.openai_messages import decode, parse_call

Message = Mapping[str, Any]
"""A message in the form of chat templates: role and content."""
Schemas = Sequence[Mapping[str, Any]]
"""Descriptions of tools in the form of chat templates and the OpenAI API (`Tool.schema`)."""
_WHAT = "agent.dialect: a conversation"


@dataclass(frozen=True)
class Call:
    """A call of a tool by the model."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Parsed:
    """Content of a reply: calls or a final answer. A malformed reply has neither."""

    calls: list[Call] = field(default_factory=list)
    """All calls of the reply; empty if one of them is malformed."""
    final: str | None = None
    """The answer without the model's thinking; None if the reply has calls or is malformed."""
    said: str = ""
    """Text next to the calls, such as a reason, without the model's thinking."""
    malformed: str | None = None
    """Description of an error in a call, in the words that the model gets to read; None without an error."""
    open: bool = False
    """True if the last call has no end mark. If the reply was truncated, this call is then incomplete."""


class Dialect:
    """A model's format of conversations for one tokenizer. Subclasses define how calls are written and how results are shown.

    The tokens of a conversation are the `prompt`, followed by sampled replies and `observation`s in turn. Sampled tokens are
    never rendered again, so earlier thinking stays even if the template would remove it.
    """

    instruction: str = ""
    """System prompt that describes the tools, for templates that do not. {tools} becomes one line of JSON per tool."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self._special = sorted(map(str, tokenizer.added_tokens_decoder.values()), key=len, reverse=True)

    @cached_property
    def _end(self) -> list[int]:
        return end_of_turn(self.tokenizer)

    @property
    def stop_token_ids(self) -> list[int]:
        """Tokens that end a reply: the template's end of a turn. Sampling also stops at the tokenizer's end of sequence."""
        return list(self._end)

    @cached_property
    def beside(self) -> tuple[Self, ThreadPoolExecutor]:
        """Copy of the dialect with its own tokenizer, and the only thread that may use it: tokenizers are not thread-safe."""
        return copy.deepcopy(self), ThreadPoolExecutor(1, "texts")

    # -- definitions of each dialect ------------------------------------------------------------------------------------

    def parse_text(self, text: str) -> Parsed:
        """Parse the text of a reply."""
        raise NotImplementedError

    def call_text(self, call: Call) -> str:
        """Return a call as the model writes it, for demonstrations."""
        raise NotImplementedError

    def message_text(self, message: Message) -> str:
        """Return an assistant's message in OpenAI's form (content, tool_calls) as the model writes it."""
        texts = [str(message["content"])] if message.get("content") else []
        for call in message.get("tool_calls") or []:
            texts.append(self.call_text(Call(*parse_call(call))))
        thought = message.get("reasoning_content")
        return (self.thought_text(str(thought)) if thought else "") + "\n".join(texts)

    def thought_text(self, thought: str) -> str:
        """Return the thinking before a reply, as the model writes it. Errors: UserError if the dialect has no form for it."""
        raise UserError(
            f"agent.dialect: {type(self).__name__} has no form for thinking (reasoning_content); leave it out of the messages"
        )

    def result_messages(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages that the tokenizer's template renders like the model's training data."""
        return list(messages)

    # -- tokens ---------------------------------------------------------------------------------------------------------

    def prompt(self, messages: Sequence[Message], tools: Schemas = ()) -> list[int]:
        """Return the tokens at the start of a conversation, up to the model's first reply."""
        written = [self._written(message) for message in messages]
        shown, contents = self._hide(written)
        told = tools if tools and self._template_tells(shown, tools) else ()
        if tools and not told:
            shown = self._with_instruction(shown, tools)
        shown = self.result_messages(shown)
        if not self.tokenizer.chat_template:
            return self._encode(self._template(shown), contents)
        return self._encode(render_prompt(self.tokenizer, shown, _WHAT, tools=told), contents)

    def parse(self, token_ids: Sequence[int]) -> Parsed:
        """Parse a sampled reply. The token that ended the reply, if it is in token_ids, is ignored."""
        ids = list(token_ids)
        while ids and ids[-1] in self.stop_token_ids:
            ids.pop()
        return self.parse_text(self.text(ids))

    def message(self, token_ids: Sequence[int]) -> dict[str, Any]:
        """Return a reply as a message in OpenAI's form, from which `reply_of` restores the text. token_ids: see `parse`."""
        ids = list(token_ids)
        while ids and ids[-1] in self.stop_token_ids:
            ids.pop()
        return {"role": "assistant", "content": self.text(ids)}

    def text(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, special tokens included."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def reply(self, text: str) -> list[int]:
        """Return the tokens of a reply that was not sampled (in a demonstration), with its end token."""
        return [*self.tokenizer.encode(text, add_special_tokens=False), *self.stop_token_ids[:1]]

    def reply_of(self, message: Message) -> list[int]:
        """Return an assistant's message in OpenAI's form (content, tool_calls) as tokens of a reply, with the end token."""
        return self.reply(self.message_text(message))

    def observation(self, results: Sequence[str | Message], after: Sequence[int] | None = None) -> list[int]:
        """Return the tokens between two replies: the template's separator, the results, and the beginning of a reply.

        results: results of calls as text, or messages (role, content). after: tokens of the previous reply. If the reply lacks
        tokens that the template puts after a reply (a truncated reply lacks its end token), the returned tokens begin with
        them. after = None: the reply has its end token.
        """
        messages = [{"role": "tool", "content": r} if isinstance(r, str) else r for r in results]
        hidden, contents = self._hide(messages)
        asked, answered = {"role": "user", "content": "?"}, {"role": "assistant", "content": PLACE.format("reply")}
        told = [answered, *self.result_messages(hidden)]
        rendered = self._template([asked, *told])
        check_shown(rendered, told, _WHAT)
        if self.tokenizer.chat_template:
            check_generation_prompt(self.tokenizer, _WHAT)
        ids = self._encode(rendered.partition(answered["content"])[2], contents)
        end = self.stop_token_ids[:1]
        last = list(after)[-1:] if after is not None else end
        if last and last == end_of_sequence(self.tokenizer):
            last = end  # a model may also end its turn with the end of sequence
        return ids[1:] if ids and ids[:1] == last else ids

    def history(
        self, messages: Sequence[Message], tools: Schemas, turns: Sequence[tuple[Sequence[int], Sequence[Message]]]
    ) -> list[int] | None:
        """Return the tokens of a history that ends with a user turn after an answer, up to the next reply.

        Earlier thinking is left out if the model's format leaves it out of histories. messages, tools: the same as for
        `prompt`; turns: tokens of each reply, and the messages that answered the reply. None: the dialect has no format of its
        own for histories, and tokens stay as sampled.
        """
        return None

    def _with_instruction(self, messages: Sequence[Message], tools: Schemas) -> list[Message]:
        """Return the messages with the dialect's own instruction about the tools, for a template that does not list them."""
        text = self.instruction.replace("{tools}", "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
        if messages and messages[0]["role"] == "system":
            return [{**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}, *messages[1:]]
        return [{"role": "system", "content": text}, *messages]

    def _template_tells(self, messages: Sequence[Message], tools: Schemas) -> bool:
        return self._template(messages, tools) != self._template(messages)

    def _template(self, messages: Sequence[Message], tools: Schemas = ()) -> str:
        if not self.tokenizer.chat_template:
            return "".join(f"{message['content']}\n" for message in messages)
        return render(self.tokenizer, messages, _WHAT, tools=tools, add_generation_prompt=True)

    def _written(self, message: Message) -> Message:
        """Return a message of the history. An assistant's calls are written into its text in the dialect's format."""
        if message["role"] != "assistant" or not message.get("tool_calls"):
            return message
        return {"role": "assistant", "content": self.message_text(message)}

    def _hide(self, messages: Sequence[Message]) -> tuple[list[Message], dict[str, str]]:
        """Replace contents that contain special tokens by placeholders. Return (messages, {placeholder: content}).

        Reason: a tool that returns `<|im_end|>` must not end a turn.
        """
        contents: dict[str, str] = {}
        shown = []
        for number, message in enumerate(messages):
            content = message.get("content")
            if isinstance(content, str) and self._has_special(content):
                place = PLACE.format(number)
                contents[place] = content
                message = {**message, "content": place}
            shown.append(message)
        return shown, contents

    def _has_special(self, text: str) -> bool:
        return any(token in text for token in self._special)

    def _encode(self, text: str, contents: Mapping[str, str]) -> list[int]:
        """Return the tokens of a rendered text. The contents of placeholders are encoded without special tokens."""
        ids: list[int] = []
        text = encodable(text)
        for place, content in contents.items():
            before, found, after = text.partition(place)
            if not found:
                continue
            ids += self.tokenizer.encode(before, add_special_tokens=False)
            ids += self.tokenizer.encode(encodable(content), add_special_tokens=False, split_special_tokens=True)
            text = after
        return ids + list(self.tokenizer.encode(text, add_special_tokens=False))


def behind_thoughts(text: str, opener: str) -> str:
    """Return the text after the model's thinking, which ends with the last `</think>` outside of calls.

    opener: regular expression for the text before a call's JSON, whose strings may contain any text.
    """
    marks, at, answer = re.compile(f"</think>|{opener}", re.MULTILINE), 0, 0
    while found := marks.search(text, at):
        at = found.end()
        if found[0] == "</think>":
            answer = at
            continue
        with suppress(ValueError):  # not a call, so its content counts as ordinary text
            at = decode(text, at)[1]
    return text[answer:]


def without_end(token_ids: list[int], ends: Sequence[int]) -> list[int]:
    """Return a reply without the token that ended it."""
    return token_ids[:-1] if token_ids and token_ids[-1] in ends else token_ids


def encodable(text: str) -> str:
    """Return the text without lone surrogates, which JSON may contain and no tokenizer accepts."""
    return text.encode(errors="replace").decode()
