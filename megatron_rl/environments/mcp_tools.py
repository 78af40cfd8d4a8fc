"""Tools of Model Context Protocol servers (stdio or streamable HTTP): one session a server, opened anew when it is lost."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, override

import httpx2
from mcp import Client, MCPError, StdioServerParameters, types
from mcp.client.stdio import get_default_environment, stdio_client
from mcp.client.streamable_http import streamable_http_client
from pydantic import ValidationError

from megatron_rl import credentials
from megatron_rl.environments.tools import Tool, ToolError, ToolLost
from megatron_rl.errors import UserError

log = logging.getLogger(__name__)

OPEN_TIMEOUT_S = 60.0
"""Longest wait for a server to start and to say what it has."""
PING_TIMEOUT_S = 5.0
ATTEMPTS = 3
"""Times that a server is opened in a row before a call gives up; a pause before each but the first."""
PAUSE_S = 1.0
MOST_BYTES = 8 * 2**20
"""Most bytes of a message: a larger one would hold up all conversations for longer than a tenth of a second."""
HTTP_TIMEOUT = httpx2.Timeout(30.0, read=300.0)
"""As the package mcp has it: an answer may be a stream that stays open."""
PLAIN = {"Accept-Encoding": "identity"}
RELAY = Path(__file__).with_name("mcp_relay.py")


@contextlib.asynccontextmanager
async def _bounded(target: str | StdioServerParameters) -> AsyncIterator[Any]:
    """The connection to a server, with a bound on the size of its messages."""
    if isinstance(target, str):
        hooks = {"response": [_bound]}
        async with httpx2.AsyncClient(timeout=HTTP_TIMEOUT, headers=PLAIN, event_hooks=hooks) as http:
            yield streamable_http_client(target, http_client=http, max_sse_event_size=MOST_BYTES)
        return
    path = (get_default_environment() | (target.env or {})).get("PATH")
    if not target.cwd and not shutil.which(target.command, path=path):
        raise FileNotFoundError(f"there is no command {target.command!r}")
    arguments = ["-I", "-S", str(RELAY), str(MOST_BYTES), target.command, *target.args]
    yield stdio_client(target.model_copy(update={"command": sys.executable, "args": arguments}), errlog=sys.stderr)


async def _bound(response: httpx2.Response) -> None:
    """Events are bounded one by one; other answers are one message."""
    response.headers.pop("Content-Encoding", None)  # a small answer might become a large one: it is taken as it came
    if not response.headers.get("Content-Type", "").lower().startswith("text/event-stream"):
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        response.stream = _BoundedStream(response.stream)


class _BoundedStream(httpx2.AsyncByteStream):
    def __init__(self, stream: httpx2.AsyncByteStream) -> None:
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = 0
        async for part in self._stream:
            if (size := size + len(part)) > MOST_BYTES:
                raise httpx2.StreamError(f"a message of more than {MOST_BYTES} bytes")
            yield part

    async def aclose(self) -> None:
        await self._stream.aclose()


class Server:
    """The session with one server. All calls share it."""

    def __init__(self, name: str, settings: dict[str, Any]) -> None:
        """settings: as in the `mcpServers` of other clients, {command, args, env, cwd} or {url}. Errors: UserError."""
        self.name = name
        key = f"agent.mcp_servers.{name}"
        try:
            given = dict(settings)
            if isinstance(given.get("env"), dict):
                given["env"] = {n: credentials.read(str(v), f"{key}.env.{n}") for n, v in given["env"].items()}
            self._target: Any = (
                credentials.read(given["url"], f"{key}.url") if "url" in given else StdioServerParameters(**given)
            )
        except ValidationError as error:
            reason = "; ".join(
                f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors(include_input=False)
            )[:200]
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
            async with _bounded(self._target) as transport, Client(transport) as client:
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
    return f"{type(error).__name__}: {credentials.hide(' '.join(str(error).split()))[:300]}"  # it may quote the address
