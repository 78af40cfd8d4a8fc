"""A judge as a reward: a model behind an OpenAI-compatible server says how good a response is (`rewards.judges`)."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import random
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean

import aiohttp

from megatron_rl.config import JudgeConfig
from megatron_rl.credentials import HIDDEN, WRONG_KEY, bearer, hide, key_of
from megatron_rl.data.trajectory import Trajectory
from megatron_rl.environments import Prompt
from megatron_rl.environments.stated_answer import behind_thinking
from megatron_rl.errors import UserError
from megatron_rl.rollout.judgements import Judgements
from megatron_rl.rollout.verdict import FIELD, question, verdict

log = logging.getLogger(__name__)

PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
"""Before a request is repeated; each time twice as long."""
MOST_BYTES = 4 * 2**20
"""Longest answer of a server."""
SAID_EVERY_S = 60.0
"""Time between two lines about how far it is."""
_RANDOM = random.SystemRandom()  # none that a run's seed decides


class NoVerdict(Exception):
    """A request without a usable answer, and why."""

    def __init__(self, problem: str, *, again: bool = True) -> None:
        """again: it may be better the next time."""
        super().__init__(hide(problem))
        self.again = again


@dataclass
class Judge:
    """One of rewards.judges."""

    name: str
    config: JudgeConfig
    known: Judgements
    asked: int = field(default=0, init=False)
    """Different responses of the last call that the server was asked about."""

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Ask for a word. prompts: some that it will see. Errors: UserError where that cannot be, or no word comes."""
        for prompt in prompts:
            self._asked(prompt)

        async def one() -> None:
            async with self._session() as session:
                await self._retried(lambda: self._reply(session, "Say OK.", max_tokens=1))

        try:
            asyncio.run(one())
        except NoVerdict as error:
            raise UserError(self._problem(str(error))) from None

    def score(self, judged: Sequence[Trajectory], prompts: Sequence[Prompt]) -> list[float | None]:
        """A score from 0 to 1 of each response; None where the judge gave none, which is logged.

        Errors: UserError where more than max_failures of them have none.
        """
        seen = [t.text if self.config.thinking else behind_thinking(t.text).strip() for t in judged]
        fields = [{"response": text} | self._asked(prompts[t.group_id]) for t, text in zip(judged, seen, strict=True)]
        keys = [self._key(of_response) for of_response in fields]
        scores = {key: score for key in keys if (score := self.known.get(key)) is not None}
        asked = {key: of_response for key, of_response in zip(keys, fields, strict=True) if key not in scores}
        self.asked, found = len(asked), dict[str, float]()
        try:
            if asked:
                asyncio.run(self._ask(asked, Counter(keys), found))
        finally:  # a run that stops need not ask for these again
            self.known.add(found)
        return [(scores | found).get(key) for key in keys]

    def _asked(self, prompt: Prompt) -> dict[str, str]:
        """Fields of a prompt that the judge is shown. Errors: UserError where the answer is wanted and missing."""
        asked = prompt.text if prompt.messages is None else json.dumps(prompt.messages, ensure_ascii=False, indent=1)
        fields = {"prompt": asked}
        if "answer" in FIELD.findall(self.config.prompt):
            if prompt.answer is None:
                raise UserError(
                    f"config: rewards.judges.{self.name}.prompt has {{answer}}, and {prompt.prompt_id} has none; take it out,"
                    " or give data with answers"
                )
            plain = isinstance(prompt.answer, str)
            fields["answer"] = prompt.answer if plain else json.dumps(prompt.answer, ensure_ascii=False, default=str)
        return fields

    def _key(self, fields: dict[str, str]) -> str:
        c = self.config
        asked = [
            c.model,
            c.prompt,
            c.scale,
            c.pattern,
            c.json_key,
            c.temperature,
            c.max_tokens,
            c.votes,
            c.options,
            fields,
        ]
        return hashlib.sha256(json.dumps(asked, sort_keys=True, default=str).encode()).hexdigest()

    async def _ask(self, asked: dict[str, dict[str, str]], counts: Counter[str], found: dict[str, float]) -> None:
        """Put scores by key into `found`. counts: responses of each key, of those that were not asked about too."""
        total, failed, problem = counts.total(), 0, ""
        clock = asyncio.get_running_loop().time
        said, room = clock(), asyncio.Semaphore(self.config.concurrency)

        async def one(session: aiohttp.ClientSession, key: str, fields: dict[str, str]) -> None:
            nonlocal failed, problem, said
            try:
                votes = [await self._vote(session, room, fields) for _ in range(self.config.votes)]
                found[key] = fmean(votes)
            except NoVerdict as error:
                failed, problem = failed + counts[key], str(error)
            if failed > self.config.max_failures * total:
                raise UserError(
                    f"{self._problem(problem)}; {failed} of {total} responses have no verdict, which is more than"
                    f" max_failures = {self.config.max_failures:g}"
                )
            if clock() - said > SAID_EVERY_S:
                said = clock()
                log.warning(f"rewards.judges.{self.name}: {len(found)} of {len(asked)} responses are judged")

        try:
            async with self._session() as session, asyncio.TaskGroup() as group:
                for key, fields in asked.items():
                    group.create_task(one(session, key, fields))
        except ExceptionGroup as several:  # the others are ended: the run stops
            raise several.exceptions[0] from None
        if failed:
            log.warning(f"rewards.judges.{self.name}: {failed} of {total} responses are masked: {problem}")

    async def _vote(self, session: aiohttp.ClientSession, room: asyncio.Semaphore, fields: dict[str, str]) -> float:
        """One verdict. Errors: NoVerdict."""

        async def once() -> float:
            nonce = secrets.token_hex(8)
            async with room:
                reply = await self._reply(session, question(self.config, nonce, fields), whole=True)
            try:
                return verdict(self.config, nonce, reply)
            except ValueError as error:
                raise NoVerdict(str(error)) from None

        return await self._retried(once)

    async def _retried[T](self, once: Callable[[], Awaitable[T]]) -> T:
        """The result of the first attempt that has one. Errors: NoVerdict, of the last attempt."""
        for attempt in range(self.config.retries):
            try:
                return await once()
            except NoVerdict as error:
                if not error.again:
                    raise
            await asyncio.sleep(min(LONGEST_PAUSE_S, PAUSE_S * 2**attempt) * _RANDOM.uniform(1, 1.5))
        return await once()

    async def _reply(
        self, session: aiohttp.ClientSession, text: str, *, max_tokens: int | None = None, whole: bool = False
    ) -> str:
        """The server's reply to a message. whole: one that a limit has cut is none. Errors: NoVerdict."""
        body = {
            "model": self.config.model,
            "messages": [{"role": "user", "content": text}],
            "temperature": self.config.temperature,
            "max_tokens": max_tokens or self.config.max_tokens,
            **self.config.options,
        }
        body = {name: value for name, value in body.items() if value is not None}
        url, raw = f"{self.config.address.rstrip('/')}/chat/completions", bytearray()
        try:
            async with session.post(url, json=body, allow_redirects=False) as answer:
                async for chunk in answer.content.iter_chunked(65536):
                    raw += chunk
                    if len(raw) > MOST_BYTES:
                        raise NoVerdict(f"{url} answers more than {MOST_BYTES} bytes")
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise NoVerdict(f"{url}: {' '.join(f'{type(error).__name__} {error}'.split()):.200}") from None
        said = repr(raw[:200].decode(errors="replace").replace(self._key_of_server() or "\0", HIDDEN))
        if answer.status in (401, 403):
            raise NoVerdict(f"{url}: {WRONG_KEY.format(setting='the api_key beside its address')}", again=False)
        if answer.status != 200:
            again = answer.status in (408, 409, 425, 429) or answer.status >= 500
            raise NoVerdict(f"{url} answers {answer.status}: {said}", again=again)
        try:
            choice = json.loads(raw)["choices"][0]
            content, ended = choice["message"]["content"], choice.get("finish_reason")
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise NoVerdict(f"{url} answers no chat completion: {said}") from None
        if whole and not isinstance(content, str):
            raise NoVerdict(f"{url} answers without a text; a judge that thinks needs more max_tokens")
        if whole and ended != "stop":
            raise NoVerdict(f"its reply was cut off ({ended!r:.40}); raise max_tokens")
        return str(content)

    def _session(self) -> aiohttp.ClientSession:
        headers = bearer(self._key_of_server())
        timeout = aiohttp.ClientTimeout(total=self.config.timeout_s)
        return aiohttp.ClientSession(timeout=timeout, headers=headers, connector=aiohttp.TCPConnector(limit=0))

    def _key_of_server(self) -> str:
        return key_of(self.config.api_key, f"rewards.judges.{self.name}.api_key")

    def _problem(self, problem: str) -> str:
        return (
            f"rewards.judges.{self.name}: {problem}; its address has to be that of an OpenAI-compatible server"
            f" (http://host:port/v1) of the model {self.config.model}"
        )
