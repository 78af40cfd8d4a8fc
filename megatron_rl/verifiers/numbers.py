r"""Reads numbers as people write them, with nothing left to compute: 20, -3/4, 3\frac{1}{2}, 50\%, 2516_8, 7 \times 10^4.

A text counts only if all of it is one number. The value is exact.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

_INTEGER = r"(?:[1-9]\d{0,2}(?:,\d{3})+(?!\d)|[1-9]\d{0,2}(?:\ \d{3})+(?!\d)|\d+)"
_DECIMAL = rf"(?:{_INTEGER}(?:\.\d+)?|\.\d+)"
_TEXT = r"\\(?:text(?:bf|rm|it|normal)?|mathrm|mbox|rm|operatorname)"
_NUMBER = re.compile(
    rf"""
    (?P<sign>[-+]?)\s*(?:
        (?P<currency>(?:US|CA?|AU?|NZ|HK)?\\?\$|[€£¥₹]|(?:USD|EUR|GBP|INR|Rs\.?)(?=[\s\d]))\s*(?P<behind>[-+]?)
    )?
    (?:
        (?P<whole>\d+)\s*\\frac\{{(?P<top1>\d+)\}}\{{(?P<bottom1>\d+)\}}
      | (?P<whole2>\d+)\s+(?P<top2>\d+)/(?P<bottom2>\d+)
      | \\frac\{{(?P<top3>[-+]?{_INTEGER})\}}\{{(?P<bottom3>[-+]?{_INTEGER})\}}
      | (?P<top4>{_INTEGER})\s?/\s?(?P<bottom4>{_INTEGER})
      | (?P<mantissa>{_DECIMAL})\s?(?:\\times|\\cdot|[*x\u00d7])\s?10\s?\^
        \s?(?:\{{\s*(?P<power1>[-+]?\d+)\s*\}}|(?P<power2>[-+]?\d+))
      | (?P<mantissa2>{_DECIMAL})[eE](?P<power3>[-+]?\d+)
      | 10\^(?:\{{(?P<power4>[-+]?\d+)\}}|(?P<power5>[-+]?\d+))
      | (?P<before>{_DECIMAL}\.?|\.)\\overline\{{(?P<repeated>\d+)\}}
      | (?P<decimal>{_DECIMAL})(?:_(?:\{{(?P<base1>\d+)\}}|(?P<base2>\d+)))?
      | (?P<comma>\d+,\d+)
    )
    (?:\s*(?P<percent>\\?%|{_TEXT}\s*\{{\s*(?:percent(?:age)?|pct)\s*\}}|(?:percent(?:age)?|per\ cent|pct)\b))?
    (?P<unit>(?:\s|{_TEXT}\s*\{{[^{{}}\d]*\}}|(?:\{{\}})?\^?\s*\{{?\s*\^?\\circ\s*\}}?|\\degree|\^\{{?o\}}?
        |(?<=[A-Za-z}}])\^\s?\{{?-?[1-3]\}}?|\\cdot|\\Omega|\\mu|\\?\$|[A-Za-z°€£/*'\u2019.-])*)
    """,
    re.VERBOSE,
)
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_NO_UNITS = frozenset(
    [
        "and",
        "or",
        "plus",
        "minus",
        "times",
        "over",
        "squared",
        "cubed",
        "factorial",
        "mod",
        "choose",
        "to",
        "pi",
        "not",
        "dozen",
        "half",
        "halves",
        "third",
        "thirds",
        "if",
        "base",
        "is",
        "divided",
        "multiplied",
        "doubled",
        "tripled",
        "halved",
        "ths",
        "fourths",
        "fifths",
        "sixths",
        "sevenths",
        "eighths",
        "ninths",
        "tenths",
        "hundredths",
        "thousandths",
        "root",
        "tens",
    ]
)
"""Words that are no units, because they change the value of the number before them or show that the text goes on."""
_LETTERS = frozenset("mgshlLJNWVAKCFT")
"""Units of one letter. Any other letter is a variable."""
_LONGEST = 4000
"""Largest number of digits in a number, and largest power of ten."""


@dataclass(frozen=True)
class Number:
    """A number and its notation."""

    value: Fraction
    percent: bool = False
    unit: str = ""
    """Text after the number, preceded by the currency if there is one."""
    decimals: int | None = None
    """Number of digits after the decimal point; None for a fraction."""
    base: int = 10
    fraction: tuple[int, int] | None = None
    """Numerator and denominator as written."""
    mantissa: Fraction | None = None
    """Factor before the power of ten; None if the number has no power of ten."""
    mixed: bool = False
    scale: int = 0
    """Power of ten that a word after the number stands for, for example 6 for million; `value` includes it."""
    comma: bool = False
    """True if the decimals follow a comma, so that the text may also be a list of two numbers."""

    @property
    def scientific(self) -> bool:
        """True if the number is written with a power of ten."""
        return self.mantissa is not None

    @property
    def reduced(self) -> bool:
        """True if the number is a fraction in lowest terms, or not a fraction."""
        return self.fraction is None or self.fraction == (abs(self.value.numerator), self.value.denominator)

    def equals(self, other: Number) -> bool:
        """Return True if two numbers are equal. One of them may be rounded to at least five significant digits.

        50% equals 0.5. It also equals 50, because the answer may be meant in percent.
        """
        if self.base != other.base:
            return False
        forms = [(self.value, other.value)]
        if self.percent != other.percent:
            forms += [(self.value / 100, other.value)] if self.percent else [(self.value, other.value / 100)]
        return any(a == b or self._rounds(b, a) or other._rounds(a, b) for a, b in forms)

    def _rounds(self, exact: Fraction, own: Fraction) -> bool:
        """Return True if this decimal number, with the value `own`, is the rounded form of an exact periodic number."""
        if self.decimals is None or self.percent or own != self.value or not _is_periodic(exact):
            return False
        return len(str(abs(own.numerator * 10**self.decimals // own.denominator))) >= 5 and abs(
            own - exact
        ) <= Fraction(1, 2 * 10**self.decimals)


def _is_periodic(value: Fraction) -> bool:
    rest = value.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    return rest != 1


def read_number(text: str) -> Number | None:
    """Read a number with its sign, currency, percent sign and unit; None if the text is anything else."""
    text = text.strip()
    while text[:1] == "(" and text[-1:] == ")" and "(" not in text[1:-1] and ")" not in text[1:-1]:
        text = text[1:-1].strip()
    if match := re.fullmatch(r"-\s*\(([^()+-]*)\)|\(\s*(-\d+)\s*\)(/\d+)", text):
        text = f"-{match[1]}" if match[1] is not None else match[2] + match[3]
    if len(text) > _LONGEST or not (match := _NUMBER.fullmatch(text)):
        return None
    unit, scale = _unit(match)
    if unit is None:
        return None
    try:
        return _read(match, unit, scale)
    except (ValueError, ZeroDivisionError, OverflowError):
        return None


def _unit(match: re.Match) -> tuple[str | None, int]:
    """Return (unit, power of ten) of the text after a number; (None, 0) if this text is not a unit."""
    text = re.sub(rf"{_TEXT}\s*\{{([^{{}}]*)\}}", r" \1 ", match["unit"])
    text = re.sub(r"\^?\s*\{?\s*\^?\\circ\s*\}?|\\degree|\^\{?o\}?|°", " degrees ", text)
    scale, words = 0, re.findall("[A-Za-z]+", text)
    if words and (scale := _SCALES.get(words[0].lower(), 0)):
        text = text.replace(words.pop(0), "", 1)
    for number, word in enumerate(words):
        if word.lower() in _NO_UNITS or (len(word) == 1 and word not in _LETTERS and not (number and word == "a")):
            return None, 0
    currency = (match["currency"] or "").replace("\\", "")
    return " ".join([*filter(None, [currency, *text.strip(" .-").split()])]), scale


def _read(match: re.Match, unit: str, scale: int) -> Number:
    found = {name.rstrip("0123456789"): value for name, value in match.groupdict().items() if value is not None}
    integer = lambda name: int(found[name].replace(",", "").replace(" ", ""))  # noqa: E731
    sign = -1 if "-" in (found["sign"] + found.get("behind", "")) else 1
    decimals, fraction, base, mantissa = None, None, 10, None
    if "comma" in found and unit:
        raise ValueError("a list")
    if "top" in found:
        top, bottom = integer("top"), integer("bottom")
        fraction = (abs(top), abs(bottom))
        value = Fraction(top, bottom)
        if "whole" in found:
            if value >= 1:
                raise ValueError("no mixed number")
            value += integer("whole")
            fraction = None
        elif value.denominator == 1:
            raise ValueError("a division that has not been done")
    elif "power" in found:
        if abs(integer("power")) > _LONGEST:
            raise ValueError("too large")
        mantissa = Fraction(found.get("mantissa", "1").replace(",", "").replace(" ", ""))
        value = mantissa * Fraction(10) ** integer("power")
    elif "repeated" in found:
        digits, period = found["before"].replace(",", ""), found["repeated"]
        places = len(digits.partition(".")[2])
        value = Fraction(digits.rstrip(".") or 0) + Fraction(int(period), (10 ** len(period) - 1) * 10**places)
    else:
        text = (
            found["decimal"].replace(",", "").replace(" ", "")
            if "decimal" in found
            else found["comma"].replace(",", ".")
        )
        decimals = len(text.partition(".")[2])
        base = int(found.get("base", 10))
        value = Fraction(text) if base == 10 else Fraction(int(text))
    value *= sign * Fraction(10) ** scale
    return Number(
        value,
        "percent" in found,
        unit,
        decimals,
        base,
        fraction,
        mantissa,
        "whole" in found,
        scale,
        "comma" in found,
    )


# -- units ---------------------------------------------------------------------------------------------------------------
# Quantities: numbers with units. Units are sympy's units; other words (apples, dollars) are compared as words.


_SIGNS = {"$": " dollar ", "€": " euro ", "£": " pound ", "¥": " yen ", "₹": " rupee ", "²": "^2", "³": "^3", "·": " "}
_SHORT = {
    "mph": "mile/hour",
    "kmh": "km/hour",
    "kph": "km/hour",
    "hr": "hour",
    "min": "minute",
    "sec": "second",
    "lb": "pound",
}
_SHORT |= {
    "metre": "meter",
    "kilometre": "kilometer",
    "centimetre": "centimeter",
    "litre": "liter",
    "sq": "square",
    "cu": "cubic",
}
_POWERS = {"square": 2, "cubic": 3}
_SMALL = frozenset({"per", "a", "an", "of", "the", "each"})
_PART = re.compile(r"(?P<number>[\d.,]+)\s*(?P<unit>[A-Za-z]+\.?)(?:\s*(?:,|and)?\s*)")


def agree(ours: Number, theirs: Number) -> bool:
    """Return True if two numbers are the same quantity: 5 km is 5000 m, but not 5 m.

    If one number has no unit, the unit of the other is ignored.
    """
    if not ours.unit or not theirs.unit:
        return ours.equals(theirs)
    units = [measure(number.unit) for number in (ours, theirs)]
    if None not in units and units[0] != units[1]:
        return _exact(ours) * units[0] == _exact(theirs) * units[1]
    words = [_words(number.unit) for number in (ours, theirs)]
    return ours.equals(theirs) and (units[0] == units[1] is not None or words[0] <= words[1] or words[1] <= words[0])


def total(text: str) -> Any:
    """Return the sum of successive quantities, as in `2 hours 30 minutes`, in sympy's base units; None for another text."""
    parts = [*_PART.finditer(text)]
    if not parts or "".join(part[0] for part in parts) != text.strip():
        return None
    found = [(read_number(part["number"]), measure(part["unit"])) for part in parts]
    if any(number is None or unit is None for number, unit in found):
        return None
    return sum(_exact(number) * unit for number, unit in found if number)


def _exact(number: Number) -> Any:
    import sympy  # imported late: importing it takes a second

    return sympy.Rational(number.value.numerator, number.value.denominator)


def _words(unit: str) -> set[str]:
    return {word.lower().removesuffix("s") for word in re.findall("[A-Za-z]+", _spelled(unit))} - _SMALL


def _spelled(unit: str) -> str:
    for sign, word in _SIGNS.items():
        unit = unit.replace(sign, word)
    return re.sub(r"[A-Za-z]+", lambda match: _SHORT.get(match[0].removesuffix("s"), match[0]), unit)


@lru_cache(1024)
def measure(unit: str) -> Any:
    """Return a unit in sympy's base units; None if the text contains other words."""
    from sympy.physics import units

    found, last, power, side = units.meter**0, units.meter**0, 1, 1
    for token in re.findall(r"[A-Za-z]+|/|\^\s?\{?\d", _spelled(unit)):
        if token in ("/", "per"):
            side = -1
        elif token[0] == "^":
            found *= last ** (side * (int(token[-1]) - 1))
        elif token.lower() in _POWERS:
            power = _POWERS[token.lower()]
        else:
            names = (token, token.lower(), token.lower().removesuffix("s"), token.upper())
            known = next((x for name in names if isinstance(x := getattr(units, name, None), units.Quantity)), None)
            if known is None:
                return None
            last, power = known**power, 1
            found *= last**side
    return units.convert_to(found, [units.meter, units.kilogram, units.second, units.radian])
