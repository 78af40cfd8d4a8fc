"""The tools of a run: opened once, called by all conversations, closed with the run."""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

from megatron_rl.config import AgentConfig
from megatron_rl.config.registry import nearest, resolve
from megatron_rl.errors import UserError
from megatron_rl.event_loop import EventLoop
from megatron_rl.tools.calculator import Calculator
from megatron_rl.tools.interpreter import PythonTool
from megatron_rl.tools.search import Search
from megatron_rl.tools.tool import (
    FunctionTool,
    Tool,
    ToolError,
    ToolLost,
    check_arguments,
    check_parameters,
    shorten,
)

# -- environment ---------------------------------------------------------------------------------------------------------
# The other side of a conversation: it answers the policy's turns, and may say what the conversation was worth.
# A single turn is the simple case: the environment ends the conversation at the first reply, and the task scores its text.


Waiting = Callable[[], AbstractContextManager[Any]]


class Called(Protocol):
    """A call of a tool (`dialects.Call`)."""

    @property
    def name(self) -> str:
        """The tool's."""
        ...

    @property
    def arguments(self) -> dict[str, Any]:
        """As the model gave them, not checked."""
        ...


class Said(Protocol):
    """Content of a reply (`dialects.Parsed`)."""

    @property
    def calls(self) -> Sequence[Called]:
        """Calls of tools."""
        ...

    @property
    def final(self) -> str | None:
        """The answer."""
        ...

    @property
    def malformed(self) -> str | None:
        """Error in a call."""
        ...


@dataclass
class Environment:
    """The other side of one conversation. `respond` answers each turn until it gives None."""

    toolbox: Toolbox
    sessions: dict[str, Any] = field(default_factory=dict)
    """State of the tools that it has called."""
    seconds: float = 0.0
    """Time of the last answer's tools."""
    waiting: Waiting = nullcontext
    """Around what waits for a turn: it does not count for the conversation's time limit."""

    async def respond(self, turn: Said) -> list[Mapping[str, Any]] | None:
        """Messages in answer to a reply; None where the conversation has ended. Errors: ToolLost.

        Here: results of calls, or what is wrong with one; a final answer ends it.
        """
        if turn.malformed is not None:
            return [{"role": "tool", "content": f"Error: {turn.malformed}"}]
        if not turn.calls:
            return None
        begun = time.monotonic()
        try:
            async with asyncio.TaskGroup() as group:
                results = [group.create_task(self._call(call)) for call in turn.calls]
        except BaseExceptionGroup as lost:  # the others are ended: nothing is called in a conversation that is over
            raise lost.exceptions[0] from None
        self.seconds = time.monotonic() - begun
        return [{"role": "tool", "content": result.result()} for result in results]

    async def _call(self, call: Called) -> str:
        try:
            return await self.toolbox.call(call.name, call.arguments, self.sessions, self.waiting)
        except ToolError as error:
            return shorten(f"Error: {error}", self.toolbox.config.max_tool_response)

    def reward_parts(self) -> dict[str, float]:
        """Reward parts that the environment knows itself; a task whose parts it has all does not score the answer."""
        return {}

    async def close(self) -> None:
        """End the conversation's state."""
        await self.toolbox.end(self.sessions)


# -- toolbox -------------------------------------------------------------------------------------------------------------


log = logging.getLogger(__name__)

TOOLS: dict[str, type[Tool]] = {"calculator": Calculator, "python": PythonTool, "search": Search}


def make_tool(name: str, options: dict[str, Any]) -> Tool:
    """The tool that agent.tools names: built in, a class of the user's, or a function. Errors: UserError."""
    found = resolve("tool", name, TOOLS, "agent.tools")
    if not inspect.isclass(found):
        if options:
            raise UserError(f"config: agent.tool_options.{name}: {name} is a function, which has no options")
        return FunctionTool(found)
    try:
        tool = found(**options)
    except TypeError as error:
        raise UserError(f"config: agent.tool_options.{name}: {error}") from None
    if not isinstance(tool, Tool):
        raise UserError(f"config: agent.tools: {name} is no megatron_rl.tools.tool.Tool")
    return tool


@dataclass
class _Held:
    state: Any
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    over: bool = False
    """A call has failed for reasons that are not the model's: no other one is begun."""


class Toolbox:
    """All tools by name, with their limits. `open` and `close` are called from the run's thread, the rest in its event loop."""

    def __init__(self, config: AgentConfig, more: Sequence[Tool] = ()) -> None:
        """more: tools that the task brings along. Errors: UserError for names and options that do not fit."""
        self.config = config
        if unknown := set(config.tool_options) - set(config.tools):
            name = min(unknown)
            raise UserError(
                f"config: agent.tool_options.{name}: agent.tools has no '{name}'{nearest(name, config.tools)}"
            )
        self._made = [make_tool(name, config.tool_options.get(name, {})) for name in config.tools] + list(more)
        self.tools: dict[str, Tool] = {}
        self.loop = EventLoop()
        self._servers: list[Any] = []

    def open(self) -> None:
        """Open all tools. Errors: UserError saying which one does not, and the remedy."""
        try:
            self.loop.run(self._open())
        except ToolLost as error:
            self.close()
            raise UserError(f"agent.tools: {error}") from None
        except BaseException:
            self.close()
            raise

    async def _open(self) -> None:
        self._free = asyncio.Semaphore(self.config.tool_concurrency)
        if self.config.mcp_servers:
            from megatron_rl.tools.mcp import Server

            self._servers = [Server(name, settings) for name, settings in self.config.mcp_servers.items()]
        of_servers = [tool for server in self._servers for tool in await server.tools()]
        for tool in [*self._made, *of_servers]:
            if tool.name in self.tools:
                raise UserError(f"config: agent: two tools are called '{tool.name}'; leave one out")
            check_parameters(tool)
            self.tools[tool.name] = tool
            await tool.open()

    def close(self) -> None:
        """Close all tools and the loop."""

        async def close_all() -> None:
            for thing in [*self.tools.values(), *self._servers]:
                try:
                    await thing.close()
                except Exception as error:  # the others are closed too
                    log.warning("closing %s: %s: %s", getattr(thing, "name", thing), type(error).__name__, error)

        try:
            self.loop.run(close_all())
        finally:
            self.loop.close()

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The tools as templates want them."""
        return [tool.schema for tool in self.tools.values()]

    async def call(
        self, name: str, arguments: dict[str, Any], sessions: dict[str, Any], waiting: Waiting = nullcontext
    ) -> str:
        """The observation of a call. sessions: the conversation's state of each tool, by name, filled here.

        waiting: around the wait for other conversations' calls.

        Errors: ToolError where the call is the model's fault; ToolLost where the tool fails.
        """
        tool = self.tools.get(name)
        if tool is None:
            raise ToolError(f"there is no tool '{name}'; there is: {', '.join(self.tools) or 'none'}")
        check_arguments(tool, arguments)
        if name not in sessions:
            sessions[name] = _Held(tool.session())
        held = sessions[name]
        # Calls of one reply that share a state come one after the other: none waits at the expense of its own time.
        async with held.turn if held.state is not None else nullcontext():
            with waiting():
                await self._free.acquire()
            try:
                if held.over:
                    raise ToolLost(f"tool {name}: a call before this one failed")
                return shorten(await self._answer(tool, arguments, held.state), self.config.max_tool_response)
            except ToolLost:
                held.over = True
                raise
            finally:
                self._free.release()

    async def _answer(self, tool: Tool, arguments: dict[str, Any], state: Any) -> str:
        """Call a tool within its time limit; its own errors are no fault of the model's.

        Errors: ToolError, ToolLost.
        """
        try:
            async with asyncio.timeout(self.config.tool_timeout_s):
                return await tool.call(arguments, state)
        except (ToolError, ToolLost):
            raise
        except TimeoutError:
            limit = f"agent.tool_timeout_s = {self.config.tool_timeout_s:g} s"
            raise ToolLost(f"tool {tool.name}: no answer within {limit}") from None
        except Exception as error:
            raise ToolLost(f"tool {tool.name}: {type(error).__name__}: {' '.join(str(error).split())[:300]}") from error

    async def end(self, sessions: dict[str, Any]) -> None:
        """End a conversation's state of each tool."""
        for name, held in sessions.items():
            try:
                await self.tools[name].end(held.state)
            except Exception as error:
                log.warning("tool %s: ending a conversation: %s: %s", name, type(error).__name__, error)
        sessions.clear()
