"""A calculator as a tool. It accepts only arithmetic with numbers."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any, ClassVar, override

from megatron_rl.tools.tool import Tool, ToolError

LONGEST = 1000
"""Largest number of characters in an expression."""
LARGEST = 10**100
_BINARY: dict[type[ast.operator], Callable] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: dict[type[ast.unaryop], Callable] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


def calculate(expression: str) -> int | float:
    """Return the value of an arithmetic expression; integers are exact. Errors: ToolError."""
    if len(expression) > LONGEST:
        raise ToolError(f"the expression has more than {LONGEST} characters")
    try:
        return _value(ast.parse(expression.strip().replace("^", "**"), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ToolError(f"not an arithmetic expression: {expression[:100]}") from None
    except ZeroDivisionError:
        raise ToolError("division by zero") from None
    except OverflowError:
        raise ToolError("the result is too large") from None


def _value(node: ast.AST) -> int | float:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            found = value
        case ast.BinOp(left, op, right) if type(op) in _BINARY:
            left, right = _value(left), _value(right)
            if isinstance(op, ast.Pow) and (abs(right) > 400 or abs(left) > LARGEST):
                raise OverflowError
            found = _BINARY[type(op)](left, right)
            exact = isinstance(op, ast.Div) and isinstance(left, int) and isinstance(right, int) and left % right == 0
            found = left // right if exact else found
        case ast.UnaryOp(op, operand) if type(op) in _UNARY:
            found = _UNARY[type(op)](_value(operand))
        case _:
            raise ValueError
    if isinstance(found, complex):
        raise ValueError
    if abs(found) > LARGEST:
        raise OverflowError
    return found


class Calculator(Tool):
    """Tool `calculator`: returns the value of an expression."""

    name = "calculator"
    description = "Computes an arithmetic expression of numbers, + - * / // % ** and parentheses."
    parameters: ClassVar[dict[str, Any]] = {
        "type": "object",
        "properties": {"expression": {"type": "string", "description": "such as (3 + 4) * 12"}},
        "required": ["expression"],
        "additionalProperties": False,
    }

    @override
    async def call(self, arguments: dict[str, Any], session: Any) -> str:
        return str(calculate(arguments["expression"]))
