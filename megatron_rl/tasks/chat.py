"""Chat templates: rendering conversations, checking that a template shows everything, and finding the token that ends turns."""

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
"""Marker that stands for a message's content while a template is rendered. No template contains its characters."""
Messages = Sequence[Mapping[str, Any]]


def render(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, what: str, *, tools: Any = None, **options: Any
) -> str:
    """Render a conversation with the tokenizer's chat template. what: name of the conversation in error messages.

    options: arguments of apply_chat_template. Errors: UserError with the exception's message, if the template raises an
    exception. A template is code from the model's author and may raise any exception.
    """
    try:
        plain = [dict(message) for message in messages]
        return str(tokenizer.apply_chat_template(plain, tools=list(tools or []) or None, tokenize=False, **options))
    except Exception as error:
        said = " ".join(str(error).split())[:300]
        raise UserError(f"{what}: the chat template of the tokenizer does not take it: {said}") from None


def render_prompt(tokenizer: PreTrainedTokenizerBase, messages: Messages, what: str, *, tools: Any = None) -> str:
    """Render a conversation up to the start of the model's reply, and check that the template leaves nothing out.

    Errors: UserError if the template raises an exception, if it changes or drops the content of a message, if it does not show
    the tools, or if it does not add the start of a reply.
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
    """Raise UserError if the rendered text does not contain the content of a message unchanged.

    A template may drop blanks around the content, and the assistant's thinking in earlier turns. Some templates show the
    content as JSON.
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
    """Raise UserError if replies start with a header that the template does not add with add_generation_prompt."""
    try:
        closed, asked = (
            render(tokenizer, [_ASKED], what, add_generation_prompt=adds).partition(_ASKED["content"])[2]
            for adds in (False, True)
        )
        between = _around_reply(tokenizer)[0]
    except UserError:
        return  # rendering the prompt reports this error with a better message
    same = takewhile(lambda pair: pair[0] == pair[1], zip(closed, between, strict=False))
    head = between[sum(1 for _ in same) :].strip()
    if asked == closed and head:
        raise UserError(
            f"{what}: the chat template of the tokenizer has no generation prompt: a reply begins with {head!r:.60}, which"
            " add_generation_prompt does not add"
        )


def end_of_sequence(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the end-of-sequence token as a list of one token id, or [] if the tokenizer has none."""
    end: Any = tokenizer.eos_token_id
    return [] if end is None else [end]


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the token that ends an assistant's turn, as a list of one token id. It is found by rendering a turn.

    The token is the first special token after the assistant's content. Without such a token, or without a template, the
    function returns `end_of_sequence(tokenizer)`.
    """
    if tokenizer.chat_template:
        try:
            behind = _around_reply(tokenizer)[1]
        except UserError:  # rendering a prompt reports this error
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
    """Return the text that the template adds between question and answer, and after the answer. Errors: UserError."""
    text = render(tokenizer, [_ASKED, _REPLY], "a reply", add_generation_prompt=False)
    check_shown(text, [_ASKED, _REPLY], "a reply")
    before, _, behind = text.partition(_REPLY["content"])
    return before.partition(_ASKED["content"])[2], behind


# -- text ----------------------------------------------------------------------------------------------------------------
# Tokens of a text and the number of bytes that each token stands for, as needed for bits per byte.


NO_TEXT = -1
"""Value in place of the number of bytes, for a token without text such as the end-of-sequence token."""


def encode_text(
    tokenizer: PreTrainedTokenizerBase, text: str, end: Sequence[int] | None = None
) -> tuple[list[int], list[int]]:
    """Encode a demonstration or a text to learn. Returns its tokens [n], and the number of text bytes [n] of each token.

    end: tokens to append. By default, the token that ends a turn in the chat template, or the end-of-sequence token without a
    template. If the tokenizer does not report character offsets (it is not a "fast" tokenizer), all numbers of bytes are
    NO_TEXT. Errors: ValueError for half a surrogate pair.
    """
    check_text(text)
    last = end_of_turn(tokenizer) if end is None else list(end)
    if not tokenizer.is_fast:
        tokens = list(tokenizer.encode(text, add_special_tokens=False)) + last
        return tokens, [NO_TEXT] * len(tokens)
    found: Any = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return found["input_ids"] + last, bytes_of(text, found["offset_mapping"]) + [NO_TEXT] * len(last)


def check_text(value: Any) -> None:
    """Check all texts in a value. Errors: ValueError for half a surrogate pair, which JSON can contain but UTF-8 cannot."""
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
    """Return the number of UTF-8 bytes of `text` that each token covers. The numbers sum to the bytes of the text.

    spans: (first character, end) of each token. If several tokens form one character, the last of them gets its bytes. Text
    between two tokens, such as blanks that a tokenizer drops, belongs to the later token.
    """
    if not spans:
        return []
    first, end = np.asarray(spans).T
    borders = np.concatenate([[0], np.minimum(end[:-1], first[1:]), [len(text)]])
    points = np.frombuffer(text.encode("utf-32-le"), "<u4")
    widths = 1 + (points >= 0x80) + (points >= 0x800) + (points >= 0x10000)
    before = np.concatenate([[0], np.cumsum(widths)])  # number of bytes before each character
    return np.diff(before[np.maximum.accumulate(borders)]).tolist()
