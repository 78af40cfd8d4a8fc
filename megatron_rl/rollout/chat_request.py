"""A request for a chat completion (OpenAI's API), checked once: what passes here, no part of the endpoint trips over."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

MOST_STOPS = 1024
ROLES = ("system", "developer", "user", "assistant", "tool")
OLD_NAMES = {"functions": "tools", "function_call": "tools and tool_choice"}
"""Fields of an older API, which would be left out of what the policy is told -> those of today."""


class BadRequest(Exception):
    """The agent asks for something that cannot be done; its text goes back with status 400."""


def _is_tool(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError("a tool has a function with a name")
    return tool


def _is_length(tokens: int) -> int:
    if tokens == 0:
        raise ValueError("a reply has at least one token; leave it out, or give -1, for as many as there is room for")
    return tokens


def _is_message(message: dict[str, Any]) -> dict[str, Any]:
    if (role := message.get("role")) not in ROLES:
        raise ValueError(f"a message has a role, one of {', '.join(ROLES)}, not {reprlib.repr(role)}")
    if message.get("function_call") is not None:
        raise ValueError("function_call is of an older API: give tool_calls")
    return message


Whole = Annotated[int, BeforeValidator(lambda n: int(n) if isinstance(n, float) and n.is_integer() else n)]
"""JSON has one kind of numbers: 7.0 is whole."""
Length = Annotated[Whole, AfterValidator(_is_length)]
Message = Annotated[dict[str, Any], AfterValidator(_is_message)]
Tool = Annotated[dict[str, Any], AfterValidator(_is_tool)]


class ChatRequest(BaseModel):
    """The fields that are heeded; others are allowed. null is the same as leaving one out."""

    model_config = ConfigDict(strict=True, extra="ignore")

    messages: list[Message] = Field(min_length=1)
    tools: list[Tool] | None = None
    n: Literal[1] | None = None
    max_tokens: Length | None = None
    max_completion_tokens: Length | None = None
    stop: Annotated[
        Annotated[list[str], Field(max_length=MOST_STOPS)] | None,
        BeforeValidator(lambda stop: [stop] if isinstance(stop, str) else stop),
    ] = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None

    @property
    def most_tokens(self) -> int:
        """Longest reply [tokens]; below 1: as long as it may be."""
        return self.max_completion_tokens or self.max_tokens or 0

    @property
    def stops(self) -> list[str]:
        """Texts at which a reply ends. Clients pad them with empty ones, which say nothing."""
        return [mark for mark in self.stop or [] if mark]


def parse_request(body: Mapping[str, Any]) -> ChatRequest:
    """The request in a body. Errors: BadRequest that names the first field that does not fit."""
    for old, new in OLD_NAMES.items():
        if body.get(old) is not None:
            raise BadRequest(f"{old}: it is of an older API: give {new}")
    try:
        return ChatRequest.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        raise BadRequest(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
