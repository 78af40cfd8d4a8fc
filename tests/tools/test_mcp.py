"""Real MCP servers over stdio and HTTP: called by many, killed in mid-call, hanging, and back."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import random
import re
import signal
import sys
import time
from pathlib import Path

import httpx2
import pytest

from megatron_rl.config import AgentConfig
from megatron_rl.errors import UserError
from megatron_rl.tools import mcp
from megatron_rl.tools.tool import ToolError, ToolLost
from megatron_rl.tools.toolbox import Toolbox
from tests.http_server import HttpServer
from tests.preloaded import PYTHON_WITH_PACKAGES
from tests.waiting import gone, wait_for
from tests.zygote import FOLDER

pytestmark = pytest.mark.slow
SERVER = str(Path(__file__).with_name("mcp_server.py"))


class World:
    """A toolbox with one server, which can be killed and brought back."""

    def __init__(self, kind: str):
        self.kind, self.server = kind, None
        if kind == "stdio":
            # Servers get no variables but those named; without this one each would import all packages anew.
            settings = {"command": PYTHON_WITH_PACKAGES, "args": [SERVER, "stdio"], "env": {FOLDER: os.environ[FOLDER]}}
        else:
            self.server = HttpServer(lambda port: [PYTHON_WITH_PACKAGES, SERVER, str(port)])
            settings = {"url": f"{self.server.url}/mcp"}
        self.box = Toolbox(AgentConfig(mcp_servers={"tests": settings}, tool_timeout_s=60, max_tool_response=1000))
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
    monkeypatch.setattr(mcp, "PING_TIMEOUT_S", 1.0)
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
    world.box.config = AgentConfig(tool_timeout_s=60.0)
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
        for size in (mcp.MOST_BYTES, 50 * 2**20):
            with pytest.raises(ToolLost, match="MCP server endless, say: .*Connection closed"):
                box.loop.run(box.call("say", {"bytes": size}, {}))
            assert box.loop.run(box.call("say", {"bytes": 2}, {})) == "xx", "it is started again"
    finally:
        box.close()
    said = capfd.readouterr().err.splitlines()
    assert sum("lines that are no messages; they are ignored: b'no message\\n'" in line for line in said) == 3, (
        "once each"
    )
    assert not any("Traceback" in line for line in said)


ASKING = r"""
import json, sys
heard = []
def send(message): print(json.dumps({"jsonrpc": "2.0"} | message), flush=True)
def told(method, params=None): send({"method": method} | ({"params": params} if params is not None else {}))
def answer(request, **result): send({"id": request["id"], "result": result})
def say(request, *content, **more): answer(request, content=list(content), **more)
def text(said): return {"type": "text", "text": said}
def read():
    while line := sys.stdin.readline():
        heard.append(json.loads(line))
        yield heard[-1]
messages = read()
for request in messages:
    method, params = request.get("method"), request.get("params", {})
    arguments = params.get("arguments", {})
    if method == "initialize":
        able = {"tools": {"listChanged": True}}
        answer(request, capabilities=able, serverInfo={"name": "asking", "version": "1"},
               protocolVersion=params["protocolVersion"])
    elif method == "tools/list":
        page = int(params.get("cursor", 0))
        kinds = json.loads(sys.argv[1])
        more = {"nextCursor": str(page + 1)} if page + 1 < len(kinds) or "endless" in kinds else {}
        name = kinds[page % len(kinds)] + (str(page) if "endless" in kinds else "")
        answer(request, tools=[{"name": name, "inputSchema": {"type": "object"}}], **more)
    elif method == "tools/call" and params["name"] == "ask":
        send({"id": "mine", "method": arguments["method"], "params": arguments["params"]})
        got = next(message for message in messages if message.get("id") == "mine")
        start = next(message["params"] for message in heard if message["method"] == "initialize")
        say(request, text(json.dumps({"can": start["capabilities"]} | got)))
    elif method == "tools/call" and params["name"] == "give":
        answer(request, **arguments)
    elif method == "tools/call" and params["name"] == "tell":
        for notice in arguments["notices"]: told(*notice)
        say(request, text("told"))
    elif method == "tools/call" and params["name"] == "wait":
        pass
    elif method == "tools/call" and params["name"] == "heard":
        say(request, text(json.dumps(heard)))
    elif "id" in request and "method" in request:
        code = arguments.get("code", -32601)
        send({"id": request["id"], "error": {"code": code, "message": "refused: " + request["method"]}})
"""


@pytest.fixture
def asking(tmp_path):
    """asking("a", "b", ...) -> a toolbox whose server has these tools, each on a page of its own."""
    (tmp_path / "asking.py").write_text(ASKING)
    opened = []

    def start(*tools: str, **settings) -> Toolbox:
        server = {"command": sys.executable, "args": ["-S", str(tmp_path / "asking.py"), json.dumps(tools)]}
        box = Toolbox(AgentConfig(mcp_servers={"asking": server}, tool_timeout_s=20, **settings))
        box.open()
        opened.append(box)
        return box

    yield start
    for box in opened:
        box.close()


def form(**fields) -> dict:
    required = [name for name, field in fields.items() if not field.pop("optional", False)]
    return {"type": "object", "properties": fields, "required": required}


def asked(box: Toolbox, method: str, params: dict) -> dict:
    return json.loads(box.loop.run(box.call("ask", {"method": method, "params": params}, {})))


def test_a_server_that_asks_its_user_gets_the_defaults_of_its_form_or_a_no(asking):
    rng = random.Random()
    name, count, share = f"n{rng.randrange(10**6)}", rng.randrange(1000), rng.random()
    several = {"type": "array", "items": {"type": "string", "enum": ["a", "b"]}, "default": ["b"]}
    text, whole = {"type": "string", "default": name}, {"type": "integer", "default": count}
    filled = {
        "a": (form(a=text, b=whole), {"a": name, "b": count}),
        "optional": (form(a=text, b={"type": "string", "optional": True}), {"a": name}),
        "falsy": (
            form(a={"type": "boolean", "default": False}, b={"type": "integer", "default": 0}),
            {"a": False, "b": 0},
        ),
        "several": (form(a=several, b={"type": "number", "default": share}), {"a": ["b"], "b": share}),
    }
    declined = {
        "required": form(a=text, b={"type": "boolean"}),
        "nothing to fill": form(),
        "no default": form(a={"type": "string", "optional": True}),
        "of another type": form(a={"type": "integer", "default": name}),
        "none of the choices": form(a={"type": "string", "enum": ["x"], "default": name}),
        "too long": form(a={"type": "string", "maxLength": 1, "default": name}),
        "no schema": {"type": "object", "properties": {"a": {"type": 7, "default": 1}}},
        "elsewhere": form(a={"$ref": "http://127.0.0.1:9/schema", "default": 1}),
    }
    box = asking("ask")
    for label, (schema, content) in filled.items():
        got = asked(box, "elicitation/create", {"message": "?", "requestedSchema": schema})
        assert got["result"] == {"action": "accept", "content": content}, label
    assert "elicitation" in got["can"], "a server asks a client that has said that it can answer"
    for label, schema in declined.items():
        got = asked(box, "elicitation/create", {"message": "?", "requestedSchema": schema})
        assert got["result"] == {"action": "decline"}, label
    page = {"mode": "url", "message": "?", "url": "https://example.org", "elicitationId": "1"}
    assert asked(box, "elicitation/create", page)["result"] == {"action": "decline"}


@pytest.mark.parametrize(
    ("method", "params"),
    [
        ("sampling/createMessage", {"messages": [], "maxTokens": 5}),
        ("roots/list", {}),
        ("nothing/known", {}),
        ("elicitation/create", {"message": 5}),
    ],
)
def test_a_server_that_asks_for_what_is_not_there_is_told_so(asking, method, params):
    box = asking("ask")
    got = asked(box, method, params)
    assert "error" in got and not {"sampling", "roots"} & set(got["can"])
    assert asked(box, "ping", {})["result"] == {}, "the session goes on"


def test_notices_of_a_server_disturb_no_call(asking, caplog):
    progress = [["notifications/progress", {"progressToken": i % 3, "progress": i}] for i in range(50)]
    log = [["notifications/message", {"level": "info", "data": {"n": i}}] for i in range(50)]
    odd = [["notifications/unknown", {}], ["notifications/progress", {"progress": "x"}], ["notifications/message"]]
    odd += [["notifications/cancelled", {"requestId": 10**6}], ["notifications/resources/list_changed"]]
    changed = [["notifications/tools/list_changed"]]
    box = asking("tell", "heard")
    assert box.loop.run(box.call("tell", {"notices": progress + log + odd + changed}, {})) == "told"
    box.loop.run(box.call("heard", {}, {}))
    assert "MCP server asking has changed its tools" in caplog.text
    assert set(box.tools) == {"tell", "heard"}


def test_a_call_that_is_too_slow_is_cancelled_at_the_server(asking):
    box = asking("wait", "heard", max_tool_response=10**6)
    box.config = AgentConfig(tool_timeout_s=0.5)
    with pytest.raises(ToolLost, match="no answer within"):
        box.loop.run(box.call("wait", {}, {}))
    box.config = AgentConfig(tool_timeout_s=20, max_tool_response=10**6)
    heard = json.loads(box.loop.run(box.call("heard", {}, {})))
    (call,) = [m["id"] for m in heard if m.get("method") == "tools/call" and m["params"]["name"] == "wait"]
    assert [m["params"]["requestId"] for m in heard if m.get("method") == "notifications/cancelled"] == [call]


def test_all_pages_of_tools_are_listed_and_a_list_without_end_is_told(asking):
    names = [f"t{i}" for i in range(7)]
    assert list(asking(*names).tools) == names
    with pytest.raises(UserError, match=r"MCP server asking does not list its tools: more than 100 pages"):
        asking("endless")


@pytest.mark.parametrize(
    ("result", "said"),
    [
        ({"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, "a\nb"),
        ({"content": [{"type": "resource", "resource": {"uri": "file:///x", "text": "inside"}}]}, "inside"),
        (
            {"content": [{"type": "resource", "resource": {"uri": "file:///x", "blob": "AA==", "mimeType": "a/b"}}]},
            "[resource file:///x, a/b]",
        ),
        (
            {"content": [{"type": "resource_link", "uri": "file:///x", "name": "X", "mimeType": "text/plain"}]},
            "[resource file:///x, text/plain: X]",
        ),
        ({"content": [{"type": "image", "data": "AA==", "mimeType": "image/png"}]}, "[image, image/png]"),
        ({"content": [{"type": "audio", "data": "AA==", "mimeType": "audio/wav"}]}, "[audio, audio/wav]"),
        ({"content": [], "structuredContent": {"é": [1, None]}}, '{"é": [1, null]}'),
        ({"content": [{"type": "text", "text": "1"}], "structuredContent": {"n": 1}}, "1"),
        ({"content": []}, ""),
    ],
)
def test_what_a_tool_gives_becomes_text(asking, result, said):
    box = asking("give")
    assert box.loop.run(box.call("give", result, {})) == said
    with pytest.raises(ToolError, match=re.escape(said) or "the tool failed"):
        box.loop.run(box.call("give", result | {"isError": True}, {}))


@pytest.mark.parametrize("code", [-32602, -32603, -32042, 7])
def test_an_error_of_the_protocol_is_an_answer(asking, code):
    box = asking("other", "heard")
    with pytest.raises(ToolError, match="refused: tools/call"):
        box.loop.run(box.call("other", {"code": code}, {}))
    assert box.loop.run(box.call("heard", {}, {}))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"comand": "x"}, r"agent\.mcp_servers\.s: neither a url nor a command with args; found comand"),
        ({"url": "http://x", "command": "x"}, "both a url and a command: leave one out"),
        (None, "neither a url nor a command with args; found nothing"),
        ({"command": "x", "arg": ["y"]}, "unknown key 'arg'; did you mean 'args'"),
        ({"url": "http://x", "header": {}}, "unknown key 'header'; did you mean 'headers'"),
        ({"url": "http://x", "headers": "A: b"}, r"headers: must be \{NAME: VALUE\}"),
        ({"url": "http://x", "type": "sse"}, "type: a server with a url is http or streamable-http"),
        ({"command": "x", "type": "http"}, "type: a server with a command is stdio"),
        ({"command": "x", "args": "y"}, "neither a url nor a command with args: args"),
    ],
)
def test_settings_that_would_be_left_out_are_refused(settings, message):
    with pytest.raises(UserError, match=message):
        mcp.Server("s", settings)


def test_headers_go_with_every_request(monkeypatch):
    seen = []

    def answer(request):
        seen.append(request.headers)
        return httpx2.Response(500)

    real = httpx2.AsyncClient
    kept = functools.partial(real, transport=httpx2.MockTransport(answer))
    monkeypatch.setattr(mcp.httpx2, "AsyncClient", kept)
    monkeypatch.setattr(mcp, "ATTEMPTS", 1)
    monkeypatch.setenv("SECRET_OF_TEST", "Bearer 123")
    headers = {"Authorization": "env:SECRET_OF_TEST", "X-Team": "a"}
    server = mcp.Server("s", {"url": "http://server/mcp", "headers": headers, "type": "http"})
    with pytest.raises(ToolLost):
        asyncio.run(server.client())
    assert seen and all(h["Authorization"] == "Bearer 123" and h["X-Team"] == "a" for h in seen)
    assert all(h["Accept-Encoding"] == "identity" for h in seen)


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
        transport, hooks = httpx2.MockTransport(answer), {"response": [mcp._bound]}
        async with httpx2.AsyncClient(transport=transport, headers=mcp.PLAIN, event_hooks=hooks) as http:
            await http.get("http://server/")

    with pytest.raises(httpx2.StreamError, match=f"more than {mcp.MOST_BYTES} bytes"):
        asyncio.run(work())
    assert sum(sent) == mcp.MOST_BYTES + 2**20


def test_a_command_that_is_not_there_is_told(monkeypatch):
    monkeypatch.setattr(mcp, "PAUSE_S", 0.0)
    settings = {"gone": {"command": "no-such-command"}}
    with pytest.raises(UserError, match="MCP server gone does not open: .*no command 'no-such-command'"):
        Toolbox(AgentConfig(mcp_servers=settings)).open()


def test_a_server_that_does_not_start_is_told(monkeypatch):
    monkeypatch.setattr(mcp, "PAUSE_S", 0.0)
    with pytest.raises(UserError, match="agent.tools: MCP server gone does not open"):
        Toolbox(
            AgentConfig(mcp_servers={"gone": {"command": sys.executable, "args": ["-c", "raise SystemExit(1)"]}})
        ).open()


def test_closing_ends_a_server_of_ours():
    world = World("stdio")
    (process,) = world.run(("process", {}))
    world.close()
    wait_for(lambda: gone(int(process)), 20)
