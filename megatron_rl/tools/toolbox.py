"""The tools of a run. They are opened once, used by all conversations, and closed with the run."""

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
# The environment is the other side of a conversation: it answers the policy's turns, and may reward the conversation.
# A single turn is the simplest case: the environment ends the conversation at the first reply, and the task scores its text.


Waiting = Callable[[], AbstractContextManager[Any]]


class Called(Protocol):
    """Interface of a tool call (implemented by `dialects.Call`)."""

    @property
    def name(self) -> str:
        """Name of the called tool."""
        ...

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments as the model wrote them, not yet checked."""
        ...


class Said(Protocol):
    """Interface of a parsed reply of the model (implemented by `dialects.Parsed`)."""

    @property
    def calls(self) -> Sequence[Called]:
        """The tool calls in the reply."""
        ...

    @property
    def final(self) -> str | None:
        """The final answer; None if the reply has none."""
        ...

    @property
    def malformed(self) -> str | None:
        """Error in a malformed tool call; None if there is none."""
        ...


@dataclass
class Environment:
    """The environment of one conversation. `respond` answers the model's replies, or returns None to end the conversation."""

    toolbox: Toolbox
    sessions: dict[str, Any] = field(default_factory=dict)
    """State of each tool that the conversation has called, by name."""
    seconds: float = 0.0
    """Seconds that the tools needed for the last answer."""
    waiting: Waiting = nullcontext
    """Context manager to use around waits that do not count toward the conversation's time limit."""

    async def respond(self, turn: Said) -> list[Mapping[str, Any]] | None:
        """Return the messages that answer a reply, or None if the conversation has ended. Errors: ToolLost.

        This class answers with the results of tool calls, or with the error of a malformed call. A final answer ends the
        conversation.
        """
        if turn.malformed is not None:
            return [{"role": "tool", "content": f"Error: {turn.malformed}"}]
        if not turn.calls:
            return None
        begun = time.monotonic()
        try:
            async with asyncio.TaskGroup() as group:
                results = [group.create_task(self._call(call)) for call in turn.calls]
        except BaseExceptionGroup as lost:  # the other calls are canceled, because the conversation is over
            raise lost.exceptions[0] from None
        self.seconds = time.monotonic() - begun
        return [{"role": "tool", "content": result.result()} for result in results]

    async def _call(self, call: Called) -> str:
        try:
            return await self.toolbox.call(call.name, call.arguments, self.sessions, self.waiting)
        except ToolError as error:
            return shorten(f"Error: {error}", self.toolbox.config.max_tool_response)

    def reward_parts(self) -> dict[str, float]:
        """Return the reward parts that the environment itself has computed.

        If they include all parts of the task, the task does not score the conversation.
        """
        return {}

    async def close(self) -> None:
        """Discard the conversation's state."""
        await self.toolbox.end(self.sessions)


# -- toolbox -------------------------------------------------------------------------------------------------------------


log = logging.getLogger(__name__)

TOOLS: dict[str, type[Tool]] = {"calculator": Calculator, "python": PythonTool, "search": Search}


def make_tool(name: str, options: dict[str, Any]) -> Tool:
    """Return the tool that agent.tools names: a built-in one, or the user's own class or function. Errors: UserError."""
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
        raise UserError(f"config: agent.tools: {name} is not a megatron_rl.tools.tool.Tool")
    return tool


@dataclass
class _Held:
    state: Any
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    over: bool = False
    """True if a call has failed for a reason outside the model. No further call is then started."""


class Toolbox:
    """All tools by name, with their limits.

    The run's thread calls `open` and `close`; the tools run in the toolbox's event loop.
    """

    def __init__(self, config: AgentConfig, more: Sequence[Tool] = ()) -> None:
        """more: the task's own tools. Errors: UserError for wrong names or options."""
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
        """Open all tools. Errors: UserError naming the tool that fails, and the remedy."""
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
        """Close all tools and the event loop."""

        async def close_all() -> None:
            for thing in [*self.tools.values(), *self._servers]:
                try:
                    await thing.close()
                except Exception as error:  # the other tools are closed too
                    log.warning("closing %s: %s: %s", getattr(thing, "name", thing), type(error).__name__, error)

        try:
            self.loop.run(close_all())
        finally:
            self.loop.close()

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The tools in the format of chat templates."""
        return [tool.schema for tool in self.tools.values()]

    async def call(
        self, name: str, arguments: dict[str, Any], sessions: dict[str, Any], waiting: Waiting = nullcontext
    ) -> str:
        """Return the text that answers a call. sessions: {name: state of the tool in this conversation}, filled by this method.

        waiting: context manager to use around the wait for a free slot, while calls of other conversations run.

        Errors: ToolError if the model causes the failure; ToolLost if the tool fails.
        """
        tool = self.tools.get(name)
        if tool is None:
            raise ToolError(f"there is no tool '{name}'; there is: {', '.join(self.tools) or 'none'}")
        check_arguments(tool, arguments)
        if name not in sessions:
            sessions[name] = _Held(tool.session())
        held = sessions[name]
        # Calls of one reply that share a state run one after the other, and the wait does not count for their time limits.
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
        """Call a tool within its time limit. An exception inside the tool does not count as the model's error.

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
        """Discard the conversation's state of each tool."""
        for name, held in sessions.items():
            try:
                await self.tools[name].end(held.state)
            except Exception as error:
                log.warning("tool %s: ending a conversation: %s: %s", name, type(error).__name__, error)
        sessions.clear()
