"""The real SGLang over HTTP: what it returns is what the trainer needs, and nothing is lost when it dies."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import numpy as np
import pytest

from megatron_rl.algorithms.sampling_support import SamplingSupport
from megatron_rl.errors import UserError
from megatron_rl.rollout.collect import Collection
from megatron_rl.servers.client import EngineLost, SGLangClient
from megatron_rl.servers.server import RolloutServer, reserve_port
from tests.rollout.conftest import Question, assert_agree, client_of, collect, first_groups, prefill_log_probs


def questions(count: int, vocab: int = 512, shortest: int = 3, longest: int = 40) -> list[Question]:
    rng = random.Random(count)
    return [
        Question(f"q:{i}", [rng.randrange(3, vocab) for _ in range(rng.randint(shortest, longest))])
        for i in range(count)
    ]


@pytest.fixture(scope="module")
def sampled(server, reference):
    """Trajectories at temperature 1 of prompts of unequal length, three samples each, with routes."""
    prompts = questions(12)
    trajectories, collection = collect(
        client_of(server), prompts, SamplingSupport(), samples_per_prompt=3, max_new_tokens=24, routes=reference.layout
    )
    assert collection.responses == 36 and collection.retries == 0
    return prompts, trajectories


def test_trajectories_are_in_prompt_order_and_complete(sampled, reference):
    prompts, trajectories = sampled
    end = reference.model.config.eos_token_id
    assert isinstance(end, int)
    assert [t.prompt_id for t in trajectories] == [p.prompt_id for p in prompts for _ in range(3)]
    assert [t.group_id for t in trajectories] == [p for p in range(len(prompts)) for _ in range(3)]
    for t in trajectories:
        prompt = prompts[t.group_id].tokens
        assert t.tokens[: t.prompt_length].tolist() == prompt
        assert len(t.fields["rollout_log_probs"]) == len(t.fields["loss_mask"]) == t.response_length > 0
        ended = t.tokens[-1] == end  # at the last token that is allowed, too
        assert t.finish_reason == ("stop" if ended else "length") and (ended or t.response_length == 24)
        assert [(s.version, s.start, s.end) for s in t.weight_spans] == [("default", 0, t.response_length)]
    # Samples of a prompt are different draws.
    assert len({tuple(t.tokens.tolist()) for t in trajectories}) > 30


def test_decode_log_probs_equal_prefill_and_transformers(server, reference, sampled):
    _, trajectories = sampled
    prefill = prefill_log_probs(client_of(server), [t.tokens.tolist() for t in trajectories])
    decode = [t["rollout_log_probs"] for t in trajectories]
    transformers, tied = [reference.log_probs(t.tokens).numpy() for t in trajectories], reference.tied(trajectories)
    for others in (prefill, transformers):
        responses = [one[t.prompt_length - 1 :] for one, t in zip(others, trajectories, strict=True)]
        assert_agree(responses, decode, median=1e-5, largest=1e-4, tied=tied)


def test_routes_equal_transformers(reference, sampled):
    _, trajectories = sampled
    layout = reference.layout
    equal = []
    for t in trajectories:
        assert t.routes.shape == (len(t.tokens) - 1, layout.layers, layout.topk) and t.routes.dtype == np.uint8
        ours = np.sort(t.routes.astype(np.int64), -1)
        equal.append((ours == reference.routes(t.tokens[:-1]).numpy()).all(-1).reshape(-1))
    # Of some 6,000 rows; near ties turn one in 3e5, and a few of the token's later layers with it.
    assert np.concatenate(equal).mean() > 0.999


def test_temperature_scales_the_returned_log_probs(server, reference):
    support = SamplingSupport(temperature=0.5)
    trajectories, _ = collect(client_of(server), questions(4), support, samples_per_prompt=2, max_new_tokens=12)
    scaled = [reference.log_probs(t.tokens, temperature=0.5).numpy()[t.prompt_length - 1 :] for t in trajectories]
    found, tied = [t["rollout_log_probs"] for t in trajectories], reference.tied(trajectories)
    assert_agree(scaled, found, median=1e-5, largest=1e-4, tied=tied)
    # Of all tokens together: a response may be a single token, whose log-prob the temperature hardly changes.
    plain = [reference.log_probs(t.tokens).numpy()[t.prompt_length - 1 :] for t in trajectories]
    assert np.median(np.abs(np.concatenate(plain) - np.concatenate(found))) > 1e-2


def test_greedy_is_reproducible_and_equals_transformers(server, reference):
    support = SamplingSupport(temperature=0.0)
    runs = [
        collect(client_of(server), questions(4), support, samples_per_prompt=1, max_new_tokens=12)[0] for _ in range(2)
    ]
    for first, second in zip(*runs, strict=True):
        assert first.tokens.tolist() == second.tokens.tolist()
        best = reference.logits(first.tokens)[first.prompt_length - 1 : -1].argmax(-1)
        assert best.tolist() == first.tokens[first.prompt_length :].tolist()


def test_stop_tokens_end_a_response(server):
    stop = list(range(100, 300))
    trajectories, _ = collect(
        client_of(server), questions(8), SamplingSupport(), samples_per_prompt=2, max_new_tokens=64, stop_token_ids=stop
    )
    ended = [t for t in trajectories if t.finish_reason == "stop"]
    assert len(ended) == len(trajectories)
    for t in ended:
        response = t.tokens[t.prompt_length :].tolist()
        assert response[-1] in [*stop, 2] and not set(response[:-1]) & set(stop)


def test_a_refused_prompt_is_an_error_and_is_not_retried(server):
    client = client_of(server)
    with pytest.raises(UserError, match="4500"):
        collect(client, [Question("long", [5] * 4500)], SamplingSupport(), samples_per_prompt=1, max_new_tokens=4)
    assert client.retried == 0


def test_an_unreachable_server_is_replaced_by_another(server):
    with reserve_port() as nobody:
        client = SGLangClient([f"127.0.0.1:{nobody.getsockname()[1]}", server.address], timeout_s=120, key=server.key)
        trajectories, collection = collect(
            client, questions(6), SamplingSupport(), samples_per_prompt=2, max_new_tokens=8
        )
    assert len(trajectories) == 12 and collection.retries > 0


def process_of(server: RolloutServer, name: str) -> int:
    """Id of the process below the server's supervisor whose command line contains `name`."""
    frontier = [server._process.pid]
    while frontier:
        below = [Path(f"/proc/{pid}/task/{pid}/children").read_text().split() for pid in frontier]
        frontier = [int(child) for children in below for child in children]
        for pid in frontier:
            if name in Path(f"/proc/{pid}/cmdline").read_text():
                return pid
    raise AssertionError(f"no process {name}")


@pytest.mark.parametrize("name", ["sglang_on_cpu", "sglang::scheduler"])
def test_a_server_that_hangs_is_seen(server, monkeypatch, name):
    """One whose first process stands still, and one whose scheduler does."""
    assert not server.hangs()
    monkeypatch.setattr("megatron_rl.servers.server.HANG_S", 1.0)
    pid = process_of(server, name)
    os.kill(pid, signal.SIGSTOP)
    try:
        assert server.hangs() and server.alive()
    finally:
        os.kill(pid, signal.SIGCONT)
    monkeypatch.undo()
    assert not server.hangs()


def test_a_server_that_is_paused_does_not_hang(server, monkeypatch):
    monkeypatch.setattr("megatron_rl.servers.server.HANG_S", 60.0)
    server._control(("/pause_generation", {"mode": "retract"}))
    try:
        assert not server.ready() and not server.hangs()
    finally:
        server._control(("/continue_generation", {}))
    assert server.ready()


def test_stragglers_are_aborted_once_enough_groups_are_complete(server):
    """The server stops at them and says how far they were; what is taken is whole, and later requests are answered as ever."""
    prompts, settings = questions(8), {"samples_per_prompt": 2, "max_new_tokens": 3000}
    ends = list(range(50, 54))  # responses of very different lengths, 128 tokens on average
    collection = Collection(prompts, SamplingSupport(), stop_token_ids=ends, **settings)
    first = first_groups(collection, client_of(server), 4)
    trajectories = collection.trajectories()
    assert len(first.taken) == 4 and [t.group_id for t in trajectories] == [g for g in first.taken for _ in range(2)]
    assert all(t.response_length > 0 and t.finish_reason in ("stop", "length") for t in trajectories)
    left = {r for r in range(16) if r // 2 not in first.taken}
    assert collection.aborted.keys() <= left and collection.aborted, "most have a straggler among their four"
    assert not collection._canceled, "the server gave back what it was told to stop at"
    assert 0 < max(collection.aborted.values()) < 3000
    again, _ = collect(client_of(server), prompts[:1], SamplingSupport(), stop_token_ids=ends, **settings)
    assert len(again) == 2 and all(t.response_length > 0 for t in again)


def test_what_has_not_been_sent_is_never_asked(server, monkeypatch):
    """Behind the concurrency, where groups that wait for their turn are the stragglers."""
    collection = Collection(questions(9), SamplingSupport(), samples_per_prompt=2, max_new_tokens=2100)
    collection.stop_token_ids = list(range(50, 90))
    client, asked = client_of(server, concurrency=4), list[tuple[str, bool]]()
    post = SGLangClient._post

    def posting(self, url, *arguments, **named):
        asked.append((url.rpartition("/")[2], self.aborted))
        return post(self, url, *arguments, **named)

    monkeypatch.setattr(SGLangClient, "_post", posting)
    first = first_groups(collection, client, 2)
    assert len(first.taken) == 2 and len(collection.trajectories()) == 4
    assert sum(length == 0 for length in collection.aborted.values()) >= 4 and len(collection.aborted) <= 14
    # Of those that were under way the last may have come with the second group, which leaves nothing to abort.
    after = {what for what, aborted in asked if aborted}
    assert after <= {"abort_request"}, "nor is the beginning of a prompt computed"


def test_kill_9_in_mid_step_loses_nothing(server):
    """Of the process that answers; tests/e2e and tests/sync kill the one that computes."""
    prompts = questions(64)
    killed = []

    def kill_once(arrived: int, wanted: int) -> None:
        if not killed:
            killed.append((arrived, wanted))
            os.kill(process_of(server, "sglang_on_cpu"), signal.SIGKILL)

    # A call for each request, and a few stop tokens, which give responses of very different lengths: most are on their way
    # when the first one arrives.
    collection = Collection(
        prompts,
        SamplingSupport(),
        samples_per_prompt=1,
        max_new_tokens=3000,
        stop_token_ids=list(range(50, 62)),
        on_progress=kill_once,
    )
    client = client_of(server)
    with pytest.raises(EngineLost, match="died"):
        collection.run(client)
    answered = collection.responses
    assert 0 < answered < 64 and not collection.complete
    server.stop()
    server.start()
    server.wait_ready()
    collection.run(client)
    assert collection.responses == 64, "what was answered before the end is kept"
    trajectories = collection.trajectories()
    assert [t.prompt_id for t in trajectories] == [p.prompt_id for p in prompts]
    assert all(t.response_length > 0 for t in trajectories)
