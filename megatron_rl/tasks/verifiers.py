"""Verifiers: how right is a response? Each gives named parts in [0, 1].

`correct` is the verdict; `answered` is 1 where an answer could be read out of the response at all.
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
    """1 if the extracted answer equals the expected one, apart from white space around them."""
    found = extract_answer(text)
    return {"correct": float(found != "" and found == str(answer).strip())}


def number_list(text: str, answer: Sequence[float] | str) -> Parts:
    """1 if the response is the expected list of numbers, with nothing around it but separators.

    answer: the numbers, or a text like '3 6 12 15'.
    """
    expected = read_numbers(answer) if isinstance(answer, str) else [Decimal(str(n)) for n in answer]
    found = read_numbers(text)
    return {"correct": float(bool(found) and found == expected), "answered": float(found is not None)}


def zigzag(text: str, question: str) -> Parts:
    """1 if the response has the question's numbers, all of them once, going up and down in turn.

    question: `<6 15 3 12:` to begin upwards, `>6 15 3 12:` to begin downwards.
    """
    found = read_numbers(text)
    right = found is not None and sorted(found) == sorted(read_numbers(question[1:-1]) or [])
    upwards = question[0] == "<"
    turns = all((a < b) == (upwards == (i % 2 == 0)) and a != b for i, (a, b) in enumerate(pairwise(found or [])))
    return {"correct": float(right and turns), "answered": float(found is not None)}


def read_numbers(text: str) -> list[Decimal] | None:
    """The numbers of a text that is nothing but numbers and separators, exactly, or None."""
    words = [word for word in re.split(r"[\s,;\[\]()]+", text) if word]
    return [Decimal(w) for w in words] if words and all(_NUMBER.fullmatch(w) for w in words) else None


def unjudged(text: str, answer: Any) -> Parts:
    """No parts: for prompts without answers, whose responses reward models judge."""
    del text, answer
    return {}


@dataclass(frozen=True)
class Verifier:
    """A function(response, answer, ...) -> parts, and how it is called."""

    function: Callable[..., Any]
    parts: tuple[str, ...] = ("correct", "answered")
    pooled: tuple[str, ...] | None = None
    """Modules that its worker processes import first; None: it is quick on any text, and needs no worker."""
    extract: Callable[[str], str] = lambda text: extract_answer(text.rpartition("####")[2])
    """The answer inside a response, for maj@n and distinct@n."""
    expected: Callable[[dict[str, Any], Any, str], Any] | None = None
    """(row, answer, prompt) -> the answer as the function takes it. Errors: ValueError saying why the row cannot be used."""


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
"""Arguments that a verifier gets besides response and answer, where it has a parameter of that name. One that takes timeout_s
keeps to it itself."""
GRACE_S = 30.0
"""Seconds behind such a verifier's own limit, after which its worker is ended."""


class PooledCalls:
    """Calls of a scoring function in worker processes; one that fails scores 0 in all parts and is counted."""

    def __init__(self, target: str, parts: tuple[str, ...], *, timeout_s: float, imports: Sequence[str] = ()):
        self.parts = parts
        self.pool = WorkerPool(target, timeout_s=timeout_s, imports=imports)
        self.timeouts = 0
        self.errors = 0

    def score(
        self, prompts: Sequence[Prompt], calls: Sequence[tuple], keywords: Sequence[dict[str, Any]] | None = None
    ) -> list[Parts]:
        """Parts of each call; prompts[i] names call i in the log.

        Errors: UserError for results that are no parts, and where the workers cannot work.
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
                f"data.verifier: {self.pool.target} gives the parts {', '.join(parts)}, expected were"
                f" {', '.join(self.parts)}: give each its weight in data.rewards (0 for one that is only logged)"
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
        """End the workers."""
        self.pool.close()


class RowVerifier:
    """The verifier that data.verifier names, for prompts with an answer (`none`: without one).

    The user's own is a function score(response, answer, ...) -> number or numbers by name, with `prompt` (its text) and
    `truncated` where it has parameters of these names. It has the parts that data.rewards names, or `correct` alone, and runs
    in worker processes with a hard limit for each call.
    """

    def __init__(self, name: str, weighted: Sequence[str], *, timeout_s: float, alone: bool = False):
        """weighted: the parts that data.rewards names. alone: each call of the user's own is in a process that only computes.

        Errors: UserError where there is no such function, and for `alone` where it cannot be.
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
        """Parts of texts[i] as a response to prompts[i]."""
        cut = truncated or [False] * len(texts)
        calls = [(*self._before, text, prompt.answer) for prompt, text in zip(prompts, texts, strict=True)]
        own = {"timeout_s": self._timeout_s}
        extras = [{"prompt": p.text, "truncated": bool(c)} | own for p, c in zip(prompts, cut, strict=True)]
        keywords = [{name: extra[name] for name in self._extras} for extra in extras]
        if self.pooled:
            return self.pooled.score(prompts, calls, keywords)
        return [self._function(*call, **more) for call, more in zip(calls, keywords, strict=True)]

    def close(self) -> None:
        """End the workers, where there are some."""
        if self.pooled:
            self.pooled.close()


def judge_alone(name: str, limit_s: float, text: str, answer: Any, /, **extras: Any) -> Mapping[str, float]:
    """A verifier of the user's, in a process of its own that can only compute. A worker calls it.

    Errors: TimeoutError; Unscored.
    """
    function: Callable[..., Any] = resolve("verifier", name, {}, "data.verifier")

    def judge() -> Mapping[str, float]:
        found = function(text, answer, **extras)
        return found if isinstance(found, Mapping) else {"correct": float(found)}

    return isolated.call(judge, (), timeout_s=limit_s)


def _extras(function: Callable, name: str) -> list[str]:
    """Names in `_EXTRAS` that the function takes. Errors: UserError where it does not take (response, answer)."""
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
