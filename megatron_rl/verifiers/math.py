"""Verifier `math`: checks whether the final answer of a response is the expected answer.

If the expected answer is a number, the response must give a number. An expression must have the form that the question asks
for, with nothing left to compute. Words must be equal. An answer with additional content does not count.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from sympy import Add, Expr, Integer, Mul, Pow, Rational, Symbol, preorder_traversal
from sympy.core.relational import Relational

from megatron_rl.verifiers import numbers
from megatron_rl.verifiers.math_answer import (
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
from megatron_rl.verifiers.numbers import Number, read_number
from megatron_rl.verifiers.stated_answer import statements

# -- asked form ----------------------------------------------------------------------------------------------------------
# Form that a question asks for. An answer with the right value in another form only repeats the question.


_SIMPLE = re.compile(r"simpl|reduc|lowest terms|collect|combine", re.IGNORECASE)
_RATIONAL = re.compile(rf"rationaliz|{_SIMPLE.pattern}", re.IGNORECASE)
_FRACTION = re.compile(
    r"lowest terms|common fraction|reduced fraction|reduce the fraction|as a fraction|simplest form", re.IGNORECASE
)
_FACTOR = re.compile(r"\bfactor(?!ial)", re.IGNORECASE)
_EXPAND = re.compile(r"\bexpand|\bmultiply out", re.IGNORECASE)
_SOLVE = re.compile(r"\bsolve|\bisolate|in terms of", re.IGNORECASE)
_DERIVE = re.compile(
    r"derivative|differentiate|integral|integrate|\\frac\{d\}|\\int|evaluate|compute|calculate|what is|find",
    re.IGNORECASE,
)


def squeeze(text: str) -> str:
    """Return the text in a uniform notation, so that a search finds an expression in any notation."""
    text = re.sub(r"\\frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}", r"\1/\2", text)
    text = re.sub(r"\\times|\\cdot", "*", text).replace(r"\div", "/")
    return re.sub(r"\\(?:[,;!()\[\]])|[\s${}]|(?<=\d),(?=\d{3})", "", text)


def has_form_of_number(number: Number, gold: Number, prompt: str) -> bool:
    """Return True if a number has the form that the prompt's words ask for and is not copied from the prompt."""
    prompt = squeeze_spaces(prompt)
    if number.fraction and (_SIMPLE.search(prompt) or _FRACTION.search(prompt)) and not number.reduced:
        return False
    if gold.fraction and not number.fraction and _FRACTION.search(prompt):
        return False
    if re.search(r"as a decimal|in decimal", prompt) and gold.decimals is not None and number.decimals is None:
        return False
    if "mixed number" in prompt and number.mixed != gold.mixed:
        return False
    if "scientific notation" in prompt and number.mantissa != gold.mantissa:
        return False
    squeezed = squeeze(prompt)
    if number.fraction and not gold.fraction and "/".join(map(str, number.fraction)) in squeezed:
        return False
    return not (number.scientific and not gold.scientific and re.search(r"10\^|\de\d", squeezed))


def squeeze_spaces(text: str) -> str:
    """Replace each run of white space by one space."""
    return re.sub(r"\s+", " ", text)


def has_form(expression: Any, gold: Any, shown: str, expected: str, prompt: str) -> bool:
    """Return True if an expression has the form that the prompt asks for and is not copied from the prompt.

    expression, gold: the response's and the expected expression, parsed without evaluation. shown, expected: their texts.
    """
    ours, theirs, asked = (squeeze(text) for text in (shown, expected, prompt))
    if len(ours) > 2 and re.search(r"\W", ours.strip("-+()")) and ours in asked and ours != theirs:
        return False
    if _SOLVE.search(prompt) and _is_solved(gold) and isinstance(expression, Relational):
        return _is_solved(expression)
    if not isinstance(expression, Expr) or not isinstance(gold, Expr):
        return True
    if _FACTOR.search(prompt):
        return _factors(expression) == _factors(gold) if not gold.free_symbols else _degree(expression) >= _degree(gold)
    if _EXPAND.search(prompt):
        return not any(_has_brackets(node) for node in preorder_traversal(expression)) and _is_collected(expression)
    if _RATIONAL.search(prompt) and _has_root_below(expression) and not _has_root_below(gold):
        return False
    if _SIMPLE.search(prompt):
        return _is_collected(expression) and _size(expression) <= _size(gold)
    return _size(expression) <= 2 * _size(gold) + 4 or not _DERIVE.search(prompt)


def _factors(product: Any) -> list[str]:
    found = []
    for factor in Mul.make_args(product):
        base, exponent = factor.as_base_exp() if isinstance(factor, Pow) else (factor, 1)
        found += (
            [str(base)] * int(exponent)
            if getattr(exponent, "is_Integer", True) and 0 < exponent < 200
            else [str(factor)]
        )
    return sorted(factor for factor in found if factor not in ("1", "-1"))


def _degree(product: Any) -> int:
    count = 0
    for factor in Mul.make_args(product):
        base, exponent = factor.args if isinstance(factor, Pow) else (factor, Integer(1))
        if not base.free_symbols:
            continue
        if not (exponent.is_Integer and exponent >= 0 and base.is_polynomial(*base.free_symbols)):
            return 0
        count += int(exponent)
    return count


def _has_brackets(node: Any) -> bool:
    if isinstance(node, Mul):
        return sum(isinstance(factor, Add) for factor in node.args) > 0 and len([f for f in node.args if f != -1]) > 1
    return isinstance(node, Pow) and isinstance(node.base, Add) and node.exp.is_Integer and node.exp > 1


def _is_collected(expression: Any) -> bool:
    """Return True if no two terms or factors can be combined, and no root contains a square."""
    for node in preorder_traversal(expression):
        if isinstance(node, Add):
            parts = [term.doit().as_coeff_Mul()[1] for term in node.args]
        elif isinstance(node, Mul):
            parts = [factor.as_base_exp()[0] for factor in node.args if factor.free_symbols]
        else:
            if (
                isinstance(node, Pow)
                and node.base.is_Integer
                and node.exp.is_Number
                and not node.exp.is_Integer
                and Pow(node.base, Rational(str(node.exp))) != node
            ):
                return False
            continue
        if len({*parts}) < len(parts):
            return False
    return True


def _is_solved(relation: Any) -> bool:
    if not isinstance(relation, Relational):
        return False
    left, right = relation.lhs, relation.rhs
    return any(isinstance(a, Symbol) and a not in b.free_symbols for a, b in ((left, right), (right, left)))


def _has_root_below(expression: Any) -> bool:
    return any(
        isinstance(node, Pow)
        and node.exp.is_negative
        and not node.free_symbols
        and any(isinstance(n, Pow) and n.exp.is_Integer is False for n in preorder_traversal(node))
        for node in preorder_traversal(expression)
    )


def _size(expression: Any) -> int:
    return sum(not node.args and node != -1 for node in preorder_traversal(expression))


# -- math verifier -------------------------------------------------------------------------------------------------------


_BASES = {2: "binary", 8: "octal", 16: "hexadecimal"}
_CHOICE = re.compile(r"(?<![\w+*/^=-])\(?([A-J])(?:\)|[.:](?=\s))|\b(?:[Oo]ption|[Cc]hoice)\s\W?([A-J])\b")
"""Letter of a multiple-choice option, as it stands before the option's text."""


@dataclass(frozen=True)
class Expected:
    """The expected answer of a row: a number, an expression, or words."""

    text: str
    number: Number | None
    expression: Any
    unfinished: bool
    alone: bool
    """True if the expected answer is not an equation. In this case, only the last side of an equation in the response is
    compared."""
    total: Any
    """Sum of the answer's quantities, as in `2 hours 30 minutes`; None for an answer without quantities."""
    name: str
    """Left side of an answer that is an equation, such as `x = 5`; else ''."""


def compare_math(text: str, answer: Any, prompt: str = "", truncated: bool = False) -> dict[str, float]:
    """Return correct (1 if the response's final answer is the expected one) and answered (1 if the response has an answer).

    A truncated response has no answer. Errors: ValueError if the expected answer is empty.
    """
    from megatron_rl.verifiers import math_expressions as expressions  # imported late: importing sympy takes a second

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
                gold.total is not None and numbers.total(found[0]) == gold.total
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
    """Parse the answer of a row: its last box, the text after its last ####, or all of it.

    Errors: ValueError if it is empty.
    """
    from megatron_rl.verifiers import math_expressions as expressions

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
    return Expected(
        text, number, expression, unfinished, alone, numbers.total(text), chain[0] if len(chain) > 1 else ""
    )


def _is_of(text: str, name: str) -> bool:
    """Return False if an answer such as `x = 5` names another letter than the expected answer does."""
    first = sides(unwrap(text))[:1] or [""]
    return first[0] == name or not (len(first[0]) == len(name) == 1 and first[0].isalpha())


def _exact_part(text: str) -> str:
    exact, *rough = re.split(r"\\approx|≈", text)
    return rough[0] if rough and is_name(exact) else exact


def _is_right_number(number: Number, gold: Number, prompt: str) -> bool:
    """Return True if a number is the expected one, in the form that the prompt asks for, and not copied from the prompt."""
    if number.scale and not gold.scale and re.search(r"\b(?:thousand|million|billion|trillion)", prompt):
        number = replace(number, value=number.value / 10**number.scale)  # the prompt asks for 4, in millions
    if number.base == 10 != gold.base and re.search(
        rf"\bbase[\s-]*\$?{gold.base}\b|\b{_BASES.get(gold.base, 'base')}\b", prompt
    ):
        number = replace(number, base=gold.base)  # the prompt asks for 11001, in base 2
    return numbers.agree(number, gold) and has_form_of_number(number, gold, prompt)


def words(text: str) -> str:
    """Return a text in a uniform notation, in which words can be compared."""
    text = re.sub(r"\\(?:text|mathrm|mathbf|mbox)(?:bf|rm|it|normal)?\s*\{([^{}]*)\}", r" \1 ", text)
    text = re.sub(r"(?<=\d)(?:st|nd|rd|th)\b", "", re.sub(r"[\\${}().,;:!?\"'*]", " ", text.casefold()))
    return " ".join(text.split())
