"""Which server gets which request, by the real client against local HTTP endpoints that count; no engine is needed for it."""

from __future__ import annotations

import asyncio
import base64
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from aiohttp import web

from megatron_rl.agents.agent import Agents
from megatron_rl.agents.openai_agent import OpenAIAgents
from megatron_rl.algorithms.sampling_support import SamplingSupport
from megatron_rl.config.plan import share_of
from megatron_rl.data.engine_routes import EngineFeatures, EngineRoutes
from megatron_rl.errors import UserError
from megatron_rl.rollout.collect import Collection
from megatron_rl.rollout.program import SingleTurn
from megatron_rl.servers import client as client_module
from megatron_rl.servers.client import EngineLost, SGLangClient, server_order
from tests.rollout.conftest import Question

LAYOUT = EngineRoutes(layers=2, moe_layers=(0, 1), experts=8, topk=2)


@dataclass
class Endpoint:
    """What one of them was asked: the prompts of each call."""

    sampled: list[list[tuple[int, ...]]] = field(default_factory=list)
    prefixes: list[tuple[int, ...]] = field(default_factory=list)
    refuses: int = 0
    """Status with which it does."""
    says: bytes | None = None
    """In the place of its answer."""
    hangs: bool = False
    delay_s: float = 0.0
    ready_status: int = 200
    version: str = "0"
    address: str = ""

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        await asyncio.sleep(600 if self.hangs else self.delay_s)
        if self.refuses:
            return web.Response(status=self.refuses, body=b"busy \xff", content_type="text/plain", charset="no-such")
        prompts = [tuple(ids) for ids in body["input_ids"]]
        sampling = body["sampling_params"]  # of all prompts, or one for each
        if isinstance(sampling, dict) and not sampling["max_new_tokens"]:
            self.prefixes += prompts
            return web.json_response([{"output_ids": []} for _ in prompts])
        self.sampled.append(prompts)
        if self.says is not None:
            return web.Response(body=self.says)
        return web.json_response([self.reply(prompt, body) for prompt in prompts])

    def reply(self, prompt: tuple[int, ...], body: dict) -> dict:
        meta = {
            "finish_reason": {"type": "stop"},
            "weight_version": self.version,
            "output_token_logprobs": [[-0.5, 7, None]],
        }
        if body["return_routed_experts"]:
            table = np.tile(np.arange(LAYOUT.topk, dtype=np.uint8), (len(prompt), LAYOUT.layers, 1))
            meta["routed_experts"] = base64.b64encode(table.tobytes()).decode()
        return {"output_ids": [7], "meta_info": meta}

    async def ready(self, request: web.Request) -> web.Response:
        if self.hangs:
            await asyncio.sleep(600)
        return web.Response(status=self.ready_status)

    @property
    def responses(self) -> int:
        return sum(len(call) for call in self.sampled)


@pytest.fixture
def endpoints():
    """endpoints(n): n of them on ports of their own, in a thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    runners = []

    async def start(endpoint: Endpoint) -> None:
        app = web.Application()
        app.router.add_post("/generate", endpoint.generate)
        app.router.add_get("/ready", endpoint.ready)
        runners.append(web.AppRunner(app, shutdown_timeout=0.1))
        await runners[-1].setup()
        site = web.TCPSite(runners[-1], "127.0.0.1", 0)
        await site.start()
        endpoint.address = f"127.0.0.1:{site._server.sockets[0].getsockname()[1]}"

    def make(count: int) -> list[Endpoint]:
        made = [Endpoint() for _ in range(count)]
        for endpoint in made:
            asyncio.run_coroutine_threadsafe(start(endpoint), loop).result(30)
        return made

    yield make
    for runner in runners:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(30)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(30)
    loop.close()


def ask(
    servers: list[Endpoint],
    *,
    leaders: int,
    prompts: int,
    samples: int,
    max_new_tokens: int,
    options: dict | None = None,
    versions: set[str] | None = None,
    timeout_s: float = 30,
    **settings,
) -> list:
    """Every leader asks for its share; all trajectories. options, versions, timeout_s: of the clients."""
    questions = [Question(str(i), [5, 6, i + 10]) for i in range(prompts)]
    found = []
    for leader in range(leaders):
        collection = Collection(
            questions,
            SamplingSupport(),
            samples_per_prompt=samples,
            max_new_tokens=max_new_tokens,
            share=share_of(prompts * samples, leader, leaders),
            **settings,
        )
        client = SGLangClient(
            [server.address for server in servers], timeout_s=timeout_s, versions=versions, **(options or {})
        )
        collection.run(client)
        assert collection.complete and collection.responses == len(collection.share)
        found += collection.trajectories()
    return found


@pytest.mark.parametrize("max_new_tokens", [32, 32768])
@pytest.mark.parametrize(
    ("leaders", "prompts", "samples", "servers"),
    [(32, 64, 8, 16), (32, 2, 16, 16), (1, 64, 8, 16), (5, 12, 8, 7), (16, 16, 1, 16), (3, 2, 5, 4)],
)
def test_requests_are_spread_evenly(endpoints, monkeypatch, leaders, prompts, samples, servers, max_new_tokens):
    made = endpoints(servers)
    found = ask(made, leaders=leaders, prompts=prompts, samples=samples, max_new_tokens=max_new_tokens)
    counts = [server.responses for server in made]
    assert max(counts) - min(counts) <= 1, counts
    if prompts * samples == 512:
        assert max(counts) / np.mean(counts) <= 1.1
    # Nothing is lost, and all groups are whole.
    assert [t.group_id for t in found] == [p for p in range(prompts) for _ in range(samples)]
    assert [t.tokens[2] - 10 for t in found] == [t.group_id for t in found]
    if max_new_tokens > 4096:
        assert all(len(call) == 1 for server in made for call in server.sampled), "a call has one long response"


def test_most_samples_of_a_prompt_share_a_server_that_computes_it_once(endpoints):
    made = endpoints(4)
    ask(made, leaders=2, prompts=6, samples=8, max_new_tokens=32768)
    for server in made:
        samples = Counter(prompt for call in server.sampled for prompt in call)
        assert len(samples) == 2 and sorted(samples.values()) == [4, 8]  # 12 requests each
        # By each leader: they do not know of each other.
        assert Counter(server.prefixes).keys() == samples.keys() and len(server.prefixes) <= 2 * len(samples)


@pytest.mark.parametrize("servers", [1, 2, 3, 16])
def test_every_server_is_tried_before_one_is_tried_again(servers):
    for number in range(48):
        order = server_order(number, 48, servers)
        assert sorted(order) == list(range(servers))
    # Neighbors that share their first server go on to different ones.
    seconds = Counter(server_order(number, 48, servers)[1] for number in range(48 // servers)) if servers > 1 else {}
    assert not seconds or max(seconds.values()) - min(seconds.values()) <= 1


@pytest.mark.parametrize("status", [503, 429, 408])
def test_what_a_dead_or_busy_server_had_goes_to_all_others(endpoints, monkeypatch, status):
    monkeypatch.setattr(client_module, "FIRST_PAUSE_S", 0.01)
    made = endpoints(5)
    made[2].refuses = status
    ask(made, leaders=4, prompts=10, samples=8, max_new_tokens=32768)
    assert [server.responses for server in made] == [20, 20, 0, 20, 20]


def test_a_request_that_a_server_does_not_take_ends_the_run(endpoints):
    [one] = endpoints(1)
    one.refuses = 400
    with pytest.raises(UserError, match=r"refused a request \(400\): busy") as error:
        ask([one], leaders=1, prompts=1, samples=1, max_new_tokens=8)
    assert not isinstance(error.value, EngineLost)


@pytest.mark.parametrize(
    ("says", "message"),
    [
        (b"[" * 100_000, "not JSON"),
        (b'[{"output_ids": [' + b"9" * 5000 + b"]}]", "not JSON"),
        (b'[{"output_ids": "\xff"}]', "not JSON"),
        (b"[]", "answered 1 requests with something else"),
        (b"[null]", "is not what release"),
        (b'{"output_ids": [7]}', "something else"),
    ],
)
def test_answers_that_are_none_are_told_in_one_line_with_the_server(endpoints, monkeypatch, says, message):
    monkeypatch.setattr(client_module, "FIRST_PAUSE_S", 0.01)
    [one] = endpoints(1)
    one.says = says
    with pytest.raises(UserError, match=message) as error:
        ask([one], leaders=1, prompts=1, samples=1, max_new_tokens=8, options={"retries": 1})
    assert one.address in str(error.value) and "\n" not in str(error.value)


def test_what_a_server_without_a_sign_of_life_has_is_asked_of_the_others(endpoints):
    """As where its host is cut off: no connection breaks, and nothing comes."""
    made = endpoints(3)
    made[1].hangs = True
    start = time.monotonic()
    settings = {"leaders": 1, "prompts": 6, "samples": 4, "max_new_tokens": 32768}
    # Three seconds for an answer to a look: the others give it, however busy the machine is.
    found = ask(made, **settings, options={"health": (0.2, 3.0)}, timeout_s=250)
    assert time.monotonic() - start < 200, "long before the client's own limit of 250 s"
    assert len(found) == 24 and [server.responses for server in made] == [12, 0, 12]


@pytest.mark.parametrize("status", [200, 503])
def test_an_answer_slower_than_a_look_at_the_server_is_waited_for(endpoints, status):
    """Also of one that is paused, as in a push, which SGLang then calls not ready."""
    [one] = endpoints(1)
    one.delay_s, one.ready_status = 1.0, status
    found = ask([one], leaders=1, prompts=1, samples=2, max_new_tokens=9999, options={"health": (0.1, 3.0)})
    assert len(found) == 2 and one.responses == 2


def test_answers_of_weights_that_were_not_pushed_are_not_taken(endpoints, monkeypatch):
    """A server that was started anew at its old address has those of its folder."""
    monkeypatch.setattr(client_module, "FIRST_PAUSE_S", 0.01)
    made = endpoints(3)
    made[0].version = "default"
    found = ask(made, leaders=1, prompts=6, samples=4, max_new_tokens=32768, versions={"0", "1"})
    assert {span.version for t in found for span in t.weight_spans} == {"0"} and len(found) == 24
    for server in made:
        server.version = "default"
    with pytest.raises(EngineLost, match="weights of version 'default', which this run has not pushed"):
        ask(made, leaders=1, prompts=1, samples=1, max_new_tokens=8, versions={"0"})
    assert len(ask(made, leaders=1, prompts=1, samples=1, max_new_tokens=8)) == 1, "without a trainer any will do"


def test_a_failed_call_samples_what_it_did_not_get_and_no_more(endpoints, monkeypatch):
    """The first call with the last prompt is refused after the others were answered."""
    monkeypatch.setattr(client_module, "FIRST_PAUSE_S", 0.01)
    [one] = endpoints(1)
    refused = []
    original = one.reply

    def reply(prompt, body):
        if not refused:
            refused.append(prompt)
            raise web.HTTPServiceUnavailable
        return original(prompt, body)

    one.reply = reply
    ask([one], leaders=1, prompts=2, samples=8, max_new_tokens=32768)
    assert len(refused) == 1 and one.responses == 16 + 1, "one response is sampled again"


def test_calls_are_as_large_as_what_they_carry_allows():
    """Short responses share a call, by tokens and, with routes and features, by bytes."""
    questions = [Question(str(i), [5]) for i in range(8)]
    wide = EngineRoutes(layers=100, moe_layers=tuple(range(100)), experts=128, topk=8)  # 4,266 bytes a token
    features = EngineFeatures(moe_layers=100, hidden=2048, experts=128, dtype=torch.bfloat16)

    def sizes(max_new_tokens: int, **settings) -> list[int]:
        collection = Collection(
            questions, SamplingSupport(), samples_per_prompt=4, max_new_tokens=max_new_tokens, **settings
        )
        calls = collection._calls(servers=2)
        assert sorted(r for call in calls for r in call.requests) == list(range(32))
        return [len(call.requests) for call in calls]

    assert sizes(16) == [16, 16] and sizes(1024) == [4] * 8 and sizes(4096) == sizes(9999) == [1] * 32
    assert max(sizes(1024, routes=wide)) == 3
    mixed = Collection(
        questions, SamplingSupport(), samples_per_prompt=4, max_new_tokens=16, features=features, features_from=12
    )
    for call in mixed._calls(servers=2):
        assert (call.features == features) == (call.requests[0] >= 12) == (call.requests[-1] >= 12)
        assert call.features == features or call.features == features.logits_alone
        assert (len(call.requests) == 1) == (call.features == features)


def test_features_of_samples_that_may_be_several_sequences_are_all_whole():
    """Which sequence is of the first update is known by their number alone, which a session does not have before its end."""
    features = EngineFeatures(moe_layers=2, hidden=16, experts=8, dtype=torch.bfloat16)
    settings = {
        "prompts": [Question(str(i), [5]) for i in range(4)],
        "support": SamplingSupport(),
        "samples_per_prompt": 2,
        "max_new_tokens": 8,
        "features": features,
        "features_from": 4,
    }

    class Several(Collection):
        def trajectories(self):
            return 2 * super().trajectories()

    class Program(SingleTurn):
        def __init__(self):
            pass

    several = Program()
    several.collection = Several

    def agents(history: str) -> SimpleNamespace:
        return SimpleNamespace(settings=SimpleNamespace(history=history))

    whole = [OpenAIAgents.collect(agents("sampled"), **settings), Agents.collect(agents("rendered"), **settings)]
    for collection in (*whole, several.collect(**settings)):
        assert {collection._features_of(r) for r in range(8)} == {features}
    for collection in (Agents.collect(agents("sampled"), **settings), Program().collect(**settings)):
        assert [collection._features_of(r).hidden for r in range(8)] == [0] * 4 + [16] * 4


def test_each_server_gets_a_call_in_turn():
    """Where fewer fit under the concurrency than there are, the first ones are not all of one server."""
    questions = [Question(str(i), [5]) for i in range(8)]
    collection = Collection(questions, SamplingSupport(), samples_per_prompt=4, max_new_tokens=9999)
    first = [server_order(call.requests[0], 32, 4)[0] for call in collection._calls(servers=4)]
    assert all(one != other for one, other in pairwise(first)) and first[:4] == [0, 1, 2, 3]


def test_replies_are_decoded_beside_the_event_loop(endpoints):
    threads = []

    class Watched(EngineRoutes):
        def decode(self, encoded, tokens):
            threads.append(threading.current_thread())
            return super().decode(encoded, tokens)

    found = ask(endpoints(1), leaders=1, prompts=2, samples=2, max_new_tokens=9999, routes=Watched(**vars(LAYOUT)))
    assert all(t.routes.shape == (3, 2, 2) for t in found)
    assert len(threads) == 4 and threading.main_thread() not in threads
