"""Verifiable instructions (IFEval, arXiv:2311.07911; IFBench, arXiv:2507.02833): the verifier `instructions`."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from megatron_rl.errors import UserError

Instruction = tuple[str, dict[str, Any]]
"""Its name, such as keywords:existence, and its arguments."""
PARTS = ("correct", "followed", "correct_loose", "followed_loose")


def follows(response: str, answer: Any) -> dict[str, float]:
    """correct: all instructions are followed; followed: the share that is; and both as the benchmarks' loose criterion has it.

    answer: in a form of `listed`. It runs inside a worker. Errors: UserError where an instruction cannot be checked here.
    """
    from megatron_rl.environments.instruction_checkers import follow, lacking

    wanted = listed(answer)
    if problem := next(filter(None, (lacking(name) for name, _ in wanted)), ""):
        raise UserError(f"data: {problem}")
    found = [follow(response, name, arguments) for name, arguments in wanted]
    strict, loose = zip(*found, strict=True)
    shares = [sum(strict) / len(found), sum(loose) / len(found)]
    return dict(zip(PARTS, (float(all(strict)), shares[0], float(all(loose)), shares[1]), strict=True))


def listed(value: Any) -> list[Instruction]:
    """The instructions that a row names.

    value: {instruction_id_list: [...], kwargs: [{...}, ...]} as in IFEval and IFBench, or {instruction_id, kwargs} in a list
    of one, mostly as text, as in IF_multi_constraints_upto5. Arguments without a value are left out.

    Errors: ValueError saying what is wrong with it.
    """
    value = read(value)
    if isinstance(value, list) and len(value) == 1:
        value = read(value[0])
    if not isinstance(value, Mapping):
        raise ValueError("instructions are instruction_id_list and kwargs")
    names = read(value.get("instruction_id_list", value.get("instruction_id")))
    arguments = read(value.get("kwargs"))
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise ValueError("instruction_id_list is no list of names")
    if not isinstance(arguments, list) or len(arguments) != len(names):
        raise ValueError("kwargs is no list with one element for each instruction")
    found = []
    for name, given in zip(names, arguments, strict=True):
        given = read(given) or {}
        if not isinstance(given, Mapping):
            raise ValueError(f"the kwargs of {name} are no object")
        found.append((name, {key: value for key, value in given.items() if value is not None}))
    return found


def read(value: Any) -> Any:
    """What a text says in JSON or as a literal of Python's; anything else as it is. Errors: ValueError."""
    if not isinstance(value, str):
        return value
    for parse in (json.loads, ast.literal_eval):
        with suppress(ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            return parse(value)
    raise ValueError(f"{value!r:.60} is neither JSON nor a literal of Python's")
