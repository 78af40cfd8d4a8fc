"""Whatever is sent to the recording endpoint, it answers: 400 with OpenAI's error object for a client's mistake, and no 5xx."""

from __future__ import annotations

import json
from types import SimpleNamespace

import aiohttp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.agents.endpoint import MOST_BYTES, Endpoint, reward_parts
from megatron_rl.agents.recorder import Session
from megatron_rl.algorithms.sampling_support import SamplingSupport
from megatron_rl.data.trajectory import WeightSpan
from megatron_rl.dialects import Call, Qwen
from megatron_rl.event_loop import EventLoop
from megatron_rl.servers.reply import Reply
from tools.make_tiny_model import text_tokenizer

USER = [{"role": "user", "content": "hi"}]
CHAT = "/v1/chat/completions"


FORM = Qwen(text_tokenizer(512))


def reply_of(text: str) -> Reply:
    tokens = np.asarray([*FORM.tokenizer.encode(text, add_special_tokens=False), FORM.tokenizer.eos_token_id], np.int32)
    fields = {"loss_mask": np.ones(len(tokens), bool), "rollout_log_probs": np.zeros(len(tokens), np.float32)}
    return Reply(tokens, fields, "stop", [WeightSpan("0", 0, len(tokens))])


@pytest.fixture(scope="module")
def world():
    """post(raw or body, path) -> (status, answer), to a session of its own; `session` is the last one, and `ask` goes on in it.

    The policy says what `replies` has, in turn.
    """
    loop, endpoint = EventLoop(), Endpoint()
    found = SimpleNamespace(replies=["hello"], sampled=[])

    async def sample(talk, sampling):
        reply = reply_of(found.replies[len(found.sampled) % len(found.replies)])
        found.sampled.append(reply.first(min(len(reply.tokens), sampling["max_new_tokens"])))
        return found.sampled[-1]

    async def send(url, raw, headers):
        timeout = aiohttp.ClientTimeout(total=120)
        async with (
            aiohttp.ClientSession(timeout=timeout) as http,
            http.post(url, data=raw, headers={"Content-Type": "application/json"} | headers) as answer,
        ):
            return answer.status, (await answer.read()).decode()

    def open_session(room=400, **settings):
        found.sampled.clear()
        found.session = endpoint.sessions["s"] = Session(FORM, sample, room, 4000, **settings)

    def ask(body, path=CHAT, **headers):
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        return loop.run(send(f"http://127.0.0.1:{endpoint.port}/s{path}", raw, headers))

    def post(body, path=CHAT, **headers):
        open_session()
        return ask(body, path, **headers)

    def reward(body):
        open_session(parts=("correct", "form"))
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        status, answer = loop.run(send(endpoint.reward_url("s"), raw, {}))
        return status, answer, found.session.reward

    loop.run(endpoint.start())
    found.open, found.ask, found.post, found.reward, found.endpoint = open_session, ask, post, reward, endpoint
    yield found
    loop.run(endpoint.close())
    loop.close()


def check_refused(status: int, answer: str) -> None:
    assert status == 400, answer
    error = json.loads(answer)["error"]
    assert error["type"] == "invalid_request_error" and error["message"] and "\n" not in error["message"]


def called(arguments) -> list[dict]:
    return [
        {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": arguments}}]},
        *USER,
    ]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}',
        b'{"max_tokens": ' + b"9" * 5000 + b"}",
        b"NaN",
        b'{"messages": [{"role": "user", "content": "hi"}], "temperature": NaN}',
        b'{"messages": [{"role": "user", "content": "hi"}], "more": [-Infinity]}',
        b'{"messages": [{"role": "user", "content": "hi"}], "more": 1e999}',
        b'{"messages": [{"role": "user", "content": "hi"}], "messages": []}',
        b'{"messages": [{"role": "user", "content": "hi"}]} {}',
        [],
        "text",
        None,
        {},
        {"messages": None},
        {"messages": []},
        {"messages": "hi"},
        {"messages": {"role": "user"}},
        {"messages": [None]},
        {"messages": ["hi"]},
        {"messages": [{}]},
        {"messages": [{"role": 5, "content": "x"}]},
        {"messages": [{"role": None, "content": "x"}]},
        {"messages": [{"role": ["user"], "content": "x"}]},
        *({"messages": [{"role": role, "content": "x"}]} for role in ("asistant", "User", "", "function", "\ud800")),
        {"messages": [{"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}]},
        {"messages": USER, "functions": [{"name": "f"}]},
        {"messages": USER, "function_call": "auto"},
        *(
            {"messages": [{"role": "user", "content": content}]}
            for content in (5, 0, False, {"a": 1}, [5], ["x"], [None])
        ),
        *(
            {"messages": [{"role": "user", "content": [part]}]}
            for part in ({}, {"type": ["text"]}, {"type": "image_url"})
        ),
        {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
        *(
            {"messages": called(arguments)}
            for arguments in (5, "{", "[1]", "[" * 100_000, [1], "9" * 5000, '{"a": NaN}', "{}{}", '{"a": 1, "a": 2}')
        ),
        {"messages": [{"role": "assistant", "tool_calls": "x"}]},
        {"messages": [{"role": "assistant", "tool_calls": [1]}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"function": [1]}]}]},
        {"messages": USER, "tools": "x"},
        {"messages": USER, "tools": [1]},
        {"messages": USER, "tools": ["x"]},
        {"messages": USER, "tools": {"function": {}}},
        {"messages": USER, "tools": [{"function": "f"}]},
        {"messages": USER, "tools": [{"function": {"name": 1}}]},
        {"messages": USER, "stop": 5},
        {"messages": USER, "stop": {"a": 1}},
        {"messages": USER, "stop": [1]},
        {"messages": USER, "stop": ["x"] * 1025},
        {"messages": USER, "max_tokens": "9"},
        {"messages": USER, "max_tokens": 0},
        {"messages": USER, "max_completion_tokens": 0.0},
        {"messages": USER, "n": 0},
        {"messages": USER, "max_tokens": 1e999},
        {"messages": USER, "max_tokens": [1]},
        {"messages": USER, "max_completion_tokens": True},
        {"messages": USER, "n": 2},
        {"messages": USER, "n": "1"},
        {"messages": USER, "stream": "yes"},
        {"messages": USER, "stream": True, "stream_options": [1]},
        {"messages": USER, "stream": True, "stream_options": True},
    ],
    ids=lambda body: str(body)[:40],
)
def test_a_malformed_request_is_400_and_records_nothing(world, body):
    check_refused(*world.post(body))
    assert not world.session.branches


@pytest.mark.parametrize("depth", [100, 300, 500, 900, 2000])
@pytest.mark.parametrize("place", ["temperature", "tools", "arguments", "unknown"])
def test_nested_parts_are_answered_or_refused(world, place, depth):
    deep = '{"a":' * depth + "1" + "}" * depth
    body = {"messages": USER} | {
        "tools": {"tools": [{"type": "function", "function": {"name": "f", "parameters": "DEEP"}}]},
        "arguments": {"messages": called("DEEP")},
    }.get(place, {place: "DEEP"})
    status, answer = world.post(json.dumps(body).replace('"DEEP"', deep).encode())
    assert status == 200 or check_refused(status, answer) is None


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": "\ud83d"}]},
        {
            "messages": USER,
            "tools": None,
            "stop": None,
            "n": None,
            "stream": None,
            "stream_options": None,
            "max_tokens": None,
        },
        {"messages": USER, "max_tokens": 10**30},
        {"messages": USER, "max_tokens": -(10**30), "temperature": [[1]], "unknown": {"a": 1}},
        {"messages": USER, "stop": [""], "stream": True, "stream_options": {"include_usage": "yes", "more": [1]}},
        '{"messages": [{"role": "user", "content": "x"}]}'.encode("utf-16"),
    ],
    ids=lambda body: str(body)[:40],
)
def test_an_odd_request_is_answered(world, body):
    assert world.post(body)[0] == 200 and len(world.session.branches) == 1


def test_a_body_that_is_too_large_is_413(world):
    status, answer = world.post(b'{"messages": "' + b"x" * MOST_BYTES + b'"}')
    assert status == 413 and f"at most {MOST_BYTES} bytes" in json.loads(answer)["error"]["message"]


@pytest.mark.parametrize(
    "headers", [{"Content-Encoding": "gzip"}, {"Content-Type": "application/json; charset=no-such"}]
)
def test_headers_that_lie_are_the_clients_mistake(world, headers):
    assert 200 <= world.post({"messages": USER}, **headers)[0] < 500


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec=None), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
odd = st.shared(json_values, key="odd") | json_values
parts = st.fixed_dictionaries({}, optional={"type": st.just("text") | odd, "text": odd})
calls = st.fixed_dictionaries(
    {}, optional={"id": odd, "function": odd | st.fixed_dictionaries({}, optional={"name": odd, "arguments": odd})}
)
messages = st.fixed_dictionaries(
    {},
    optional={
        "role": st.sampled_from(["user", "system", "assistant", "tool", "developer"]) | odd,
        "content": st.text(max_size=8) | st.lists(parts, max_size=2) | odd,
        "tool_calls": st.lists(calls, max_size=2) | odd,
        "tool_call_id": odd,
        "name": odd,
    },
)
functions = st.fixed_dictionaries(
    {}, optional={"name": st.text(max_size=4) | odd, "parameters": odd, "description": odd}
)
tools = st.fixed_dictionaries({}, optional={"type": odd, "function": functions | odd})
requests = st.fixed_dictionaries(
    {"messages": st.just(USER) | st.lists(messages, max_size=3) | odd},
    optional={
        "tools": st.lists(tools, max_size=2) | odd,
        "stop": st.lists(st.text(max_size=3), max_size=3) | odd,
        "stream": st.booleans() | odd,
        "stream_options": st.fixed_dictionaries({}, optional={"include_usage": odd}) | odd,
        **dict.fromkeys(("n", "max_tokens", "max_completion_tokens", "temperature", "logprobs", "more"), odd),
    },
)
unhurried = settings(max_examples=150, derandomize=True, database=None)


REPLIES = [
    "hello",
    "<tool_call>",
    "</think>",
    FORM.call_text(Call("f", {"a": "</tool_call>"})),
    '{"name": ',
    "\ud7ff",
    "",
]


@unhurried
@given(
    st.lists(requests | st.tuples(st.integers(0, 3), st.lists(messages, max_size=2)), max_size=4),
    st.lists(st.lists(st.sampled_from(REPLIES), min_size=1, max_size=3).map("".join), min_size=1, max_size=3),
    st.sampled_from([8, 60, 400]),
)
def test_no_request_is_5xx_and_the_record_is_whole_behind_each(world, bodies, replies, room):
    """Requests of one session, some of which go on from what was answered before, until there is no room for a reply."""
    world.replies[:], said = replies, [USER]
    world.open(room)
    for body in bodies:
        if isinstance(body, tuple):
            body = {"messages": [*said[body[0] % len(said)], *body[1]]}
        before = [list(branch.talk.tokens) for branch in world.session.branches]
        status, answer = world.ask(body)
        assert status == 200 or check_refused(status, answer) is None
        if status == 200 and not body.get("stream"):
            said.append([*body["messages"], json.loads(answer)["choices"][0]["message"]])
        for branch, tokens in zip(world.session.branches, before, strict=False):
            assert list(branch.talk.tokens)[: len(tokens)] == tokens and (
                status == 200 or len(branch.talk.tokens) == len(tokens)
            )
        for branch in world.session.branches:
            talk = branch.talk
            assert not branch.busy and len(branch.ends) == len(talk.replies)
            full = talk.finish_reason == "tokens"
            assert full or branch.ends[-1] == (len(branch.messages), len(talk.context))
            assert not branch.ends or (branch.ends[-1][1] == len(talk.context) and len(talk.tokens) <= room)
            assert list(talk.context) == [*talk.prompt, *talk.tokens]
        assert sum(len(b.talk.replies) for b in world.session.branches) == len(world.sampled)
    world.session.close("stop")
    for branch in filter(lambda branch: branch.talk.replies, world.session.branches):
        mask = branch.talk.trajectory(False, prompt_id="p", group_id=0, support=SamplingSupport(), text="", part=0)[
            "loss_mask"
        ]
        assert mask.sum() == sum(len(reply.tokens) for reply in branch.talk.replies)


@unhurried
@given(st.binary(max_size=60) | json_values.map(lambda value: json.dumps(value).encode()))
def test_no_body_is_5xx(world, raw):
    check_refused(*world.post(raw))
    status, answer, reward = world.reward(raw)
    assert not reward and check_refused(status, answer) is None


@unhurried
@given(json_values | st.dictionaries(st.sampled_from(["correct", "form", "other"]), json_values, max_size=2))
def test_a_reward_is_a_number_of_a_known_part_or_is_refused(world, value):
    status, answer, reward = world.reward({"reward": value})
    if status == 200:
        assert reward.keys() <= {"correct", "form"} and all(abs(part) <= 1e9 for part in reward.values())
    else:
        assert not reward and check_refused(status, answer) is None


@pytest.mark.parametrize(
    "value",
    [
        "NaN",
        "Infinity",
        "-Infinity",
        '"1"',
        "null",
        "[1]",
        "9" * 400,
        "1e300",
        '{"form": "1"}',
        '{"bonus": 9}',
        "[" * 100_000,
    ],
)
def test_rewards_that_are_none(world, value):
    status, answer, reward = world.reward(f'{{"reward": {value}}}'.encode())
    assert not reward and check_refused(status, answer) is None


@pytest.mark.parametrize(
    ("value", "wanted"),
    [(1, {"correct": 1}), (-0.5, {"correct": -0.5}), (True, {"correct": 1}), ({"form": 0.5}, {"form": 0.5}), ({}, {})],
)
def test_rewards_that_are_some(world, value, wanted):
    status, _, reward = world.reward({"reward": value})
    assert status == 200 and reward == wanted and reward_parts(value) == wanted


def test_who_knows_the_base_url_alone_pays_nobody(world):
    """As the agent's tools do, which get it as OPENAI_BASE_URL."""
    for path in ("/v1/reward", "/reward", "/reward/", "/reward/x", "/reward/%ed%a0%80", "/v1/../reward"):
        assert world.post({"reward": 1}, path)[0] in (403, 404)
        assert not world.session.reward
    assert world.reward({"reward": 1})[2] == {"correct": 1}
    assert len(world.endpoint.sessions["s"].reward_key) == 22, "128 bits in base64"
