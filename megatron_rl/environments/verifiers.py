"""Verifiers: how right is a response? Each gives named parts in [0, 1].

`correct` is the verdict; `answered` is 1 where an answer could be read out of the response at all.
"""

from __future__ import annotations

import inspect
import logging
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from megatron_rl.environments.code import passes_tests, program_of
from megatron_rl.environments.instructions import PARTS, follows
from megatron_rl.environments.math_answer import (
    Literal,
    clean,
    only_number,
    repeats,
    squeeze,
    stated_number,
    statements,
)
from megatron_rl.environments.task import Parts, Prompt
from megatron_rl.environments.worker_pool import Failure, WorkerPool
from megatron_rl.errors import UserError
from megatron_rl.registry import resolve

log = logging.getLogger(__name__)

_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_PHRASE = re.compile(r"(?:final answer|answer)\s*(?:is|:|=)+\s*:?\s*(.+)", re.IGNORECASE)
_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?")


def extract_answer(text: str, *, multiline: bool = False) -> str:
    r"""The answer in a response: the last <answer> tag, `\boxed{}` or 'The answer is ...', else the last line.

    multiline: without a marker the whole text is the answer (for answers that are grids).
    """
    if tags := _TAG.findall(text):
        return tags[-1].strip()
    if (boxed := last_boxed(text)) is not None:
        return boxed.strip()
    if phrases := _PHRASE.findall(text):
        return phrases[-1].strip().removesuffix(".").strip("*` ")
    text = text.strip()
    return text if multiline or not text else text.splitlines()[-1].strip()


def last_boxed(text: str) -> str | None:
    r"""Content of the last complete `\boxed{...}`, or None."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    for end in range(start + 6, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[start + 7 : end]
    return None


def exact(text: str, answer: Any) -> Parts:
    """1 if the extracted answer equals the expected one, apart from white space around them."""
    return {"correct": float(extract_answer(text) == str(answer).strip())}


def number_list(text: str, answer: Sequence[float] | str) -> Parts:
    """1 if the response is the expected list of numbers, with nothing around it but separators.

    answer: the numbers, or a text like '3 6 12 15'.
    """
    expected = read_numbers(answer) if isinstance(answer, str) else [float(n) for n in answer]
    found = read_numbers(text)
    return {"correct": float(found is not None and found == expected), "answered": float(found is not None)}


def zigzag(text: str, question: str) -> Parts:
    """1 if the response has the question's numbers, all of them once, going up and down in turn.

    question: `<6 15 3 12:` to begin upwards, `>6 15 3 12:` to begin downwards.
    """
    found = read_numbers(text)
    right = found is not None and sorted(found) == sorted(read_numbers(question[1:-1]) or [])
    upwards = question[0] == "<"
    turns = all((a < b) == (upwards == (i % 2 == 0)) and a != b for i, (a, b) in enumerate(pairwise(found or [])))
    return {"correct": float(right and turns), "answered": float(found is not None)}


def read_numbers(text: str) -> list[float] | None:
    """The numbers of a text that is nothing but numbers and separators, or None."""
    words = [word for word in re.split(r"[\s,;\[\]()]+", text) if word]
    return [float(w) for w in words] if words and all(_NUMBER.fullmatch(w) for w in words) else None


def math_answer(text: str) -> str:
    """The number that a response gives as its final answer, or where there is none what it states last."""
    stated = statements(clean(text))
    numbers = filter(None, map(stated_number, stated))
    return next((number.text for number in numbers), stated[0].text.strip() if stated else "")


def compare_math(text: str, answer: Any, prompt: str = "", truncated: bool = False) -> Parts:
    """1 if the final answer of a response is the expected one; math-verify compares the two.

    Where a number is expected, a literal has to be given: in a box, after a marker, or as the last of the last line. What
    repeats the question, and a response that was cut off, is no answer. Errors: ValueError where `answer` is no mathematical
    expression. It runs inside a worker, which has no need of that library's own (alarm-based) limits.
    """
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its limits are off
    expected = clean(str(answer).rpartition("####")[2]).strip()
    number = only_number(expected)
    gold = _parse(number.text if number else expected, parse)
    if not gold:
        raise ValueError(f"the expected answer {answer!r} is not a mathematical expression")
    found = []
    if not truncated:
        found = _given_number(text, number, prompt, parse) if number else _given(text, expected, prompt, parse)
    correct = bool(found) and verify(gold, found, timeout_seconds=None)
    return {"correct": float(correct), "answered": float(bool(found))}


def _given_number(text: str, gold: Literal, prompt: str, parse: Callable[..., list]) -> list:
    """The final answer, parsed, where a number is expected."""
    for stated in statements(clean(text)):
        if number := stated_number(stated):
            asked_for = number.fraction and not gold.fraction and squeeze(number.text) in squeeze(prompt)
            return [] if asked_for else _parse(number.text, parse)
        if stated.kind == "boxed":
            return [] if repeats(stated.text, prompt) else _parse(stated.text, parse)
    return []


def _given(text: str, gold: str, prompt: str, parse: Callable[..., list]) -> list:
    """The final answer, parsed, where an expression is expected: what is stated last."""
    for stated in statements(clean(text)):
        content = stated.text.strip().removesuffix(".").strip("*` ")
        if stated.kind == "line":
            found = parse(content, parsing_timeout=None)
            content = next((part for part in found if isinstance(part, str)), content)
        else:
            found = _parse(content, parse)
        if found:
            return [] if repeats(content, prompt) and squeeze(content) != squeeze(gold) else found
    return []


def _parse(text: str, parse: Callable[..., list]) -> list:
    """math-verify wants LaTeX between dollars."""
    in_tex = "$" in text or "\\boxed" in text or "\\(" in text
    return parse(text if in_tex else f"${text}$", parsing_timeout=None) or parse(text, parsing_timeout=None)


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


VERIFIERS = {
    "code": Verifier(passes_tests, pooled=("megatron_rl.environments.code",), extract=program_of),
    "exact": Verifier(exact, parts=("correct",)),
    "instructions": Verifier(
        follows, PARTS, pooled=("megatron_rl.environments.instruction_checkers",), extract=lambda text: text.strip()
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

    def __init__(self, name: str, weighted: Sequence[str], *, timeout_s: float):
        """weighted: the parts that data.rewards names. Errors: UserError where there is no such function."""
        found = resolve("verifier", name, VERIFIERS, "data.verifier")
        if not isinstance(found, Verifier):
            found = Verifier(found, tuple(weighted) or ("correct",), pooled=())
        self.parts, self.extract, self._function = found.parts, found.extract, found.function
        self._extras, self._timeout_s = _extras(self._function, name), timeout_s
        limit_s = timeout_s + (GRACE_S if "timeout_s" in self._extras else 0.0)
        self.pooled: PooledCalls | None = None
        if found.pooled is not None:
            target = f"{found.function.__module__}:{found.function.__name__}" if name in VERIFIERS else name
            self.pooled = PooledCalls(target, self.parts, timeout_s=limit_s, imports=found.pooled)

    def score(self, prompts: Sequence[Prompt], texts: Sequence[str], truncated: Sequence[bool] = ()) -> list[Parts]:
        """Parts of texts[i] as a response to prompts[i]."""
        cut = truncated or [False] * len(texts)
        calls = [(text, prompt.answer) for prompt, text in zip(prompts, texts, strict=True)]
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


def _extras(function: Callable, name: str) -> list[str]:
    """Those of `_EXTRAS` that the function takes. Errors: UserError where it does not take (response, answer)."""
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
