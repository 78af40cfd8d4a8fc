"""`megatron-rl serve-agent`: start the recording endpoint for manual use, to see an agent's conversations before training."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import replace

from megatron_rl.agents.openai_agent import OpenAIAgents
from megatron_rl.config import Config
from megatron_rl.report.samples import readable, write_responses
from megatron_rl.rollout.engine import Engine
from megatron_rl.run.run import Run
from megatron_rl.tasks import Prompt


async def wait(prompt: Prompt, base_url: str) -> None:
    """Placeholder for an agent's function. Any client of the session acts as the agent."""


def serve_agent(config: Config) -> None:
    """Serve the model in model.path in one session until SIGINT or SIGTERM. Then write the conversation to agent.jsonl.

    The file is in the run's folder and has one JSON line per sequence.
    """
    agent = replace(config.agent, function=f"{__name__}:{wait.__name__}", time_limit_s=1e9)
    rollout = replace(config.rollout, program="openai_agent", request_timeout_s=1e9)
    with Run(replace(config, agent=agent, rollout=rollout), kind="sample") as run, Engine(run) as engine:
        assert isinstance(run.program, OpenAIAgents)
        run.program.set_function(_Served(run))
        engine.join()
        prompts = [Prompt("by hand", "")]
        trajectories = engine.ask(prompts, run.support, samples=1, seed="serve-agent")
        run.rewards.verify(trajectories, prompts)
        file = run.folder / "agent.jsonl"
        write_responses(file, [readable(run.tokenizer, t) for t in trajectories])
        turns = sum(turn.role == "assistant" for t in trajectories for turn in t.turns)
        run.logger.say(f"{len(trajectories)} sequences with {turns} replies are in {file}")


class _Served:
    def __init__(self, run: Run) -> None:
        self.run = run
        self._told = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._tell)

    def _tell(self, *_: object) -> None:
        self._told = True

    def __call__(self, prompt: Prompt, base_url: str) -> dict[str, float]:
        """Serve until the command is told to stop.

        Returns 0 for all reward parts, so that the task does not score the conversation.
        """
        self.run.logger.say(
            f"base_url: {base_url} (model: policy, any API key); press Ctrl-C to stop and write the conversation"
        )
        asyncio.run(self._until_told())
        return dict.fromkeys(self.run.task.parts, 0.0)

    async def _until_told(self) -> None:
        while not self._told:
            await asyncio.sleep(0.2)
