"""Requests to a reward model's or a teacher's server about finished responses: scores and log-probs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp
import numpy as np

from megatron_rl.credentials import WRONG_KEY, hide
from megatron_rl.data.trajectory import Trajectory
from megatron_rl.errors import UserError
from megatron_rl.http_client import NoAnswer, ask, session
from megatron_rl.servers.reply import impossible, numbers

ATTEMPTS, PAUSE_S, AT_A_TIME = 3, 0.5, 64


def ask_all[T](
    address: str,
    path: str,
    bodies: Sequence[dict[str, Any]],
    read: Callable[[Any], T],
    *,
    timeout_s: float,
    what: str,
    key: str = "",
) -> list[T]:
    """POST each body to address/path, and return the answers (JSON), as `read` converts them, in the order of the bodies.

    key: key of the server. what: template of the error text, with {url} and {problem}. Errors: UserError if an answer does not
    come, or if `read` raises LookupError, TypeError, ValueError or OverflowError.
    """

    async def everything() -> list[T]:
        room = asyncio.Semaphore(AT_A_TIME)
        async with session(timeout_s=timeout_s, key=key) as server:

            async def one(body: dict[str, Any]) -> T:
                async with room:
                    return await _ask(server, f"{address.rstrip('/')}/{path}", body, read, what)

            return list(await asyncio.gather(*map(one, bodies)))

    return asyncio.run(everything())


async def _ask[T](
    server: aiohttp.ClientSession, url: str, body: dict[str, Any], read: Callable[[Any], T], what: str
) -> T:
    problem = ""
    for attempt in range(ATTEMPTS):
        await asyncio.sleep(PAUSE_S * attempt)
        try:
            answer = await ask(server, "POST", url, body)
            problem = f"it answers {answer.status}, and no JSON"
            if answer.refuses_key:
                problem = WRONG_KEY.format(setting="the api_key beside its address")
                break
            found = answer.json()
            problem = f"it answers {answer.status}: {found!r:.200}"
            if answer.status == 200:
                return read(found)
        except NoAnswer as error:
            problem = str(error)
        except (LookupError, TypeError, ValueError, OverflowError, RecursionError):  # `problem` holds the answer
            continue
    raise UserError(what.format(url=hide(url), problem=hide(problem)))


TEACHER = (
    "distillation.address: no log-probs from {url}: {problem}; it has to be SGLang's server of the teacher, with room for"
    " rollout.context_length tokens"
)


def teacher_log_probs(address: str, trajectories: Sequence[Trajectory], *, timeout_s: float, key: str = "") -> None:
    """Set teacher_log_probs of each trajectory: the teacher's log-probs at temperature 1, from the teacher's SGLang server.

    Errors: UserError if the server does not answer, or returns no log-probs of these tokens.
    """
    bodies = [
        {
            "input_ids": t.tokens.tolist(),
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        for t in trajectories
    ]
    answers = ask_all(address, "generate", bodies, _input_log_probs, timeout_s=timeout_s, what=TEACHER, key=key)
    for t, (ids, values) in zip(trajectories, answers, strict=True):
        if not np.array_equal(ids, t.tokens):
            raise UserError(TEACHER.format(url=address, problem="it gives log-probs of other tokens"))
        t["teacher_log_probs"] = values[t.prompt_length :]


def _input_log_probs(answer: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return (ids [n], log-probs [n]) of the prompt tokens in SGLang's answer; the first log-prob is NaN.

    Errors: ValueError if a value cannot be a log-prob.
    """
    entries = answer["meta_info"]["input_token_logprobs"]
    ids, values = [entry[1] for entry in entries], [entry[0] for entry in entries[1:]]
    log_probs = numbers(values, "input_token_logprobs")
    if impossible(log_probs).any():
        raise ValueError("log-probs that no probability has")
    return numbers(ids, "input_token_logprobs", "i"), np.asarray([np.nan, *log_probs], np.float32)
