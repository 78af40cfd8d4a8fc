r"""Mathematical expressions: math-verify's LaTeX parser reads them without evaluation, and sympy compares them exactly.

A model's text is never evaluated as a program, because the parser is a grammar. A comparison with sympy may take long, so this
code runs in a worker with a time limit.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fractions import Fraction
from itertools import accumulate
from typing import Any

import sympy
from latex2sympy2_extended import NormalizationConfig, latex2sympy
from latex2sympy2_extended.logic import And
from sympy import Add, Basic, Eq, FiniteSet, Interval, MatrixBase, Mul, Pow, Rational, Set, Symbol, Tuple
from sympy.core.relational import GreaterThan, Relational, StrictGreaterThan, StrictLessThan

from megatron_rl.verifiers.numbers import Number, read_number

Expression = Basic | MatrixBase

_NORMALIZATION = NormalizationConfig(basic_latex=True, malformed_operators=True, boxed="none")
_FUNCTIONS = "sin cos tan cot sec csc log ln exp sqrt pi infty arcsin arccos arctan sinh cosh tanh"
_WORD = re.compile(r"(?<![\\A-Za-z])(?!(?:and|or|inf|infinity)(?![A-Za-z]))[A-Za-z]*[a-z][A-Za-z]*[A-Za-z](?![A-Za-z])")
"""A word. Functions and names of several capital letters (the segment AB) do not match. A product of letters does not match if
spaces separate them."""
_COMPLEX = re.compile(r"(?<![A-Za-z\\])i(?![A-Za-z])|\\imath|\\mathbb\{C\}")
_LONGEST = 2000
_DEEPEST = 8
"""Largest depth of nested brackets. Each level triples the parser's time."""


def read_expression(text: str) -> Expression | None:
    """Parse a text that is one formula as a whole; None if it is not."""
    if "phantom" in text:  # invisible content
        return None
    text = re.sub(r"\\text\s*\{\s*(,?\s*(?:and|or)|,)\s*\}", r" \1 ", text).strip().rstrip(".")
    text = re.sub(r"\\mathrm\s*\{([ie])\}", r"\1", text)
    text = re.sub(r"\s*\\(?:text|mbox|mathrm)\s*\{[^{}]*\}(?:\^\{?\d\}?)?$", "", text) or text
    text = re.sub(r"\\begin\s*\{array\}\s*\{[^{}]*\}", r"\\begin{pmatrix}", text).replace(
        r"\end{array}", r"\end{pmatrix}"
    )
    text = re.sub(r"^\s*[\[(]\s*(\\begin\{.matrix\}.*\\end\{.matrix\})\s*[\])]\s*$", r"\1", text, flags=re.DOTALL)
    text = re.sub(r"(?:,\s*|(?<=[\s\d)}\]]))(?:and|or)(?=[\s\d({\\A-Z])", ",", text)
    text = re.sub(r"\\?(?<![A-Za-z])sqrt\s?\(([^()]*)\)", r"\\sqrt{\1}", text)
    text = re.sub(r"(?<=\d)\.0+(?!\d)", "", text)
    text = re.sub(rf"(?<![\\A-Za-z])({'|'.join(_FUNCTIONS.split())})(?![A-Za-z])", r"\\\1", text)
    plain = re.sub(r"\\(?:begin|end)\s*\{[a-z]+\}", "", text)
    if (
        len(text) > _LONGEST
        or _depth(text) > _DEEPEST
        or text.count("|") > 2 * _DEEPEST
        or _WORD.search(plain)
        or re.search(r"\d\s+\d", text)
    ):
        return None
    try:
        parsed = latex2sympy(text, is_real=not _COMPLEX.search(text), normalization_config=_NORMALIZATION)
    except Exception:  # the parser raises plain Exceptions and others
        return None
    return parsed if isinstance(parsed, Basic | MatrixBase) else None


def _depth(text: str) -> int:
    depths = accumulate(1 if sign in "({[" else -1 for sign in re.findall(r"[(){}\[\]]", text))
    return max(depths, default=0)


def is_unfinished(expression: Expression) -> bool:
    """Return True if numbers in an expression remain to be computed: 9 + 11, 2 * 3 * x, 5!, sqrt(16), a sum, a derivative."""
    if isinstance(expression, sympy.Sum | sympy.Product | sympy.Integral | sympy.Derivative | sympy.Limit):
        return True
    arguments: Sequence[Any] = expression.args if isinstance(expression, Basic) else [*expression]
    if isinstance(expression, Add) and sum(isinstance(a, sympy.Number) for a in arguments) > 1:
        return True
    if isinstance(expression, Mul) and max(map(len, _factors(expression))) > 1:
        return True
    if isinstance(expression, Pow) and expression.base.is_Rational:
        if expression.exp.is_Integer and expression.exp != -1 and expression.base != 10:
            return True
        if expression.exp == Rational(1, 2) and Pow(expression.base, expression.exp).is_Rational:
            return True
    if isinstance(expression, sympy.Function) and not expression.free_symbols and len(arguments) == 1:
        number: Any = arguments[0]
        small = isinstance(expression, sympy.factorial) and not (number.is_Integer and number > 50)
        if (isinstance(expression, sympy.factorial) and not small) or expression.doit().is_Rational:
            return True
    return any(map(is_unfinished, arguments))


def _in_order(chain: Any) -> tuple[Any, ...]:
    return chain._unsorted_args


def _factors(product: Mul) -> tuple[list[Any], list[Any]]:
    numbers = [a for a in product.args if isinstance(a, sympy.Number) and abs(a) != 1]
    below = [a for a in product.args if isinstance(a, Pow) and a.exp == -1 and a.base.is_Number and abs(a.base) != 1]
    return numbers, below


def are_equal(gold: Any, answer: Any) -> bool:
    """Return True if an answer equals the expected answer in any form. Errors: exceptions of sympy."""
    if isinstance(gold, Interval | Tuple):
        answer = _point(answer)
    gold, answer = _without_names(gold, answer)
    if isinstance(gold, Interval | Tuple) and isinstance(answer, Interval | Tuple) and type(gold) is not type(answer):
        gold, answer = (_pair(x) for x in (gold, answer))  # the parser reads (1, 2) as an interval
        return gold is not None and answer is not None and are_equal(gold, answer)
    if _is_relation(gold) or _is_relation(answer):
        return _are_equal_relations(gold, answer)
    if (
        isinstance(gold, MatrixBase)
        or isinstance(answer, MatrixBase)
        or isinstance(gold, Tuple)
        or isinstance(answer, Tuple)
    ):
        return _are_equal_sequences(gold, answer)
    if isinstance(gold, Interval) and isinstance(answer, Interval):
        return (gold.left_open, gold.right_open) == (answer.left_open, answer.right_open) and _are_equal_sequences(
            Tuple(gold.start, gold.end), Tuple(answer.start, answer.end)
        )
    if isinstance(gold, Set) or isinstance(answer, Set):
        return _are_equal_sets(gold, answer)
    return _are_equal_values(gold, answer)


def _without_names(gold: Any, answer: Any) -> tuple[Any, Any]:
    names = [_name(x) for x in (gold, answer)]
    if all(names) and names[0] != names[1]:
        return gold, answer
    if _is_equation(gold) and _is_equation(answer):
        if all(names):
            gold, answer = _last_side(gold), _last_side(answer)
    elif _is_equation(answer):
        answer = _last_side(answer)
    elif names[0]:
        gold = _last_side(gold)
    return gold, answer


def _point(x: Any) -> Any:
    """Convert the solution `x = 3, y = -4` to a point. Other values are returned unchanged."""
    parts: list[Any] = [*x.args] if isinstance(x, FiniteSet) else []
    if len(parts) < 2 or not all(isinstance(part, Eq) and isinstance(part.lhs, Symbol) for part in parts):
        return x
    values = {part.lhs.name: part.rhs for part in parts}
    return Tuple(*(values[name] for name in sorted(values))) if len(values) == len(parts) else x


def _name(x: Any) -> Any:
    first = _in_order(x)[0] if isinstance(x, And) and _in_order(x) else x
    if not _is_equation(x) or not isinstance(first, Eq):
        return None
    left = first.lhs
    symbols = (
        left.args
        if isinstance(left, Tuple | FiniteSet)
        else [left.start, left.end]
        if isinstance(left, Interval)
        else [left]
    )
    plain = all(isinstance(s, Symbol) or _is_call(s) or _is_product_of_symbols(s) for s in symbols)
    return str(left) if plain else None


def _is_call(x: Any) -> bool:
    return isinstance(x, (sympy.core.function.AppliedUndef, sympy.Abs))


def _is_product_of_symbols(x: Any) -> bool:
    return isinstance(x, Mul | Pow) and all(
        isinstance(a, Symbol) or a == -1 or _is_product_of_symbols(a) for a in x.args
    )


def _is_equation(x: Any) -> bool:
    return isinstance(x, Eq) or (isinstance(x, And) and all(isinstance(a, Eq) for a in _in_order(x)))


def _last_side(x: Any) -> Any:
    return (_in_order(x)[-1] if isinstance(x, And) else x).rhs


def _is_relation(x: Any) -> bool:
    return isinstance(x, Relational | And)


def _pair(x: Interval | Tuple) -> Tuple | None:
    if isinstance(x, Tuple):
        return x
    return Tuple(x.start, x.end) if x.left_open and x.right_open else None


def _are_equal_values(gold: Any, answer: Any) -> bool:
    numbers = [_number(x) for x in (gold, answer)]
    if numbers[0] and numbers[1]:
        return numbers[0].equals(numbers[1])
    gold, answer = (_exact(x) for x in (gold, answer))
    if isinstance(gold, Symbol) and isinstance(answer, Symbol):
        return gold.name == answer.name
    if gold == answer:
        return True
    difference = sympy.simplify(gold - answer)
    return bool(difference.is_zero) or difference == 0


def _number(x: Any) -> Number | None:
    if isinstance(x, sympy.Float):
        return read_number(str(x).rstrip("0").rstrip("."))
    return Number(Fraction(int(x.p), int(x.q))) if isinstance(x, Rational) else None


def _exact(x: Any) -> Any:
    return x.xreplace({number: Rational(str(number)) for number in x.atoms(sympy.Float)}).doit()


def _are_equal_sequences(gold: Any, answer: Any) -> bool:
    gold, answer = (x.doit() if hasattr(x, "doit") else x for x in (gold, answer))
    if isinstance(gold, MatrixBase) != isinstance(answer, MatrixBase):
        return False
    if isinstance(gold, MatrixBase):
        return gold.shape == answer.shape and all(map(are_equal, gold.flat(), answer.flat()))
    if not (isinstance(gold, Tuple) and isinstance(answer, Tuple)):
        return False
    return len(gold) == len(answer) and all(map(are_equal, gold, answer))


def _are_equal_sets(gold: Any, answer: Any) -> bool:
    if isinstance(gold, FiniteSet | Basic) and isinstance(answer, FiniteSet | Basic) and _are_lists(gold, answer):
        return _match(_elements(gold), _elements(answer))
    if not (isinstance(gold, Set) and isinstance(answer, Set)):
        return False
    return gold == answer or gold.symmetric_difference(answer).is_empty is True


def _are_lists(*sets: Any) -> bool:
    return all(isinstance(s, FiniteSet) or not isinstance(s, Set) for s in sets)


def _elements(x: Any) -> list[Any]:
    return [*x.args] if isinstance(x, FiniteSet) else [x]


def _match(gold: list[Any], answer: Iterable[Any]) -> bool:
    left = list(answer)
    if len(left) != len(gold):
        return False
    for element in gold:
        found = next((i for i, other in enumerate(left) if are_equal(element, other)), None)
        if found is None:
            return False
        left.pop(found)
    return True


def _are_equal_relations(gold: Any, answer: Any) -> bool:
    if isinstance(answer, Set) and _is_relation(gold):
        return _are_equal_sets(_as_set(gold), answer)
    if isinstance(gold, And) or isinstance(answer, And):
        return isinstance(gold, And) and isinstance(answer, And) and _match([*_in_order(gold)], _in_order(answer))
    if not (isinstance(gold, Relational) and isinstance(answer, Relational)):
        return False
    (kind, ours), (other, theirs) = _from_zero(gold), _from_zero(answer)
    if kind is not other:
        return False
    if isinstance(gold, Eq) and isinstance(gold.rhs, Set | Tuple):
        return _name(gold) == _name(answer) and are_equal(gold.rhs, answer.rhs)
    ratio = sympy.simplify(ours / theirs)
    return bool(
        ratio.is_number and ratio.is_finite and (ratio.is_positive or (kind in (Eq, sympy.Ne) and ratio.is_nonzero))
    )


def _from_zero(relation: Any) -> tuple[type, Any]:
    """Return (kind, expression) of a relation that compares the expression with 0 by =, !=, > or >=."""
    left: Any
    right: Any
    left, right = (_exact(x) if isinstance(x, sympy.Expr) else x for x in (relation.lhs, relation.rhs))
    if isinstance(left, Set | Tuple) or isinstance(right, Set | Tuple):
        return type(relation), relation
    if isinstance(relation, StrictLessThan | sympy.LessThan):
        return (StrictGreaterThan if isinstance(relation, StrictLessThan) else GreaterThan), right - left
    return type(relation), left - right


def _as_set(relation: Any) -> Any:
    parts = _in_order(relation) if isinstance(relation, And) else [relation]
    calls = {
        call: Symbol("value", real=True) for part in parts for call in part.atoms(sympy.core.function.AppliedUndef)
    }
    found = [part.xreplace(calls).as_set() for part in parts]
    return sympy.Intersection(*found)
