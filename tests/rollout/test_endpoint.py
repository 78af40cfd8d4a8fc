"""The recording endpoint with the real `openai` client and an agent framework: every sequence exact to the token."""

from __future__ import annotations

import json
import os
import signal
import threading
from types import SimpleNamespace

import httpx
import numpy as np
import openai
import pytest
from transformers import AutoTokenizer

from megatron_rl.agents.openai_agent import OpenAIAgents
from megatron_rl.algorithms.sampling_support import SamplingSupport
from megatron_rl.config.load import build_config
from megatron_rl.errors import UserError
from megatron_rl.rewards.verify import give_rewards
from megatron_rl.servers.client import EngineLost
from megatron_rl.tasks import Prompt
from tests.rollout.conftest import assert_agree, client_of, prefill_log_probs
from tests.rollout.test_agents import Asking, Echo, Plain, Talkative, pieces
from tests.rollout.test_engine import process_of
from tests.tasks.scripted import ONE_PROCESS

ECHO = Echo().schema


@pytest.fixture
def world(reference, monkeypatch, server):
    """world(function, **agent section) -> (agents, collect(count, samples) -> trajectories)."""
    opened = []

    def make(function, **section):
        monkeypatch.setattr("megatron_rl.agents.openai_agent.resolve", lambda *names: function)
        tree = {"model": {"path": str(reference.folder)}, "rollout": {"program": "openai_agent", "max_new_tokens": 200}}
        config = build_config(tree | {"agent": {"function": "tests:function", "tool_concurrency": 16} | section})
        agents = OpenAIAgents(config, AutoTokenizer.from_pretrained(reference.folder), Asking(Echo()), ONE_PROCESS)
        agents.dialect = Talkative(agents.tokenizer)
        opened.append(agents)

        def collect(count=8, samples=1, **settings):
            prompts = [
                agents.encode(Prompt(f"q:{i}", str(np.random.default_rng().integers(10**6)))) for i in range(count)
            ]
            asked = agents.collect(
                prompts=prompts, support=SamplingSupport(), samples_per_prompt=samples, max_new_tokens=200, **settings
            )
            asked.run(client_of(server))
            assert asked.complete
            agents.check(asked)
            zero = {"zero_truncated": agents.config.zero_truncated}
            return give_rewards(agents.task, agents.tokenizer, prompts, asked.trajectories(), **zero), asked

        return agents, collect

    yield make
    for agents in opened:
        agents.close()


def say(client: openai.OpenAI, messages, stream=False, **options) -> SimpleNamespace:
    """A reply, plain or put together from its chunks: content, tool_calls [(id, name, arguments)], finish."""
    if not stream:
        choice = client.chat.completions.create(model="policy", messages=messages, max_tokens=12, **options).choices[0]
        calls = [(c.id, c.function.name, c.function.arguments) for c in choice.message.tool_calls or []]
        return SimpleNamespace(content=choice.message.content, calls=calls, finish=choice.finish_reason)
    content, calls, finish = "", [], None
    for chunk in client.chat.completions.create(
        model="policy", messages=messages, max_tokens=12, stream=True, **options
    ):
        for choice in chunk.choices:
            content += choice.delta.content or ""
            calls += [(c.id, c.function.name, c.function.arguments) for c in choice.delta.tool_calls or []]
            finish = choice.finish_reason or finish
    return SimpleNamespace(content=content or (None if calls else ""), calls=calls, finish=finish)


def assistant(reply) -> dict:
    calls = [{"id": i, "type": "function", "function": {"name": n, "arguments": a}} for i, n, a in reply.calls]
    return {"role": "assistant", "content": reply.content} | ({"tool_calls": calls} if calls else {})


def converse(client, messages, turns, stream=False) -> list[dict]:
    """So many turns, whatever the policy says."""
    reply = None
    for number in range(turns):
        if number:
            messages = [
                *messages,
                *({"role": "tool", "tool_call_id": i, "content": json.loads(a)["text"]} for i, _, a in reply.calls),
            ]
            if not reply.calls:
                messages.append({"role": "user", "content": f"go on <|im_end|> {number}"})
        reply = say(client, messages, stream, tools=[ECHO])
        messages = [*messages, assistant(reply)]
    return messages


def check_exact(agents, trajectories, asked) -> None:
    """Every sequence is its prompt, replies as they were sampled, and observations of the dialect."""
    branches = [b for r in asked._requests for b in asked._sessions[r].branches if b.talk.replies]
    assert len(branches) == len(trajectories)
    for t, branch in zip(trajectories, branches, strict=True):
        assert t.tokens[: t.prompt_length].tolist() == list(branch.talk.prompt)
        assert pieces(t)[::2] == [reply.tokens.tolist() for reply in branch.talk.replies]
        mask = np.concatenate([np.full(len(piece), i % 2 == 0) for i, piece in enumerate(pieces(t))])
        assert (t["loss_mask"] == mask).all()


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_of_the_openai_client_is_one_sequence(world, server, reference, stream):
    kept = {}

    def agent(prompt, base_url):
        with openai.OpenAI(base_url=base_url, api_key="none", timeout=120) as client:
            kept[base_url] = converse(client, [{"role": "user", "content": prompt.text}], 4, stream)
        return {"correct": 0.5}

    agents, collect = world(agent)
    trajectories, asked = collect(8, samples=2)
    assert len(trajectories) == 16 and [t.group_id for t in trajectories] == [i // 2 for i in range(16)]
    check_exact(agents, trajectories, asked)
    assert all(
        len(t.turns) == 7 and t.part == 0 and t.reward == 0.5 and t.finish_reason in ("stop", "tokens")
        for t in trajectories
    )
    served = prefill_log_probs(client_of(server), [t.tokens.tolist() for t in trajectories])
    of_prefill = [one[t.prompt_length - 1 :][t["loss_mask"]] for one, t in zip(served, trajectories, strict=True)]
    sampled = [t["rollout_log_probs"][t["loss_mask"]] for t in trajectories]
    tied = reference.tied(trajectories)
    assert_agree(of_prefill, sampled, median=1e-5, largest=1e-4, tied=tied)
    for t, messages in zip(trajectories, kept.values(), strict=False):
        assert len(messages) >= 8 and not t.masked
    said = {message["content"] for messages in kept.values() for message in messages if message["role"] == "tool"}
    assert said, "some replies call"


def test_side_branches_are_sequences_of_their_own(world):
    """A sub-agent, a rewritten history, and two ways to go on from one reply."""

    def agent(prompt, base_url):
        with openai.OpenAI(base_url=base_url, api_key="none", timeout=120) as client:
            asked = [{"role": "user", "content": prompt.text}]
            messages = converse(client, asked, 2)
            say(client, [{"role": "system", "content": "You help."}, {"role": "user", "content": "sub-agent"}])
            say(client, [*messages, {"role": "user", "content": "one way"}], tools=[ECHO])
            say(client, [*messages, {"role": "user", "content": "another way"}], tools=[ECHO])
            rewritten = [
                *asked,
                {"role": "assistant", "content": "what it never said"},
                {"role": "user", "content": "so?"},
            ]
            say(client, rewritten, tools=[ECHO])
        return 1.0

    agents, collect = world(agent)
    trajectories, asked = collect(4)
    check_exact(agents, trajectories, asked)
    assert [t.part for t in trajectories] == [0, 1, 2, 3] * 4 and [t.group_id for t in trajectories] == [
        i // 4 for i in range(16)
    ]
    for main, sub, other, rewritten in zip(*(trajectories[i::4] for i in range(4)), strict=True):
        text = lambda t: agents.dialect.text(t.tokens)  # noqa: E731
        assert "one way" in text(main) and "You help." in text(sub) and "what it never said" in text(rewritten)
        assert "another way" in text(other) and "one way" not in text(other)
        shared = len(main.tokens[: main.prompt_length]) + main.turns[2].end
        assert other.tokens[:shared].tolist() == main.tokens[:shared].tolist(), "the same tokens up to the fork"
        assert other.prompt_length >= shared and len(other.turns) == 1, "which train in the first sequence alone"
        assert {t.reward for t in (main, sub, other, rewritten)} == {1.0}


def test_a_reward_by_a_call_and_one_by_the_task(world):
    def agent(prompt, base_url, reward_url):
        with openai.OpenAI(base_url=base_url, api_key="none", timeout=120) as client:
            say(client, [{"role": "user", "content": prompt.text}])
        number = int(prompt.prompt_id.partition(":")[2])
        if number % 2:
            assert httpx.post(reward_url, json={"reward": number}).status_code == 200
        assert httpx.post(reward_url, json={"reward": {"other": 9}}).status_code == 400
        assert httpx.post(f"{base_url}/reward", json={"reward": 9}).status_code == 404
        assert len(base_url.split("/")[-2]) == 22, "128 bits in base64: nobody guesses another one's session"

    _, collect = world(agent)
    for t in collect(8)[0]:
        assert t.reward == (t.group_id if t.group_id % 2 else float(bool(t.text)))


def test_requests_that_cannot_be_answered_say_why(world):
    problems = []

    def agent(prompt, base_url):
        with openai.OpenAI(base_url=base_url, api_key="none", timeout=120) as client:
            user = [{"role": "user", "content": "hi"}]
            picture = [{"type": "image_url", "image_url": {"url": "x"}}]
            for options in (
                {"messages": []},
                {"messages": user, "n": 2},
                {"messages": [{"role": "user", "content": picture}]},
            ):
                with pytest.raises(openai.BadRequestError) as found:
                    client.chat.completions.create(model="policy", **options)
                problems.append(str(found.value))
            assert [model.id for model in client.models.list()] == ["policy"]
        other = openai.OpenAI(base_url=base_url.replace("/v1", "x/v1"), api_key="none")
        with other, pytest.raises(openai.NotFoundError, match="no such session"):
            other.chat.completions.create(model="policy", messages=user)
        return 0.0

    _, collect = world(agent)
    trajectories, _ = collect(1)
    assert [word in problem for word, problem in zip(("messages", "n: ", "image_url"), problems, strict=True)] == [
        True
    ] * 3
    assert len(trajectories) == 1 and trajectories[0].response_length == 0, "an agent that never asked"


def test_a_conversation_that_is_full_says_so(world):
    def agent(prompt, base_url):
        client = openai.OpenAI(base_url=base_url, api_key="none", timeout=120)
        with client, pytest.raises(openai.BadRequestError, match="context_length_exceeded"):
            converse(client, [{"role": "user", "content": prompt.text}], 100)

    _, collect = world(agent)
    for t in collect(2)[0]:
        assert t.finish_reason == "tokens" and t.response_length <= 200 and t.turns[-1].role == "assistant"


@pytest.mark.parametrize("treatment", ["score", "zero", "mask"])
def test_a_sample_of_several_sequences_is_judged_as_a_whole(world, treatment):
    """What ended the sequence of the last reply has ended the sample; how a sub-agent's ended does not matter."""

    def agent(prompt, base_url):
        # Any sign ends a reply, and a part of one too, which is shown as U+FFFD: there is no reply without any.
        cut, whole = {}, {"stop": [*map(chr, range(256)), "\ufffd"]}
        last = cut if int(prompt.prompt_id.partition(":")[2]) % 2 else whole
        with openai.OpenAI(base_url=base_url, api_key="none", timeout=120) as client:
            for options in (whole if last is cut else cut, last):
                text = f"{prompt.text} {'last' if options is last else 'first'}"
                say(client, [{"role": "user", "content": text}], **options)
        return {"correct": 1.0}

    agents, collect = world(agent, on_truncation=treatment)
    agents.dialect = Plain(agents.tokenizer)
    # One of 512 tokens ends a reply, one of twelve with a chance of 0.023: all six that are cut with one of 2e-10.
    trajectories, _ = collect(12)
    ends = agents.dialect.stop_token_ids
    for main, other in zip(trajectories[::2], trajectories[1::2], strict=True):
        assert (main.group_id, main.part, other.part) == (main.group_id, 0, 1)
        was_cut = main.group_id % 2 == 1 and other.tokens[-1] not in ends
        assert main.finish_reason == other.finish_reason == ("tokens" if was_cut else "stop")
        assert {main.masked, other.masked} == {was_cut and treatment == "mask"}
        assert main["loss_mask"].any() != main.masked and other["loss_mask"].any() != other.masked
        assert main.reward == other.reward == float(not was_cut or treatment == "score")
    assert any(t.finish_reason == "tokens" for t in trajectories)


def test_texts_at_which_an_agent_wants_to_stop(world):
    """The record ends with the token that completes the text: nothing behind it was sampled, as far as anyone can tell."""

    def agent(prompt, base_url):
        with openai.OpenAI(base_url=base_url, api_key="none", timeout=120) as client:
            said[base_url] = say(client, [{"role": "user", "content": prompt.text}], stop=["e", "t"])
        return 0.0

    said = {}
    agents, collect = world(agent)
    trajectories, asked = collect(24)
    check_exact(agents, trajectories, asked)
    stopped = 0
    for t in trajectories:
        reply = t.tokens[t.prompt_length :].tolist()
        whole, before = agents.dialect.text(reply), agents.dialect.text(reply[:-1])
        assert "e" not in before and "t" not in before
        stopped += "e" in whole or "t" in whole
    assert stopped and not any("e" in (r.content or "") or "t" in (r.content or "") for r in said.values())


def test_an_agent_that_fails_masks_its_sample_and_one_that_always_fails_ends_the_run(world):
    def agent(prompt, base_url):
        with openai.OpenAI(base_url=base_url, api_key="none", timeout=120) as client:
            say(client, [{"role": "user", "content": prompt.text}])
        if prompt.prompt_id in failing:
            raise RuntimeError("broken")

    failing = {"q:1"}
    _, collect = world(agent)
    trajectories, _ = collect(4)
    assert [t.masked for t in trajectories] == [False, True, False, False]
    assert trajectories[1].finish_reason == "failure" and not trajectories[1]["loss_mask"].any()
    failing |= {f"q:{i}" for i in range(4)}
    with pytest.raises(
        UserError, match="all 4 conversations failed, the last one: its agent failed: RuntimeError: broken"
    ):
        collect(4)


def test_an_agent_that_takes_too_long_keeps_what_it_has(world):
    done = threading.Event()

    def agent(prompt, base_url):
        with openai.OpenAI(base_url=base_url, api_key="none", timeout=120) as client:
            say(client, [{"role": "user", "content": prompt.text}])
        if prompt.prompt_id == "q:0":
            done.wait(120)

    _, collect = world(agent, time_limit_s=14.0)  # a reply of a busy machine takes seconds
    try:
        trajectories, _ = collect(3)
    finally:
        done.set()
    assert [t.finish_reason == "time" for t in trajectories] == [True, False, False] and trajectories[0][
        "loss_mask"
    ].any()


def test_a_server_that_dies_is_waited_for_and_nothing_is_sampled_twice(world, server):
    asked_for, killed = [], []

    def agent(prompt, base_url):
        with openai.OpenAI(base_url=base_url, api_key="none", timeout=200, max_retries=0) as client:
            messages = [{"role": "user", "content": prompt.text}]
            for number in range(3):
                if number == 2 and not killed:
                    killed.append(prompt.prompt_id)
                    os.kill(process_of(server, "sglang_on_cpu"), signal.SIGKILL)
                asked_for.append(number)
                messages = [
                    *messages,
                    assistant(say(client, messages, tools=[ECHO])),
                    {"role": "user", "content": "and?"},
                ]

    agents, _ = world(agent)
    prompts = [agents.encode(Prompt(f"q:{i}", str(i))) for i in range(8)]
    settings = {"samples_per_prompt": 1, "max_new_tokens": 200}
    asked = agents.collect(prompts=prompts, support=SamplingSupport(), **settings)
    client = client_of(server)

    for _ in range(4):
        try:
            asked.run(client)
            break
        except EngineLost:
            server.stop()
            server.start()
            server.wait_ready()
    assert asked.complete and len(asked_for) == 24 and killed
    trajectories = asked.trajectories()
    check_exact(agents, trajectories, asked)
    assert [len(t.turns) for t in trajectories] == [5] * 8 and all(t.part == 0 for t in trajectories)


def test_smolagents(world):
    """A framework that rewrites its history in its own words: what it asks is what is recorded."""
    from smolagents import CodeAgent, OpenAIServerModel, ToolCallingAgent, tool

    @tool
    def echo(text: str) -> str:
        """Says it again.

        Args:
            text: what to say
        """
        return text

    def agent(prompt, base_url):
        kind = ToolCallingAgent if int(prompt.prompt_id.partition(":")[2]) % 2 else CodeAgent
        model = OpenAIServerModel("policy", api_base=base_url, api_key="none", max_tokens=12)
        made = kind(tools=[echo], model=model, max_steps=2, verbosity_level=-1)
        made.prompt_templates["system_prompt"] = "You call tools."  # theirs is longer than this model's context
        made.run(prompt.text)

    agents, collect = world(agent)
    trajectories, asked = collect(4)
    check_exact(agents, trajectories, asked)
    assert sum(not t.masked for t in trajectories) >= 4
