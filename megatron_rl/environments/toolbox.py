"""The tools of a run: opened once, called by all conversations, closed with the run."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from megatron_rl.config import AgentConfig
from megatron_rl.environments.calculator import Calculator
from megatron_rl.environments.environment import Waiting
from megatron_rl.environments.event_loop import EventLoop
from megatron_rl.environments.interpreter import PythonTool
from megatron_rl.environments.search import Search
from megatron_rl.environments.tools import (
    FunctionTool,
    Tool,
    ToolError,
    ToolLost,
    check_arguments,
    check_parameters,
    shorten,
)
from megatron_rl.errors import UserError
from megatron_rl.registry import nearest, resolve

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
        raise UserError(f"config: agent.tools: {name} is no megatron_rl.environments.tools.Tool")
    return tool


@dataclass
class _Held:
    """A conversation's state of one tool."""

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
            from megatron_rl.environments.mcp_tools import Server

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
        """What a tool says within its time; its own errors are no fault of the model's. Errors: ToolError, ToolLost."""
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
