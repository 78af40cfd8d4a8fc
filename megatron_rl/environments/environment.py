"""The other side of a conversation: it answers the policy's turns, and may say what the conversation was worth.

A single turn is the simple case: the environment ends the conversation at the first reply, and the task scores its text.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from megatron_rl.environments.toolbox import Toolbox
from megatron_rl.environments.tools import ToolError, shorten

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
    """What a reply says (`dialects.Parsed`)."""

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
        """What is wrong with a call."""
        ...


@dataclass
class Environment:
    """What one conversation talks with. `respond` answers each turn until it gives None."""

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
