"""Parts that all dialects share: the template's suffixes between turns, without ever rendering what was sampled."""

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
"""A message as chat templates take it: role and content."""
Schemas = Sequence[Mapping[str, Any]]
"""Tools as chat templates and the OpenAI API take them (`Tool.schema`)."""
_WHAT = "agent.dialect: a conversation"


@dataclass(frozen=True)
class Call:
    """A call of a tool."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Parsed:
    """Content of a reply: calls, or a final answer, or neither because it is malformed."""

    calls: list[Call] = field(default_factory=list)
    """All calls of the reply, none where one is malformed."""
    final: str | None = None
    """The answer, without the model's thinking; None where it calls, or is malformed."""
    said: str = ""
    """The text beside the calls, such as a reason, without the model's thinking."""
    malformed: str | None = None
    """Error in a call, in the words that the model is told."""
    open: bool = False
    """The last call's text has no end of its own: of a reply that was cut off it is only a part."""


class Dialect:
    """The conversation's form for one tokenizer. Subclasses say how calls are written and results are shown.

    A conversation's tokens are `prompt`, then in turn a reply as it was sampled and `observation`. Nothing that was sampled is
    rendered again, so a template that strips earlier thinking does not strip it here.
    """

    instruction: str = ""
    """System prompt that tells of the tools ({tools}: their JSON, one a line), where the template does not."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self._special = sorted(map(str, tokenizer.added_tokens_decoder.values()), key=len, reverse=True)

    @cached_property
    def _end(self) -> list[int]:
        return end_of_turn(self.tokenizer)

    @property
    def stop_token_ids(self) -> list[int]:
        """Tokens that end a reply: the template's end of a turn. Sampling stops at the end of sequence too."""
        return list(self._end)

    @cached_property
    def beside(self) -> tuple[Self, ThreadPoolExecutor]:
        """The same with a tokenizer of its own, and the thread in which alone it is used: a tokenizer takes one at a time."""
        return copy.deepcopy(self), ThreadPoolExecutor(1, "texts")

    # -- what a dialect says of itself ----------------------------------------------------------------------------------

    def parse_text(self, text: str) -> Parsed:
        """Parse the text of a reply."""
        raise NotImplementedError

    def call_text(self, call: Call) -> str:
        """A call as the model writes it: for demonstrations."""
        raise NotImplementedError

    def message_text(self, message: Message) -> str:
        """An assistant's message in OpenAI's form (content, tool_calls) as the model writes it."""
        texts = [str(message["content"])] if message.get("content") else []
        for call in message.get("tool_calls") or []:
            texts.append(self.call_text(Call(*parse_call(call))))
        thought = message.get("reasoning_content")
        return (self.thought_text(str(thought)) if thought else "") + "\n".join(texts)

    def thought_text(self, thought: str) -> str:
        """The model's thought before it speaks, as it writes it. Errors: UserError for a dialect without a form for it."""
        raise UserError(
            f"agent.dialect: {type(self).__name__} has no form for thinking (reasoning_content); leave it out of the messages"
        )

    def result_messages(self, messages: Sequence[Message]) -> list[Message]:
        """Messages in a form that the tokenizer's template shows as the model is used to."""
        return list(messages)

    # -- tokens ---------------------------------------------------------------------------------------------------------

    def prompt(self, messages: Sequence[Message], tools: Schemas = ()) -> list[int]:
        """Tokens of a conversation's beginning, up to where the model's first reply begins."""
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
        """Parse a reply. token_ids: as sampled; the token that ended it is no part of what it says."""
        ids = list(token_ids)
        while ids and ids[-1] in self.stop_token_ids:
            ids.pop()
        return self.parse_text(self.text(ids))

    def message(self, token_ids: Sequence[int]) -> dict[str, Any]:
        """A reply as a message in OpenAI's form, of which `reply_of` makes the same text again. token_ids: as in `parse`."""
        ids = list(token_ids)
        while ids and ids[-1] in self.stop_token_ids:
            ids.pop()
        return {"role": "assistant", "content": self.text(ids)}

    def text(self, token_ids: Sequence[int]) -> str:
        """Tokens as text, special ones included."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def reply(self, text: str) -> list[int]:
        """Tokens of a reply that was not sampled, with its end: for demonstrations."""
        return [*self.tokenizer.encode(text, add_special_tokens=False), *self.stop_token_ids[:1]]

    def reply_of(self, message: Message) -> list[int]:
        """Tokens of an assistant's message in OpenAI's form (content, tool_calls) as a reply, with its end."""
        return self.reply(self.message_text(message))

    def observation(self, results: Sequence[str | Message], after: Sequence[int] | None = None) -> list[int]:
        """Tokens between a reply and the next one: the template's separator, the results, and the beginning of a reply.

        results: results of calls as text, or messages (role, content). after: the reply's tokens; what the template has between
        its text and them, and was not sampled (the end token of a reply that was cut off), comes first. None: the reply has its
        end token.
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
            last = end  # with which a model may end its turn as well
        return ids[1:] if ids and ids[:1] == last else ids

    def history(
        self, messages: Sequence[Message], tools: Schemas, turns: Sequence[tuple[Sequence[int], Sequence[Message]]]
    ) -> list[int] | None:
        """Tokens up to the next reply, of a conversation in which the user goes on after an answer, as the model is used.

        Without what it thought before, where its format leaves that out of a history. messages, tools: as of `prompt`; turns:
        tokens of each reply, and what it was answered. None: the format does not say, and tokens stay as they were sampled.
        """
        return None

    def _with_instruction(self, messages: Sequence[Message], tools: Schemas) -> list[Message]:
        """The messages with the dialect's own instruction, where the template says nothing of the tools."""
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
        """A message of the history: an assistant's calls are part of its text, in the dialect's form."""
        if message["role"] != "assistant" or not message.get("tool_calls"):
            return message
        return {"role": "assistant", "content": self.message_text(message)}

    def _hide(self, messages: Sequence[Message]) -> tuple[list[Message], dict[str, str]]:
        """The messages with places for contents that would be read as special tokens, and these contents.

        A tool that returns `<|im_end|>` must not end a turn.
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
        """Tokens of a rendered text; contents that stand in places have no special tokens."""
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
    """The text that follows the model's thinking: behind the last `</think>` that is no part of a call.

    opener: regular expression of what stands before a call's JSON, whose strings may have any text.
    """
    marks, at, answer = re.compile(f"</think>|{opener}", re.MULTILINE), 0, 0
    while found := marks.search(text, at):
        at = found.end()
        if found[0] == "</think>":
            answer = at
            continue
        with suppress(ValueError):  # that is no call: what is in it counts as any text
            at = decode(text, at)[1]
    return text[answer:]


def without_end(token_ids: list[int], ends: Sequence[int]) -> list[int]:
    """A reply without the token at which it stopped, which is no part of what it says."""
    return token_ids[:-1] if token_ids and token_ids[-1] in ends else token_ids


def encodable(text: str) -> str:
    """The text without lone surrogates, which JSON may bring and no tokenizer takes."""
    return text.encode(errors="replace").decode()
