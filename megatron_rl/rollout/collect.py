"""Request all prompts of a step at once, and return the trajectories in the order of the prompts.

Each rollout program (program.py) names the class that it uses: `Collection`, or a class with the same fields and with `run`,
`cancel`, `complete`, `trajectories` and `retries`.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import batched, groupby
from typing import NamedTuple

import numpy as np

from megatron_rl.algorithms.sampling_support import SamplingSupport, request_seed
from megatron_rl.data.engine_routes import EngineFeatures, EngineRoutes
from megatron_rl.data.trajectory import Trajectory
from megatron_rl.servers.client import Aborted, EngineLost, SGLangClient, server_order
from megatron_rl.servers.reply import Reply
from megatron_rl.tasks import Prompt

TOKENS_PER_CALL = 4096
"""Approximate limit of the response tokens that one HTTP call requests. Shared calls save work in client and server. Long
responses get a call each, so that a failure costs little."""
BYTES_PER_CALL = 1 << 24
"""Approximate limit of the bytes of routes and features that one call returns."""


class Call(NamedTuple):
    """One HTTP call."""

    requests: tuple[int, ...]
    shared: list[int]
    """Indices of the prompts in this call that the server samples several times."""
    features: EngineFeatures | None


@dataclass
class Collection:
    """Requests of one step, and the responses that have arrived so far (one for each request).

    `run` requests only missing responses, so it can be called again after an engine died.
    """

    prompts: Sequence[Prompt]
    support: SamplingSupport
    samples_per_prompt: int
    max_new_tokens: int
    stop_token_ids: Sequence[int] = ()
    routes: EngineRoutes | None = None
    features: EngineFeatures | None = None
    features_from: int = 0
    """Index of the first request that asks for all router features. Earlier requests ask for router logits only."""
    top_log_probs: int = 0
    """Number of likeliest tokens, by the engine's log-probs, to return for each token of a response."""
    share: range | None = None
    """Indices of the requests that this process sends; None: all. `prompts` holds the prompts of all data-parallel leaders, and
    request r is a sample of prompt r // samples_per_prompt."""
    seed: str | None = None
    """Key from which `request_seed` derives a seed for each request, so that requests draw independently; None: no seeds."""
    on_progress: Callable[[int, int], None] | None = None
    """Called with (responses that arrived, responses wanted)."""
    evaluates: bool = False
    """True if the responses are for evaluation, not for training."""
    known: Mapping[int, list[Trajectory]] = field(default_factory=dict)
    """Samples that already exist, by index of the request; these requests are not sent."""
    on_finished: Callable[[dict[int, list[Trajectory]]], None] | None = None
    """Called with samples by request, as the samples finish."""
    retries: int = 0
    """Number of HTTP calls that were repeated."""

    def __post_init__(self) -> None:
        self._total = len(self.prompts) * self.samples_per_prompt
        self._all = range(self._total) if self.share is None else self.share
        self._requests = [r for r in self._all if r not in self.known]
        """Requests to send."""
        self._replies: dict[int, Reply] = {}
        self._made: dict[int, list[Trajectory]] = {}
        """Finished samples by index of the request, stored because an environment is queried only once for its rewards."""
        self.aborted: dict[int, int] = {}
        """Aborted requests, with the number of tokens sampled before the abort."""
        self._canceled = False
        self._asked_by: SGLangClient | None = None
        self._task: tuple[asyncio.AbstractEventLoop, asyncio.Task] | None = None

    @property
    def requests(self) -> int:
        """Number of responses that this process wants."""
        return len(self._all)

    @property
    def responses(self) -> int:
        """Number of responses that exist, known samples included."""
        return len(self._all) - len(self._requests) + self._arrived

    @property
    def _arrived(self) -> int:
        return len(self._replies)

    @property
    def complete(self) -> bool:
        """True if all responses have arrived."""
        return self.responses == len(self._all)

    @property
    def finished(self) -> set[int]:
        """Requests that have a complete answer."""
        return {*self.known} | {*self._replies}

    def keep(self, groups: Iterable[int]) -> None:
        """Drop all requests except those of the given prompts."""
        kept = {*groups}
        self._all = [r for r in self._all if self._prompt_of(r) in kept]

    def _calls(self, servers: int) -> list[Call]:
        """Return the HTTP calls for unanswered requests. Each call is for one server; calls of different servers alternate."""
        by_server: dict[int, list[int]] = defaultdict(list)
        for request in self._requests:
            if request not in self._replies:
                by_server[server_order(request, self._total, servers)[0]].append(request)
        calls = []
        for server, requests in by_server.items():
            several = {p for p, n in Counter(map(self._prompt_of, requests)).items() if n > 1}
            for with_features, kind in groupby(requests, self._features_of):
                per_token = self.routes.bytes_per_token if self.routes else 0
                per_token += with_features.bytes_per_token if with_features else 0
                per_token += 11 * self.top_log_probs  # an int and a float in base64
                tokens = min(TOKENS_PER_CALL, BYTES_PER_CALL // max(per_token, 1))
                for part in batched(kind, max(1, tokens // self.max_new_tokens)):
                    shared = [p for p in dict.fromkeys(map(self._prompt_of, part)) if p in several]
                    calls.append((part[0] - requests[0], server, Call(part, shared, with_features)))
        return [call for _, _, call in sorted(calls, key=lambda one: one[:2])]

    def _prompt_of(self, request: int) -> int:
        return request // self.samples_per_prompt

    def _features_of(self, request: int) -> EngineFeatures | None:
        if self.features is None or request >= self.features_from:
            return self.features
        return self.features.logits_alone

    def run(self, client: SGLangClient) -> None:
        """Request all missing responses. Errors: EngineLost; UserError; CancelledError after a call of `cancel`.

        Responses that have already arrived are kept.
        """
        asyncio.run(self._until_canceled(client))

    def cancel(self) -> None:
        """End `run`, which runs or is about to run in another thread. Responses that have already arrived are kept."""
        self._canceled = True
        if (task := self._task) is not None:
            with suppress(RuntimeError):  # its loop has ended
                task[0].call_soon_threadsafe(task[1].cancel)

    def abort(self) -> None:
        """Make the servers abort unanswered requests, so that `run`, which runs in another thread, ends."""
        client, task = self._asked_by, self._task
        if client is not None and task is not None:
            with suppress(RuntimeError):  # its loop has ended
                asyncio.run_coroutine_threadsafe(client.abort(), task[0])

    async def _until_canceled(self, client: SGLangClient) -> None:
        current = asyncio.current_task()
        assert current is not None
        self._task, self._asked_by = (asyncio.get_running_loop(), current), client
        try:
            if self._canceled:
                raise asyncio.CancelledError
            await self._run(client)
        finally:
            self._task = None

    async def _run(self, client: SGLangClient) -> None:
        before = client.retried
        async with client:
            tasks = [self._ask(client, call) for call in self._calls(len(client.addresses))]
            done = await asyncio.gather(*tasks, return_exceptions=True)
        self.retries += client.retried - before
        self._raise(done)

    @staticmethod
    def _raise(done: Sequence[BaseException | None]) -> None:
        problems = [p for p in done if isinstance(p, BaseException) and not isinstance(p, Aborted)]
        # A run can recover from a lost engine, but from no other error: raise other errors first.
        for problem in sorted(problems, key=lambda p: isinstance(p, EngineLost)):
            raise problem

    async def _ask(self, client: SGLangClient, call: Call) -> None:
        sampling = self.support.request() | {
            "max_new_tokens": self.max_new_tokens,
            "stop_token_ids": [int(token) for token in self.stop_token_ids],
        }
        each = [sampling for _ in call.requests]
        if self.seed is not None:
            each = [sampling | {"sampling_seed": request_seed(self.seed, request)} for request in call.requests]
        asking = client.call(
            [self.prompts[self._prompt_of(r)].tokens for r in call.requests],
            each,
            number=call.requests[0],
            total=self._total,
            prefixes=[self.prompts[p].tokens for p in call.shared],
            routes=self.routes,
            features=call.features,
            top_log_probs=self.top_log_probs,
            options=self.support.options(),
        )
        try:
            replies = await asking
        except Aborted as ended:
            self.aborted.update(zip(call.requests, ended.lengths, strict=True))
            return
        except asyncio.CancelledError:
            if client.aborted:  # a server did not abort in time, so the run continues without these responses
                self.aborted.update(dict.fromkeys(call.requests, 0))
            raise
        self._replies.update(zip(call.requests, replies, strict=True))
        await self._finish(call.requests)

    async def _finish(self, requests: Iterable[int]) -> None:
        if self.on_finished:
            self._made |= (made := {request: self._sample(request) for request in requests})
            await asyncio.to_thread(self.on_finished, made)  # does not block the event loop for other calls
        if self.on_progress:
            self.on_progress(self.responses, len(self._all))

    def trajectories(self) -> list[Trajectory]:
        """Return the trajectories in the order of the requests; the group id is the index of the prompt."""
        made = self._made | dict(self.known)
        return [t for r in self._all for t in (made[r] if r in made else self._sample(r))]

    def _sample(self, request: int) -> list[Trajectory]:
        p, reply = self._prompt_of(request), self._replies[request]
        return [
            Trajectory(
                prompt_id=self.prompts[p].prompt_id,
                group_id=p,
                tokens=np.concatenate([np.asarray(self.prompts[p].tokens, np.int32), reply.tokens]),
                prompt_length=len(self.prompts[p].tokens),
                fields=reply.fields,
                finish_reason=reply.finish_reason,
                support=self.support.sampled(),
                kept=reply.kept,
                routes=reply.routes,
                gates=reply.gates,
                features=reply.features,
                top=reply.top,
                weight_spans=reply.weight_spans,
                text=reply.text,
            )
        ]
