"""Chat templates: conversations as text, with what a template leaves out, and the token at which it ends a turn."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_rl.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PLACE = "\u2e28{}\u2e29"
"""Stands for a content while a template is rendered: signs that no template has."""
Messages = Sequence[Mapping[str, Any]]


def render(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, what: str, *, tools: Any = None, **options: Any
) -> str:
    """The template's text of a conversation. what: it is, for messages. options: of apply_chat_template.

    Errors: UserError with the template's own words where it raises, as a program of the model's may do for any reason.
    """
    try:
        plain = [dict(message) for message in messages]
        return str(tokenizer.apply_chat_template(plain, tools=list(tools or []) or None, tokenize=False, **options))
    except Exception as error:
        said = " ".join(str(error).split())[:300]
        raise UserError(f"{what}: the chat template of the tokenizer does not take it: {said}") from None


def render_prompt(tokenizer: PreTrainedTokenizerBase, messages: Messages, what: str, *, tools: Any = None) -> str:
    """The text of a conversation, up to where the model's reply begins, with nothing left out.

    Errors: UserError where the template raises, changes the content of a message or leaves it out, says nothing of the tools,
    or has no beginning of a reply.
    """
    text = render(tokenizer, messages, what, tools=tools, add_generation_prompt=True)
    check_shown(text, messages, what)
    template = tokenizer.chat_template
    if any(message.get("reasoning_content") for message in messages) and "reasoning_content" not in str(template):
        raise UserError(f"{what}: the chat template of the tokenizer has no place for earlier thinking; leave it out")
    if tools and text == render(tokenizer, messages, what, add_generation_prompt=True):
        raise UserError(f"{what}: the chat template of the tokenizer says nothing of tools, and the prompt has some")
    check_generation_prompt(tokenizer, what)
    return text


def check_shown(text: str, messages: Messages, what: str) -> None:
    """Errors: UserError where the content of a message is not in the rendered text as it is.

    Blanks around it, and an assistant's earlier thinking, are the template's to drop; some templates show contents as JSON.
    """
    for number, message in enumerate(messages, 1):
        content = message.get("content")
        if not isinstance(content, str):
            continue
        if message["role"] == "assistant":
            content = content.rpartition("</think>")[2]
        content = content.strip()
        forms = (json.dumps(content, ensure_ascii=ascii)[1:-1] for ascii in (False, True))
        if content not in text and not any(form in text for form in forms):
            raise UserError(
                f"{what}: the chat template of the tokenizer leaves out or changes the content of message {number} (role"
                f" {message['role']}): {content!r:.60}"
            )
        for call in message.get("tool_calls") or []:
            if (name := call["function"]["name"]) not in text:
                raise UserError(
                    f"{what}: the chat template of the tokenizer leaves out the call of {name} in message {number}"
                )


def check_generation_prompt(tokenizer: PreTrainedTokenizerBase, what: str) -> None:
    """Errors: UserError where replies have a head in the template that add_generation_prompt does not add."""
    try:
        closed, asked = (
            render(tokenizer, [_ASKED], what, add_generation_prompt=adds).partition(_ASKED["content"])[2]
            for adds in (False, True)
        )
        between = _around_reply(tokenizer)[0]
    except UserError:
        return  # which a prompt says in better words
    same = takewhile(lambda pair: pair[0] == pair[1], zip(closed, between, strict=False))
    head = between[sum(1 for _ in same) :].strip()
    if asked == closed and head:
        raise UserError(
            f"{what}: the chat template of the tokenizer has no generation prompt: a reply begins with {head!r:.60}, which"
            " add_generation_prompt does not add"
        )


def end_of_sequence(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The end-of-sequence token [1]; [] where the tokenizer has none."""
    end: Any = tokenizer.eos_token_id
    return [] if end is None else [end]


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The token [1] with which the template ends an assistant's turn, found by rendering one.

    It is the first special token behind what the assistant says. Without one, or without a template, it is the end of sequence.
    """
    if tokenizer.chat_template:
        try:
            behind = _around_reply(tokenizer)[1]
        except UserError:  # which is told where a prompt is rendered
            behind = ""
        special = tokenizer.added_tokens_decoder
        for token in tokenizer.encode(behind, add_special_tokens=False):
            if token in special:
                return [token]
            if str(tokenizer.decode([token])).strip():
                break
    return end_of_sequence(tokenizer)


_ASKED = {"role": "user", "content": PLACE.format("question")}
_REPLY = {"role": "assistant", "content": PLACE.format("reply")}


def _around_reply(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """The template's text between a question and its answer, and behind it. Errors: UserError where it shows neither."""
    text = render(tokenizer, [_ASKED, _REPLY], "a reply", add_generation_prompt=False)
    check_shown(text, [_ASKED, _REPLY], "a reply")
    before, _, behind = text.partition(_REPLY["content"])
    return before.partition(_ASKED["content"])[2], behind


# -- text ----------------------------------------------------------------------------------------------------------------
# A text as tokens, with the bytes of it that each of them stands for: what bits per byte are counted by.


NO_TEXT = -1
"""Bytes of a token that stands for no text, such as the end-of-sequence token."""


def encode_text(
    tokenizer: PreTrainedTokenizerBase, text: str, end: Sequence[int] | None = None
) -> tuple[list[int], list[int]]:
    """Tokens [n] of a demonstration after its prompt, or of a text to learn, and the bytes [n] of text of each.

    end: tokens that close them; by default the one with which the chat template ends a turn, without a template the end of
    sequence. A tokenizer that does not tell where its tokens come from (one without a `fast` form) leaves the bytes of all of
    them NO_TEXT. Errors: ValueError for half a surrogate pair.
    """
    check_text(text)
    last = end_of_turn(tokenizer) if end is None else list(end)
    if not tokenizer.is_fast:
        tokens = list(tokenizer.encode(text, add_special_tokens=False)) + last
        return tokens, [NO_TEXT] * len(tokens)
    found: Any = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return found["input_ids"] + last, bytes_of(text, found["offset_mapping"]) + [NO_TEXT] * len(last)


def check_text(value: Any) -> None:
    """Look at all texts in a value. Errors: ValueError for half a surrogate pair, which JSON may bring and no text has."""
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            half = f"half a surrogate pair ({value[error.start]!a})"
            raise ValueError(f"{half} is no text: surrogates not allowed") from None
    elif isinstance(value, Mapping):
        for key, one in value.items():
            check_text(key)
            check_text(one)
    elif isinstance(value, list | tuple | set):
        for one in value:
            check_text(one)


def bytes_of(text: str, spans: list[tuple[int, int]]) -> list[int]:
    """UTF-8 bytes of the text that each token stands for, whose sum is the text's.

    spans: first character and end of each token. A character of several tokens counts at the last of them, and what lies
    between two tokens, as blanks that a tokenizer drops, at the later one.
    """
    if not spans:
        return []
    first, end = np.asarray(spans).T
    borders = np.concatenate([[0], np.minimum(end[:-1], first[1:]), [len(text)]])
    points = np.frombuffer(text.encode("utf-32-le"), "<u4")
    widths = 1 + (points >= 0x80) + (points >= 0x800) + (points >= 0x10000)
    before = np.concatenate([[0], np.cumsum(widths)])  # bytes in front of each character
    return np.diff(before[np.maximum.accumulate(borders)]).tolist()
