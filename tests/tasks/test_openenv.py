"""Episodes of a real OpenEnv server: rewards, errors of actions, and servers that die, hang, are full or forget their seeds."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from megatron_rl.config import AgentConfig, DataConfig
from megatron_rl.errors import UserError
from megatron_rl.tasks import build_task, openenv
from megatron_rl.tasks.openenv import to_action
from megatron_rl.tools.tool import ToolError, ToolLost
from megatron_rl.tools.toolbox import Toolbox
from tests.http_server import HttpServer
from tests.preloaded import PYTHON_WITH_VERIFIERS, VERIFIERS

SERVER = Path(__file__).with_name("openenv_server.py")


def start_server(sessions: int) -> HttpServer:
    """One of so many sessions."""
    assert Path(VERIFIERS.python).exists(), "tools/setup.sh --verifiers makes the environment that these tests want"
    return HttpServer(lambda port: [PYTHON_WITH_VERIFIERS, str(SERVER), str(port), str(sessions)])


@pytest.fixture
def server():
    """server(sessions) -> address; ends it."""
    started = []

    def start(sessions: int = 64) -> str:
        started.append(start_server(sessions))
        return started[-1].url

    yield start
    for one in started:
        one.close()


def task_of(url: str, **options):
    return build_task(DataConfig(task="openenv", options={"url": url, "size": 50, "timeout_s": 20} | options))


def final(text: str):
    return SimpleNamespace(calls=[], final=text, malformed=None)


async def episode(task, prompt, texts) -> tuple[list, dict[str, float]]:
    """What an episode answers to each text, and its reward."""
    world = task.environment(prompt, Toolbox(AgentConfig()))
    try:
        return [await world.respond(final(text)) for text in texts], world.reward_parts()
    finally:
        await world.close()


@pytest.mark.slow
def test_episodes_reward_what_the_server_says(server):
    task = task_of(server())
    prompts = task.prompts("train")
    held_out = task.prompts("eval")
    assert {p.metadata["seed"] for p in prompts}.isdisjoint(p.metadata["seed"] for p in held_out)
    assert len(prompts) == 50 and prompts[3].text == f"episode {prompts[3].metadata['seed']}: speak"
    rng = random.Random()
    texts = [["".join(rng.choices("ab", k=rng.randint(1, 9))) for _ in range(3)] for _ in range(40)]

    async def all_of_them():
        return await asyncio.gather(*(episode(task, prompts[i], texts[i]) for i in range(40)))

    for said, (answers, parts) in zip(texts, asyncio.run(all_of_them()), strict=True):
        assert [a and a[0]["content"] for a in answers] == ["step 1", "step 2", None]
        assert parts == {"reward": pytest.approx(sum(text.count("a") / len(text) for text in said))}
    assert task.score(prompts[:2], ["ab", "bb"]) == [{"reward": 0.5}, {"reward": 0.0}]  # one action is an episode


@pytest.mark.slow
def test_what_goes_wrong_is_the_models_or_the_servers(server):
    url = server(2)
    task = task_of(url, sessions=2)
    prompt = task.prompts("train")[0]
    [refused, unknown, heard], parts = asyncio.run(episode(task, prompt, ["raise", '{"word": "a"}', '{"text": "a"}']))
    assert "not that" in refused[0]["content"] and "text: Field required" in unknown[0]["content"]
    assert heard[0]["content"] == "step 1" and parts == {"reward": 1.0}, "the episode went on after what was refused"

    async def crowd(task):
        return await asyncio.gather(
            *(episode(task, prompt, ["a", "a", "a"]) for _ in range(12)), return_exceptions=True
        )

    assert [parts for _, parts in asyncio.run(crowd(task))] == [{"reward": 3.0}] * 12, "the others wait for a session"
    full = [found for found in asyncio.run(crowd(task_of(url, sessions=12))) if isinstance(found, ToolLost)]
    assert full and all("max_concurrent_envs" in str(error) for error in full)

    fickle = task_of(url, reset={"fickle": True})
    with pytest.raises(ToolLost, match="two resets with seed"):
        asyncio.run(episode(fickle, fickle.prompts("train")[0], ["a"]))
    hasty = task_of(url, timeout_s=2)
    with pytest.raises(ToolLost, match=r"no answer to step within 2 s"):
        asyncio.run(episode(hasty, prompt, ["hang"]))
    with pytest.raises(ToolLost, match="the connection ended at step"):
        asyncio.run(episode(task, prompt, ["die"]))
    with pytest.raises(UserError, match=f"OpenEnv server {url} gives no /schema"):
        task_of(url)


@pytest.mark.slow
def test_a_policy_that_thinks_for_long_keeps_its_session(server):
    """The test's server ends a session that answers no ping for three seconds."""
    task = task_of(server())
    prompt = task.prompts("train")[0]

    async def slowly():
        world = task.environment(prompt, Toolbox(AgentConfig()))
        await world.respond(final("a"))
        await asyncio.sleep(5)
        for text in ("b", "a"):
            said = await world.respond(final(text))
        await world.close()
        return said, world.reward_parts()

    assert asyncio.run(slowly()) == (None, {"reward": 2.0})


@pytest.mark.slow
def test_a_server_that_is_restarted_is_waited_for():
    server = start_server(8)
    try:
        prompts = task_of(server.url, timeout_s=60).prompts("train")
        first = prompts[0].text
        server.kill()
        again = threading.Timer(0.5, server.start)
        again.start()
        try:
            assert prompts[1].text != first
        finally:
            again.join()
    finally:
        server.close()


def test_headers_go_with_every_request(monkeypatch):
    """As a private server behind a proxy wants them."""
    monkeypatch.setenv("KEY_OF_TEST", "Bearer 123")
    seen = []

    async def schema(request):
        seen.append(request.headers.get("Authorization"))
        return web.json_response({"action": {"required": ["text"]}})

    async def talk(request):
        seen.append(request.headers.get("Authorization"))
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        await socket.receive()
        await socket.send_str(RIGHT % "x")
        return socket

    async def ask(options):
        app = web.Application()
        app.router.add_get("/schema", schema)
        app.router.add_get("/ws", talk)
        async with TestServer(app) as made:
            headers = openenv._headers(options)
            server = openenv.Server(str(made.make_url("")), sessions=1, timeout_s=60, headers=headers)
            assert await server.action_schema() == {"required": ["text"]}
            async with server.session() as session:
                assert (await session.reset({})).reward == 1.0

    asyncio.run(ask({"Authorization": "env:KEY_OF_TEST"}))
    assert seen == ["Bearer 123"] * 2
    for bad, message in (
        ({"A": "env:NOT_THERE"}, "headers.A: the environment variable NOT_THERE is not set"),
        ("A: b", "is wanted"),
    ):
        with pytest.raises(UserError, match=message):
            build_task(DataConfig(task="openenv", options={"url": "http://127.0.0.1:9", "headers": bad}))


def test_bad_configs_are_named():
    with pytest.raises(UserError, match=r"needs data.options.url"):
        build_task(DataConfig(task="openenv"))
    with pytest.raises(UserError, match=r"unknown key 'data.options.sizes'.*size"):
        build_task(DataConfig(task="openenv", options={"url": "http://127.0.0.1:9", "sizes": 3}))


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("crane", {"word": "crane"}),
        ("7", {"word": "7"}),
        (' {"word": "x", "n": 1} ', {"word": "x", "n": 1}),
        ('```json\n{"word": "x"}\n```', {"word": "x"}),
        ("[" * 200_000, {"word": "[" * 200_000}),
    ],
)
def test_text_becomes_an_action(text, action):
    schema = {"required": ["word"], "properties": {"word": {"type": "string"}}}
    assert to_action(text, schema) == action


def test_numbers_become_actions_and_several_fields_want_json():
    assert to_action("7", {"required": ["cell"], "properties": {"cell": {"type": "integer"}}}) == {"cell": 7}
    with pytest.raises(ToolError, match="JSON object with row, column"):
        to_action("7", {"required": ["row", "column"]})


async def answered_with(*texts: str) -> tuple[openenv.Result, int]:
    """The result of a step where a server answers it with these, and how many answers then wait to be read."""

    async def talk(request):
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        await socket.receive()
        with suppress(ConnectionError):
            for text in texts:
                await socket.send_str(text)
            await socket.receive()
        return socket

    app = web.Application()
    app.router.add_get("/ws", talk)
    async with (
        TestServer(app) as made,
        openenv.Server(str(made.make_url("")), sessions=1, timeout_s=60).session() as session,
    ):
        found = await session.step({})
        deadline = time.monotonic() + 30
        while len(texts) > 1 and session._answers.qsize() < openenv.MOST_UNREAD and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1 * (len(texts) > 1))
        return found, session._answers.qsize()


RIGHT = '{"type": "observation", "data": {"observation": {"text": "%s"}, "reward": 1}}'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (RIGHT % ("x" * openenv.MOST_BYTES), "the connection ended at step .*exceeds limit"),
        ("[" * 100_000, "does not have the form of OpenEnv: RecursionError"),
        (RIGHT.replace("1}", "9" * 400 + "}") % "", "does not have the form of OpenEnv: OverflowError"),
        (RIGHT.replace("1}", "NaN}") % "", "the reward of step is nan"),
        ("null", "does not have the form of OpenEnv"),
    ],
    ids=lambda text: text[:20],
)
def test_answers_that_are_none_lose_their_conversation(text, message):
    with pytest.raises(ToolLost, match=message) as error:
        asyncio.run(answered_with(text))
    assert len(str(error.value)) < 500


def test_messages_that_nobody_asked_for_do_not_fill_the_memory():
    found, waiting = asyncio.run(answered_with(*[RIGHT % "x"] * 10 * openenv.MOST_UNREAD))
    assert waiting == openenv.MOST_UNREAD
    assert found.observation == {"text": "x"} and found.reward == 1.0
