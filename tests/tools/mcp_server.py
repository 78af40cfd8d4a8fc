"""An MCP server for tests: `mcp_server.py stdio` or `mcp_server.py PORT`; its tools tell, hang, flood, and end it."""

from __future__ import annotations

import os
import sys
import time

import anyio
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("tests")


@server.tool()
async def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


@server.tool()
async def slow(seconds: float) -> str:
    """Answers late."""
    await anyio.sleep(seconds)
    return "late"


@server.tool()
async def die() -> str:
    """Ends the server."""
    os._exit(9)


@server.tool()
async def block() -> str:
    """Blocks the whole server."""
    time.sleep(600)
    return "never"


@server.tool()
async def fail(text: str) -> str:
    """Fails."""
    raise ToolError(text)


@server.tool()
async def flood() -> str:
    """Says too much."""
    return "x" * 1_000_000


@server.tool()
async def process() -> int:
    """The server's process."""
    return os.getpid()


if __name__ == "__main__":
    if sys.argv[1] == "stdio":
        server.run("stdio")
    else:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
