"""Interface of the tools that a policy may call in a conversation, and the two kinds of errors of a call."""

from __future__ import annotations

import asyncio
import inspect
import json
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from types import MappingProxyType
from typing import Any, override

from jsonschema.exceptions import SchemaError, best_match
from jsonschema.validators import validator_for
from referencing import Registry
from referencing.exceptions import Unresolvable

from megatron_rl.errors import UserError

# -- blocking functions, called from an event loop ----------------------------------------------------------------------


async def in_thread[T](function: Callable[..., T], *arguments: Any) -> T:
    """Call the function in its own thread and return the result.

    The process can end even if the thread hangs.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(how: Callable[[Any], None], value: Any) -> None:
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(lambda: None if future.done() else how(value))

    def work() -> None:
        try:
            result = function(*arguments)
        except BaseException as error:
            settle(future.set_exception, error)
        else:
            settle(future.set_result, result)

    threading.Thread(target=work, daemon=True).start()
    return await future


# -- tools ---------------------------------------------------------------------------------------------------------------


class ToolError(Exception):
    """A call failed because of the model. The model sees the error's text; the conversation continues and is trained on."""


class ToolLost(Exception):
    """A call failed because of the infrastructure (a lost tool server, a failed sandbox).

    The conversation is not trained on.
    """


class Tool:
    """A tool that the policy may call. It has a name, a description, a JSON schema of its arguments, and the method `call`.

    One object serves all conversations of a run, in one event loop.
    """

    name: str = ""
    description: str = ""
    parameters: Mapping[str, Any] = MappingProxyType({"type": "object", "properties": {}})
    """JSON schema of the arguments, which form one object."""

    async def open(self) -> None:
        """Start the tool, once for the run. Errors: ToolLost with the reason why the tool cannot start, and the remedy."""

    async def close(self) -> None:
        """Close the tool at the end of the run."""

    def session(self) -> Any:
        """Return the tool's state for a conversation. Called before the conversation's first call."""
        return None

    async def call(self, arguments: dict[str, Any], session: Any) -> str:
        """Return the text that answers a call. arguments: already checked against the schema. Errors: ToolError, ToolLost."""
        raise NotImplementedError

    async def end(self, session: Any) -> None:
        """Discard the tool's state for a conversation; `session` is the result of `session()`."""

    @property
    def schema(self) -> dict[str, Any]:
        """The tool in the format of chat templates and the OpenAI API."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


class FunctionTool(Tool):
    """A tool made from a function with type hints and a Google-style docstring.

    A function that is not async runs in a thread.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        """Errors: UserError if the type hints or the docstring lack a description that the model needs."""
        from transformers.utils.chat_template_utils import get_json_schema

        try:
            schema = get_json_schema(function)["function"]
        except Exception as error:  # the library's errors about hints and docstrings
            name = getattr(function, "__name__", function)
            raise UserError(f"config: agent.tools: {name} cannot be a tool: {' '.join(str(error).split())}") from None
        self.name, self.description, self.parameters = schema["name"], schema["description"], schema["parameters"]
        self._function = function

    @override
    async def call(self, arguments: dict[str, Any], session: Any) -> str:
        if inspect.iscoroutinefunction(self._function):
            return str(await self._function(**arguments))
        return str(await in_thread(partial(self._function, **arguments)))


def _checker(schema: Mapping[str, Any]) -> Any:
    """Return a validator that resolves no remote references; the default validator fetches them from the network."""
    return validator_for(schema)(schema, registry=Registry())


def is_valid(value: Any, schema: Mapping[str, Any]) -> bool:
    """Return whether a value is valid under a JSON schema. Errors: exceptions of jsonschema, if the schema is invalid."""
    validator_for(schema).check_schema(dict(schema))
    return _checker(schema).is_valid(value)


def check_parameters(tool: Tool) -> None:
    """Raise UserError if the schema of a tool's arguments is invalid."""
    try:
        validator_for(tool.parameters).check_schema(dict(tool.parameters))
    except SchemaError as error:
        place = ".".join(map(str, error.absolute_path))
        raise UserError(
            f"agent.tools: the parameters of {tool.name} are no valid JSON schema: {place}: {error.message[:300]}"
        ) from None


def check_arguments(tool: Tool, arguments: Any) -> None:
    """Raise ToolError if an argument does not fit the tool's schema, or ToolLost if a schema reference cannot be resolved."""
    try:
        problem = best_match(_checker(tool.parameters).iter_errors(arguments))
    except (Unresolvable, RecursionError) as error:
        raise ToolLost(f"tool {tool.name}: its parameters cannot be checked: {type(error).__name__}: {error}") from None
    if problem is not None:
        place = ".".join(map(str, problem.absolute_path))
        raise ToolError(f"arguments of {tool.name}{f', {place}' if place else ''}: {problem.message[:300]}")
    try:
        json.dumps(arguments, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ToolError(f"arguments of {tool.name}: a half of a surrogate pair is no text") from None


def shorten(text: str, most: int) -> str:
    """Shorten a text to about `most` characters. A longer text keeps its first and last characters."""
    text = text.encode(errors="replace").decode()  # lone surrogates
    cut = len(text) - most
    return text if cut <= 0 else f"{text[: most // 2]}\n[... {cut} characters ...]\n{text[len(text) - most // 2 :]}"
