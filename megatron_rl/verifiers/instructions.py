"""Verifier `instructions` for instructions that a program can verify (IFEval, arXiv:2311.07911; IFBench, arXiv:2507.02833)."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from megatron_rl.errors import UserError
from megatron_rl.verifiers.stated_answer import behind_thinking

Instruction = tuple[str, dict[str, Any]]
"""An instruction: its name, for example keywords:existence, and its arguments."""
PARTS = ("correct", "followed", "correct_loose", "followed_loose", "content")
WORDS, SHARED = 20, 2
"""A response needs WORDS different words, and SHARED words in common with the prompt, for the part `content` to be 1."""


def follows(response: str, answer: Any, prompt: str = "") -> dict[str, float]:
    """Return the reward parts of a response. Called in a worker process.

    correct: 1 if all instructions are followed. followed: share of the instructions that are followed. correct_loose and
    followed_loose: the same under the benchmarks' loose criterion. content: how much the response says (`content_of`), which
    the benchmarks do not score. answer: instructions in a form that `listed` accepts. Errors: UserError if an instruction
    cannot be checked on this machine.
    """
    from megatron_rl.verifiers.instruction_checkers import follow, lacking

    wanted = listed(answer)
    if problem := next(filter(None, (lacking(name) for name, _ in wanted)), ""):
        raise UserError(f"data: {problem}")
    found = [follow(response, name, arguments) for name, arguments in wanted]
    strict, loose = zip(*found, strict=True)
    shares = [sum(strict) / len(found), sum(loose) / len(found)]
    values = (float(all(strict)), shares[0], float(all(loose)), shares[1], content_of(response, prompt))
    return dict(zip(PARTS, values, strict=True))


def content_of(response: str, prompt: str) -> float:
    """Return how much a response says, from 0 to 1. Half is for its different words, half for words shared with the prompt.

    A response that only has the required form, without content, scores almost 0. In scripts without blanks, each letter counts
    as a word.
    """
    own, asked = (_words(text) for text in (behind_thinking(response), prompt))
    long = {word for word in asked if len(word) > 3}
    shared = min(1.0, len(own & long) / min(SHARED, len(long))) if long else 1.0
    said = min(1.0, len(own) / WORDS)
    return 0.5 * said + 0.5 * said * shared


def _words(text: str) -> set[str]:
    found = set(re.findall(r"[^\W\d_]+", text.casefold()))
    without_blanks = {word for word in found if any(sign >= "\u0e00" and not word.isascii() for sign in word)}
    return {word for word in found - without_blanks if len(word) > 1} | {
        sign for word in without_blanks for sign in word
    }


def listed(value: Any) -> list[Instruction]:
    """Return the instructions in a row.

    value: {instruction_id_list: [...], kwargs: [{...}, ...]} as in IFEval and IFBench; or a list with one {instruction_id,
    kwargs}, usually as text, as in IF_multi_constraints_upto5. Arguments without a value are left out.

    Errors: ValueError with the problem.
    """
    value = read(value)
    if isinstance(value, list) and len(value) == 1:
        value = read(value[0])
    if not isinstance(value, Mapping):
        raise ValueError("instructions need instruction_id_list and kwargs")
    names = read(value.get("instruction_id_list", value.get("instruction_id")))
    arguments = read(value.get("kwargs"))
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise ValueError("instruction_id_list is not a list of names")
    if not isinstance(arguments, list) or len(arguments) != len(names):
        raise ValueError("kwargs is not a list with one element for each instruction")
    found = []
    for name, given in zip(names, arguments, strict=True):
        given = read(given) or {}
        if not isinstance(given, Mapping):
            raise ValueError(f"the kwargs of {name} are not an object")
        found.append((name, {key: value for key, value in given.items() if value is not None}))
    return found


def read(value: Any) -> Any:
    """Parse a text as JSON or as a Python literal. Other values are returned unchanged. Errors: ValueError."""
    if not isinstance(value, str):
        return value
    for parse in (json.loads, ast.literal_eval):
        with suppress(ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            return parse(value)
    raise ValueError(f"{value!r:.60} is neither JSON nor a Python literal")
