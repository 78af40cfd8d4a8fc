"""HTTP client of one or many SGLang servers: bounded concurrency, timeouts, retries, typed replies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import aiohttp
import numpy as np

from megatron_rl.errors import UserError
from megatron_rl.rollout.routes import FeatureLayout, RouteLayout
from megatron_rl.rollout.trajectory import RouterFeatures, WeightSpan

FIRST_PAUSE_S = 0.5
"""Pause before the first retry; each further one is twice as long, up to LONGEST_PAUSE_S."""
LONGEST_PAUSE_S = 30.0


class EngineLost(UserError):
    """No server answered, after all retries."""


@dataclass
class Reply:
    """One sampled response, p prompt tokens and m response tokens."""

    tokens: np.ndarray
    """[m] int32."""
    log_probs: np.ndarray
    """[m] float32, under the sampling support."""
    finish_reason: str
    """stop | length | abort."""
    weight_spans: list[WeightSpan]
    kept: list[np.ndarray] | None = None
    """Per token the ids that top-p and top-k kept, int32, where the request asks for them."""
    routes: np.ndarray | None = None
    """[p + m - 1 - start, moe_layers, topk]: start rows were known already."""
    features: RouterFeatures | None = None
    prompt_log_probs: np.ndarray | None = None
    """[p - 1] float32: log-probs of prompt tokens 1..p-1 at temperature 1, from the prefill."""
    text: str = ""
    """Decoded by the server, empty where it has no tokenizer."""


def parse_reply(
    reply: dict[str, Any],
    prompt_length: int,
    routes: RouteLayout | None,
    prompt_log_probs: bool,
    *,
    routes_start: int = 0,
    features: FeatureLayout | None = None,
    kept: bool = False,
) -> Reply:
    """One element of SGLang's answer. Errors: UserError that names the field that is missing or malformed."""
    try:
        meta = reply["meta_info"]
        tokens = np.asarray(reply["output_ids"], np.int32)
        # Those of output_token_logprobs are from before the truncation.
        values = (
            meta["output_token_sampling_logprobs"] if kept else [entry[0] for entry in meta["output_token_logprobs"]]
        )
        log_probs = np.asarray(values, np.float32)
        reason = meta["finish_reason"]
        spans = [WeightSpan(str(s["version"]), s["start"], s["end"]) for s in meta.get("weight_versions") or []]
        sets = [np.asarray(ids, np.int32) for ids in meta["output_token_sampling_mask"]] if kept else None
        if not spans:
            spans = [WeightSpan(str(meta["weight_version"]), 0, len(tokens))]
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise UserError(f"reply of SGLang is not what release 0.5.23 sends ({type(error).__name__}: {error})") from None
    if reason["type"] == "abort" and "status_code" in reason:
        raise UserError(f"SGLang refused a prompt of {prompt_length} tokens: {reason.get('message')}")
    if len(log_probs) != len(tokens):
        raise UserError(f"reply of SGLang has {len(tokens)} tokens but {len(log_probs)} log-probs")
    parsed = Reply(tokens, log_probs, reason["type"], spans, text=reply.get("text") or "")
    if kept:
        parsed.kept = sets
        if len(sets) != len(tokens):
            raise UserError(f"reply of SGLang has {len(tokens)} tokens but {len(sets)} sets of tokens that it kept")
        outside = [i for i, (token, ids) in enumerate(zip(tokens, parsed.kept, strict=True)) if token not in ids]
        if outside:
            raise UserError(
                f"SGLang says that token {outside[0]} of a response is not among those it kept to sample from"
            )
    if routes is not None:
        if meta.get("routed_experts") is None:
            raise UserError("SGLang returned no routed_experts: start it with --enable-return-routed-experts")
        parsed.routes = routes.decode(meta["routed_experts"], prompt_length + len(tokens) - 1 - routes_start)
    if features is not None:
        entries = meta.get("router_features")
        if entries is None or len(entries) != len(tokens):
            raise UserError(
                f"SGLang returned router_features of {len(entries or [])} tokens for a response of {len(tokens)}:"
                " is it served with route predictors and a feature stride?"
            )
        parsed.features = features.decode(entries)
    if prompt_log_probs:
        entries = meta["input_token_logprobs"]
        parsed.prompt_log_probs = np.asarray([entry[0] for entry in entries[1:]], np.float32)
    return parsed


@dataclass
class ClientStats:
    """Counts since the client was made."""

    retries: int = 0
    errors: list[str] = field(default_factory=list)
    """What the retries were for, the newest last."""


class SGLangClient:
    """`async with SGLangClient(addresses) as client:`; it may be entered again, also under another event loop."""

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        concurrency: int = 512,
        timeout_s: float = 600.0,
        retries: int = 3,
        lost: Callable[[], bool] = lambda: False,
    ):
        """concurrency: responses in flight; timeout_s: of one HTTP call; lost(): True where a retry is pointless, as
        the server is known to be dead."""
        if not addresses:
            raise UserError("no SGLang server: rollout.addresses is empty and none was started")
        self.addresses = [a.rstrip("/") if "://" in a else f"http://{a.rstrip('/')}" for a in addresses]
        self.concurrency, self.timeout_s, self.retries, self.lost = concurrency, timeout_s, retries, lost
        self.stats = ClientStats()
        self._in_flight = dict.fromkeys(self.addresses, 0)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> SGLangClient:
        timeout = aiohttp.ClientTimeout(total=self.timeout_s, sock_connect=min(10.0, self.timeout_s))
        self._session = aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0))
        self._free, self._running = asyncio.Condition(), 0
        return self

    async def __aexit__(self, *_exception) -> None:
        await self._session.close()

    async def ready(self) -> bool:
        """Whether every server answers /ready (which, unlike /health, generates nothing)."""
        for address in self.addresses:
            try:
                async with self._session.get(f"{address}/ready") as reply:
                    if reply.status != 200:
                        return False
            except (aiohttp.ClientError, OSError):
                return False
        return True

    async def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: dict[str, Any],
        *,
        samples: int = 1,
        routes: RouteLayout | None = None,
        prompt_log_probs: bool = False,
        routes_start: Sequence[int] | None = None,
        features: FeatureLayout | None = None,
        options: dict[str, Any] | None = None,
    ) -> list[list[Reply]]:
        """`samples` responses to each prompt, [prompts][samples], all from one server.

        sampling: SGLang's sampling_params; options: other fields of its request. routes_start: for each prompt, how many
        rows of its routes are known already and stay away (0 to its length); SGLang takes one number a call, so that each
        prompt gets a call of its own, and they may go to different servers. Errors: EngineLost after all retries; UserError
        for what no retry mends.
        """
        inputs = [[int(token) for token in prompt] for prompt in prompts]
        ask = partial(
            self._generate,
            sampling=sampling,
            samples=samples,
            routes=routes,
            prompt_log_probs=prompt_log_probs,
            features=features,
            options=options or {},
        )
        if routes_start is None:
            return await ask(inputs)
        calls = [ask([prompt], routes_start=start) for prompt, start in zip(inputs, routes_start, strict=True)]
        return [groups[0] for groups in await asyncio.gather(*calls)]

    async def _generate(
        self,
        inputs: list[list[int]],
        *,
        sampling: dict[str, Any],
        samples: int,
        routes: RouteLayout | None,
        prompt_log_probs: bool,
        features: FeatureLayout | None,
        options: dict[str, Any],
        routes_start: int = 0,
    ) -> list[list[Reply]]:
        """One HTTP call (two with the prefixes)."""
        body: dict[str, Any] = {
            "input_ids": [prompt for prompt in inputs for _ in range(samples)],
            "sampling_params": sampling,
            "return_logprob": True,
            "return_routed_experts": routes is not None,
            "routed_experts_start_len": routes_start,
            **options,
        }
        if prompt_log_probs:
            body["logprob_start_len"] = 0
        # SGLang's own n > 1 computes the shared prefixes first too, but waits for one prompt after the other.
        prefixes = {"input_ids": inputs, "sampling_params": {"max_new_tokens": 0}}
        bodies = [prefixes, body] if samples > 1 and not prompt_log_probs else [body]
        async with self._in_turn(len(inputs) * samples):
            answer = await self._ask(bodies)
        if not isinstance(answer, list) or len(answer) != len(inputs) * samples:
            raise UserError(f"SGLang answered {len(inputs)} prompts x {samples} samples with something else")
        known = {"routes_start": routes_start, "features": features, "kept": options.get("return_sampling_mask", False)}
        replies = [
            parse_reply(one, len(prompt), routes, prompt_log_probs, **known)
            for one, prompt in zip(answer, body["input_ids"], strict=True)
        ]
        return [replies[i : i + samples] for i in range(0, len(replies), samples)]

    @asynccontextmanager
    async def _in_turn(self, responses: int) -> AsyncIterator[None]:
        """Wait until `responses` more fit under the concurrency; a call that is larger than it goes alone."""
        async with self._free:
            await self._free.wait_for(lambda: not self._running or self._running + responses <= self.concurrency)
            self._running += responses
        try:
            yield
        finally:
            async with self._free:
                self._running -= responses
                self._free.notify_all()

    async def _ask(self, bodies: list[dict[str, Any]]) -> Any:
        """Generate from all bodies in turn on the least busy server, on another after a failure; the last answer."""
        tried = dict.fromkeys(self.addresses, 0)
        for attempt in range(self.retries + 1):
            address = min(self.addresses, key=lambda a: (tried[a], self._in_flight[a]))
            tried[address] += 1
            self._in_flight[address] += 1
            try:
                for body in bodies:
                    answer = await self._post(f"{address}/generate", body)
                return answer
            except TimeoutError:
                problem = f"{address} did not answer within {self.timeout_s:g} s"
            except (aiohttp.ClientError, OSError, ValueError) as error:
                problem = f"{address}: {str(error) or type(error).__name__}"
            finally:
                self._in_flight[address] -= 1
            if self.lost():
                raise EngineLost(f"SGLang's server died ({problem})")
            if attempt < self.retries:
                self.stats.retries += 1
                self.stats.errors.append(problem)
                await asyncio.sleep(min(FIRST_PAUSE_S * 2**attempt, LONGEST_PAUSE_S))
        raise EngineLost(f"SGLang: {self.retries + 1} attempts failed, the last one: {problem}")

    async def _post(self, url: str, body: dict[str, Any]) -> Any:
        """Errors: UserError for a 4xx (the request is wrong, and will be), aiohttp's and TimeoutError for the rest."""
        async with self._session.post(url, json=body) as reply:
            if 400 <= reply.status < 500:
                raise UserError(f"SGLang refused a request ({reply.status}): {_message(await reply.text())}")
            if reply.status >= 500:
                raise aiohttp.ClientError(f"answered {reply.status}: {_message(await reply.text())}")
            return await reply.json()


def _message(text: str) -> str:
    """The start of an error body, on one line."""
    return " ".join(text.split())[:300]
