"""Extracts the final answer of a response to a mathematical question: a formula or number in prose, or the content of a box."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator

from megatron_rl.verifiers.numbers import Number, agree, read_number
from megatron_rl.verifiers.stated_answer import Statement, statements

_SIGNS = str.maketrans(
    "\u2212\u2013\u00d7\u00b7\u00f7\u2044\u00a0\u202f\u2009\uff0b\uff1d\uff0c\u00ba",
    "--**//   +=,\u00b0",
    "\u200b\ufeff",
)
_RAISED = str.maketrans("\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079\u207b\u207a", "0123456789-+")
_BOLD = re.compile(r"(?<!\d)\*\*|\*\*(?!\d)|__")
_POWER = re.compile(r"(?<![A-Za-z])([A-Za-z]|(?<=\w)\))\*\*(?=\d{1,2}(?![\d*]))")
"""A power in Python's notation, for example x**2."""
_BLANK = re.compile(r"(?<!\\)\\[,;: ]|(?<!\\)\\q?quad(?![A-Za-z])|(?<![~\\])~(?!~)")
_CALCULATION = re.compile(r"<<[^<>\n]*>>")
"""Calculations that GSM8K adds to its solutions."""
_NARROW = re.compile(r"\\!\s*|(?<!\\)\\[,;: ](?=[-\d])|(?<=\d)\s*\{\s*,\s*\}\s*")
"""TeX spaces and commas within numbers."""
_WRAPPED = re.compile(
    r"(?:\\(?:text|math|bold)(?:bf|rm|it|normal|symbol|sf)?|\\(?:underline|boxed|fbox))?\s*\{(.*)\}"
    r"|\\(?:(?:display|text)style|bf|rm|large|Large)(?![A-Za-z])\s*(.*)",
    re.DOTALL,
)
_DEEPEST = 8
_DELIMITED = re.compile(r"\$\$(.+?)\$\$|\\\[(.+?)\\\]|\\\((.+?)\\\)|\$((?:\\\$|[^$\n])+?)\$", re.DOTALL)
_WORD = re.compile(
    r"(?<![\w\\.{])[A-Za-z]+\d\w*|(?<=\s)[aAI](?=\s)|"
    r"(?<![A-Za-z\\{])(?![A-Za-z]+\(\d)(?!(?:percent(?:age)?|pct|hundred|thousand|million|billion|trillion)\b)"
    r"(?!(?:squared|cubed|factorial|(?:plus|minus|times|(?:divided|multiplied)\sby)(?=\s[\d$\\(]))\b)"
    r"[A-Za-z]{2,}(?:['\u2019-][A-Za-z]+)*"
)
"""A word of prose. Words that belong to a number or a formula do not match."""
_PLAIN_WORD = re.compile(r"(?<![\\A-Za-z{])(?!(?:and|or)\b)[A-Z]?[a-z]{2,}")
_IN_TEXT = re.compile(r"\\(?:text|mbox|mathrm)(?:bf|rm|it|normal)?\s*\{([^{}]*)\}")
_OPERATES = re.compile(
    "[-+*/^=<>!|(){}\\\\_\u00b1\u2213\u2260\u2264\u2265]|^(?![aAI]$)[A-Za-z]$|^(?:squared|cubed|factorial|plus|minus|times)\\b"
)
"""Text next to a number that makes the number part of a formula: an operator, or a letter as a factor."""
_EQUALS = re.compile(r"(?<![<>!:\\])=")
_APPROXIMATES = re.compile(r"\\approx|≈|\\simeq|\\sim\b")
_MOST = 2000
"""Largest number of characters of a line that are considered."""
_DENIED = {
    "line": re.compile(
        r"(?:(?i:\b(?:not|never|nor))|n['\u2019]t)\s(?:be\s|equal\s(?:to\s)?)?[-+*$\\({\[]{0,5}(?:\d[\w.,/%]{0,40}|[A-Z])\W*$"
        r"|\bthan\s[-+*$\\({\[]{0,5}\d[\w.,/%]{0,40}\W*$"
    ),
    "phrase": re.compile(
        r"\W*(?:[a-z]+\s)?(?:not|n['\u2019]t|never|neither|between|\w{1,20}er than|(?:more|less) than)\b", re.IGNORECASE
    ),
}
_DENIED["hash"] = _DENIED["phrase"]
"""Patterns of texts that only exclude a value or bound the answer: not 5, between 3 and 7, more than 2. The pattern is searched
at the end of the last line, but at the start of other statements."""
_OR, _OR_TO = re.compile(r"\bor\b", re.IGNORECASE), re.compile(r"\b(?:or|to)\b", re.IGNORECASE)
_ENDS = re.compile(r"\d[^\w\n.;:!?]{0,8}(?:([A-Za-z]\w*)[^\w\n.;:!?]{1,3}){0,2}$")
_BEGINS = re.compile(r"\W{1,8}(?:[A-Za-z]\w*\W{1,3}){0,2}\d[\d.,/]*\W{0,3}([A-Za-z]\w*)?")
_OF_LISTS = re.compile(r"\b(?:and|or)\b|[\d\s.,;/$%()]", re.IGNORECASE)
_LINKS = re.compile(r"[,;]?\s*(?:and|or)?|[,;]")
_EDGES = " \t\n,;:!?*_\"'`\u201c\u201d"


def clean(text: str) -> str:
    """Convert signs to ASCII, and remove bold marks and the TeX within numbers."""
    text = _POWER.sub(r"\1^", _CALCULATION.sub("", text).translate(_SIGNS))
    text = _BOLD.sub("", text)
    if not text.isascii():
        text = re.sub(
            "[\u00bc-\u00be\u2150-\u215e]", lambda m: " " + unicodedata.normalize("NFKC", m[0]).translate(_SIGNS), text
        )
        text = re.sub("[\u2070\u00b9\u00b2\u00b3\u2074-\u207b]+", lambda m: f"^{{{m[0].translate(_RAISED)}}}", text)
        text = re.sub(r"\u221a\s?(?:\((\w+)\)|(\w+))", lambda m: rf"\sqrt{{{m[1] or m[2]}}}", text).replace(
            "\u221e", r"\infty "
        )
    if "\\begin" not in text:  # in a matrix or an equation, \\ ends a row
        text = re.sub(r"\\\\(?=[A-Za-z])", r"\\", text)
    text = re.sub(r"\\(?:left|right|[bB]igg?[lrm]?)(?![A-Za-z])", "", re.sub(r"\\[dtc]frac", r"\\frac", text))
    text = re.sub(r"\\(boxed|fbox)[ \t]+([-+]?\w[\w.,/]*)", r"\\\1{\2}", text)
    text = re.sub(r"\{([^{}\\]*|\\pi\s*)\\over(?![A-Za-z])([^{}]*)\}", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac\s*(\d|\\pi)\s*(\d|\\pi(?![A-Za-z]))", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac\{\\(?:text|mathrm)\{([^{}]*)\}\}\{\\(?:text|mathrm)\{([^{}]*)\}\}", r"\\text{\1/\2}", text)
    text = re.sub(r"\\frac\s*(\d)\s*\{", r"\\frac{\1}{", text)
    text = re.sub(r"(\\frac\s*\{[^{}]*\})\s*(\d)", r"\1{\2}", text)
    text = re.sub(r"(\\frac)\s*\{\s*([-+]?[\d,]+)\s*\}\s*\{\s*([\d,]+)\s*\}", r"\1{\2}{\3}", text)
    return _BLANK.sub(" ", _NARROW.sub(lambda match: "," if "," in match[0] and "{" in match[0] else "", text))


def unwrap(text: str) -> str:
    """Remove the dollars, braces and fonts around the whole text."""
    text = text.strip()
    for _ in range(_DEEPEST):
        inner = text
        for begin, end in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
            if len(text) > len(begin + end) and text.startswith(begin) and text.endswith(end):
                content = text[len(begin) : len(text) - len(end)]
                if begin not in content:
                    inner = content.strip()
                    break
        if (match := _WRAPPED.fullmatch(inner)) and (match[1] is None or _is_closed(match[1])):
            inner = (match[1] if match[1] is not None else match[2]).strip()
        inner = inner.rstrip(".").strip() if inner.endswith(".") and not inner.endswith("..") else inner
        if inner == text:
            break
        text = inner
    return text


def _is_closed(text: str) -> bool:
    depth = 0
    for sign in re.findall(r"(?<!\\)[{}]", text):
        depth += 1 if sign == "{" else -1
        if depth < 0:
            return False
    return not depth


def sides(text: str) -> list[str]:
    """Return the sides of a chain of equations. An approximation adds a side, unless the exact side before it is a number."""
    exact, *rough = _APPROXIMATES.split(text)
    parts = [part.strip() for part in _EQUALS.split(exact) if part.strip()]
    if rough and not (parts and read_number(unwrap(parts[-1]))):
        parts += [part.strip() for part in rough if part.strip()]
    return parts


def number_of(text: str) -> Number | None:
    """Return the number that a formula states: the formula itself, or its last side that is a number.

    Returns None for an equation that is still to be solved.
    """
    text = unwrap(text)
    if re.fullmatch(r"\([^()]*=[^()]*\)", text):
        text = text[1:-1]
    parts = [unwrap(part) for part in sides(text)]
    for index in reversed(range(len(parts))):
        if number := read_number(parts[index]):
            others = parts[:index] + parts[index + 1 :]
            return number if all(is_name(part) or not has_letters(part) for part in others) else None
    return None


def is_name(side: str) -> bool:
    r"""Return True if a side of an equation is a name that gets a value: x, f(2), |AB|, `\text{area}`."""
    side = re.sub(r"\\(?:text|mbox|mathrm)\s*\{[^{}]*\}|_(?:\w|\{[^{}]*\})|\([^()]*\)", "", side)
    return not re.search(r"[-+*/^\d]", side)


def has_letters(side: str) -> bool:
    """Return True if a formula has letters other than commands. An x between numbers counts as a multiplication sign."""
    side = re.sub(r"(?<=[\d)])\s*[xX]\s*(?=[\d($.])", "*", _IN_TEXT.sub("", side))
    return bool(re.search("[A-Za-z]", re.sub(r"\\[A-Za-z]+", "", side)))


def pieces(prose: str) -> list[tuple[bool, str]]:
    """Split a text into pieces (True for a formula between delimiters, text of the piece).

    A dollar sign before words is money, not a delimiter.
    """
    found, position = [], 0
    while match := _DELIMITED.search(prose, position):
        content = next(filter(None, match.groups()))
        if match[4] is not None and _PLAIN_WORD.search(re.sub(r"\\[A-Za-z]+\s*(?:\{[A-Za-z ]*\})?", " ", content)):
            found.append((False, prose[position : match.start() + 1]))
            position = match.start() + 1
            continue
        found += [(False, prose[position : match.start()]), (True, content)]
        position = match.end()
    return [*found, (False, prose[position:])]


def numbers_in(prose: str) -> Iterator[Number]:
    """Yield the numbers that stand alone in a text, in order. Operands and parts of words do not count."""
    joined = ""
    for formula, text in pieces(prose):
        if formula and (number := number_of(text)):
            yield from _numbers_of_runs(joined)
            joined = ""
            yield number
        else:
            joined += f" {text} " if formula else text
    yield from _numbers_of_runs(joined)


def _numbers_of_runs(text: str) -> Iterator[Number]:
    for run in _WORD.split(_IN_TEXT.sub(r" \1 ", text)):
        run = _paired(run.strip(_EDGES).removesuffix(" -").rstrip(_EDGES + "."))
        if not re.search(r"\d", run):
            continue
        if run.startswith("- "):  # a bullet of a list
            run = run[2:]
        before, bracket, _ = run.partition(" (")
        if number := number_of(run) or (number_of(before) if bracket else None):
            yield number
            continue
        for part in re.split(r"[.,;:]\s+|\s-$", run):
            if number := number_of(part.strip(_EDGES).rstrip(".")):
                yield number
            else:
                yield from _alone(part.split())


def _paired(text: str) -> str:
    """Remove unpaired brackets at the edges of a text. Intervals keep their brackets."""
    if "[" in text or "]" in text:
        return text
    if text.count(")") > text.count("("):
        return text.rstrip(_EDGES + ".)") if text.endswith(")") else text
    return text.lstrip(_EDGES + "(") if text.startswith("(") and text.count("(") > text.count(")") else text


def _alone(words: list[str]) -> Iterator[Number]:
    around = ["", *words, ""]
    for before, word, behind in zip(around, words, around[2:], strict=False):
        if not (_OPERATES.search(before) or _OPERATES.search(behind)) and (
            number := read_number(word.strip(_EDGES).rstrip("."))
        ):
            yield number


def stated_number(statement: Statement) -> Number | None:
    """Return the number that a statement gives: a box's whole content, a phrase's first number, a last line's last number."""
    if statement.kind in ("boxed", "tag"):
        return number_of(statement.text)
    if is_denied(statement):
        return None
    last = statement.kind == "line"
    text = statement.text[-_MOST:] if last else statement.text[:_MOST]
    found = [*numbers_in(text)]
    if not found:
        return None
    number = found[-1 if last else 0]
    others = found if not _OF_LISTS.sub("", text) else _alternatives(text, last)
    return number if all(agree(number, other) for other in others) else None


def is_denied(statement: Statement) -> bool:
    """Return True if a statement only excludes a value or bounds the answer: not 5, between 3 and 7, more than 2."""
    if statement.kind == "line":
        return bool(_DENIED["line"].search(statement.text[-_MOST:]))
    return statement.kind in _DENIED and bool(_DENIED[statement.kind].match(statement.text))


def _alternatives(text: str, last: bool) -> list[Number]:
    """Return a list with the alternative to a text's first or last number; [] if there is none.

    last: if True, return the number before the last one (20 in `20 or 21`). If False, return the number after the first one (21
    in `20 or 21` and in `20 to 21`).
    """
    cuts = [*(_OR if last else _OR_TO).finditer(text)]
    if not cuts:
        return []
    before, behind = text[: cuts[-last].start()], text[cuts[-last].end() :]
    begins, ends = _ENDS.search(before[-80:]), _BEGINS.match(behind)
    if not (begins and ends) or (begins[1] and ends[1] and begins[1] != ends[1]):  # 20 minutes or 1200 seconds
        return []
    sides = [*numbers_in(before)], [*numbers_in(behind)]
    if len(sides[last]) != 1:
        return []
    return sides[0][-1:] if last else sides[1][:1]


def stated_formulas(statement: Statement) -> list[str]:
    """Return the parts of a statement that may be the answer as an expression, the most likely part first."""
    text = statement.text
    if statement.kind in ("boxed", "tag"):
        return [unwrap(text)]
    text = text[-_MOST:] if statement.kind == "line" else text[:_MOST]
    parts = pieces(text)
    formulas = [unwrap(part) for is_formula, part in parts if is_formula]
    if formulas:
        between = [part.strip() for is_formula, part in parts if not is_formula]
        linked = all(_LINKS.fullmatch(part) for part in between[1:-1])
        return [", ".join(formulas) if linked else formulas[-1 if statement.kind == "line" else 0]]
    runs = [run.strip(_EDGES + ".") for run in _WORD.split(text)]
    return [unwrap(text), *filter(None, [runs[-1 if statement.kind == "line" else 0]])]


def math_answer(text: str) -> str:
    """Return the number that is a response's final answer, or else its last statement, in a uniform notation."""
    stated = statements(clean(text))
    number = next(filter(None, map(stated_number, stated)), None)
    if number:
        return f"{number.value}{'%' * number.percent}"
    return re.sub(r"\s+", "", unwrap(stated[0].text[-_MOST:])) if stated else ""
