"""Verifiers: how right is a response? Each gives named parts in [0, 1].

`correct` is the verdict; `answered` is 1 where an answer could be read out of the response at all.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from megatron_rl.environments.task import Prompt
from megatron_rl.environments.worker_pool import Failure, WorkerPool

log = logging.getLogger(__name__)

_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_PHRASE = re.compile(r"(?:final answer|answer)\s*(?:is|:|=)+\s*:?\s*(.+)", re.IGNORECASE)
_THOUSANDS = re.compile(r"\$?[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?")


def extract_answer(text: str, *, multiline: bool = False) -> str:
    """The answer in a response: the last <answer> tag, `\\boxed{}` or 'The answer is ...', else the last line.

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
    """Content of the last complete `\\boxed{...}`, or None."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    for end in range(start + 6, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[start + 7 : end]
    return None


def exact(text: str, answer: Any) -> dict[str, float]:
    """1 if the extracted answer equals the expected one, apart from white space around them."""
    return {"correct": float(extract_answer(text) == str(answer).strip())}


def number_list(text: str, answer: Sequence[float] | str) -> dict[str, float]:
    """1 if the response is the expected list of numbers, with nothing around it but separators.

    answer: the numbers, or a text like '3 6 12 15'.
    """
    expected = read_numbers(answer) if isinstance(answer, str) else [float(n) for n in answer]
    found = read_numbers(text)
    return {"correct": float(found is not None and found == expected), "answered": float(found is not None)}


def zigzag(text: str, question: str) -> dict[str, float]:
    """1 if the response has the question's numbers, all of them once, going up and down in turn.

    question: `<6 15 3 12:` to begin upwards, `>6 15 3 12:` to begin downwards.
    """
    found = read_numbers(text)
    right = found is not None and sorted(found) == sorted(read_numbers(question[1:-1]))
    upwards = question[0] == "<"
    turns = all((a < b) == (upwards == (i % 2 == 0)) and a != b for i, (a, b) in enumerate(pairwise(found or [])))
    return {"correct": float(right and turns), "answered": float(found is not None)}


def read_numbers(text: str) -> list[float] | None:
    """The numbers of a text that is nothing but numbers and separators, or None."""
    words = [word for word in re.split(r"[\s,;\[\]()]+", text) if word]
    return [float(w) for w in words] if words and all(_NUMBER.fullmatch(w) for w in words) else None


def compare_math(text: str, answer: str) -> dict[str, float]:
    """math-verify's verdict; runs inside a worker, which has no need of that library's own (alarm-based) limits."""
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its limits are off
    gold = _parse_gold(answer, parse)
    if not gold:
        raise ValueError(f"the expected answer {answer!r} is not a mathematical expression")
    # GSM8K's own format marks the answer with ####; what stands before it would only confuse the parser
    found = parse(text.rpartition("####")[2], parsing_timeout=None)
    correct = bool(found) and verify(gold, found, timeout_seconds=None)
    return {"correct": float(correct), "answered": float(bool(found))}


def _parse_gold(answer: str, parse) -> list:
    """math-verify wants LaTeX between dollars, but reads '70,000' there as a tuple."""
    text = answer.rpartition("####")[2].strip()
    if _THOUSANDS.fullmatch(text):
        return parse(text.replace(",", "").strip("$"), parsing_timeout=None)
    return parse(text if "$" in text or "\\boxed" in text else f"${text}$", parsing_timeout=None) or parse(
        text, parsing_timeout=None
    )


class PooledVerifier:
    """A verifier whose calls run in worker processes; a call that fails scores 0 in all parts and is counted."""

    def __init__(self, target: str, parts: tuple[str, ...], *, timeout_s: float, imports: Sequence[str]):
        self.parts = parts
        self.pool = WorkerPool(target, timeout_s=timeout_s, imports=imports)
        self.timeouts = 0
        self.errors = 0

    def score(self, prompts: Sequence[Prompt], calls: Sequence[tuple]) -> list[dict[str, float]]:
        """Parts of each call; prompts[i] names call i in the log."""
        results = []
        for prompt, result in zip(prompts, self.pool.map(calls), strict=True):
            if isinstance(result, Failure):
                self.timeouts += result.timed_out
                self.errors += not result.timed_out
                log.warning(
                    "verifier: a response to %s scored 0: %s (%d over the time limit, %d failed so far)",
                    prompt.prompt_id,
                    result.reason,
                    self.timeouts,
                    self.errors,
                )
                result = dict.fromkeys(self.parts, 0.0)
            results.append(result)
        return results

    def close(self) -> None:
        self.pool.close()
