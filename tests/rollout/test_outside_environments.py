"""The policy in environments of other packages: an OpenEnv server, and a task set of `verifiers` behind the endpoint."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from megatron_rl.agents.programs import rollout_program
from megatron_rl.algorithms.sampling_support import SamplingSupport
from megatron_rl.config.load import build_config
from megatron_rl.dialects import without_end
from megatron_rl.errors import UserError
from megatron_rl.rewards.verify import give_rewards
from megatron_rl.tasks import build_task
from tests.preloaded import PYTHON_WITH_VERIFIERS
from tests.rollout.conftest import client_of
from tests.rollout.test_agents import Plain, pieces
from tests.tasks.scripted import ONE_PROCESS
from tests.tasks.test_openenv import start_server

ENDS = range(100, 200)
"""Tokens that end a reply: a random model samples the template's own too rarely. One of 512 is that."""
LETTERS = {"task": "verifiers:letters", "options": {"python": PYTHON_WITH_VERIFIERS}}
TASKS = Path(__file__).resolve().parents[1] / "tasks/verifiers_tasks"


@pytest.fixture
def play(reference, server):
    """play(program, data section, agent section) -> (agents, collect(choose prompts) -> trajectories)."""
    opened = []

    def make(program, data, agent):
        settings = {"program": program, "max_new_tokens": 120, "context_length": 512}
        tree = {"model": {"path": str(reference.folder)}, "data": data, "rollout": settings, "agent": agent}
        config = build_config(tree)
        task = build_task(config.data, more_parts=("well_formed",))
        tokenizer = AutoTokenizer.from_pretrained(reference.folder)
        agents = rollout_program(program)(config, tokenizer, task, ONE_PROCESS)
        agents.dialect = Plain(agents.tokenizer)
        opened.append((agents, task))

        def collect(choose):
            prompts = [agents.encode(prompt) for prompt in choose(task)]
            asked = agents.collect(
                prompts=prompts,
                support=SamplingSupport(),
                samples_per_prompt=2,
                max_new_tokens=120,
                stop_token_ids=ENDS,
            )
            asked.run(client_of(server))
            assert asked.complete
            agents.check(asked)
            return give_rewards(task, agents.tokenizer, prompts, asked.trajectories())

        return agents, collect

    yield make
    for agents, task in opened:
        agents.close()
        task.close()


def test_episodes_of_openenv(play):
    games = start_server(16)
    try:
        data = {"task": "openenv", "options": {"url": games.url}}
        agents, collect = play("agent", data, {"max_turn_tokens": 30})
        found = collect(lambda task: task.prompts("train")[:8])
    finally:
        games.close()
    assert len(found) == 16
    whole = 0
    for t in found:
        replies = pieces(t)[::2]
        stopped = t.finish_reason == "stop"
        assert not t.masked and t.finish_reason in ("stop", "tokens") and (len(replies) == 3 or not stopped)
        whole += stopped
        heard = replies if stopped else replies[:-1]
        said = [agents.dialect.text(without_end(tokens, ENDS)).strip() for tokens in heard]
        shares = [text.count("a") / max(1, len(text)) for text in said]
        assert t.reward == pytest.approx(sum(shares))
        mask = np.concatenate([np.full(len(piece), i % 2 == 0) for i, piece in enumerate(pieces(t))])
        assert (t["loss_mask"] == mask).all()
    assert whole, "some episode was played to its end"


@pytest.mark.timeout(600)
def test_episodes_of_verifiers(play, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(TASKS))

    def words(first, last):
        def choose(task):
            everything = [*task.prompts("train"), *task.prompts("eval")]
            return sorted(everything, key=lambda prompt: prompt.metadata["task"])[first:last]

        return choose

    agents, collect = play("openai_agent", LETTERS, {"time_limit_s": 550})
    with pytest.raises(UserError, match="all 2 conversations failed, .*its process has ended with status 3"):
        collect(words(41, 42))  # that one ends its process; the worker goes on
    found = collect(words(38, 41))
    judged, refused = [t for t in found if not t.masked], [t for t in found if t.masked]
    assert len(judged) == 4 and {t.group_id for t in refused} == {2}, "what could not be judged does not train"
    for t in judged:
        [reply] = pieces(t)
        said = agents.dialect.text(without_end(reply, ENDS)).strip()
        assert t.reward == pytest.approx(said.count("a") / max(1, len(said)) + 0.5)
        assert t["loss_mask"].all()


def test_a_task_that_brings_its_agent_says_which_program_it_wants(play, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(TASKS))
    with pytest.raises(UserError, match="verifiers:letters needs rollout.program: openai_agent"):
        play("agent", LETTERS, {})
