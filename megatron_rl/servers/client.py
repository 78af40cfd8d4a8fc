"""HTTP client of one or many SGLang servers: bounded concurrency, timeouts, retries."""

from __future__ import annotations

import asyncio
import copy
import json
import uuid
from collections.abc import Callable, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import cycle, islice
from typing import Any

import aiohttp

from megatron_rl.credentials import WRONG_KEY
from megatron_rl.data.engine_routes import EngineFeatures, EngineRoutes
from megatron_rl.errors import UserError
from megatron_rl.http_client import NoAnswer, ask, session
from megatron_rl.servers.reply import MOST_VOCABULARY, Reply, parse_reply
from megatron_rl.servers.request_slots import RequestSlots
from megatron_rl.sync.engines import as_own, owner_of

FIRST_PAUSE_S = 0.5
"""Pause before the first retry, in seconds; each further pause is twice as long, up to LONGEST_PAUSE_S."""
LONGEST_PAUSE_S = 30.0
DECODERS = 4
"""Number of threads that decode replies. Routes of a response are many megabytes, which would block the event loop."""
NO_SIGN = "gives no sign of life"
PASSING = (408, 425, 429)
"""HTTP statuses of a busy server, or of a busy proxy in front of it. The client repeats the request, as after a 5xx status."""
ASKS_FEATURES, ASKS_LOGITS = "router-features-", "router-logits-"
"""Prefixes of a request's id: the first asks the model for router features, the second for router logits alone. The id is used
because SGLang has no request field that reaches the model. The served model reads the prefix (`ASKS` in its export.py)."""


def with_scheme(address: str) -> str:
    """Return the address as http://host:port. `http://` is added if the address has no scheme."""
    address = address.rstrip("/")
    return address if "://" in address else f"http://{address}"


def server_order(number: int, total: int, servers: int) -> list[int]:
    """Return the servers to try, as indices in order, for request `number` of `total`.

    total: number of requests of all leaders; a leader sends the requests of its data-parallel rank. Neighboring requests, such
    as the samples of a prompt, mostly have the same first server. The numbers of requests per server differ by at most one. If
    a server fails, its requests are spread evenly over the others.
    """
    first = number * servers // total
    others = [s for s in range(servers) if s != first]
    turn = number % len(others) if others else 0
    return [first, *others[turn:], *others[:turn]]


class EngineLost(UserError):
    """Raised if no server answered after all retries."""


class Aborted(Exception):
    """Raised by a call that `SGLangClient.abort` ended."""

    def __init__(self, lengths: list[int]) -> None:
        """lengths: for each response of the call, the number of tokens that it had at the abort."""
        super().__init__("aborted")
        self.lengths = lengths


class SGLangClient:
    """Client of SGLang servers: `async with SGLangClient(addresses) as client:`.

    One client can be used in several `async with` blocks in turn, also under different event loops.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        concurrency: int = 512,
        timeout_s: float = 600.0,
        retries: int = 3,
        lost: Callable[[], bool] = lambda: False,
        health: tuple[float, float] | None = None,
        adapter: str | None = None,
        run: str = "",
        key: str = "",
        vocabulary: int = MOST_VOCABULARY,
        versions: Set[str] | None = None,
        pushed: Callable[[], str | None] = lambda: None,
    ):
        """concurrency: largest number of responses in flight. timeout_s: timeout of one HTTP call, in seconds.

        lost(): whether all servers are known to be dead. health: (interval, timeout) of each server's health check, in seconds;
        if a server fails the check, its unanswered requests go to other servers at once. adapter: name of the LoRA adapter that
        the servers use; None: the model without adapter. run: id of the run that owns the weights; weight versions in replies
        are then steps of the run. key: API key of all servers; empty: the servers need no key. vocabulary: size of the model's
        vocabulary; a reply with a token outside the vocabulary is an error. versions: weight versions of this run, a set that
        grows; None: any version is accepted. A server that answers with another version was restarted, and its answers are not
        used. pushed(): weight version that was last sent to the servers, or is being sent; None: unknown.
        """
        if not addresses:
            raise UserError("no SGLang server: rollout.addresses is empty and none was started")
        self.addresses = [with_scheme(address) for address in addresses]
        self.versions, self.pushed = versions, pushed
        self.slots, self.timeout_s, self.retries, self.lost = RequestSlots(concurrency), timeout_s, retries, lost
        self.step = 0
        self.aborted = False
        """True if `abort` was called."""
        self._run, self._key = run, key
        self.health, self.vocabulary = health, vocabulary
        self._of_all = {} if adapter is None else {"lora_path": adapter}
        """Fields of the JSON body that every request has."""
        self.retried = 0
        """Number of retries since the client was made."""

    def move(self, addresses: Sequence[str]) -> None:
        """Use other servers from now on. No request may be in flight."""
        self.addresses = [*addresses]

    def copy(self, step: int) -> SGLangClient:
        """Return another client of the same servers, for another event loop. Both clients share one limit of concurrency.

        step: training step that waits for the answers. Requests of this step are sent before requests of later steps.
        """
        another = copy.copy(self)
        another.step, another.aborted = step, False
        return another

    async def __aenter__(self) -> SGLangClient:
        self._session = session(timeout_s=self.timeout_s, connect_s=min(10.0, self.timeout_s), key=self._key)
        self._pool = ThreadPoolExecutor(DECODERS, "decode")
        self._prefixes: dict[tuple[str, tuple[int, ...]], asyncio.Task] = {}
        self._down: dict[str, str] = {}
        """Servers that requests try last, each with the reason."""
        self._flying: dict[str, set[asyncio.Task]] = {address: set() for address in self.addresses}
        """Calls in flight, by server."""
        self._open: dict[str, set[str]] = {address: set() for address in self.addresses}
        """Ids of the requests in flight, by server. `abort` needs these ids."""
        watched = self.addresses if self.health else []
        self._watches = [asyncio.create_task(self._watch(address, *self.health)) for address in watched if self.health]
        return self

    async def __aexit__(self, *_exception: object) -> None:
        for watch in self._watches:
            watch.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)
        await self._session.close()
        self._pool.shutdown(cancel_futures=True)

    async def call(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: dict[str, Any] | list[dict[str, Any]],
        *,
        number: int = 0,
        total: int = 1,
        prefixes: Sequence[Sequence[int]] = (),
        routes: EngineRoutes | None = None,
        routes_start: int = 0,
        features: EngineFeatures | None = None,
        prompt_log_probs: bool = False,
        top_log_probs: int = 0,
        options: dict[str, Any] | None = None,
    ) -> list[Reply]:
        """Return a response to each prompt, by one HTTP call to the server that `server_order(number, total)` names.

        sampling: SGLang's sampling_params, one for all prompts or one per prompt; options: other fields of the request.
        prefixes: prompts that other calls to the server contain too; the server computes each of these prompts once.
        routes_start: number of rows at the start of each prompt's routes that the caller already knows; the server leaves these
        rows out. top_log_probs: number of likeliest tokens whose log-probs are returned with each token of the responses.
        Errors: EngineLost after all retries; UserError for a problem that retries cannot solve.
        """
        body: dict[str, Any] = {
            "input_ids": [[int(token) for token in prompt] for prompt in prompts],
            "sampling_params": sampling,
            "return_logprob": True,
            "return_routed_experts": routes is not None,
            "routed_experts_start_len": routes_start,
            **self._of_all,
            **(options or {}),
        }
        if prompt_log_probs:
            body.setdefault("logprob_start_len", 0)
        if top_log_probs:
            # SGLang takes these after temperature, before top-p, top-k and min-p (sglang/srt/layers/sampler.py, 0.5.23).
            body |= {
                "top_logprobs_num": top_log_probs,
                "return_flat_raw_output_top_logprobs": True,
                "return_flat_raw_top_logprobs_b64": True,
            }
        asks = "" if features is None else ASKS_FEATURES if features.hidden else ASKS_LOGITS
        known = {"routes_start": routes_start, "features": features, "kept": body.get("return_sampling_mask", False)}
        known |= {"top_log_probs": top_log_probs, "vocabulary": self.vocabulary}
        most = [each.get("max_new_tokens") for each in (sampling if isinstance(sampling, list) else [sampling])]

        def decode(answer: bytes) -> list[Reply]:
            try:
                parts = json.loads(answer)
            except (ValueError, RecursionError) as error:
                raise NoAnswer(f"an answer that is not JSON ({error})") from None
            if not isinstance(parts, list) or len(parts) != len(prompts):
                raise UserError(f"SGLang answered {len(prompts)} requests with something else")
            if self.aborted:
                raise Aborted([len(part.get("output_ids") or ()) for part in parts])
            return [
                parse_reply(part, len(prompt), routes, prompt_log_probs, max_new_tokens=asked, **known)
                for part, prompt, asked in zip(parts, prompts, islice(cycle(most), len(prompts)), strict=True)
            ]

        async with self.slots.take(len(prompts), self.step):
            order = server_order(number, total, len(self.addresses))
            return await self._ask(body, [tuple(int(t) for t in prefix) for prefix in prefixes], order, decode, asks)

    async def _ask(
        self,
        body: dict[str, Any],
        prefixes: Sequence[tuple[int, ...]],
        order: Sequence[int],
        decode: Callable[[bytes], list[Reply]],
        asks: str,
    ) -> list[Reply]:
        """Return the decoded answer of the first server in `order` that answers. asks: prefix of the request ids."""
        problem, asked = "", set[str]()

        async def ask(address: str) -> list[Reply]:
            if not self.aborted:
                await self._compute(address, prefixes)
            # Each attempt has its own ids, unless the caller names them: a server may still work on an earlier attempt.
            ids = body.get("rid") or [f"{asks}{uuid.uuid4().hex}" for _ in body["input_ids"]]
            self._open[address] |= {*ids}
            try:
                if self.aborted:
                    raise Aborted([0] * len(ids))
                answer = await self._post(f"{address}/generate", body | {"rid": ids})
            finally:
                self._open[address] -= {*ids}
            try:
                replies = await asyncio.get_running_loop().run_in_executor(self._pool, decode, answer)
            except UserError as error:
                raise UserError(f"{address}: {error}") from None
            self._check_versions(address, replies)
            return replies

        for attempt in range(self.retries + 1):
            left = [self.addresses[index] for index in order if self.addresses[index] not in asked]
            if not left:
                asked.clear()
                left = [self.addresses[index] for index in order]
            address = next((one for one in left if one not in self._down), left[0])
            asked.add(address)
            task = asyncio.create_task(ask(address))
            self._flying[address].add(task)
            try:
                return await task
            except NoAnswer as error:
                late = f"{address} did not answer within {self.timeout_s:g} s"
                problem = late if error.late else f"{address}: {error}"
            except asyncio.CancelledError:
                current = asyncio.current_task()
                if address not in self._down or (current is not None and current.cancelling()):
                    raise
                problem = self._down[address]
            finally:
                self._flying[address].discard(task)
            if self.aborted:
                raise Aborted([0] * len(body["input_ids"]))
            if self.lost():
                raise EngineLost(f"SGLang's server died ({problem})")
            if attempt < self.retries:
                self.retried += 1
                await asyncio.sleep(min(FIRST_PAUSE_S * 2**attempt, LONGEST_PAUSE_S))
        raise EngineLost(f"SGLang: {self.retries + 1} attempts failed, the last one: {problem}")

    async def abort(self) -> None:
        """Tell the servers to stop all requests. Calls in flight and later calls then raise `Aborted`."""
        self.aborted = True
        posts = [
            self._post(f"{address}/abort_request", {"rid": request})
            for address, requests in self._open.items()
            for request in requests
        ]
        await asyncio.gather(*posts, return_exceptions=True)  # a silent server ends by its timeout

    def _check_versions(self, address: str, replies: Sequence[Reply]) -> None:
        """Replace the weight versions in the replies by steps of this run, and check them.

        Errors: UserError for weights that another run has pushed; NoAnswer for other weights that this run has not pushed.
        """
        for reply in replies:
            reply.weight_spans = [replace(s, version=as_own(s.version, self._run)) for s in reply.weight_spans]
        found = {span.version for reply in replies for span in reply.weight_spans}
        if self.versions is not None and (strange := found - self.versions):
            if owner_of(version := min(strange)):
                raise UserError(
                    f"SGLang at {address} answers with weights {version!r:.80} of another run: give each run its own servers"
                )
            self._down[address] = f"{address} has weights of version {min(strange)!r:.80}: it was restarted"
            raise NoAnswer(f"weights of version {min(strange)!r:.80}, which this run has not pushed")

    async def _watch(self, address: str, interval_s: float, timeout_s: float) -> None:
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        while True:
            await asyncio.sleep(interval_s)
            try:
                answer = await ask(self._session, "GET", f"{address}/ready", timeout=timeout)
                if answer.status in (200, 503):  # 503: paused, as in a push, or not yet warm
                    if self._down.get(address, "").endswith(NO_SIGN):
                        del self._down[address]
                    continue
            except NoAnswer:
                pass
            self._down.setdefault(address, f"{address} {NO_SIGN}")
            for task in self._flying[address]:
                task.cancel()

    async def _compute(self, address: str, prefixes: Sequence[tuple[int, ...]]) -> None:
        """Make a server compute the prefixes that it has not computed yet, and wait until it has computed all.

        SGLang's own parameter n > 1 shares prefixes too, but SGLang then computes one prompt after the other.
        """
        new = [p for p in prefixes if (address, p) not in self._prefixes]
        if new:
            body = {"input_ids": new, "sampling_params": {"max_new_tokens": 0}, **self._of_all}
            task = asyncio.create_task(self._post(f"{address}/generate", body))
            task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # maybe no call waits
            self._prefixes |= {(address, p): task for p in new}
        try:
            tasks = {self._prefixes[address, p] for p in prefixes}
            if tasks:
                await asyncio.wait(tasks)  # `wait` leaves the tasks running on cancellation: other calls share them
            for task in tasks:
                task.result()
        except BaseException:
            for p in prefixes:  # a later attempt computes the prompt again
                self._prefixes.pop((address, p), None)
            raise

    async def _post(self, url: str, body: dict[str, Any]) -> bytes:
        """POST a request. Errors: UserError for a 4xx (a retry would fail too), NoAnswer for other failures."""
        answer = await ask(self._session, "POST", url, body)
        if answer.status < 400:
            return answer.body
        if answer.refuses_key:
            raise UserError(f"SGLang at {url}: {WRONG_KEY.format(setting='rollout.api_key')}")
        if answer.status < 500 and answer.status not in PASSING:
            raise UserError(f"SGLang refused a request ({answer.status}): {answer.text()}")
        raise NoAnswer(str(answer))
