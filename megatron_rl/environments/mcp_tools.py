"""Tools of Model Context Protocol servers (stdio or streamable HTTP): one session a server, opened anew when it is lost."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any, override

from mcp import Client, MCPError, StdioServerParameters, types

from megatron_rl.environments.tools import Tool, ToolError, ToolLost
from megatron_rl.errors import UserError

log = logging.getLogger(__name__)

OPEN_TIMEOUT_S = 60.0
"""Longest wait for a server to start and to say what it has."""
PING_TIMEOUT_S = 5.0
ATTEMPTS = 3
"""Times that a server is opened in a row before a call gives up; a pause before each but the first."""
PAUSE_S = 1.0


class Server:
    """The session with one server. All calls share it."""

    def __init__(self, name: str, settings: dict[str, Any]) -> None:
        """settings: as in the `mcpServers` of other clients, {command, args, env, cwd} or {url}. Errors: UserError."""
        self.name = name
        try:
            self._target: Any = settings["url"] if "url" in settings else StdioServerParameters(**settings)
        except Exception as error:  # pydantic's
            reason = " ".join(str(error).split())[:200]
            raise UserError(
                f"config: agent.mcp_servers.{name}: neither a url nor a command with args: {reason}"
            ) from None
        self._client: Client | None = None
        self._owner: asyncio.Task | None = None
        """The task that has entered the session, which has to leave it too."""
        self._leave = asyncio.Event()
        self._opening = asyncio.Lock()

    async def client(self) -> Client:
        """The open session. Errors: ToolLost."""
        async with self._opening:
            problem = ""
            for attempt in range(ATTEMPTS):
                if self._client is not None and self._owner is not None and not self._owner.done():
                    return self._client
                if attempt:
                    await asyncio.sleep(PAUSE_S * attempt)
                await self.close()
                self._leave = asyncio.Event()
                entered: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
                self._owner = asyncio.create_task(self._own(entered, self._leave))
                try:
                    self._client = await asyncio.wait_for(entered, OPEN_TIMEOUT_S)
                except TimeoutError:
                    problem = f"no answer within {OPEN_TIMEOUT_S:g} s"
                except Exception as error:
                    problem = _reason(error)
            raise ToolLost(f"MCP server {self.name} does not open: {problem}")

    async def _own(self, entered: asyncio.Future[Client], leave: asyncio.Event) -> None:
        try:
            async with Client(self._target) as client:
                if not entered.cancelled():
                    entered.set_result(client)
                await leave.wait()
        except Exception as error:  # of opening, or of a server that has gone since
            if not entered.done():
                entered.set_exception(error)

    async def close(self) -> None:
        """Leave the session."""
        owner, self._owner, self._client = self._owner, None, None
        if owner is None:
            return
        self._leave.set()
        done, _ = await asyncio.wait([owner], timeout=PING_TIMEOUT_S)
        if not done:
            owner.cancel()
            await asyncio.wait([owner], timeout=PING_TIMEOUT_S)

    async def drop_if_lost(self, client: Client) -> bool:
        """Forget the session where the server no longer answers. Returns whether it is forgotten."""
        try:
            await asyncio.wait_for(client.list_tools(cache_mode="bypass"), PING_TIMEOUT_S)
        except Exception:
            async with self._opening:
                if self._client is client:
                    log.warning("MCP server %s is lost; its session is opened anew at the next call", self.name)
                    await self.close()
            return True
        return False

    async def tools(self) -> list[Tool]:
        """The server's tools. Errors: ToolLost."""
        client, found, cursor = await self.client(), [], None
        try:
            while True:
                page = await asyncio.wait_for(client.list_tools(cursor=cursor), OPEN_TIMEOUT_S)
                found += [RemoteTool(self, tool) for tool in page.tools]
                cursor = page.next_cursor
                if not cursor:
                    return found
        except (Exception, TimeoutError) as error:
            raise ToolLost(f"MCP server {self.name} does not list its tools: {_reason(error)}") from None


class RemoteTool(Tool):
    """One tool of a server."""

    def __init__(self, server: Server, tool: types.Tool) -> None:
        self.server = server
        self.name, self.description, self.parameters = tool.name, tool.description or "", dict(tool.input_schema)

    @override
    async def call(self, arguments: dict[str, Any], session: Any) -> str:
        client = await self.server.client()
        try:
            result = await client.call_tool(self.name, arguments)
        except asyncio.CancelledError:  # too slow: is it the server?
            with contextlib.suppress(BaseException):
                await asyncio.shield(self.server.drop_if_lost(client))
            raise
        except Exception as error:
            lost = await self.server.drop_if_lost(client)
            if isinstance(error, MCPError) and not lost:  # an answer: the server refuses the call
                raise ToolError(str(error)) from None
            raise ToolLost(f"MCP server {self.server.name}, {self.name}: {_reason(error)}") from None
        text = "\n".join(
            part.text if isinstance(part, types.TextContent) else f"[{part.type}]" for part in result.content
        )
        if result.is_error:
            raise ToolError(text or "the tool failed")
        return text


def _reason(error: BaseException) -> str:
    """The first plain exception of a group, on one line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
