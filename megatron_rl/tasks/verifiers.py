"""Verifiers: functions that score how right a response is. Each verifier returns named parts in [0, 1].

The part `correct` is 1 if the response is right. `answered` is 1 if an answer could be extracted from the response.
"""

from __future__ import annotations

import inspect
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import pairwise
from typing import Any

from megatron_rl.config.registry import resolve
from megatron_rl.errors import UserError
from megatron_rl.sandbox import isolated
from megatron_rl.sandbox.worker_pool import Failure, WorkerPool
from megatron_rl.tasks.task import Parts, Prompt
from megatron_rl.verifiers.code import last_block, passes_tests, tests_of_row
from megatron_rl.verifiers.instructions import PARTS, follows
from megatron_rl.verifiers.math import compare_math
from megatron_rl.verifiers.math_answer import math_answer
from megatron_rl.verifiers.stated_answer import extract_answer

log = logging.getLogger(__name__)

_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?")


def exact(text: str, answer: Any) -> Parts:
    """Score 1 if the extracted answer equals the expected answer, ignoring white space around both."""
    found = extract_answer(text)
    return {"correct": float(found != "" and found == str(answer).strip())}


def number_list(text: str, answer: Sequence[float] | str) -> Parts:
    """Score 1 if the response is exactly the expected list of numbers, with any separators.

    answer: the numbers, or a text like '3 6 12 15'.
    """
    expected = read_numbers(answer) if isinstance(answer, str) else [Decimal(str(n)) for n in answer]
    found = read_numbers(text)
    return {"correct": float(bool(found) and found == expected), "answered": float(found is not None)}


def zigzag(text: str, question: str) -> Parts:
    """Score 1 if the response has each number of the question once, and the numbers alternately rise and fall.

    question: `<6 15 3 12:` to start with a rise, `>6 15 3 12:` to start with a fall.
    """
    found = read_numbers(text)
    right = found is not None and sorted(found) == sorted(read_numbers(question[1:-1]) or [])
    upwards = question[0] == "<"
    turns = all((a < b) == (upwards == (i % 2 == 0)) and a != b for i, (a, b) in enumerate(pairwise(found or [])))
    return {"correct": float(right and turns), "answered": float(found is not None)}


def read_numbers(text: str) -> list[Decimal] | None:
    """Return the numbers of a text, exactly, if it has only numbers and separators; None for another text."""
    words = [word for word in re.split(r"[\s,;\[\]()]+", text) if word]
    return [Decimal(w) for w in words] if words and all(_NUMBER.fullmatch(w) for w in words) else None


def unjudged(text: str, answer: Any) -> Parts:
    """Return no parts. This verifier is for prompts without answers, whose responses are scored by reward models."""
    del text, answer
    return {}


@dataclass(frozen=True)
class Verifier:
    """A verifier: a function (response, answer, ...) -> parts, with its settings."""

    function: Callable[..., Any]
    parts: tuple[str, ...] = ("correct", "answered")
    pooled: tuple[str, ...] | None = None
    """Modules that the worker processes import first. None: the function is quick for any text, so it runs without workers."""
    extract: Callable[[str], str] = lambda text: extract_answer(text.rpartition("####")[2])
    """Function that extracts the answer from a response, for maj@n and distinct@n."""
    expected: Callable[[dict[str, Any], Any, str], Any] | None = None
    """Function (row, answer, prompt) -> expected answer in the form that `function` takes. Errors: ValueError for an unusable
    row."""


VERIFIERS = {
    "code": Verifier(passes_tests, pooled=("megatron_rl.verifiers.code",), extract=last_block, expected=tests_of_row),
    "exact": Verifier(exact, parts=("correct",)),
    "instructions": Verifier(
        follows, PARTS, pooled=("megatron_rl.verifiers.instruction_checkers",), extract=lambda text: text.strip()
    ),
    "math": Verifier(compare_math, pooled=("math_verify",), extract=math_answer),
    "none": Verifier(unjudged, parts=(), extract=lambda text: text.strip()),
    "number_list": Verifier(number_list),
}
_EXTRAS = ("prompt", "truncated", "timeout_s")
"""Names of further arguments. A verifier gets those for which it has parameters, in addition to response and answer. A verifier
that takes timeout_s must keep this time limit itself."""
GRACE_S = 30.0
"""Seconds by which a verifier that keeps its time limit itself may exceed the limit. Its worker is then killed."""


class PooledCalls:
    """Calls a scoring function in worker processes. A call that fails scores 0 in all parts and is counted."""

    def __init__(self, target: str, parts: tuple[str, ...], *, timeout_s: float, imports: Sequence[str] = ()):
        self.parts = parts
        self.pool = WorkerPool(target, timeout_s=timeout_s, imports=imports)
        self.timeouts = 0
        self.errors = 0

    def score(
        self, prompts: Sequence[Prompt], calls: Sequence[tuple], keywords: Sequence[dict[str, Any]] | None = None
    ) -> list[Parts]:
        """Return the parts of each call; prompts[i] names call i in the log.

        Errors: UserError if a result does not consist of the expected parts, or if the workers cannot run.
        """
        return [
            self._failed(prompt, result) if isinstance(result, Failure) else self._checked(prompt, result)
            for prompt, result in zip(prompts, self.pool.map(calls, keywords), strict=True)
        ]

    def _checked(self, prompt: Prompt, result: Any) -> Parts:
        given = result if isinstance(result, dict) else {"correct": result}
        try:
            parts = {name: float(value) for name, value in given.items()}
        except (TypeError, ValueError):
            raise UserError(
                f"data.verifier: {self.pool.target} gives {result!r:.80}, neither a number nor numbers by name"
            ) from None
        if set(parts) != set(self.parts):
            raise UserError(
                f"data.verifier: {self.pool.target} gives the parts {', '.join(parts)}, but expected were"
                f" {', '.join(self.parts)}: give each part a weight in data.rewards (0 for a part that is only logged)"
            )
        if not all(map(math.isfinite, parts.values())):
            return self._failed(prompt, Failure(f"its score is {result!r:.80}"))
        return parts

    def _failed(self, prompt: Prompt, failure: Failure) -> Parts:
        if failure.fatal:
            raise UserError(failure.reason)
        self.timeouts += failure.timed_out
        self.errors += not failure.timed_out
        counts = f"{self.timeouts} over the time limit, {self.errors} failed so far"
        log.warning(f"verifier: a response to {prompt.prompt_id} scored 0: {failure.reason} ({counts})")
        return dict.fromkeys(self.parts, 0.0)

    def close(self) -> None:
        """Stop the worker processes."""
        self.pool.close()


class RowVerifier:
    """The verifier that data.verifier names. Prompts need an answer, except with the verifier `none`.

    A user's own verifier is a function score(response, answer, ...) that returns a number, or a dict {name: number}. The
    function also gets `prompt` (the text) and `truncated` if it has parameters with these names. Its parts are the parts in
    data.rewards, or only `correct`. It runs in worker processes with a hard time limit for each call.
    """

    def __init__(self, name: str, weighted: Sequence[str], *, timeout_s: float, alone: bool = False):
        """weighted: names of the parts in data.rewards. alone: run each call of a user's own verifier in an isolated process.

        Errors: UserError if the function does not exist, or if `alone` is set but not possible.
        """
        found = resolve("verifier", name, VERIFIERS, "data.verifier")
        if not isinstance(found, Verifier):
            found = Verifier(found, tuple(weighted) or ("correct",), pooled=())
        self.parts, self.extract, self._function = found.parts, found.extract, found.function
        self.expected = found.expected or (lambda row, answer, prompt: answer)
        if alone and name in VERIFIERS:
            raise UserError(f"config: data.options.isolated is for a verifier of your own, and '{name}' is built in")
        if alone and (problem := isolated.problem()):
            raise UserError(f"config: data.options.isolated: {problem}")
        self._before: tuple[Any, ...] = (name, timeout_s) if alone else ()
        self._extras, self._timeout_s = _extras(self._function, name), timeout_s
        limit_s = timeout_s + (GRACE_S if alone or "timeout_s" in self._extras else 0.0)
        self.pooled: PooledCalls | None = None
        if found.pooled is not None:
            target = f"{found.function.__module__}:{found.function.__name__}" if name in VERIFIERS else name
            if alone:
                target = f"{__name__}:{judge_alone.__name__}"
            self.pooled = PooledCalls(target, self.parts, timeout_s=limit_s, imports=found.pooled)

    def score(self, prompts: Sequence[Prompt], texts: Sequence[str], truncated: Sequence[bool] = ()) -> list[Parts]:
        """Return the parts of each texts[i] as a response to prompts[i]."""
        cut = truncated or [False] * len(texts)
        calls = [(*self._before, text, prompt.answer) for prompt, text in zip(prompts, texts, strict=True)]
        own = {"timeout_s": self._timeout_s}
        extras = [{"prompt": p.text, "truncated": bool(c)} | own for p, c in zip(prompts, cut, strict=True)]
        keywords = [{name: extra[name] for name in self._extras} for extra in extras]
        if self.pooled:
            return self.pooled.score(prompts, calls, keywords)
        return [self._function(*call, **more) for call, more in zip(calls, keywords, strict=True)]

    def close(self) -> None:
        """Stop the worker processes, if there are any."""
        if self.pooled:
            self.pooled.close()


def judge_alone(name: str, limit_s: float, text: str, answer: Any, /, **extras: Any) -> Mapping[str, float]:
    """Run a user's own verifier in an isolated process that can only compute. Workers call this function.

    Errors: TimeoutError; Unscored.
    """
    function: Callable[..., Any] = resolve("verifier", name, {}, "data.verifier")

    def judge() -> Mapping[str, float]:
        found = function(text, answer, **extras)
        return found if isinstance(found, Mapping) else {"correct": float(found)}

    return isolated.call(judge, (), timeout_s=limit_s)


def _extras(function: Callable, name: str) -> list[str]:
    """Return the names in `_EXTRAS` that the function takes. Errors: UserError if it does not take (response, answer)."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions written in C
        return []
    extras = [extra for extra in _EXTRAS if extra in signature.parameters]
    try:
        signature.bind("", "", **dict.fromkeys(extras))
    except TypeError as error:
        given = ", ".join(["response", "answer", *extras])
        raise UserError(f"config: data.verifier: {name}{signature} cannot be called with ({given}): {error}") from None
    return extras
