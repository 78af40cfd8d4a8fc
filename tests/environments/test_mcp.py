"""Real MCP servers over stdio and HTTP: called by many, killed in mid-call, hanging, and back."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

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
