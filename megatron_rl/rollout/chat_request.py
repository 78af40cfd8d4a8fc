"""A request for a chat completion (OpenAI's API), checked once: what passes here, no part of the endpoint trips over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

MOST_STOPS = 1024


class BadRequest(Exception):
    """The agent asks for something that cannot be done; its text goes back with status 400."""


def _is_tool(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError("a tool has a function with a name")
    return tool


Whole = Annotated[int, BeforeValidator(lambda n: int(n) if isinstance(n, float) and n.is_integer() else n)]
"""JSON has one kind of numbers: 7.0 is whole."""
Tool = Annotated[dict[str, Any], AfterValidator(_is_tool)]


class ChatRequest(BaseModel):
    """The fields that are heeded; others are allowed. null is the same as leaving one out."""

    model_config = ConfigDict(strict=True, extra="ignore")

    messages: list[dict[str, Any]] = Field(min_length=1)
    tools: list[Tool] | None = None
    n: Literal[1] | None = None
    max_tokens: Whole | None = None
    max_completion_tokens: Whole | None = None
    stop: Annotated[
        Annotated[list[str], Field(max_length=MOST_STOPS)] | None,
        BeforeValidator(lambda stop: [stop] if isinstance(stop, str) else stop),
    ] = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None

    @property
    def most_tokens(self) -> int:
        """Longest reply [tokens]; 0 or less: as long as it may be."""
        return self.max_completion_tokens or self.max_tokens or 0

    @property
    def stops(self) -> list[str]:
        """Texts at which a reply ends. Clients pad them with empty ones, which say nothing."""
        return [mark for mark in self.stop or [] if mark]


def parse_request(body: Mapping[str, Any]) -> ChatRequest:
    """The request in a body. Errors: BadRequest that names the first field that does not fit."""
    try:
        return ChatRequest.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        raise BadRequest(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
