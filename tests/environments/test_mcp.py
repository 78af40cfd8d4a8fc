"""Real MCP servers over stdio and HTTP: called by many, killed in mid-call, hanging, and back."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import httpx2
import pytest

from megatron_rl.config import AgentConfig
from megatron_rl.environments import mcp_tools
from megatron_rl.environments.toolbox import Toolbox
from megatron_rl.environments.tools import ToolError, ToolLost
from megatron_rl.errors import UserError
from tests.http_server import HttpServer
from tests.preloaded import PYTHON_WITH_PACKAGES

pytestmark = pytest.mark.slow
SERVER = str(Path(__file__).with_name("mcp_server.py"))


class World:
    """A toolbox with one server, which can be killed and brought back."""

    def __init__(self, kind: str):
        self.kind, self.server = kind, None
        if kind == "stdio":
            settings = {"command": PYTHON_WITH_PACKAGES, "args": [SERVER, "stdio"]}
        else:
            self.server = HttpServer(lambda port: [PYTHON_WITH_PACKAGES, SERVER, str(port)])
            settings = {"url": f"{self.server.url}/mcp"}
        self.box = Toolbox(AgentConfig(mcp_servers={"tests": settings}, tool_timeout_s=20, max_tool_response=1000))
        self.box.open()

    def run(self, *calls):
        """Results of (name, arguments) calls, all at once; an error stands for itself."""

        async def all_of_them():
            return await asyncio.gather(*(self.box.call(name, a, {}) for name, a in calls), return_exceptions=True)

        return self.box.loop.run(all_of_them())

    def back(self) -> None:
        """Bring the server back where nobody else does."""
        if self.server is not None:
            self.server.kill()
            self.server.start()

    def close(self) -> None:
        self.box.close()
        if self.server is not None:
            self.server.close()


@pytest.fixture(params=["stdio", "http"])
def world(request, monkeypatch):
    monkeypatch.setattr(mcp_tools, "PING_TIMEOUT_S", 3.0)
    made = World(request.param)
    yield made
    made.close()


def test_tools_are_listed_and_called_by_many(world):
    assert {"add", "slow", "die"} <= {schema["function"]["name"] for schema in world.box.schemas}
    assert world.run(*[("add", {"a": i, "b": 1}) for i in range(64)]) == [str(i + 1) for i in range(64)]


def test_a_slow_call_holds_up_no_other(world):
    async def calls():
        slow = asyncio.create_task(world.box.call("slow", {"seconds": 600.0}, {}))
        await asyncio.sleep(0)  # it goes first
        quick = await asyncio.gather(*(world.box.call("add", {"a": i, "b": 1}, {}) for i in range(63)))
        waiting = not slow.done()
        slow.cancel()
        return quick, waiting

    assert world.box.loop.run(calls()) == ([str(i + 1) for i in range(63)], True)


def test_what_the_model_did_wrong_is_told(world):
    wrong, failed, flooded = world.run(("add", {"a": "x", "b": 1}), ("fail", {"text": "not so"}), ("flood", {}))
    assert isinstance(wrong, ToolError) and "arguments of add" in str(wrong)
    assert isinstance(failed, ToolError) and "not so" in str(failed)
    assert len(flooded) < 1100 and "characters" in flooded


def test_a_server_that_is_killed_in_mid_call_comes_back(world):
    """The call that it had is lost, which masks its conversation; the next ones open the session anew."""
    (first,) = world.run(("process", {}))
    [lost, other] = world.run(("die", {}), ("slow", {"seconds": 5.0}))
    assert isinstance(lost, ToolLost) and isinstance(other, ToolLost), (lost, other)
    world.back()
    assert world.run(("add", {"a": 1, "b": 1}), ("add", {"a": 2, "b": 2})) == ["2", "4"]
    assert world.run(("process", {})) != [first]


def test_a_server_that_is_killed_between_calls_comes_back(world):
    (process,) = world.run(("process", {}))
    os.kill(int(process), signal.SIGKILL)
    time.sleep(0.5)
    world.back()
    found = world.run(("add", {"a": 1, "b": 1}))
    if isinstance(found[0], ToolLost):  # the call that found it dead
        found = world.run(("add", {"a": 1, "b": 1}))
    assert found == ["2"]


def test_a_server_that_hangs_is_left(world, monkeypatch):
    (process,) = world.run(("process", {}))
    world.box.config = AgentConfig(tool_timeout_s=1.0)
    (hung,) = world.run(("block", {}))
    assert isinstance(hung, ToolLost) and "no answer within" in str(hung)
    world.box.config = AgentConfig(tool_timeout_s=20.0)
    if world.kind == "http":  # a new session needs a server that answers
        os.kill(int(process), signal.SIGKILL)
        world.back()
    assert world.run(("add", {"a": 1, "b": 1})) == ["2"]


ENDLESS = r"""
import json, sys
def say(request, result): print(json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": result}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    if request.get("method") == "initialize":
        about = {"capabilities": {"tools": {}}, "serverInfo": {"name": "endless", "version": "1"}}
        say(request, about | {"protocolVersion": request["params"]["protocolVersion"]})
    elif request.get("method") == "tools/list":
        schema = {"type": "object", "properties": {"bytes": {"type": "integer"}}}
        say(request, {"tools": [{"name": "say", "description": "", "inputSchema": schema}]})
    elif request.get("method") == "tools/call":
        print("no message", "[" * 10000, "[1, 2]", sep="\n", flush=True)
        text = "x" * request["params"]["arguments"]["bytes"]
        say(request, {"content": [{"type": "text", "text": text}], "isError": False})
    elif "id" in request:
        print(json.dumps({"jsonrpc": "2.0", "id": request["id"], "error": {"code": -32601, "message": "no"}}), flush=True)
"""


def test_a_message_without_bounds_ends_its_server_and_holds_up_nobody(tmp_path, capfd):
    """One of 50 MB was put together, part by part, in the event loop of all conversations, until the time was over."""
    (tmp_path / "endless.py").write_text(ENDLESS)
    settings = {"endless": {"command": sys.executable, "args": ["-S", str(tmp_path / "endless.py")]}}
    box = Toolbox(AgentConfig(mcp_servers=settings, tool_timeout_s=200, max_tool_response=10**9))
    box.open()
    try:
        for size in (1, 7 * 2**20):
            assert box.loop.run(box.call("say", {"bytes": size}, {})) == "x" * size
        for size in (mcp_tools.MOST_BYTES, 50 * 2**20):
            with pytest.raises(ToolLost, match="MCP server endless, say: .*Connection closed"):
                box.loop.run(box.call("say", {"bytes": size}, {}))
            assert box.loop.run(box.call("say", {"bytes": 2}, {})) == "xx", "it is started again"
    finally:
        box.close()
    said = capfd.readouterr().err.splitlines()
    assert sum("lines that are no messages; they are left out: b'no message\\n'" in line for line in said) == 3, (
        "once each"
    )
    assert not any("Traceback" in line for line in said)


def test_an_answer_in_one_piece_has_bounds_too():
    """An answer is not decoded, and no more is read than the bound."""
    sent = []

    async def endless():
        while True:
            sent.append(2**20)
            yield b"x" * sent[-1]

    def answer(request):
        assert request.headers["Accept-Encoding"] == "identity"
        headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
        return httpx2.Response(200, headers=headers, content=endless())

    async def work():
        transport, hooks = httpx2.MockTransport(answer), {"response": [mcp_tools._bound]}
        async with httpx2.AsyncClient(transport=transport, headers=mcp_tools.PLAIN, event_hooks=hooks) as http:
            await http.get("http://server/")

    with pytest.raises(httpx2.StreamError, match=f"more than {mcp_tools.MOST_BYTES} bytes"):
        asyncio.run(work())
    assert sum(sent) == mcp_tools.MOST_BYTES + 2**20


def test_a_command_that_is_not_there_is_told(monkeypatch):
    monkeypatch.setattr(mcp_tools, "PAUSE_S", 0.0)
    settings = {"gone": {"command": "no-such-command"}}
    with pytest.raises(UserError, match="MCP server gone does not open: .*no command 'no-such-command'"):
        Toolbox(AgentConfig(mcp_servers=settings)).open()


def test_a_server_that_does_not_start_is_told():
    with pytest.raises(UserError, match="agent.tools: MCP server gone does not open"):
        Toolbox(
            AgentConfig(mcp_servers={"gone": {"command": sys.executable, "args": ["-c", "raise SystemExit(1)"]}})
        ).open()


def test_closing_ends_a_server_of_ours():
    world = World("stdio")
    (process,) = world.run(("process", {}))
    world.close()
    deadline = time.monotonic() + 20
    while Path(f"/proc/{process}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{process}").exists()
