"""Quantities: numbers with units behind them. Units are sympy's; other words (apples, dollars) are compared as words."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from megatron_rl.environments.number_answer import Number, read_number

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
    """Tell whether two numbers are of the same quantity: 5 km is 5000 m, and is no 5 m. A unit that is not named is any."""
    if not ours.unit or not theirs.unit:
        return ours.equals(theirs)
    units = [measure(number.unit) for number in (ours, theirs)]
    if None not in units and units[0] != units[1]:
        return _exact(ours) * units[0] == _exact(theirs) * units[1]
    words = [_words(number.unit) for number in (ours, theirs)]
    return ours.equals(theirs) and (units[0] == units[1] is not None or words[0] <= words[1] or words[1] <= words[0])


def total(text: str) -> Any:
    """The sum of quantities in a row, `2 hours 30 minutes`, in base units; None for a text that is none."""
    parts = [*_PART.finditer(text)]
    if not parts or "".join(part[0] for part in parts) != text.strip():
        return None
    found = [(read_number(part["number"]), measure(part["unit"])) for part in parts]
    if any(number is None or unit is None for number, unit in found):
        return None
    return sum(_exact(number) * unit for number, unit in found if number)


def _exact(number: Number) -> Any:
    import sympy  # it takes a second to import

    return sympy.Rational(number.value.numerator, number.value.denominator)


def _words(unit: str) -> set[str]:
    return {word.lower().removesuffix("s") for word in re.findall("[A-Za-z]+", _spelled(unit))} - _SMALL


def _spelled(unit: str) -> str:
    for sign, word in _SIGNS.items():
        unit = unit.replace(sign, word)
    return re.sub(r"[A-Za-z]+", lambda match: _SHORT.get(match[0].removesuffix("s"), match[0]), unit)


@lru_cache(1024)
def measure(unit: str) -> Any:
    """The unit in sympy's base units; None where it has another word in it."""
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
