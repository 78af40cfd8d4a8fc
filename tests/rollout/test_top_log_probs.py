"""The engine's log-probs of its likeliest tokens, as they are recorded: those of transformers at each token of a response."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from megatron_rl.agents.agent import Agents
from megatron_rl.algorithms.sampling_support import SamplingSupport
from megatron_rl.config.load import build_config
from megatron_rl.dialects.text import Qwen
from megatron_rl.tasks import Prompt
from tests.rollout.conftest import Question, assert_agree, client_of, collect
from tests.rollout.test_agents import Asking, Echo, Talkative
from tests.tasks.scripted import ONE_PROCESS

VOCAB = 512


def check(t, reference, k: int) -> tuple[np.ndarray, np.ndarray]:
    """(recorded, transformers') log-probs of the recorded tokens, and of the likeliest, for each sampled token: [n, 2 k]."""
    said = t["loss_mask"]
    log_probs = reference.logits(t.tokens.tolist())[t.prompt_length - 1 : -1].log_softmax(-1)[torch.from_numpy(said)]
    ids, values = t.top.token_ids[said], t.top.log_probs[said]
    assert ids.shape == values.shape == (said.sum(), k) and (ids >= 0).all()
    assert all(len(set(row)) == k for row in ids.tolist())
    theirs = log_probs.gather(1, torch.from_numpy(ids).long()).numpy(), log_probs.topk(k).values.numpy()
    sampled = t.tokens[t.prompt_length :][said][:, None]
    own = np.where(ids == sampled, values, 0).sum(1)[(ids == sampled).any(1)]
    assert np.array_equal(own, t["rollout_log_probs"][said][(ids == sampled).any(1)]), (
        "of the sampled token, the same number"
    )
    return np.concatenate([values, values], 1), np.concatenate(theirs, 1)


def agree(found, reference, k: int) -> None:
    pairs = [check(t, reference, k) for t in found]
    ours, theirs = zip(*pairs, strict=True)
    assert_agree([*ours], [*theirs], median=1e-5, largest=1e-4, tied=reference.tied(found))


@pytest.mark.parametrize("k", [1, 20, VOCAB])
def test_log_probs_are_those_of_transformers(k, server, reference):
    rng = np.random.default_rng()
    prompts = [Question(str(n), rng.integers(4, 200, int(rng.integers(1, 30))).tolist()) for n in range(8)]
    asked = {"samples_per_prompt": 2, "max_new_tokens": 9, "seed": str(rng.integers(2**32)), "top_log_probs": k}
    found, _ = collect(client_of(server), prompts, SamplingSupport(), **asked)
    agree(found, reference, k)
    if k == VOCAB:  # all there is: 512 rounded numbers of fp32
        sums = np.concatenate([np.exp(t.top.log_probs.astype(np.float64)).sum(1) for t in found])
        assert np.abs(sums - 1).max() < VOCAB * 2**-23


def test_of_a_conversation_the_replies_have_them_and_observations_none(server, reference):
    tree = {
        "model": {"path": str(reference.folder)},
        "rollout": {"program": "agent", "max_new_tokens": 160},
        "agent": {"max_turns": 4, "max_turn_tokens": 12},
    }
    tokenizer = AutoTokenizer.from_pretrained(reference.folder)
    agents = Agents(build_config(tree), tokenizer, Asking(Echo()), ONE_PROCESS)
    assert isinstance(agents.dialect, Qwen)
    agents.dialect = Talkative(agents.tokenizer)
    try:
        # Three replies in four go on to an observation: none of the first ones of 16 with a chance of 2e-10.
        prompts = [agents.encode(Prompt(str(n), f"What is {n}?")) for n in range(16)]
        settings = {"samples_per_prompt": 1, "max_new_tokens": 160, "top_log_probs": 3}
        collection = agents.collect(prompts=prompts, support=SamplingSupport(), **settings)
        collection.run(client_of(server))
        found = collection.trajectories()
    finally:
        agents.close()
    assert any((~t["loss_mask"]).any() for t in found), "something was observed"
    for t in found:
        assert (t.top.token_ids[~t["loss_mask"]] == -1).all()
    agree(found, reference, 3)
