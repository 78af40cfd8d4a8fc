"""A policy that says what it is told to, in conversations that are led by the real loop of agents."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from megatron_rl.agents.agent import Agents
from megatron_rl.algorithms.sampling_support import SamplingSupport
from megatron_rl.config.load import build_config
from megatron_rl.data.trajectory import Trajectory
from megatron_rl.rewards.verify import give_rewards
from megatron_rl.servers.reply import Reply
from megatron_rl.tasks import Prompt, Task
from tools.make_tiny_model import text_tokenizer

ONE_PROCESS = SimpleNamespace(
    leaders_do=lambda work: work(), from_main=lambda value: value, gather_from_leaders=lambda value: [value]
)


class Script:
    """In the place of a client of SGLang: replies in the order given, and what the policy saw before each."""

    def __init__(self, tokenizer, replies: list[str]) -> None:
        self.tokenizer, self.replies, self.seen, self.retried = tokenizer, list(replies), [], 0

    async def __aenter__(self) -> Script:
        return self

    async def __aexit__(self, *problem: object) -> None:
        pass

    async def call(self, contexts, sampling, **settings) -> list[Reply]:
        self.seen.append(self.tokenizer.decode(contexts[0]))
        tokens = self.tokenizer.encode(self.replies.pop(0), add_special_tokens=False)
        tokens = np.asarray([*tokens, self.tokenizer.eos_token_id][: sampling["max_new_tokens"]], np.int32)
        stopped = tokens[-1] == self.tokenizer.eos_token_id
        return [
            Reply(
                tokens,
                {"rollout_log_probs": np.zeros(len(tokens), np.float32), "loss_mask": np.ones(len(tokens), bool)},
                "stop" if stopped else "length",
                [],
            )
        ]


def play(task: Task, prompt: Prompt, replies: list[str], **agent) -> tuple[Trajectory, list[str]]:
    """The conversation, with its reward, and what the policy saw before each reply. agent: the config's section."""
    tokenizer = text_tokenizer(512)
    rollout = {"program": "agent", "max_new_tokens": 8000, "context_length": 12000}
    agents = Agents(build_config({"rollout": rollout, "agent": agent}), tokenizer, task, ONE_PROCESS)
    try:
        asked = [agents.encode(prompt)]
        collection = agents.collect(prompts=asked, support=SamplingSupport(), samples_per_prompt=1, max_new_tokens=8000)
        script = Script(tokenizer, replies)
        collection.run(script)
        [found] = give_rewards(task, tokenizer, asked, collection.trajectories())
    finally:
        agents.close()
    return found, script.seen
