"""All prompts of a step, asked at once; trajectories in the order of the prompts, whatever happened in between.

A rollout program (program.py) names a class like `Collection`, with its fields, `run`, `cancel`, `complete`, `trajectories`
and `retries`.
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
"""Short responses share HTTP calls of at most about that many response tokens, which spares both sides work per call; long
ones get a call each, so that a failure costs little."""
BYTES_PER_CALL = 1 << 24
"""Where routes and features go along, calls have at most about that many bytes of them."""


class Call(NamedTuple):
    """One HTTP call."""

    requests: tuple[int, ...]
    shared: list[int]
    """Prompts of it of which the server gets several samples."""
    features: EngineFeatures | None


@dataclass
class Collection:
    """The trajectories of one step as they arrive, one response to each request.

    `run` asks for what is missing, so it may be called again after the engine died.
    """

    prompts: Sequence[Prompt]
    support: SamplingSupport
    samples_per_prompt: int
    max_new_tokens: int
    stop_token_ids: Sequence[int] = ()
    routes: EngineRoutes | None = None
    features: EngineFeatures | None = None
    features_from: int = 0
    """The first request whose features are asked for; of those before it router logits alone."""
    top_log_probs: int = 0
    """How many of the engine's likeliest tokens are asked for at each token."""
    share: range | None = None
    """The requests that this process asks for; None: all. They are numbered prompt by prompt: `prompts` are those of all
    leaders, and request r is for a sample of prompt r // samples_per_prompt."""
    seed: str | None = None
    """Base of the requests' own seeds (`request_seed`): their draws do not depend on each other."""
    on_progress: Callable[[int, int], None] | None = None
    """Called with (responses that arrived, responses wanted)."""
    evaluates: bool = False
    """True: nothing is learned from them."""
    known: Mapping[int, list[Trajectory]] = field(default_factory=dict)
    """Samples by request that are there already; none of them is asked for."""
    on_finished: Callable[[dict[int, list[Trajectory]]], None] | None = None
    """Called with samples by request, as they finish."""
    retries: int = 0
    """HTTP calls that were made again."""

    def __post_init__(self) -> None:
        self._total = len(self.prompts) * self.samples_per_prompt
        self._all = range(self._total) if self.share is None else self.share
        self._requests = [r for r in self._all if r not in self.known]
        """Requests to send."""
        self._replies: dict[int, Reply] = {}
        self._made: dict[int, list[Trajectory]] = {}
        """Samples that have finished: an environment is asked once for its rewards."""
        self.aborted: dict[int, int] = {}
        """Requests that were aborted, and how many tokens they had by then."""
        self._canceled = False
        self._asked_by: SGLangClient | None = None
        self._task: tuple[asyncio.AbstractEventLoop, asyncio.Task] | None = None

    @property
    def requests(self) -> int:
        """Responses that this process wants."""
        return len(self._all)

    @property
    def responses(self) -> int:
        """Responses that are there."""
        return len(self._all) - len(self._requests) + self._arrived

    @property
    def _arrived(self) -> int:
        return len(self._replies)

    @property
    def complete(self) -> bool:
        """True if all arrived."""
        return self.responses == len(self._all)

    @property
    def finished(self) -> set[int]:
        """Requests that have been answered to the end."""
        return {*self.known} | {*self._replies}

    def keep(self, groups: Iterable[int]) -> None:
        """Leave out all requests but those of these prompts."""
        kept = {*groups}
        self._all = [r for r in self._all if self._prompt_of(r) in kept]

    def _calls(self, servers: int) -> list[Call]:
        """HTTP calls for what is unanswered: a call goes to one server, and each server gets one in turn."""
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
        """Ask for all that is missing. Errors: EngineLost (what was answered stays), UserError; CancelledError by `cancel`."""
        asyncio.run(self._until_canceled(client))

    def cancel(self) -> None:
        """End `run`, which another thread is in, or is about to be; what was answered stays."""
        self._canceled = True
        if (task := self._task) is not None:
            with suppress(RuntimeError):  # its loop has ended
                task[0].call_soon_threadsafe(task[1].cancel)

    def abort(self) -> None:
        """Have the servers stop at what is unanswered: `run`, which another thread is in, comes to its end."""
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
        # A lost engine can be mended, anything else cannot: it goes first.
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
            if client.aborted:  # a server did not stop in time, and the run goes on without these
                self.aborted.update(dict.fromkeys(call.requests, 0))
            raise
        self._replies.update(zip(call.requests, replies, strict=True))
        await self._finish(call.requests)

    async def _finish(self, requests: Iterable[int]) -> None:
        if self.on_finished:
            self._made |= (made := {request: self._sample(request) for request in requests})
            await asyncio.to_thread(self.on_finished, made)  # the loop goes on with the others
        if self.on_progress:
            self.on_progress(self.responses, len(self._all))

    def trajectories(self) -> list[Trajectory]:
        """The trajectories in the order of the requests; a prompt's place is their group id."""
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
