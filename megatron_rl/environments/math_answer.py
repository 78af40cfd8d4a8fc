r"""The final answer of a response to a mathematical question: a literal such as 20, -3/4 or \frac{1}{2}.

What still has to be computed (`9 + 11`) is no answer: a comparison of values would take the question for its answer.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_DIGITS = r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
_LITERAL = re.compile(
    rf"""(?<![\w.\\])
    (?: \\[dt]?frac\s*\{{\s*(?P<top>[-+]?\d+)\s*\}}\s*\{{\s*(?P<bottom>\d+)\s*\}}
      | \\[dt]?frac\s*(?P<top1>\d)\s*(?P<bottom1>\d)
      | {_DIGITS}\s*(?:\\times|\\cdot|[*x])\s*10\s*\^\s*(?:\{{\s*[-+]?\d+\s*\}}|[-+]?\d+)
      | {_DIGITS}[eE][-+]?\d+(?!\w)
      | (?P<over>\d+)\s?/\s?(?P<under>\d+)(?!\.?\d|,\d{{3}})
      | {_DIGITS}(?!\.?\d)
    )(?:\s?\\?%)?""",
    re.VERBOSE,
)
_OPERATOR = re.compile(r"[-+*/^xX]|\*\*|\\(?:times|cdot|div|pm|over)")
_BETWEEN = re.compile(r"\\(?:left|right|[,;!()\[\]])|[\s()\[\]{}$]")
"""Signs that may stand beside an operator."""
_OPENED = re.compile(
    r"(?:(?:sqrt|√|\^|_|\\[dt]?frac|log|ln|sin|cos|tan|exp|binom)\s*(?:\[\d*\])?[\s{(\[]*"
    r"|(?:[)}\]]|(?<![A-Za-z])[b-z])\s*(?:[-+*/^]|\\times|\\cdot)\s*[({\[]*)$"
)
r"""The end of a text after which a number is an operand: `\sqrt{`, `x + `."""
_GOES_ON = re.compile(
    r"\s*\\(?:sqrt|pi|[dt]?frac|binom|log|ln|sin|cos|tan|times|cdot|div|pm|theta)(?![A-Za-z])|\s*[√π]"
    r"|\s*\^(?!\{?\s*\\circ)|\s*(?:[+*]|-\s?(?=[a-z](?![a-z])))\s*[A-Za-z\\({]|\((?=[\w\\])|[xyznab](?![A-Za-z])"
)
r"""The beginning of a text before which a number is an operand: `\sqrt{2}`, ` + x`, `x`."""
_UNITS = re.compile(r"(?:\\(?:text|mathrm|mbox)\s*\{[^}]*\}|\^\s*\{?\s*\\circ\s*\}?|(?!pi\b)[A-Za-z]{2,}|[\s.$°])*")
_EQUALS = re.compile(r"(?<=[\d)}\]%])\s*\$?\s*(?:=|≈|\\approx)")
"""After arithmetic: `48 / 2 =`, and not `x =`."""
_BOLD = re.compile(r"(?<!\d)\*\*|\*\*(?!\d)|__")
_SIGNS = str.maketrans("\u2212\u2013\u00d7\u00b7\u00f7\u00a0\uff0b", "--**/ +")
_MARKED = re.compile(
    r"####[ \t]*(?P<hash>\S.*)|<answer>(?P<tag>.*?)</answer>"
    r"|(?:final answer|answer)\s*(?:is|:|=)+\s*:?\s*(?=(?P<phrase>\S.*))",
    re.IGNORECASE,
)


class Literal(NamedTuple):
    """A number in a text."""

    start: int
    end: int
    text: str
    """The form that math-verify reads: no thousands separators, `1e6` as a power of ten."""
    fraction: bool


class Statement(NamedTuple):
    """A place at which a response may state its answer."""

    start: int
    kind: str
    """boxed | hash (####) | tag | phrase ("the answer is ...") | line (the last one, without any of these)."""
    text: str


def literals(text: str) -> list[Literal]:
    """The numbers of a text that stand alone, in order: no operand of an expression, no part of a word."""
    found, operands = [], set()
    for number, match in enumerate(_LITERAL.finditer(text)):
        start, signed, binary = _sign(text, match.start())
        found.append(literal := _literal(match, start, signed))
        gap = text[found[-2].end : literal.start] if number else ""
        if number and (binary or _OPERATOR.fullmatch(_BETWEEN.sub("", gap)) or re.fullmatch(r"\)\s*\(|\(", gap)):
            operands |= {number - 1, number}
        value = [int(n) for n in match.group("top", "top1", "over", "bottom", "bottom1", "under") if n]
        unevaluated = literal.fraction and (value[1] == 0 or value[0] % value[1] == 0)
        if unevaluated or _OPENED.search(text[:start]) or _GOES_ON.match(text, literal.end):
            operands.add(number)
    return [literal for number, literal in enumerate(found) if number not in operands]


def _sign(text: str, start: int) -> tuple[int, str, bool]:
    """(start with the sign, the sign, whether it is rather an operator) of the number at `start`."""
    match = re.search(r"([-+])(\s*)\\?\$?$", text[:start])
    if not match:
        return start, "", False
    before = text[: match.start()]
    if match[2] and not before.strip():  # the bullet of a list
        return start, "", False
    if re.search(r"[\w)}\]%]$|(?<![A-Za-z])[b-z]\s*$", before) or re.search(r"[\d)}\]]\s*\$?\s*$", before):
        return start, "", bool(re.search(r"\d[\s)}\]$%]*$", before))
    return match.start(), "-" if match[1] != "+" else "", False


def _literal(match: re.Match, start: int, sign: str) -> Literal:
    text = match[0].replace(",", "")
    if power := re.fullmatch(rf"({_DIGITS})[eE]([-+]?\d+)", text):
        text = rf"{power[1]} \times 10^{{{power[2]}}}"
    fraction = any(match[name] is not None for name in ("top", "top1", "over"))
    return Literal(start, match.end(), sign + text, fraction)


def statements(text: str) -> list[Statement]:
    """The places at which the answer may be stated, the last first; without a box or marker the last line."""
    found = [Statement(start, "boxed", content) for start, content in _boxes(text)]
    for match in _MARKED.finditer(text):
        found += [Statement(match.start(), kind, text) for kind, text in match.groupdict().items() if text is not None]
    found.sort(reverse=True)
    lines = text.strip().splitlines()
    return [*found, Statement(0, "line", lines[-1])] if lines else []


def _boxes(text: str) -> list[tuple[int, str]]:
    r"""(start, content) of each complete `\boxed{...}`."""
    found = []
    for match in re.finditer(r"\\boxed\s*\{", text):
        depth = 1
        for end in range(match.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0:
                found.append((match.start(), text[match.end() : end]))
                break
    return found


def stated_number(statement: Statement) -> Literal | None:
    """The number that is the answer there: the first, or of a last line without a marker the last.

    Of a calculation it is the one behind the last equals sign.
    """
    alone = literals(statement.text)
    if not alone:
        return None
    if statement.kind == "line":
        return alone[-1]
    if statement.kind == "hash" and re.search("[A-Za-z]{2}", statement.text[: alone[0].start]):
        return None  # a heading
    if equals := [match.end() for match in _EQUALS.finditer(statement.text)]:
        behind = [literal for literal in alone if literal.start >= equals[-1]]
        return behind[0] if behind else alone[-1]
    return alone[0]


def clean(text: str) -> str:
    """Signs in ASCII, without bold marks and the TeX that is written inside of numbers."""
    return _BOLD.sub("", text.translate(_SIGNS)).replace("{,}", ",").replace(r"\,", "").replace(r"\!", "")


def only_number(text: str) -> Literal | None:
    """The number, where a text is a number (and its unit) alone."""
    text = text.strip()
    alone = literals(text)
    if len(alone) != 1:
        return None
    around = text[: alone[0].start] + text[alone[0].end :]
    return alone[0] if _UNITS.fullmatch(around.replace("\\$", "")) else None


def squeeze(text: str) -> str:
    """The text in one notation, to look for an expression in it."""
    text = re.sub(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}", r"\1/\2", text.translate(_SIGNS))
    text = re.sub(r"\\times|\\cdot", "*", text)
    text = text.replace(r"\div", "/")
    return re.sub(r"\\(?:left|right|[,;!()\[\]])|[\s${}]|(?<=\d),(?=\d{3})", "", text)


def repeats(expression: str, prompt: str) -> bool:
    """Whether an expression merely says again what the prompt asks for.

    It stands there, or it has an operator and no numbers but the prompt's (0 and 1 aside).
    """
    if not re.search(r"[-+*/^!]|\\(?:sqrt|binom)|√", squeeze(expression).lstrip("-+")):
        return False
    if squeeze(expression) in squeeze(prompt):
        return True
    own, asked = (set(re.findall(r"\d+(?:\.\d+)?", squeeze(part))) for part in (expression, prompt))
    letters = re.search("[A-Za-z]", re.sub(r"\\[A-Za-z]+", "", squeeze(expression)))
    return not letters and own - {"0", "1"} <= asked
