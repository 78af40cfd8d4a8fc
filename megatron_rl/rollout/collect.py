"""All prompts of a step, asked at once; trajectories in the order of the prompts, whatever happened in between."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from megatron_rl.rollout.client import EngineLost, Reply, SGLangClient
from megatron_rl.rollout.routes import RouteLayout
from megatron_rl.rollout.sampling import SamplingSupport
from megatron_rl.rollout.server import RolloutServer
from megatron_rl.rollout.trajectory import Trajectory

log = logging.getLogger(__name__)

SHARED_PREFIX_TOKENS = 64
"""From this prompt length on a prompt goes out once with n samples, so that the engine computes its prefix once; a shorter
one is repeated, many prompts in one call, which spares the engine a pass over the prefix alone."""
RESPONSES_PER_CALL = 64
"""Responses that short prompts share one call for."""


class Prompt(Protocol):
    """What collect needs of a prompt."""

    prompt_id: str
    tokens: list[int]


@dataclass
class CollectStats:
    responses: int = 0
    tokens: int = 0
    """Response tokens."""
    retries: int = 0
    restarts: int = 0
    """Times that the server was dead and started again."""
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
    on_progress: Callable[[int, int], None] | None = None
    """Called with (responses that arrived, responses wanted)."""
    stats: CollectStats = field(default_factory=CollectStats)

    def __post_init__(self) -> None:
        self._replies: dict[tuple[int, int], Reply] = {}
        self.wanted = len(self.prompts) * self.samples_per_prompt

    @property
    def complete(self) -> bool:
        return len(self._replies) == self.wanted

    def _calls(self) -> list[tuple[int, list[tuple[int, int]]]]:
        """What is missing as (n, [(prompt, sample), ...]) per HTTP call: n samples of one prompt, or one of each listed."""
        missing = [
            (p, s) for p in range(len(self.prompts)) for s in range(self.samples_per_prompt) if (p, s) not in self._replies
        ]
        long = {p for p, prompt in enumerate(self.prompts) if len(prompt.tokens) >= SHARED_PREFIX_TOKENS}
        by_prompt: dict[int, list[tuple[int, int]]] = {}
        for key in missing:
            if key[0] in long:
                by_prompt.setdefault(key[0], []).append(key)
        short = [key for key in missing if key[0] not in long]
        calls = [(len(keys), keys) for keys in by_prompt.values()]
        return calls + [(1, short[i : i + RESPONSES_PER_CALL]) for i in range(0, len(short), RESPONSES_PER_CALL)]

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
            tasks = [asyncio.create_task(self._ask(client, n, keys)) for n, keys in self._calls()]
            done = await asyncio.gather(*tasks, return_exceptions=True)
        self.stats.retries += client.stats.retries - before
        problems = [problem for problem in done if isinstance(problem, BaseException)]
        # A lost engine can be mended, anything else cannot: it goes first.
        for problem in sorted(problems, key=lambda p: isinstance(p, EngineLost)):
            raise problem

    async def _ask(self, client: SGLangClient, n: int, keys: list[tuple[int, int]]) -> None:
        prompts = [self.prompts[p].tokens for p, _ in (keys[:1] if n > 1 else keys)]
        sampling = self.support.request() | {
            "max_new_tokens": self.max_new_tokens,
            "stop_token_ids": [int(token) for token in self.stop_token_ids],
            "skip_special_tokens": False,
        }
        replies = await client.generate(prompts, sampling, samples=n, routes=self.routes)
        self._replies.update(zip(keys, replies, strict=True))
        self.stats.responses += len(replies)
        self.stats.tokens += sum(len(reply.tokens) for reply in replies)
        if self.on_progress:
            self.on_progress(len(self._replies), self.wanted)

    def trajectories(self, first_group: int = 0) -> list[Trajectory]:
        """All samples of the first prompt, then of the second, ...; group ids count the prompts from `first_group`."""
        result = []
        for (p, _), reply in sorted(self._replies.items()):
            prompt = self.prompts[p]
            result.append(
                Trajectory(
                    prompt_id=prompt.prompt_id,
                    group_id=first_group + p,
                    tokens=np.concatenate([np.asarray(prompt.tokens, np.int32), reply.tokens]),
                    prompt_length=len(prompt.tokens),
                    log_probs=reply.log_probs,
                    loss_mask=np.ones(len(reply.tokens), bool),
                    finish_reason=reply.finish_reason,
                    routes=reply.routes,
                    weight_spans=reply.weight_spans,
                    text=reply.text,
                )
            )
        return result


def collect(
    client: SGLangClient,
    prompts: Sequence[Prompt],
    support: SamplingSupport,
    *,
    samples_per_prompt: int,
    max_new_tokens: int,
    stop_token_ids: Sequence[int] = (),
    routes: RouteLayout | None = None,
    server: RolloutServer | None = None,
    restarts: int = 3,
    on_restart: Callable[[], None] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    first_group: int = 0,
) -> tuple[list[Trajectory], CollectStats]:
    """Sample `samples_per_prompt` responses to every prompt, all in flight at once.

    server: the child server behind `client`, if it is one. When it dies it is started again, at most `restarts` times;
    then `on_restart` is called (a fresh server has the weights of the model folder: push the current ones), and what was
    not answered is asked again. Errors: EngineLost when an engine stays away, UserError.
    """
    collection = Collection(
        prompts, support, samples_per_prompt, max_new_tokens, stop_token_ids, routes, on_progress
    )
    while not collection.complete:
        try:
            collection.run(client)
        except EngineLost as problem:
            if server is None or collection.stats.restarts >= restarts:
                raise
            log.warning("%s; starting it again, %d of %d responses kept", problem, len(collection._replies), collection.wanted)
            collection.stats.restarts += 1
            server.restart()
            if on_restart:
                on_restart()
    return collection.trajectories(first_group), collection.stats
