"""The verifier `math`: is the final answer of a response the expected one?

A number has to be given as a number, an expression as one in which nothing is left to compute, in the form that the question
asks for, words as they are. What has more to it is no answer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from megatron_rl.environments import units
from megatron_rl.environments.asked_form import has_form, has_form_of_number
from megatron_rl.environments.math_answer import (
    clean,
    has_letters,
    is_denied,
    is_name,
    pieces,
    sides,
    stated_formulas,
    stated_number,
    unwrap,
)
from megatron_rl.environments.number_answer import Number, read_number
from megatron_rl.environments.stated_answer import statements

_BASES = {2: "binary", 8: "octal", 16: "hexadecimal"}
_CHOICE = re.compile(r"(?<![\w+*/^=-])\(?([A-J])(?:\)|[.:](?=\s))|\b(?:[Oo]ption|[Cc]hoice)\s\W?([A-J])\b")
"""A letter of a multiple choice, as it stands before what it names."""


@dataclass(frozen=True)
class Expected:
    """The expected answer of a row: a number, an expression, or words."""

    text: str
    number: Number | None
    expression: Any
    unfinished: bool
    alone: bool
    """It is no equation, so that of one its last side counts."""
    total: Any
    """The sum of quantities."""
    name: str
    """The left side of `x = 5`, or ''."""


def compare_math(text: str, answer: Any, prompt: str = "", truncated: bool = False) -> dict[str, float]:
    """correct: the final answer of a response is the expected one; answered: there is one of that kind.

    A response that was cut off has none. Errors: ValueError where nothing is expected.
    """
    from megatron_rl.environments import math_expressions as expressions  # sympy takes a second to import

    gold = expected(str(answer))
    if truncated:
        return {"correct": 0.0, "answered": 0.0}
    for statement in statements(clean(text)):
        if gold.number and (number := stated_number(statement)):
            right = _is_right_number(number, gold.number, clean(prompt)) and _is_of(statement.text, gold.name)
            if right or not gold.number.comma:
                return {"correct": float(right), "answered": 1.0}
        if gold.number and not gold.number.comma:
            if statement.kind == "boxed":
                break
            continue
        if is_denied(statement) and gold.expression is not None:
            break
        found = stated_formulas(statement)
        letter = gold.text.strip("()")
        if re.fullmatch("[A-J]", letter) and (letters := _CHOICE.findall(statement.text[:2000])):
            return _verdict({first or second for first, second in letters} == {letter}, True)
        if gold.expression is None:
            same = words(found[0]) == words(gold.text) or (
                gold.total is not None and units.total(found[0]) == gold.total
            )
            return _verdict(same, bool(words(found[0])))
        if gold.alone:
            found = [(sides(exact) or [exact])[-1] for exact in map(_exact_part, found)]
        parsed = [(t, e) for t in found if (e := expressions.read_expression(_exact_part(t))) is not None]
        if not parsed and statement.kind == "phrase":
            continue
        if not parsed:
            return _verdict(words(found[0]) == words(gold.text), False)
        shown, expression = parsed[0]
        if expressions.is_unfinished(expression) and not gold.unfinished:
            break
        return _verdict(
            has_form(expression, gold.expression, shown, gold.text, clean(prompt))
            and expressions.are_equal(gold.expression, expression),
            True,
        )
    return _verdict(False, False)


def _verdict(correct: bool, answered: bool) -> dict[str, float]:
    return {"correct": float(correct), "answered": float(answered)}


@lru_cache(4096)
def expected(answer: str) -> Expected:
    """The answer that a row states: its last box, or what follows its last ####, or all. Errors: ValueError for nothing."""
    from megatron_rl.environments import math_expressions as expressions

    text = clean(answer)
    marked = [s for s in statements(text) if s.kind != "line"]
    if marked and marked[0].kind != "boxed":
        text = stated_formulas(marked[0])[0]
    else:
        text = unwrap(
            "".join(
                f" {part} " if is_formula else part for is_formula, part in pieces(marked[0].text if marked else text)
            )
        )
    if not text.strip("# "):
        raise ValueError(f"the expected answer {answer!r} is empty")
    chain = sides(text)
    plain = all(is_name(side) or not has_letters(side) for side in chain[:-1])
    number = read_number(unwrap(chain[-1])) if plain else None
    expression = expressions.read_expression(text) if number is None or number.comma else None
    unfinished = expression is not None and expressions.is_unfinished(expression)
    alone = len(chain) == 1 and "," not in text
    return Expected(text, number, expression, unfinished, alone, units.total(text), chain[0] if len(chain) > 1 else "")


def _is_of(text: str, name: str) -> bool:
    """Tell whether the answer `x = 5` has the name that is expected, where both are a letter."""
    first = sides(unwrap(text))[:1] or [""]
    return first[0] == name or not (len(first[0]) == len(name) == 1 and first[0].isalpha())


def _exact_part(text: str) -> str:
    """A formula without its approximation."""
    exact, *rough = re.split(r"\\approx|≈", text)
    return rough[0] if rough and is_name(exact) else exact


def _is_right_number(number: Number, gold: Number, prompt: str) -> bool:
    """Tell whether it is the expected number, in the form that the prompt asks for, and nothing that the prompt has said."""
    if number.scale and not gold.scale and re.search(r"\b(?:thousand|million|billion|trillion)", prompt):
        number = replace(number, value=number.value / 10**number.scale)  # 4, asked for in millions
    if number.base == 10 != gold.base and re.search(
        rf"\bbase[\s-]*\$?{gold.base}\b|\b{_BASES.get(gold.base, 'base')}\b", prompt
    ):
        number = replace(number, base=gold.base)  # 11001, asked for in base 2
    return units.agree(number, gold) and has_form_of_number(number, gold, prompt)


def words(text: str) -> str:
    """A text in one notation, to compare words."""
    text = re.sub(r"\\(?:text|mathrm|mathbf|mbox)(?:bf|rm|it|normal)?\s*\{([^{}]*)\}", r" \1 ", text)
    text = re.sub(r"(?<=\d)(?:st|nd|rd|th)\b", "", re.sub(r"[\\${}().,;:!?\"'*]", " ", text.casefold()))
    return " ".join(text.split())
