"""Tools: arguments against their schema, whose fault a failure is, limits, and what is open is closed."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import MappingProxyType
from typing import override

import pytest

from megatron_rl.config import AgentConfig
from megatron_rl.dialects import Call, Parsed
from megatron_rl.errors import UserError
from megatron_rl.sandbox import bubblewrap
from megatron_rl.tools.calculator import calculate
from megatron_rl.tools.search import Search
from megatron_rl.tools.tool import Tool, ToolError, ToolLost, check_arguments, shorten
from megatron_rl.tools.toolbox import Environment, Toolbox

OWN = '''
def double(number: int) -> int:
    """
    Doubles a number.

    Args:
        number: which one
    """
    return 2 * number

def undocumented(number: int) -> int:
    return number
'''


class Odd(Tool):
    """A tool that does what its argument says."""

    name = "odd"
    parameters = MappingProxyType({"type": "object", "properties": {"what": {"type": "string"}}, "required": ["what"]})

    def __init__(self):
        self.ended, self.closed = [], False

    @override
    async def call(self, arguments, session):
        match arguments["what"]:
            case "hang":
                await asyncio.sleep(600)
            case "block":
                await asyncio.to_thread(time.sleep, 2)
            case "raise":
                raise KeyError("no such")
            case "lost":
                raise ToolLost("gone")
            case "wrong":
                raise ToolError("not so")
            case "flood":
                return "x" * 10**7
            case "surrogate":
                return "a\ud800b"
        return arguments["what"]

    @override
    def session(self):
        return []

    @override
    async def end(self, session):
        self.ended.append(session)

    @override
    async def close(self):
        self.closed = True


@pytest.fixture
def odd():
    return Odd()


@pytest.fixture
def toolbox(odd):
    box = Toolbox(AgentConfig(tools=["calculator"], tool_timeout_s=60.0, max_tool_response=100), [odd])
    box.open()
    yield box
    box.close()
    assert odd.closed


def call(box: Toolbox, name: str, sessions=None, **arguments):
    return box.loop.run(box.call(name, arguments, {} if sessions is None else sessions))


def test_the_calculator_is_exact():
    rng = random.Random()
    for _ in range(200):
        terms = [rng.randrange(1, 10**6) for _ in range(rng.randint(2, 5))]
        signs = [rng.choice("+-*") for _ in terms[1:]]
        text = str(terms[0]) + "".join(f" {sign} {term}" for sign, term in zip(signs, terms[1:], strict=True))
        value, product = Fraction(0), Fraction(terms[0])
        for sign, term in zip(signs, terms[1:], strict=True):
            if sign == "*":
                product *= term
            else:
                value, product = value + product, Fraction(term if sign == "+" else -term)
        assert calculate(text) == value + product
    assert (
        calculate("(1+2)*3") == 9 and calculate("7/2") == 3.5 and calculate("2^10") == 1024 and calculate("-3 + 3") == 0
    )
    assert isinstance(calculate("84/2"), int)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("1/0", "division by zero"),
        ("9**9**9**9", "too large"),
        ("2**400*2**400", "too large"),
        ("__import__('os')", "not an arithmetic"),
        ("(-1)**0.5", "not an arithmetic"),
        ("'a'*3", "not an arithmetic"),
        ("True+1", "not an arithmetic"),
        ("1 +", "not an arithmetic"),
        ("", "not an arithmetic"),
        ("(" * 500 + "1" + ")" * 499, "not an arithmetic"),
        ("1+" * 600 + "1", "more than 1000"),
        ("1\x00", "not an arithmetic"),
        ("x" * 100, "not an arithmetic"),
    ],
)
def test_what_the_calculator_refuses(text, problem):
    with pytest.raises(ToolError, match=problem):
        calculate(text)


def test_a_call(toolbox):
    assert call(toolbox, "calculator", expression="2*(3+4)") == "14"
    assert {schema["function"]["name"] for schema in toolbox.schemas} == {"calculator", "odd"}


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({}, "'expression' is a required property"),
        ({"expression": 3}, "expression: 3 is not of type 'string'"),
        ({"expression": "1", "more": 2}, "more"),
    ],
)
def test_arguments_are_checked_against_the_schema(toolbox, arguments, problem):
    with pytest.raises(ToolError, match=f"arguments of calculator.*{problem}"):
        call(toolbox, "calculator", **arguments)


def with_parameters(parameters) -> Tool:
    tool = Tool()
    tool.name, tool.parameters = "given", parameters
    return tool


def test_nothing_of_a_schema_is_fetched_from_the_network():
    """The schema is a tool server's, and to fetch a part of it would hold up all conversations."""
    asked = []

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"type": "integer"}')

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        elsewhere = {"$ref": f"http://127.0.0.1:{server.server_port}/integer"}
        tool = with_parameters({"type": "object", "properties": {"a": elsewhere}})
        with pytest.raises(ToolLost, match="tool given: its parameters cannot be checked"):
            check_arguments(tool, {"a": 1})
        check_arguments(tool, {"b": 1})
        server.shutdown()
    assert not asked
    here = {"type": "object", "properties": {"a": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"type": "integer"}}}
    check_arguments(with_parameters(here), {"a": 1})
    with pytest.raises(ToolError, match="arguments of given, a: 'x' is not of type 'integer'"):
        check_arguments(with_parameters(here), {"a": "x"})


@pytest.mark.parametrize(
    "parameters", [{"type": "number of things"}, {"properties": {"a": {"type": 3}}}, {"required": "a"}, {"enum": 1}]
)
def test_a_schema_that_is_none_is_told_at_the_start(parameters):
    box = Toolbox(AgentConfig(), [with_parameters(parameters)])
    with pytest.raises(UserError, match=r"agent\.tools: the parameters of given are no valid JSON schema"):
        box.open()


def test_an_unknown_tool_is_the_models_fault(toolbox):
    with pytest.raises(ToolError, match="no tool 'calculater'; there is: calculator, odd"):
        call(toolbox, "calculater")


@pytest.mark.parametrize(
    ("what", "kind", "problem"),
    [
        ("hang", ToolLost, "odd: no answer within agent.tool_timeout_s = 0.5 s"),
        ("block", ToolLost, "no answer"),
        ("raise", ToolLost, "odd: KeyError"),
        ("lost", ToolLost, "gone"),
        ("wrong", ToolError, "not so"),
    ],
)
def test_whose_fault(toolbox, what, kind, problem):
    patient = toolbox.config
    if what in ("hang", "block"):  # all others answer at once, however late that is on a busy machine
        toolbox.config = replace(patient, tool_timeout_s=0.5)
    with pytest.raises(kind, match=problem):
        call(toolbox, "odd", what=what)
    toolbox.config = patient
    assert call(toolbox, "odd", what="next") == "next", "others go on"


def test_results_are_capped_and_are_text(toolbox):
    flooded = call(toolbox, "odd", what="flood")
    assert len(flooded) < 150 and flooded.startswith("x" * 50) and "[... 9999900 characters ...]" in flooded
    assert call(toolbox, "odd", what="surrogate") == "a?b"


def test_shortened_texts_keep_both_ends():
    text = "".join(random.choices("abc", k=1001))
    assert shorten(text, 1001) == text
    short = shorten(text, 101)
    assert short.startswith(text[:50] + "\n") and short.endswith("\n" + text[-51:]) is not short.endswith(
        "\n" + text[-50:]
    )


def test_a_slow_tool_of_many_holds_up_no_other(odd):
    """63 calls at their own speed beside one that hangs: none waits for it."""
    box = Toolbox(AgentConfig(tool_timeout_s=60), [odd])
    box.open()

    async def all_calls():
        slow = asyncio.create_task(box.call("odd", {"what": "hang"}, {}))
        quick = await asyncio.wait_for(asyncio.gather(*(box.call("odd", {"what": str(i)}, {}) for i in range(63))), 30)
        assert not slow.done()
        slow.cancel()
        return quick

    try:
        assert box.loop.run(all_calls()) == [str(i) for i in range(63)]
    finally:
        box.close()


def test_at_most_so_many_calls_are_under_way(odd):
    running, most = 0, 0

    class Counting(Odd):
        name = "counting"

        @override
        async def call(self, arguments, session):
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.01)
            running -= 1
            return "done"

    box = Toolbox(AgentConfig(tool_concurrency=3, tool_timeout_s=30), [Counting()])
    box.open()

    async def all_calls():
        return await asyncio.gather(*(box.call("counting", {"what": ""}, {}) for _ in range(20)))

    try:
        assert box.loop.run(all_calls()) == ["done"] * 20 and most == 3
    finally:
        box.close()


def test_a_conversations_sessions_are_made_once_and_ended(toolbox, odd):
    sessions = {}
    call(toolbox, "odd", sessions, what="1")
    first = sessions["odd"].state
    call(toolbox, "odd", sessions, what="2")
    assert sessions["odd"].state is first
    toolbox.loop.run(toolbox.end(sessions))
    assert odd.ended == [first] and not sessions


def test_search_finds_passages_by_their_words(tmp_path):
    (tmp_path / "below").mkdir()
    (tmp_path / "a.txt").write_text("The river Lena flows north.\n\nIt is long.")
    (tmp_path / "below" / "b.md").write_text(
        "# Rivers\n\n" + "filler words only. " * 80 + "\n\nThe Rhine flows to Rotterdam."
    )
    (tmp_path / "c.bin").write_bytes(b"Rhine" * 100)
    box = Toolbox(AgentConfig(tools=["search"], tool_options={"search": {"folder": str(tmp_path), "passages": 1}}))
    box.open()
    try:
        found = call(box, "search", query="Where does the Rhine flow?")
        assert found.startswith("[below/b.md]") and "Rotterdam" in found and len(found) < 1200
        assert call(box, "search", query="lena's flowing").startswith("[a.txt]")
        assert call(box, "search", query="zebra") == "nothing found"
        assert (
            call(box, "search", query='") OR *') == "nothing found"
            or call(box, "search", query="?!") == "no words to look for"
        )
    finally:
        box.close()


def test_a_folder_without_documents_is_told_at_the_start(tmp_path):
    with pytest.raises(UserError, match="not a folder with documents"):
        Toolbox(AgentConfig(tools=["search"], tool_options={"search": {"folder": str(tmp_path)}})).open()
    assert issubclass(Search, Tool)


def test_functions_of_ones_own_are_tools(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    box = Toolbox(AgentConfig(tools=[f"{tmp_path / 'own.py'}:double"]))
    box.open()
    try:
        assert call(box, "double", number=4) == "8"
        with pytest.raises(ToolError, match="number"):
            call(box, "double", number="four")
        assert box.schemas[0]["function"]["description"] == "Doubles a number."
    finally:
        box.close()
    with pytest.raises(UserError, match="undocumented cannot be a tool"):
        Toolbox(AgentConfig(tools=[f"{tmp_path / 'own.py'}:undocumented"]))


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"tools": ["calculater"]}, "agent.tools: there is no tool 'calculater'; did you mean 'calculator'"),
        ({"tools": ["search"]}, "agent.tool_options.search.*folder"),
        (
            {"tools": ["calculator"], "tool_options": {"search": {}}},
            "agent.tool_options.search: agent.tools has no 'search'",
        ),
        ({"tools": ["python"], "tool_options": {"python": {"timeout": 3}}}, "agent.tool_options.python.*timeout"),
        ({"tools": ["os.path:join"], "tool_options": {"os.path:join": {"a": 1}}}, "is a function"),
        ({"mcp_servers": {"files": {"comand": "x"}}}, "agent.mcp_servers.files: neither a url nor a command"),
    ],
)
def test_bad_settings_are_told(settings, problem):
    box = None
    with pytest.raises(UserError, match=problem):
        box = Toolbox(AgentConfig(**settings))
        box.open()


def test_two_tools_of_one_name(odd):
    with pytest.raises(UserError, match="two tools are called 'odd'"):
        Toolbox(AgentConfig(), [odd, Odd()]).open()


def respond(box: Toolbox, *calls: Call) -> list[str]:
    """What a conversation's only reply, with these calls, is answered."""

    async def once():
        world = Environment(box)
        try:
            return await world.respond(Parsed(calls=list(calls)))
        finally:
            await world.close()

    return [message["content"] for message in box.loop.run(once())]


def test_errors_are_no_longer_than_results(toolbox):
    long = "y" * 10**6
    for said in respond(toolbox, Call("odd", {}), Call(long, {}), Call("odd", {"what": 3, long: 1})):
        assert said.startswith("Error: ") and len(said) < 200
    assert respond(toolbox, Call("\ud83d", {}))[0].encode()


@pytest.mark.slow
@pytest.mark.skipif(bool(bubblewrap.problem()), reason=bubblewrap.problem() or "contained")
def test_calls_of_one_reply_that_share_a_state_come_one_after_the_other():
    """Six loops take longer together than one call may: each is the model's fault, and none the tool's."""
    box = Toolbox(AgentConfig(tools=["python"], tool_options={"python": {"timeout_s": 1.0}}, tool_timeout_s=5.0))
    box.open()
    try:
        loops = respond(box, *[Call("python", {"code": "while True: pass"})] * 6)
        assert all("it took longer than 1 s" in said for said in loops)
    finally:
        box.close()


@pytest.mark.skipif(bool(bubblewrap.problem()), reason=bubblewrap.problem() or "contained")
def test_variables_stay_between_calls_and_calls_of_one_reply_keep_their_order():
    box = Toolbox(AgentConfig(tools=["python"]))
    box.open()
    try:
        codes = ["x = 1", "x += 1", "x *= 10", "x -= 3", "x"]
        assert respond(box, *(Call("python", {"code": code}) for code in codes))[-1] == "17"

        async def slowly(sessions):
            for code in ("y = 7", "y *= 6"):
                await box.call("python", {"code": code}, sessions)
                await asyncio.sleep(0.5)  # the thread of the call has ended
            said = await box.call("python", {"code": "y"}, sessions)
            await box.end(sessions)
            return said

        assert box.loop.run(slowly({})) == "42"
    finally:
        box.close()


def test_nothing_is_called_in_a_conversation_that_is_over():
    class Noting(Odd):
        def __init__(self):
            super().__init__()
            self.called = []

        @override
        async def call(self, arguments, session):
            self.called.append((arguments["what"], list(self.ended)))
            return await super().call(arguments, session)

    noting = Noting()
    box = Toolbox(AgentConfig(tool_timeout_s=1.0), [noting])
    box.open()
    try:
        with pytest.raises(ToolLost, match="no answer within"):
            respond(box, *(Call("odd", {"what": what}) for what in ("1", "hang", "2", "3")))
        box.loop.run(asyncio.sleep(0.2))
        assert [what for what, _ in noting.called] == ["1", "hang"] and len(noting.ended) == 1
    finally:
        box.close()


def test_arguments_that_are_no_text_are_the_models_fault(toolbox):
    """An MCP session would end with them, for all conversations."""
    with pytest.raises(ToolError, match="half of a surrogate pair"):
        call(toolbox, "odd", what="\ud83d")


def test_waiting_for_other_conversations_is_told_apart():
    waited = []

    @contextmanager
    def waiting():
        begun = time.monotonic()
        yield
        waited.append(time.monotonic() - begun)

    class Slow(Odd):
        @override
        async def call(self, arguments, session):
            await asyncio.sleep(0.8)
            return "done"

    box = Toolbox(AgentConfig(tool_concurrency=1), [Slow()])
    box.open()

    async def all_calls():
        await asyncio.gather(*(box.call("odd", {"what": ""}, {}, waiting) for _ in range(3)))

    try:
        box.loop.run(all_calls())
    finally:
        box.close()
    # A task of a busy machine begins to wait a little after the first one has begun its 0.8 s.
    assert [wait >= least for wait, least in zip(sorted(waited), (0.0, 0.4, 1.2), strict=True)] == [True] * 3
