"""Reward parts that come when responses are there: shaping, pooling, servers, and what is left out."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from megatron_rl.config import Config
from megatron_rl.config.load import build_config
from megatron_rl.data.packing import Labels
from megatron_rl.data.trajectory import Trajectory
from megatron_rl.errors import UserError
from megatron_rl.rewards.rewards import Rewards, _encoded, names_of, pooled
from megatron_rl.rewards.shaping import overlong, set_outcome_rewards
from megatron_rl.rollout.program import SingleTurn
from megatron_rl.tasks import Prompt
from megatron_rl.trainer.scored_spans import with_last_state

ALONE: Any = SimpleNamespace(gather_from_leaders=lambda value: [value], leaders_do=lambda work, patient=False: work())
"""Ranks of a run of one process."""


class _Scorer(BaseHTTPRequestHandler):
    """A server with SGLang's answers: the score of some tokens is their sum; it fails as often as it is told to."""

    failures = 0
    answer = staticmethod(lambda tokens: {"embedding": [float(sum(tokens))]})

    def do_POST(self) -> None:
        tokens = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["input_ids"]
        fails = type(self).failures > 0
        type(self).failures -= fails
        self.send_response(503 if fails else 200)
        self.end_headers()
        self.wfile.write(json.dumps({"message": "busy"} if fails else self.answer(tokens)).encode())

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def scorer() -> Iterator[tuple[type[_Scorer], str]]:
    kind = type("Scorer", (_Scorer,), {})
    server = ThreadingHTTPServer(("127.0.0.1", 0), kind)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield kind, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join(20)
    server.server_close()


def trajectory(length: int = 4, **more: Any) -> Trajectory:
    tokens = np.random.default_rng().integers(4, 60, 2 + length).astype(np.int32)
    found = Trajectory(tokens=tokens, prompt_length=2, prompt_id="p", group_id=0, reward_parts={"correct": 1.0}, **more)
    found["loss_mask"] = True
    return found


def later(models: dict, url: str = "", **more: Any) -> tuple[Rewards, Config]:
    settings = {name: {"address": url, **of_model} for name, of_model in models.items()}
    config = build_config({"rewards": {"models": settings, **more}})
    task: Any = SimpleNamespace(weights={"correct": 0.5} | dict.fromkeys(names_of(config.rewards), 2.0))
    return Rewards(config.rewards, ALONE, task, max_new_tokens=8), config


PROMPTS = [Prompt("p", "question")]


def test_scores_are_shaped_and_weighed(scorer):
    _, url = scorer
    rewards, _ = later({"liked": {"shift": 10.0, "scale": 4.0, "clip": 30.0}}, url)
    for learns in (True, False):
        found = [trajectory() for _ in range(5)]
        rewards.score(found, PROMPTS, learns=learns)
        for t in found:
            score = (t.tokens.sum() - 10.0) / 4.0
            score = min(30.0, score) if learns else score
            assert t.reward_parts["liked"] == pytest.approx(score)
            assert t.reward == pytest.approx(0.5 * 1.0 + 2.0 * score)


def test_normalized_scores_have_the_run_s_mean_and_deviation(scorer):
    """Of all scores that were learned from so far, these included; an evaluation's do not count, and stay as they are."""
    _, url = scorer
    rewards, _ = later({"liked": {"normalize": True}}, url)
    seen: list[float] = []
    for learns in (True, False, True):
        found = [trajectory() for _ in range(7)]
        rewards.score(found, PROMPTS, learns=learns)
        scores = [float(t.tokens.sum()) for t in found]
        seen += scores if learns else []
        expected = (np.array(scores) - np.mean(seen)) / np.std(seen) if learns else np.array(scores)
        assert [t.reward_parts["liked"] for t in found] == pytest.approx(expected.tolist())
    again, _ = later({"liked": {"normalize": True}}, url)
    again.load_state_dict(json.loads(json.dumps(rewards.state_dict())))
    ours, theirs = trajectory(), trajectory()
    theirs.tokens = ours.tokens
    rewards.score([ours], PROMPTS, learns=True), again.score([theirs], PROMPTS, learns=True)
    assert ours.reward == theirs.reward
    assert ours.reward_parts["liked"] != float(ours.tokens.sum())


def test_a_server_is_asked_again_and_then_named(scorer, monkeypatch):
    monkeypatch.setattr("megatron_rl.servers.scores.PAUSE_S", 0.01)
    kind, url = scorer
    rewards, _ = later({"liked": {}}, url)
    kind.failures = 2
    found = [trajectory()]
    rewards.score(found, PROMPTS)
    assert found[0].reward_parts["liked"] == float(found[0].tokens.sum())
    kind.failures = 3
    with pytest.raises(
        UserError, match=r"rewards\.models\.liked: no score from http://127.* it answers 503: .*busy.*--is-embedding"
    ):
        rewards.score([trajectory()], PROMPTS)
    kind.failures, kind.answer = 0, staticmethod(lambda tokens: {"embedding": [1.0, 2.0]})
    with pytest.raises(UserError, match=r"it answers 200: .*one\s*label"):
        rewards.score([trajectory()], PROMPTS)


def test_a_server_without_a_chat_template_is_sent_what_the_model_has_learned_from(tiny_model):
    """Prompt and response encoded apart, and the end of the sequence, unless a limit came before it."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model("llama", "--tokenizer", "numbers", "--vocab", "64"))
    tokenizer.chat_template = None
    program: Any = SimpleNamespace(tokenizer=tokenizer)
    prompt = Prompt("p", "<3 1 2>:")
    for reason in ("stop", "length"):
        found = trajectory(finish_reason=reason)
        found.text = "1 2 3"
        wanted = SingleTurn.sequence(program, prompt.encode(tokenizer), found.text).tokens.tolist()
        assert wanted[-1] == tokenizer.eos_token_id
        assert _encoded(tokenizer, prompt, found) == (wanted if reason == "stop" else wanted[:-1])
    with pytest.raises(UserError, match="is a conversation, but the model's tokenizer has no chat template"):
        _encoded(tokenizer, Prompt("p", "last", messages=[{"role": "user", "content": "last"}]), trajectory())


def test_what_is_masked_is_not_scored_and_parts_share_their_sample_s(scorer):
    _, url = scorer
    rewards, _ = later({"liked": {}}, url, overlong_buffer=4)
    first, part, masked = trajectory(5), trajectory(part=1), trajectory(masked=True)
    for t in (first, part, masked):
        t.reward_parts |= {"liked": 0.0, "overlong": 0.0}
    rewards.score([first, part, masked], PROMPTS)
    assert first.reward_parts == {"correct": 1.0, "liked": float(first.tokens.sum()), "overlong": -0.25}
    assert part.reward_parts == first.reward_parts and part.reward == first.reward
    assert masked.reward_parts["liked"] == 0.0 and masked.reward == 0.5


def test_overlong_is_dapo_s():
    assert [overlong(n, longest=10, buffer=4) for n in (1, 6, 7, 8, 9, 10, 12)] == [0, 0, -0.25, -0.5, -0.75, -1, -1]


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_a_response_s_score_is_that_of_its_own_states(pooling):
    rng = np.random.default_rng()
    plain = [trajectory(int(n)) for n in rng.integers(1, 9, 6)]
    for t in plain:
        mask = rng.random(t.response_length) < 0.7
        mask[rng.integers(t.response_length)] = True  # a conversation may end with what a tool said
        t["loss_mask"] = mask
    closed = [with_last_state(t) for t in plain]
    labels = Labels(closed)
    values = torch.from_numpy(rng.normal(size=labels.count))
    found, start = pooled(values, labels, closed, pooling), 0
    for t, score in zip(plain, found, strict=True):
        behind = values[start + 1 : start + t.response_length + 1].numpy()  # each response token
        start += t.response_length + 1
        own = behind[t["loss_mask"]]
        assert score == pytest.approx(own[-1] if pooling == "last" else own.mean())


@pytest.mark.parametrize("whiten", [False, True])
def test_advantages_see_rewards_within_a_limit_and_whitened(whiten):
    """What is masked counts for nothing, and the sequences of a sample have one reward; the one that is logged stays."""
    config = build_config({"rewards": {"clip": 2.0, "whiten": whiten}})
    rewards = np.random.default_rng().normal(0, 3, 50)
    first = [trajectory(reward=reward) for reward in rewards]
    found = [one for t in first for one in (t, trajectory(part=1), trajectory(reward=9.0, masked=True))]
    said = {"process": config.process_rewards, "bootstraps": config.bootstraps_truncated}
    set_outcome_rewards(config.rewards, config.data.rewards, ALONE, found, **said)
    expected = rewards.clip(-2, 2)
    expected = (expected - expected.mean()) / expected.std() if whiten else expected
    for t, part, masked, outcome in zip(found[::3], found[1::3], found[2::3], expected, strict=True):
        assert (
            t.outcome_reward == part.outcome_reward == np.float32(t.outcome_reward) == pytest.approx(outcome, rel=1e-6)
        )
        assert masked.outcome_reward == 0.0
    assert [t.reward for t in first] == rewards.tolist()


def test_what_is_bootstrapped_is_paid_for_its_length_alone():
    """With rewards of steps, the whole is paid what is left of its reward without them."""
    models = {"steps": {"path": "m", "steps": True, "step_placement": "tokens"}}
    config = build_config(
        {
            "algorithm": {"advantage": "gae", "bootstrap_truncated": True},
            "data": {"rewards": {"steps": 0.5, "overlong": 3.0}},
            "rewards": {"models": models, "overlong_buffer": 2},
        }
    )
    parts = {"steps": 4.0, "overlong": -0.5}
    found = [trajectory(reward=5.0, finish_reason=reason) for reason in ("stop", "length")]
    for t in found:
        t.reward_parts = parts
    said = {"process": config.process_rewards, "bootstraps": config.bootstraps_truncated}
    set_outcome_rewards(config.rewards, config.data.rewards, ALONE, found, **said)
    assert [t.outcome_reward for t in found] == [5.0 - 0.5 * 4.0, 3.0 * -0.5]
