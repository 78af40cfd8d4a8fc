"""Conversations with the real SGLang: exact to the token, scored alike by both sides, and bounded whatever tools do."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from dataclasses import replace
from types import MappingProxyType, SimpleNamespace
from typing import override

import numpy as np
import pytest
from transformers import AutoTokenizer

from megatron_rl.agents.agent import Agents
from megatron_rl.algorithms.sampling_support import SamplingSupport
from megatron_rl.config.load import build_config
from megatron_rl.data.engine_routes import sampled_by
from megatron_rl.dialects import Call, Parsed
from megatron_rl.dialects.text import Qwen
from megatron_rl.errors import UserError
from megatron_rl.rewards.verify import give_rewards
from megatron_rl.routing.table import has_route
from megatron_rl.servers.client import EngineLost
from megatron_rl.tasks import Prompt, Task
from megatron_rl.tools.tool import Tool, ToolLost
from megatron_rl.tools.toolbox import Environment
from tests.ranks import run_ranks
from tests.rollout.conftest import assert_agree, client_of, first_groups, prefill_log_probs
from tests.rollout.test_agreement import ask_trainer
from tests.rollout.test_engine import process_of
from tests.rollout.test_routes import agreement, generate
from tests.tasks.scripted import ONE_PROCESS


class Talkative(Qwen):
    """What a random model says is a call in six of eight replies, malformed in one, and an answer in one."""

    @override
    def parse(self, token_ids):
        kind = sum(token_ids) % 8
        if kind == 0:
            return Parsed(final=self.text(token_ids))
        if kind == 1:
            return Parsed(malformed="not like this")
        return Parsed([Call("echo", {"text": str(sum(token_ids))})])


class Plain(Qwen):
    """Whatever a random model says is an answer."""

    @override
    def parse(self, token_ids):
        return Parsed(final=self.text(token_ids))


class Echo(Tool):
    """Says its argument again, after having done what the test wants."""

    name = "echo"
    parameters = MappingProxyType({"type": "object", "properties": {"text": {"type": "string"}}})

    def __init__(self):
        self.calls = 0
        self.sessions = []

    @override
    def session(self):
        self.sessions.append(SimpleNamespace(calls=0))
        return self.sessions[-1]

    @override
    async def call(self, arguments, session):
        self.calls += 1
        session.calls += 1
        await self.do(session)
        return f"<|im_end|>{arguments['text']}"

    async def do(self, session):
        """What the test wants."""


class Asking(Task):
    """Random questions; an answer that is there is right."""

    def __init__(self, tool: Tool):
        self.tool, self.parts, self.weights = tool, ("correct", "well_formed"), {"correct": 1.0, "well_formed": 0.0}

    @override
    def tools(self):
        return [self.tool]

    @override
    def score(self, prompts, texts, truncated=()):
        return [{"correct": float(bool(text))} for text in texts]


@pytest.fixture
def world(reference):
    """world(tool, **agent section) -> (agents, prompts)."""
    opened = []

    def make(tool: Tool, **section) -> Agents:
        tree = {"model": {"path": str(reference.folder)}, "rollout": {"program": "agent", "max_new_tokens": 160}}
        settings = {"max_turns": 4, "max_turn_tokens": 12, "tool_timeout_s": 60} | section
        agents = Agents(
            build_config(tree | {"agent": settings}),
            AutoTokenizer.from_pretrained(reference.folder),
            Asking(tool),
            ONE_PROCESS,
        )
        agents.dialect = Talkative(agents.tokenizer)
        opened.append(agents)
        return agents

    yield make
    for agents in opened:
        agents.close()


def questions(agents: Agents, count: int) -> list[Prompt]:
    rng = np.random.default_rng()
    return [agents.encode(Prompt(f"q:{i}", str(rng.integers(10**6)))) for i in range(count)]


def collection(agents: Agents, prompts: list[Prompt], samples: int = 1, **settings):
    known = {"samples_per_prompt": samples, "max_new_tokens": agents.config.rollout.max_new_tokens}
    return agents.collect(prompts=prompts, support=SamplingSupport(), **known | settings)


def pieces(t) -> list[list[int]]:
    response = t.tokens[t.prompt_length :].tolist()
    return [response[turn.start : turn.end] for turn in t.turns]


def turns_apart(trajectories, ours: list[np.ndarray]) -> set[tuple[int, int]]:
    """(conversation, turn) of the replies whose log-probs are apart by more than 1e-3 in the median."""
    found = set()
    for number, (t, values) in enumerate(zip(trajectories, ours, strict=True)):
        whole = np.zeros(t.response_length, np.float32)
        whole[t["loss_mask"]] = values
        for place, turn in enumerate(t.turns):
            stretch = slice(turn.start, turn.end)
            if turn.role == "assistant" and np.median(np.abs(whole - t["rollout_log_probs"])[stretch]) > 1e-3:
                found.add((number, place))
    return found


def test_conversations_are_exact_and_both_sides_score_them_alike(server, reference, world):
    agents = world(Echo())
    prompts = questions(agents, 16)
    asked = collection(agents, prompts, samples=4, routes=reference.layout)
    asked.run(client_of(server))
    assert asked.complete and asked.retries == 0
    trajectories = asked.trajectories()
    assert len(trajectories) == 64 and len({len(t.turns) for t in trajectories}) > 2
    for request, t in enumerate(trajectories):
        replies = [reply.tokens.tolist() for reply in asked._talks[request].replies]
        assert t.tokens[: t.prompt_length].tolist() == prompts[request // 4].tokens
        assert pieces(t)[::2] == replies, "replies as they were sampled"
        for reply, observation in zip(replies, pieces(t)[1::2], strict=False):
            parsed = agents.dialect.parse(reply)
            result = f"Error: {parsed.malformed}" if parsed.malformed else f"<|im_end|>{sum(reply)}"
            assert observation == agents.dialect.observation([result], after=reply)
        mask = np.concatenate([np.full(len(piece), i % 2 == 0) for i, piece in enumerate(pieces(t))])
        assert (t["loss_mask"] == mask).all() and t.turns[-1].role == "assistant"
        assert t.finish_reason in ("stop", "turns", "tokens")
    served = prefill_log_probs(client_of(server), [t.tokens.tolist() for t in trajectories])
    of_prefill = [one[t.prompt_length - 1 :][t["loss_mask"]] for one, t in zip(served, trajectories, strict=True)]
    sampled = [t["rollout_log_probs"][t["loss_mask"]] for t in trajectories]
    tied = reference.tied(trajectories)
    assert_agree(of_prefill, sampled, median=1e-5, largest=1e-4, tied=tied)

    # A turn that is decoded and encoded again: the very thing that must not happen.
    for number, t in enumerate(trajectories):
        again = agents.tokenizer.encode(agents.dialect.text(pieces(t)[0]), add_special_tokens=False)
        if again != pieces(t)[0] and len(t.turns) > 1 and not tied[number]:
            break
    end = t.turns[0].end
    before, after = t.tokens[: t.prompt_length], t.tokens[t.prompt_length + end :]
    shift = len(again) - end
    fields = {
        name: np.concatenate([np.resize(values[:end], len(again)), values[end:]]) for name, values in t.fields.items()
    }
    planted = replace(
        t,
        tokens=np.concatenate([before, np.asarray(again, np.int32), after]),
        fields=fields,
        routes=None,
        turns=[
            replace(turn, start=turn.start + shift * (i > 0), end=turn.end + shift) for i, turn in enumerate(t.turns)
        ],
    )
    plain, with_planted = ask_trainer(
        reference.folder,
        ("fp32", trajectories, SamplingSupport()),
        ("fp32", [*trajectories[:number], planted, *trajectories[number + 1 :]], SamplingSupport()),
    )
    assert_agree(plain, sampled, median=1e-5, largest=1e-4, tied=tied)
    apart = turns_apart(trajectories, plain)
    turns = sum(len(t.turns) for t in trajectories)
    print(f"{len(apart)} of {turns} turns apart")
    assert len(apart) <= turns / 50, "two experts nearly tied"
    found = turns_apart([*trajectories[:number], planted, *trajectories[number + 1 :]], with_planted)
    # Where experts nearly tie, another micro-batch may choose the other one.
    assert {one for one, _ in found - apart if not tied[one]} == {number}


def of_three_turns(agents: Agents, server, reference, count: int) -> list:
    """Trajectories with routes and at least three replies, of so many conversations.

    Three replies in four call, and go on: nine in 16 conversations have as many, none or one of 32 with a chance of 2e-10.
    """
    asked = collection(agents, questions(agents, count), routes=reference.layout)
    asked.run(client_of(server))
    several = [t for t in asked.trajectories() if len(t.turns) >= 5]
    assert len(several) > 1
    return several


def test_what_is_known_is_not_asked_and_what_finishes_is_told_once(server, world):
    agents = world(Echo())
    prompts = questions(agents, 6)
    told: dict[int, list] = {}

    def tell(samples: dict[int, list]) -> None:
        assert not told.keys() & samples.keys()
        told.update(samples)

    first = collection(agents, prompts, samples=2, on_finished=tell)
    first.run(client_of(server))
    assert sorted(told) == list(range(12)) and [t for r in range(12) for t in told[r]] == first.trajectories()
    known = {r: told.pop(r) for r in random.sample(range(12), 5)}
    told.clear()
    second = collection(agents, prompts, samples=2, known=known, on_finished=tell)
    assert second.responses == 5 and not second.complete
    second.run(client_of(server))
    assert second.complete and sorted(told) == sorted(set(range(12)) - known.keys())
    assert [t for r in range(12) for t in (known | told)[r]] == second.trajectories()


def test_routes_of_a_conversation_are_those_of_one_prefill(server, reference, world):
    several = of_three_turns(world(Echo()), server, reference, 32)
    whole = generate(
        server,
        [t.tokens[:-1].tolist() for t in several],
        {"temperature": 0, "max_new_tokens": 1},
        routes=reference.layout,
    )
    for t, reply in zip(several, whole, strict=True):
        assert t.routes.shape == (len(t.tokens) - 1, *reply.routes.shape[1:]) and has_route(torch_of(t.routes)).all()
        assert agreement(t.routes, reply.routes) >= 0.98  # near-ties
        assert sampled_by(t, t.weight_spans[-1].version) and len(t.weight_spans) == 1


def routes_used(model: str, samples: list) -> list[np.ndarray]:
    """Per sample [tokens - 1, layers, topk]: the experts to which a pass of the trainer under r3 sends each token, sorted.

    Runs in a process of its own.
    """
    from megatron_rl.distributed import parallel
    from megatron_rl.models.router import routers
    from megatron_rl.run.update_hooks import update_hooks
    from megatron_rl.trainer.trainer import build_trainer

    values = {"model": {"path": model}, "batch": {"tokens_per_micro_batch": 1024}, "precision": {"train": "fp32"}}
    config = build_config(values | {"routing": {"source": "r3"}})
    hooks = update_hooks(config, scores_alone=True)
    ranks = parallel.initialize(config.parallel, config.seed)
    trainer = build_trainer(config, ranks, total_updates=1, support=SamplingSupport(), hooks=hooks)
    chosen: dict[int, list] = {}
    for layer, router in routers(trainer.chunks):
        chosen[layer] = []
        router.register_forward_hook(lambda _module, _inputs, out, to=chosen[layer]: to.append(out[1]))
    batches = trainer.pack(samples)
    trainer.compute_log_probs(batches)
    found = [np.full(sample.routes.shape, -1) for sample in samples]
    for number, batch in enumerate(batches):
        for place, layer in enumerate(sorted(chosen)):
            for t, experts in enumerate(chosen[layer][number]):
                row, position = int(batch.segments.ids[t]), int(batch.position_ids[0, t])
                if 0 <= row < len(batch.samples) and position < len(found[batch.samples[row]]):
                    found[batch.samples[row]][position, place] = experts.nonzero()[:, 0]
    assert len(batches) > 1
    return found


def test_routes_of_three_turns_are_replayed_exactly(server, reference, world):
    several = of_three_turns(world(Echo()), server, reference, 32)
    # Others than the trainer would choose by itself, so that a free choice shows, wherever it is.
    others = [replace(t, routes=(t.routes + 1) % reference.layout.experts) for t in several]
    [used] = run_ranks(1, "tests.rollout.test_agents:routes_used", (str(reference.folder), [*several, *others]))
    for t, found in zip([*several, *others], used, strict=True):
        assert (found == np.sort(t.routes, -1)).all()


def torch_of(array: np.ndarray):
    import torch

    return torch.from_numpy(array)


def test_the_same_seed_draws_the_same_conversations(server, world):
    agents = world(Echo())
    prompts = questions(agents, 6)
    runs = []
    for _ in range(2):
        asked = collection(agents, prompts, samples=2, seed="7/3")
        asked.run(client_of(server))
        runs.append([t.tokens.tolist() for t in asked.trajectories()])
    # Logits of two batches differ by 1e-7: some 600 draws, each on a border between two tokens with a chance of 1e-5 (see
    # test_seeds.py), and near ties of experts, set four conversations apart with a chance of 1e-10.
    assert sum(a == b for a, b in zip(*runs, strict=True)) >= 9
    assert len({tuple(tokens) for tokens in runs[0]}) == 12


def test_a_server_killed_in_turn_3_loses_nothing_and_nothing_is_sampled_twice(server, world):
    class Killing(Echo):
        killed = False

        async def do(self, session):
            if session.calls == 3 and not self.killed:
                self.killed = True
                os.kill(process_of(server, "sglang_on_cpu"), signal.SIGKILL)

    tool = Killing()
    agents = world(tool, max_turns=6)
    prompts = questions(agents, 40)  # (3/4)^3 of them come to a third call: none with a chance of 3e-10
    asked = collection(agents, prompts, max_new_tokens=400)  # room for a fourth turn of the one that kills
    client = client_of(server)
    with pytest.raises(EngineLost):
        asked.run(client)
    assert tool.killed and not asked.complete
    before = {r: [reply.tokens.tolist() for reply in talk.replies] for r, talk in asked._talks.items()}
    calls = tool.calls
    assert max(map(len, before.values())) >= 3
    server.stop()
    server.start()
    server.wait_ready()
    asked.run(client)
    assert asked.complete
    trajectories = asked.trajectories()
    for request, replies in before.items():
        assert pieces(trajectories[request])[::2][: len(replies)] == replies
    observations = Counter(turn.role for t in trajectories for turn in t.turns)["tool"]
    malformed = sum(bool(turn.malformed) for t in trajectories for turn in t.turns[:-1])
    dropped = sum(t.finish_reason == "tokens" and t.turns[-1].calls != [] for t in trajectories)
    assert tool.calls > calls and observations - malformed <= tool.calls <= observations - malformed + dropped


def test_one_of_many_tools_that_hangs_masks_its_conversation_alone(server, world):
    class OneHangs(Echo):
        async def do(self, session):
            if session is self.sessions[0]:
                await asyncio.sleep(600)

    agents = world(OneHangs(), tool_timeout_s=4.0)
    prompts = questions(agents, 32)
    finished = []
    asked = collection(
        agents, prompts, samples=2, on_progress=lambda arrived, wanted: finished.append((arrived, wanted))
    )
    asked.run(client_of(server))
    trajectories = give_rewards(agents.task, agents.tokenizer, prompts, asked.trajectories())
    assert finished == [(i, 64) for i in range(1, 65)]
    masked = [t for t in trajectories if t.masked]
    assert len(masked) == 1 and masked[0].finish_reason == "failure" and not masked[0]["loss_mask"].any()
    assert all(
        t["loss_mask"].any() and t.reward_parts["correct"] == float(bool(t.text)) for t in trajectories if not t.masked
    )
    assert len(trajectories) == 64 and [t.group_id for t in trajectories] == [i // 2 for i in range(64)]


def test_a_straggler_in_a_tool_is_given_up_and_its_world_is_closed(server, world, monkeypatch):
    monkeypatch.setattr("megatron_rl.rollout.recover.CANCEL_S", 1.0)
    closed = []

    class OneHangs(Echo):
        async def do(self, session):
            if session is self.sessions[0]:
                await asyncio.sleep(600)

    class Closing(Environment):
        async def close(self):
            await super().close()
            closed.append(self)

    agents = world(OneHangs(), tool_timeout_s=500.0)
    monkeypatch.setattr(agents.task, "environment", lambda prompt, toolbox: Closing(toolbox))
    prompts = questions(agents, 12)
    asked = collection(agents, prompts)
    first = first_groups(asked, client_of(server), 11)
    trajectories = asked.trajectories()
    assert [t.group_id for t in trajectories] == first.taken and not any(t.masked for t in trajectories)
    [(request, length)] = asked.aborted.items()
    assert request not in first.taken and length == len(asked._talks[request].tokens) > 0
    assert len(closed) == 12, "of the straggler too"
    assert len(pieces(trajectories[0])) >= 1


def test_an_environment_of_ones_own(server, world):
    """It answers what it likes, knows the reward, is closed, and its errors mask one conversation each."""

    class Guess(Environment):
        closed = 0

        async def respond(self, turn):
            self.guesses = getattr(self, "guesses", 0) + 1
            if prompts.index(self.prompt) == 3:
                raise KeyError("a bug")
            return [{"role": "user", "content": "warmer"}] if self.guesses < 3 else None

        def reward_parts(self):
            return {part: float(prompts.index(self.prompt))}

        async def close(self):
            Guess.closed += 1

    def environment(prompt, toolbox):
        made = Guess(toolbox)
        made.prompt = prompt
        return made

    agents, part = world(Echo()), "correct"
    agents.task.environment = environment
    agents.dialect.parse = lambda ids: Parsed([Call("any", {})])
    prompts = questions(agents, 6)
    asked = collection(agents, prompts)
    asked.run(client_of(server))
    trajectories = give_rewards(agents.task, agents.tokenizer, prompts, asked.trajectories())
    assert [t.masked for t in trajectories] == [i == 3 for i in range(6)] and Guess.closed == 6
    for number, t in enumerate(trajectories):
        if number != 3:
            assert [turn.role for turn in t.turns] == ["assistant", "user"] * 2 + ["assistant"]
            assert t.reward == number and t.finish_reason == "stop"
    part = "corect"
    with pytest.raises(UserError, match="gives the reward part 'corect', which task.*did you mean 'correct'"):
        give_rewards(agents.task, agents.tokenizer, prompts, asked.trajectories())


def test_a_tool_that_is_gone_masks(server, world):
    class Gone(Echo):
        async def do(self, session):
            raise ToolLost("gone")

    agents = world(Gone())
    asked = collection(agents, questions(agents, 16))
    asked.run(client_of(server))
    for t in asked.trajectories():
        calls = any(turn.calls for turn in t.turns)
        assert t.masked == (calls and t.finish_reason == "failure") and t.turns[-1].role == "assistant"
        assert t.finish_reason == "failure" or not calls or len(t.turns) == 7


@pytest.mark.parametrize("treatment", ["score", "zero", "mask"])
def test_limits_end_conversations(server, world, treatment):
    agents = world(Echo(), max_turns=2, on_truncation=treatment)
    # One reply in eight is an answer, which one of the end tokens ends: none of 90 conversations with a chance of 4e-11.
    prompts = questions(agents, 90)
    ends = list(range(100, 300))  # no end tokens of the template's: its separator comes first
    asked = collection(agents, prompts, max_new_tokens=90, stop_token_ids=ends)
    asked.run(client_of(server))
    zero = treatment == "zero"
    answers = asked.trajectories()
    trajectories = give_rewards(agents.task, agents.tokenizer, prompts, answers, zero_truncated=zero)
    endings = Counter(t.finish_reason for t in trajectories)
    assert endings["stop"] and endings["turns"] and set(endings) <= {"stop", "turns", "tokens"}
    for t in trajectories:
        assert t.response_length <= 90 and sum(turn.role == "assistant" for turn in t.turns) <= 2
        assert t.masked == (t.truncated and treatment == "mask")
        assert t.reward == float(bool(t.text) and not (t.truncated and treatment != "score"))
        assert t.text == "" or t.finish_reason in ("stop", "tokens")


def test_a_small_budget_ends_with_tokens(server, world):
    agents = world(Echo(), max_turn_tokens=None)
    asked = collection(agents, questions(agents, 8), max_new_tokens=30)
    asked.run(client_of(server))
    for t in asked.trajectories():
        assert t.finish_reason in ("tokens", "stop") and t.response_length <= 30 and len(t.turns) == 1


def test_a_conversation_that_takes_too_long_ends_with_what_it_has(server, world):
    class Slow(Echo):
        async def do(self, session):
            await asyncio.sleep(600 if session.calls == 2 else 0)

    agents = world(Slow(), time_limit_s=6.0)
    # Nine in 16 come to a second call: none of 28 with a chance of 1e-10.
    asked = collection(agents, questions(agents, 28))
    asked.run(client_of(server))
    endings = Counter(t.finish_reason for t in asked.trajectories())
    assert endings["time"] and set(endings) <= {"time", "stop", "turns", "tokens"}
    for t in asked.trajectories():
        assert t.turns[-1].role == "assistant" and not t.masked and t["loss_mask"].any()
