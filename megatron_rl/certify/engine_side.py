"""The engine's recordings for a certificate: it samples and prefills the same sequences in every way that occurs in a run."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_rl.algorithms.sampling_support import SamplingSupport, request_seed
from megatron_rl.certify.compare import Place, Recorded
from megatron_rl.data.trajectory import Trajectory
from megatron_rl.servers.client import SGLangClient
from megatron_rl.servers.reply import Reply
from megatron_rl.servers.server import RolloutServer
from megatron_rl.tasks import Prompt

ATTEMPTS = 8
"""Number of attempts to retract requests during sampling, which releases their cache. An attempt fails if the requests end
before the retraction."""
POLL_S = 0.002
"""Seconds between two checks of the folder for new recordings."""


@dataclass
class Sides:
    """Recordings of the engine: values by sequence number, for each way to compute them."""

    trajectories: list[Trajectory]
    """Responses sampled in `decode`. The prefills run over these responses."""
    decode: dict[int, Recorded] = field(default_factory=dict)
    """Recording of a decode: all responses are sampled in one batch."""
    decode_alone: dict[int, Recorded] = field(default_factory=dict)
    """Recording of a decode in which each response is sampled alone."""
    prefill: dict[int, Recorded] = field(default_factory=dict)
    """Recording of a prefill of all sequences in one batch."""
    prefill_alone: dict[int, Recorded] = field(default_factory=dict)
    """Recording of a prefill of each sequence alone."""
    cached: dict[int, Recorded] = field(default_factory=dict)
    """Recording of a prefill of sequences that are partly in the prefix cache; without rows for cached tokens."""
    from_cache: int = 0
    """Number of tokens in `cached` that came from the prefix cache."""
    retracted: dict[int, Recorded] = field(default_factory=dict)
    """Recording of a decode during which the server retracted the requests and released their cache."""
    computed_again: int = 0
    """Number of sequences in `retracted` whose tokens were computed again."""


class EngineRecorder:
    """Sends requests to one server, which records the outputs of its operators in `folder`."""

    def __init__(
        self,
        server: RolloutServer,
        folder: Path,
        support: SamplingSupport,
        *,
        timeout_s: float,
        say: Callable[[str], None],
    ) -> None:
        """Create it. timeout_s: limit of one HTTP call, in seconds. say: prints progress."""
        self.server, self.folder, self.support, self.say = server, folder, support, say
        self.client = SGLangClient(
            [server.address], timeout_s=timeout_s, retries=0, lost=lambda: not server.alive(), key=server.key
        )
        self._asked = 0

    def run(self, prompts: Sequence[Prompt], lengths: Sequence[int], seed: int) -> Sides:
        """Sample responses of the given lengths (in tokens) and return all recordings. Errors: UserError."""
        seeds = [request_seed(f"{seed}/certify", number) for number in range(len(prompts))]
        tokens = [[int(token) for token in prompt.tokens] for prompt in prompts]
        everyone = range(len(prompts))

        def sample(numbers: Iterable[int]) -> dict[int, tuple[Reply, Recorded]]:
            numbers = [*numbers]
            sampling = [self._sampling(lengths[n], seeds[n]) for n in numbers]
            asked = [tokens[n] for n in numbers]
            replies, rows = self._ask(asked, sampling, options=self.support.options())
            return {
                n: (reply, rows_of(reply, asked[i], rows[i]))
                for i, (n, reply) in enumerate(zip(numbers, replies, strict=True))
            }

        def rows_of(reply: Reply, prompt: list[int], rows: Recorded) -> Recorded:
            given = torch.tensor([*prompt, *reply.tokens.tolist()])
            log_probs = torch.full((len(given),), torch.nan)
            log_probs[len(prompt) :] = torch.from_numpy(reply.fields["rollout_log_probs"])
            return Recorded(given, log_probs, rows.positions, rows.values)

        self.say("decode: sampling all prompts together")
        first = sample(everyone)
        sides = Sides([_trajectory(prompts[n], n, reply, self.support) for n, (reply, _) in first.items()])
        sides.decode = {n: recorded for n, (_, recorded) in first.items()}
        whole = {n: recorded.tokens.tolist() for n, recorded in sides.decode.items()}

        self.say("decode: sampling each prompt alone, with the same seeds")
        for number in everyone:
            self.server.flush()
            sides.decode_alone |= {n: recorded for n, (_, recorded) in sample([number]).items()}

        self.say("prefill: reading all sequences together, then each alone")
        self.server.flush()
        sides.prefill = self._read(whole)
        for number in everyone:
            self.server.flush()
            sides.prefill_alone |= self._read({number: whole[number]})

        self.say("prefill: reading sequences that are partly in the prefix cache")
        self.server.flush()
        cuts = {n: max(1, len(prompts[n].tokens) // 2 + n % 3) for n in everyone}
        cuts = {n: min(cut, len(whole[n]) - 2) for n, cut in cuts.items()}
        self._ask([whole[n][:cut] for n, cut in cuts.items()], {"max_new_tokens": 0})
        sides.cached = self._read(whole, cuts)
        sides.from_cache = sum(len(whole[n]) - len(recorded.positions) for n, recorded in sides.cached.items())

        self.say("decode: releasing the cache during sampling")
        for _ in range(ATTEMPTS):
            self.server.flush()
            self._while_asking = self._retract_after(max(1, min(lengths) // 4))
            try:
                sides.retracted = {n: recorded for n, (_, recorded) in sample(everyone).items()}
            finally:
                self._while_asking = None
            twice = [r for r in sides.retracted.values() if len(r.positions) > len(r.positions.unique())]
            sides.computed_again = len(twice)
            if twice:
                break
        return sides

    def _sampling(self, length: int, seed: int) -> dict[str, Any]:
        return self.support.request() | {"max_new_tokens": length, "ignore_eos": True, "sampling_seed": seed}

    def _read(self, whole: dict[int, list[int]], starts: dict[int, int] | None = None) -> dict[int, Recorded]:
        """Record a prefill of whole sequences.

        starts: position of the first token with a log-prob in each sequence; earlier tokens may come from the prefix cache.
        """
        options: dict[str, Any] = {"logprob_start_len": [starts[n] for n in whole]} if starts else {}
        replies, rows = self._ask([*whole.values()], {"max_new_tokens": 0}, prompt_log_probs=True, options=options)
        found = {}
        for i, (number, tokens) in enumerate(whole.items()):
            known = replies[i].prompt_log_probs
            assert known is not None
            log_probs = torch.full((len(tokens),), torch.nan)
            log_probs[len(tokens) - len(known) :] = torch.from_numpy(known)
            found[number] = Recorded(torch.tensor(tokens), log_probs, rows[i].positions, rows[i].values)
        return found

    _while_asking: Callable[[], Coroutine[Any, Any, None]] | None = None
    """Coroutine that runs while requests are in progress."""

    def _ask(
        self, prompts: list[list[int]], sampling: Any, *, options: dict[str, Any] | None = None, **more: Any
    ) -> tuple[list[Reply], list[Recorded]]:
        """Send requests; return the replies and the recorded values of each request. Empty the folder before and after."""
        self._asked += 1
        rids = [f"certify-{self._asked}-{i}" for i in range(len(prompts))]
        clear(self.folder)

        async def ask() -> list[Reply]:
            async with self.client:
                call = asyncio.create_task(
                    self.client.call(prompts, sampling, options={**(options or {}), "rid": rids}, **more)
                )
                beside = asyncio.create_task(self._while_asking()) if self._while_asking else None
                try:
                    return await call
                finally:
                    if beside is not None:
                        beside.cancel()
                        await asyncio.gather(beside, return_exceptions=True)

        replies = asyncio.run(ask())
        rows = read_passes(self.folder, rids)
        clear(self.folder)
        return replies, rows

    def _retract_after(self, passes: int) -> Callable[[], Coroutine[Any, Any, None]]:
        async def retract() -> None:
            deadline = time.monotonic() + self.client.timeout_s
            while len([*self.folder.glob("*-decode.pt")]) < passes:
                if time.monotonic() > deadline:
                    return
                await asyncio.sleep(POLL_S)
            await asyncio.to_thread(self.server.retract)

        return retract


def clear(folder: Path) -> None:
    """Delete the folder's content, and create the folder if it does not exist."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def read_passes(folder: Path, rids: Sequence[str]) -> list[Recorded]:
    """Read each request's positions and values from all recorded forward passes in the folder, in order.

    Tokens and log-probs of the results stay empty.
    """
    positions: dict[str, list[Tensor]] = {rid: [] for rid in rids}
    values: dict[str, dict[Place, list[Tensor]]] = {rid: {} for rid in rids}
    for file in sorted(folder.glob("*.pt")):
        one = torch.load(file, weights_only=True)
        for index, rid in enumerate(one["rids"]):
            if rid not in positions:
                continue
            mine = (one["rows"] == index).nonzero()[:, 0]
            positions[rid].append(one["positions"][mine])
            for place, value in one["values"].items():
                values[rid].setdefault(place, []).append(value[mine])
    empty = torch.zeros(0, dtype=torch.int64)
    return [
        Recorded(
            empty,
            torch.zeros(0),
            torch.cat(positions[rid]) if positions[rid] else empty,
            {place: torch.cat(parts) for place, parts in values[rid].items()},
        )
        for rid in rids
    ]


def _trajectory(prompt: Prompt, number: int, reply: Reply, support: SamplingSupport) -> Trajectory:
    return Trajectory(
        prompt_id=prompt.prompt_id,
        group_id=number,
        tokens=np.concatenate([np.asarray(prompt.tokens, np.int32), reply.tokens]),
        prompt_length=len(prompt.tokens),
        fields=reply.fields,
        finish_reason=reply.finish_reason,
        support=support.sampled(),
        kept=reply.kept,
        weight_spans=reply.weight_spans,
    )
