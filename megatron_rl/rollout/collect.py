"""All prompts of a step, asked at once; trajectories in the order of the prompts, whatever happened in between."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Protocol

import numpy as np

from megatron_rl.rollout.client import EngineLost, Reply, SGLangClient
from megatron_rl.rollout.routes import FeatureLayout, RouteLayout
from megatron_rl.rollout.sampling import SamplingSupport
from megatron_rl.rollout.trajectory import Trajectory

TOKENS_PER_CALL = 4096
"""Short responses share HTTP calls of about that many response tokens, which spares both sides work per call; long ones
get a call per prompt, so that a failure costs little."""


class Prompt(Protocol):
    """What a collection needs of a prompt."""

    prompt_id: str
    tokens: list[int]


@dataclass
class CollectStats:
    responses: int = 0
    tokens: int = 0
    """Response tokens."""
    retries: int = 0
    seconds: float = 0.0


@dataclass
class Collection:
    """The trajectories of one step as they arrive. `run` asks for what is missing, so it may be called again after the
    engine died: what was answered is kept."""

    prompts: Sequence[Prompt]
    support: SamplingSupport
    samples_per_prompt: int
    max_new_tokens: int
    stop_token_ids: Sequence[int] = ()
    routes: RouteLayout | None = None
    features: FeatureLayout | None = None
    on_progress: Callable[[int, int], None] | None = None
    """Called with (responses that arrived, responses wanted)."""
    stats: CollectStats = field(default_factory=CollectStats)

    def __post_init__(self) -> None:
        self._replies: dict[int, list[Reply]] = {}

    @property
    def wanted(self) -> int:
        return len(self.prompts) * self.samples_per_prompt

    @property
    def complete(self) -> bool:
        return len(self._replies) == len(self.prompts)

    def _calls(self) -> list[list[int]]:
        """Unanswered prompts, as indices, by HTTP call."""
        missing = [p for p in range(len(self.prompts)) if p not in self._replies]
        size = max(1, TOKENS_PER_CALL // (self.max_new_tokens * self.samples_per_prompt))
        return [missing[i : i + size] for i in range(0, len(missing), size)]

    def run(self, client: SGLangClient) -> None:
        """Ask for all that is missing. Errors: EngineLost (what was answered is kept), UserError."""
        start = time.perf_counter()
        try:
            asyncio.run(self._run(client))
        finally:
            self.stats.seconds += time.perf_counter() - start

    async def _run(self, client: SGLangClient) -> None:
        before = client.stats.retries
        async with client:
            tasks = [self._ask(client, call) for call in self._calls()]
            done = await asyncio.gather(*tasks, return_exceptions=True)
        self.stats.retries += client.stats.retries - before
        problems = [problem for problem in done if isinstance(problem, BaseException)]
        # A lost engine can be mended, anything else cannot: it goes first.
        for problem in sorted(problems, key=lambda p: isinstance(p, EngineLost)):
            raise problem

    async def _ask(self, client: SGLangClient, call: list[int]) -> None:
        sampling = self.support.request() | {
            "max_new_tokens": self.max_new_tokens,
            "stop_token_ids": [int(token) for token in self.stop_token_ids],
        }
        prompts = [self.prompts[p].tokens for p in call]
        groups = await client.generate(
            prompts,
            sampling,
            samples=self.samples_per_prompt,
            routes=self.routes,
            features=self.features,
            options=self.support.options(),
        )
        self._replies.update(zip(call, groups, strict=True))
        self.stats.responses += sum(len(group) for group in groups)
        self.stats.tokens += sum(len(reply.tokens) for group in groups for reply in group)
        if self.on_progress:
            self.on_progress(self.stats.responses, self.wanted)

    def trajectories(self, first_group: int = 0) -> list[Trajectory]:
        """All samples of the first prompt, then of the second, ...; group ids count the prompts from `first_group`."""
        return [
            Trajectory(
                prompt_id=prompt.prompt_id,
                group_id=first_group + p,
                tokens=np.concatenate([np.asarray(prompt.tokens, np.int32), reply.tokens]),
                prompt_length=len(prompt.tokens),
                log_probs=reply.log_probs,
                loss_mask=np.ones(len(reply.tokens), bool),
                finish_reason=reply.finish_reason,
                support=asdict(self.support),
                kept=reply.kept,
                routes=reply.routes,
                features=reply.features,
                weight_spans=reply.weight_spans,
                text=reply.text,
            )
            for p, prompt in enumerate(self.prompts)
            for reply in self._replies[p]
        ]
