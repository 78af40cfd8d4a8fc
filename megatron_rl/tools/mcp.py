"""Tools of Model Context Protocol servers (stdio or streamable HTTP). Each server has one session, which is reopened if lost.

This client has no human user. If a server asks the user (elicitation), the client answers with the default values of the
server's form, or declines if they do not fill the form. It refuses requests for a model (sampling) or for folders (roots).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, override

import httpx2
from mcp import Client, MCPError, StdioServerParameters, types
from mcp.client.session import ClientRequestContext, IncomingMessage
from mcp.client.stdio import get_default_environment, stdio_client
from mcp.client.streamable_http import streamable_http_client
from pydantic import ValidationError

from megatron_rl import credentials
from megatron_rl.config.registry import nearest
from megatron_rl.errors import UserError
from megatron_rl.tools.tool import Tool, ToolError, ToolLost, is_valid

log = logging.getLogger(__name__)

OPEN_TIMEOUT_S = 60.0
"""Longest time in seconds for a server to start and list its tools."""
PING_TIMEOUT_S = 5.0
ATTEMPTS = 3
"""Number of attempts to open a session before a call fails. There is a pause before each attempt except the first."""
PAUSE_S = 1.0
MOST_BYTES = 8 * 2**20
"""Largest size in bytes of a message. A larger message would block all conversations for more than a tenth of a second."""
HTTP_TIMEOUT = httpx2.Timeout(30.0, read=300.0)
"""Timeout for HTTP requests. The package mcp uses the same values, because an answer may be a stream that stays open."""
MOST_PAGES = 100
"""Largest number of pages in a server's list of tools."""
PLAIN = {"Accept-Encoding": "identity"}
TRANSPORTS = {"url": ("http", "streamable-http", "streamable_http"), "command": ("stdio",)}
"""{key of the settings: values of `type` that other clients use for such a server}."""
KEYS = {"url": ("url", "headers", "type"), "command": (*StdioServerParameters.model_fields, "type")}
RELAY = Path(__file__).with_name("mcp_relay.py")


@contextlib.asynccontextmanager
async def _bounded(target: str | StdioServerParameters, headers: dict[str, str]) -> AsyncIterator[Any]:
    if isinstance(target, str):
        hooks = {"response": [_bound]}
        async with httpx2.AsyncClient(timeout=HTTP_TIMEOUT, headers=headers | PLAIN, event_hooks=hooks) as http:
            yield streamable_http_client(target, http_client=http, max_sse_event_size=MOST_BYTES)
        return
    path = (get_default_environment() | (target.env or {})).get("PATH")
    if not target.cwd and not shutil.which(target.command, path=path):
        raise FileNotFoundError(f"there is no command {target.command!r}")
    arguments = ["-I", "-S", str(RELAY), str(MOST_BYTES), target.command, *target.args]
    yield stdio_client(target.model_copy(update={"command": sys.executable, "args": arguments}), errlog=sys.stderr)


async def _bound(response: httpx2.Response) -> None:
    """Limit the size of an answer that is a single message. A stream needs no limit, because each of its events has one."""
    response.headers.pop("Content-Encoding", None)  # a small compressed answer could become large
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
    """The session with one server, shared by all calls."""

    def __init__(self, name: str, settings: dict[str, Any]) -> None:
        """settings: {command, args, env, cwd} or {url, headers}, as in other clients' `mcpServers`. Errors: UserError."""
        self.name = name
        key = f"agent.mcp_servers.{name}"
        try:
            given = _checked(settings, key)
            for field in ("env", "headers"):
                if isinstance(given.get(field), dict):
                    read = {n: credentials.read(str(v), f"{key}.{field}.{n}") for n, v in given[field].items()}
                    given[field] = read
            self._headers: dict[str, str] = given.get("headers") or {}
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
        """Task that has opened the session and must also close it."""
        self._leave = asyncio.Event()
        self._opening = asyncio.Lock()

    async def client(self) -> Client:
        """Return the open session. Errors: ToolLost."""
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
            async with (
                _bounded(self._target, self._headers) as transport,
                Client(transport, elicitation_callback=_fill_form, message_handler=self._hear) as client,
            ):
                if not entered.cancelled():
                    entered.set_result(client)
                await leave.wait()
        except Exception as error:  # from opening, or from a server that was lost later
            if not entered.done():
                entered.set_exception(error)

    async def _hear(self, message: IncomingMessage) -> None:
        if isinstance(message, types.ToolListChangedNotification):
            log.warning("MCP server %s has changed its tools; this run keeps the tools of its start", self.name)

    async def close(self) -> None:
        """Close the session."""
        owner, self._owner, self._client = self._owner, None, None
        if owner is None:
            return
        self._leave.set()
        done, _ = await asyncio.wait([owner], timeout=PING_TIMEOUT_S)
        if not done:
            owner.cancel()
            await asyncio.wait([owner], timeout=PING_TIMEOUT_S)

    async def drop_if_lost(self, client: Client) -> bool:
        """Drop the session if the server no longer answers. Returns whether it was dropped."""
        try:
            await asyncio.wait_for(client.list_tools(cache_mode="bypass"), PING_TIMEOUT_S)
        except Exception:
            async with self._opening:
                if self._client is client:
                    log.warning("MCP server %s is lost; the next call opens a new session", self.name)
                    await self.close()
            return True
        return False

    async def tools(self) -> list[Tool]:
        """Return the server's tools from all pages. Errors: ToolLost."""
        client, found, cursor = await self.client(), [], None
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                for _ in range(MOST_PAGES):
                    page = await client.list_tools(cursor=cursor)
                    found += [RemoteTool(self, tool) for tool in page.tools]
                    cursor = page.next_cursor
                    if not cursor:
                        return found
            problem = f"more than {MOST_PAGES} pages"
        except TimeoutError:
            problem = f"no end within {OPEN_TIMEOUT_S:g} s"
        except Exception as error:
            problem = _reason(error)
        raise ToolLost(f"MCP server {self.name} does not list its tools: {problem}")


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
        except asyncio.CancelledError:  # too slow: the server may be lost
            with contextlib.suppress(BaseException):
                await asyncio.shield(self.server.drop_if_lost(client))
            raise
        except Exception as error:
            lost = await self.server.drop_if_lost(client)
            if isinstance(error, MCPError) and not lost:  # an answer: the server refuses the call
                raise ToolError(str(error)) from None
            raise ToolLost(f"MCP server {self.server.name}, {self.name}: {_reason(error)}") from None
        text = "\n".join(map(_said, result.content))
        if not result.content and result.structured_content is not None:
            text = json.dumps(result.structured_content, ensure_ascii=False)
        if result.is_error:
            raise ToolError(text or "the tool failed")
        return text


def _checked(settings: Any, key: str) -> dict[str, Any]:
    """Return the settings of a server if all their keys are known. Errors: UserError."""
    given = dict(settings) if isinstance(settings, dict) else {}
    kinds = [kind for kind in KEYS if given.get(kind)]
    if len(kinds) > 1:
        raise UserError(f"config: {key}: both a url and a command: leave one out")
    if not kinds:
        raise UserError(f"config: {key}: neither a url nor a command with args; found {', '.join(given) or 'nothing'}")
    (kind,) = kinds
    if unknown := sorted(map(str, set(given) - set(KEYS[kind]))):
        raise UserError(f"config: {key}: unknown key '{unknown[0]}'{nearest(unknown[0], KEYS[kind])}")
    if given.pop("type", TRANSPORTS[kind][0]) not in TRANSPORTS[kind]:
        raise UserError(f"config: {key}.type: a server with a {kind} is {' or '.join(TRANSPORTS[kind])}")
    if not isinstance(given.get("headers", {}), dict):
        raise UserError(f"config: {key}.headers: must be {{NAME: VALUE}}")
    return given


async def _fill_form(context: ClientRequestContext, params: types.ElicitRequestParams) -> types.ElicitResult:
    """Return the answer to a server that asks its user: the default values of its form, if they are a valid answer.

    The client has no user. So it declines a form without complete default values, and every request to open a browser (mode
    url).
    """
    del context
    if isinstance(params, types.ElicitRequestFormParams):
        form = params.requested_schema
        with contextlib.suppress(Exception):  # an invalid form
            content = {name: field["default"] for name, field in form["properties"].items() if "default" in field}
            if content and is_valid(content, form):
                return types.ElicitResult(action="accept", content=content)
    return types.ElicitResult(action="decline")


def _said(part: types.ContentBlock) -> str:
    """Return a part of a tool's result as the model sees it. Text is unchanged; any other part becomes a short description."""
    match part:
        case types.TextContent():
            return part.text
        case types.EmbeddedResource(resource=types.TextResourceContents(text=text)):
            return text
        case types.EmbeddedResource():
            return f"[resource {part.resource.uri}{_of_kind(part.resource.mime_type)}]"
        case types.ResourceLink():
            return f"[resource {part.uri}{_of_kind(part.mime_type)}: {part.description or part.title or part.name}]"
    return f"[{part.type}{_of_kind(part.mime_type)}]"


def _of_kind(mime_type: str | None) -> str:
    return f", {mime_type}" if mime_type else ""


def _reason(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {credentials.hide(' '.join(str(error).split()))[:300]}"  # it may quote the address
