"""Tools: what a policy may call in a conversation, and whose fault it is when a call fails."""

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

# -- functions that wait, called from an event loop ---------------------------------------------------------------------


async def in_thread[T](function: Callable[..., T], *arguments: Any) -> T:
    """Call the function in a thread of its own and return its result.

    The thread does not hold up the end of the process if it hangs.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(how: Callable[[Any], None], value: Any) -> None:
        with suppress(RuntimeError):  # the loop has ended meanwhile
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
    """The model's fault: a call that cannot be done. Its text is the observation, and the conversation goes on and trains."""


class ToolLost(Exception):
    """The infrastructure's fault: a tool server that is gone, a sandbox that does not start. The conversation is masked."""


class Tool:
    """A tool that the policy may call: a name, a description, the JSON schema of its arguments, and the call itself.

    One object serves all conversations of a run, in one event loop.
    """

    name: str = ""
    description: str = ""
    parameters: Mapping[str, Any] = MappingProxyType({"type": "object", "properties": {}})
    """JSON schema of an object."""

    async def open(self) -> None:
        """Begin, once for the run. Errors: ToolLost saying why it cannot, and the remedy."""

    async def close(self) -> None:
        """End with the run."""

    def session(self) -> Any:
        """State of a conversation, made before its first call."""
        return None

    async def call(self, arguments: dict[str, Any], session: Any) -> str:
        """The observation of a call. arguments: checked against the schema. Errors: ToolError, ToolLost."""
        raise NotImplementedError

    async def end(self, session: Any) -> None:
        """End a conversation's state; `session` is what `session()` gave."""

    @property
    def schema(self) -> dict[str, Any]:
        """The tool as chat templates and the OpenAI API want it."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


class FunctionTool(Tool):
    """A function with type hints and a docstring in Google's style; a plain one is called in a thread."""

    def __init__(self, function: Callable[..., Any]) -> None:
        """Errors: UserError where the function does not say what a model needs to know."""
        from transformers.utils.chat_template_utils import get_json_schema

        try:
            schema = get_json_schema(function)["function"]
        except Exception as error:  # of the library, about hints and docstrings
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
    """With a registry of its own, since the default one fetches what a schema refers to from the network."""
    return validator_for(schema)(schema, registry=Registry())


def is_valid(value: Any, schema: Mapping[str, Any]) -> bool:
    """Tell if a value fits a JSON schema. Errors: those of jsonschema for a schema that is none."""
    validator_for(schema).check_schema(dict(schema))
    return _checker(schema).is_valid(value)


def check_parameters(tool: Tool) -> None:
    """Errors: UserError where the schema of a tool's arguments is none."""
    try:
        validator_for(tool.parameters).check_schema(dict(tool.parameters))
    except SchemaError as error:
        place = ".".join(map(str, error.absolute_path))
        raise UserError(
            f"agent.tools: the parameters of {tool.name} are no JSON schema: {place}: {error.message[:300]}"
        ) from None


def check_arguments(tool: Tool, arguments: Any) -> None:
    """Errors: ToolError saying which argument does not fit the tool's schema; ToolLost where that cannot be looked up."""
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
    """At most about `most` characters: where there are more, the first and the last ones."""
    text = text.encode(errors="replace").decode()  # lone surrogates
    cut = len(text) - most
    return text if cut <= 0 else f"{text[: most // 2]}\n[... {cut} characters ...]\n{text[len(text) - most // 2 :]}"
