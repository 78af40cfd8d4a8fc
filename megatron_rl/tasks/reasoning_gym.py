"""Task for any data set of reasoning-gym, scored by the data set's own scorer, data.task: reasoning_gym:NAME."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import io
import json
import math
import random
import re
import tokenize
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, override

from megatron_rl.config import DataConfig
from megatron_rl.config.registry import nearest
from megatron_rl.errors import UserError
from megatron_rl.sandbox import isolated
from megatron_rl.tasks.procedural import HELD_OUT_SIZE, ProceduralPrompts
from megatron_rl.tasks.task import Parts, Prompt, Split, Task, check_options
from megatron_rl.tasks.verifiers import GRACE_S, PooledCalls
from megatron_rl.tools.tool import in_thread
from megatron_rl.tools.toolbox import Environment, Said
from megatron_rl.verifiers.stated_answer import extract_answer

if TYPE_CHECKING:
    from megatron_rl.tools.toolbox import Toolbox

DEFAULT_SIZE = 10_000
_OURS = ("verifier_timeout_s", "size", "attempts")
"""Keys of data.options that belong to this task and not to the data set."""
REFUSED = {
    "coin_flip": "its scorer pays 1.0 for 0",
    "complex_arithmetic": "its scorer pays 1.0 for nan",
    "composite": "its data sets are named one by one: take them as tasks",
    "game_of_life_halting": "its scorer pays 1.0 for any text",
    "propositional_logic": "its scorer pays 0.25 for any text where the premises contradict each other",
}
"""{name of a data set: reason why it is not supported}. The scorers of these data sets reward texts that are not answers."""
_RUBBISH = (
    "no answer",
    "#",
    "?!",
    "nan",
    "inf",
    "-inf",
    "1/0",
    "[[]]",
    "[]",
    "{}",
    "None",
    "0",
    "1",
    "-1",
    "\N{SNOWMAN}",
)
_PROBED = 8
"""Number of entries of a data set on which each text of `_RUBBISH` is scored."""
_MOST_FOR_RUBBISH = 0.15
"""Largest accepted score of a meaningless text. Many scorers give any text a small score, which the task treats as 0. The task
does not accept a data set that scores such a text higher."""
_EVALUATES = re.compile(r"\b(?:eval|exec|parse_expr|sympify)\(")
_OPERATORS = frozenset({"+", "-", "*", "/", "**", "^", "%", "(", ")", ",", "[", "]", "="})
_LONGEST = 4000
_FUNCTIONS = frozenset(
    {"sin", "cos", "tan", "sec", "csc", "cot", "exp", "log", "ln", "sqrt", "abs", "Abs"}
    | {"asin", "acos", "atan", "sinh", "cosh", "tanh", "pi", "E", "e", "I"}
)
"""Names that an expression may contain in addition to single letters. These are the names that sympy prints."""


class ReasoningGym(Task):
    """A task on a data set that reasoning-gym generates."""

    parts = ("score", "answered")
    main_parts = ("score",)
    verifier = "reasoning_gym"

    def __init__(self, data: DataConfig, demonstrations: bool = False):
        super().__init__(data, demonstrations)
        self.dataset = data.task.partition(":")[2]
        self.size = int(data.options.get("size", DEFAULT_SIZE))
        own = {name: value for name, value in data.options.items() if name not in _OURS}
        self.attempts = int(data.options.get("attempts", 1))
        """Number of answers allowed in a conversation under rollout.program: agent. The last answer counts."""
        self.options = json.dumps(own, sort_keys=True)
        # Entry i of a data set is usually drawn with seed + i.
        self._first_seed = data.seed * 1_000_003 * self.size
        self._check()
        self._timeout_s = float(data.options.get("verifier_timeout_s", 5.0))
        self._verifier = PooledCalls(
            f"{__name__}:score_isolated", self.parts, timeout_s=self._timeout_s + GRACE_S, imports=["reasoning_gym"]
        )

    def _check(self) -> None:
        configs = _registry()
        if self.dataset not in configs:
            raise UserError(f"config: data.task: reasoning-gym has no '{self.dataset}'{nearest(self.dataset, configs)}")
        check_options(self.data, [*_OURS, *(field.name for field in dataclasses.fields(configs[self.dataset][1]))])
        if self.dataset in REFUSED:
            raise UserError(f"config: data.task: {self.name}: {REFUSED[self.dataset]}; choose another data set")
        if problem := isolated.problem():
            raise UserError(f"config: data.task: {self.name}: {problem}")
        try:
            entries = [self._block(0)[i] for i in range(min(_PROBED, self.size))]
        except (AssertionError, ValueError, TypeError) as error:
            raise UserError(f"config: data.options of {self.name}: {error}") from None
        self._floor = max(self._paid_for(text, entries) for text in _RUBBISH)
        if self._floor > _MOST_FOR_RUBBISH:
            raise UserError(
                f"config: data.task: the scorer of {self.name} pays {self._floor:g} for rubbish, which the policy would learn;"
                " choose another data set"
            )

    def _paid_for(self, text: str, entries: Sequence[dict[str, Any]]) -> float:
        """Return the largest score of a text on entries for which it is wrong; 0 if it scores 0 on any of these entries."""
        others = [entry for entry in entries if str(entry["answer"]).strip() != text]
        paid = [score(self.dataset, self.options, entry, text)["score"] for entry in others]
        return max(paid) if len(paid) > 1 and min(paid) > 0 else 0.0

    def _block(self, block: int) -> Any:
        return _dataset(self.dataset, self.options, self.size, (self._first_seed + block * self.size) % 2**31)

    @override
    def prompts(self, split: Split) -> ProceduralPrompts:
        return ProceduralPrompts(
            self._generate, split, self.size if split == "train" else min(self.size, HELD_OUT_SIZE)
        )

    def _generate(self, block: int, index: int) -> Prompt:
        entry = self._block(block)[index]
        text = self.data.template.replace("{prompt}", entry["question"])
        messages = [{"role": "user", "content": text}] if self.data.chat else None
        return Prompt(
            f"{self.name}:{block * self.size + index}", text, entry["answer"], None, messages, {"entry": entry}
        )

    @override
    def extract(self, text: str) -> str:
        return extract_answer(text, multiline=True)

    @override
    def demonstration(self, prompt: Prompt, rng: random.Random) -> str:
        if prompt.answer is None:
            raise UserError(f"data.task '{self.name}' gives no answers, so it has no demonstrations for SFT")
        return str(prompt.answer)

    @override
    def score(self, prompts: Sequence[Prompt], texts: Sequence[str], truncated: Sequence[bool] = ()) -> list[Parts]:
        calls = []
        for prompt, text in zip(prompts, texts, strict=True):
            answer = extract_answer(text, multiline="\n" in str(prompt.answer).strip())
            calls.append((self.dataset, self.options, prompt.metadata["entry"], answer, self._timeout_s))
        found = self._verifier.score(prompts, calls)
        return [parts if parts["score"] > self._floor else {**parts, "score": 0.0} for parts in found]

    @override
    def environment(self, prompt: Prompt, toolbox: Toolbox) -> Environment:
        return Attempts(toolbox, task=self, prompt=prompt, left=self.attempts)

    @override
    def close(self) -> None:
        self._verifier.close()


@dataclass
class Attempts(Environment):
    """A conversation in which the policy may answer again after a wrong answer, whose score it sees."""

    task: ReasoningGym = None  # type: ignore[assignment]  # the fields of Environment have defaults
    prompt: Prompt = None  # type: ignore[assignment]
    left: int = 1

    @override
    async def respond(self, turn: Said) -> list[Mapping[str, Any]] | None:
        if turn.final is None:
            return await super().respond(turn)
        self.left -= 1
        if not self.left:
            return None
        [parts] = await in_thread(self.task.score, [self.prompt], [turn.final])
        if parts["score"] >= 1.0:
            return None
        return [{"role": "user", "content": f"That scores {parts['score']:g} of 1. Try again ({self.left} left)."}]


def _registry() -> dict[str, tuple[type, type]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # cellpylib's SyntaxWarnings
        import reasoning_gym  # noqa: F401 (registers its data sets)
    from reasoning_gym.factory import DATASETS

    return DATASETS


@cache
def _dataset(name: str, options: str, size: int, seed: int) -> Any:
    _registry()
    from reasoning_gym.factory import create_dataset

    return create_dataset(name, **json.loads(options), size=size, seed=seed)


def score_isolated(
    name: str, options: str, entry: dict[str, Any], answer: str, timeout_s: float
) -> Mapping[str, float]:
    """Run `score` in an isolated process that can only compute. Workers call this function. Errors: TimeoutError; Unscored."""
    _warm(name, options)
    return isolated.call(score, (name, options, entry, answer), timeout_s=timeout_s)


@cache
def _warm(name: str, options: str) -> None:
    """Score one of the data set's own answers, so that the scorer's imports and caches exist before the process forks."""
    dataset = _dataset(name, options, 10, 0)
    with suppress(Exception):
        dataset.score_answer(dataset[0]["answer"], dataset[0])


def score(name: str, options: str, entry: dict[str, Any], answer: str) -> dict[str, float]:
    """Return the score that the data set's own scorer gives an extracted answer.

    The score is 0 if there is no answer, or if the scorer raises an exception.

    If the scorer evaluates its input as code, it gets only answers that are lists or arithmetic.
    """
    dataset = _dataset(name, options, 10, 0)
    try:
        given = answer and (is_plain(answer) or not _evaluates(type(dataset)))
        value = float(dataset.score_answer(answer, entry)) if given else 0.0
    except Exception:  # the scorers parse free text, and many raise on garbage
        value = 0.0
    return {"score": min(1.0, max(0.0, value)) if math.isfinite(value) else 0.0, "answered": float(bool(answer))}


@cache
def _evaluates(kind: type) -> bool:
    source = inspect.getsource(kind.score_answer)  # type: ignore[attr-defined]  # all of the package's data sets have it
    methods = [getattr(kind, name, None) for name in re.findall(r"self\.(\w+)\(", source)]
    return any(
        _EVALUATES.search(text) for text in (source, *(inspect.getsource(m) for m in methods if inspect.isfunction(m)))
    )


def is_plain(text: str) -> bool:
    """Return True if a text is only a value: a Python literal, or arithmetic with letters and known functions."""
    if len(text) > _LONGEST:
        return False
    if not re.search(r"[^\w\s+*/^%,-]", text):  # words and operators only: nothing can be called
        return "__" not in text
    try:
        ast.literal_eval(text)
        return True
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        pass
    try:
        tokens = [t for t in tokenize.generate_tokens(io.StringIO(text).readline) if t.string.strip()]
    except (tokenize.TokenError, SyntaxError, ValueError):
        return False
    for token, behind in zip(tokens, [*tokens[1:], None], strict=True):
        called = behind is not None and behind.string in ("(", "[")
        if token.type == tokenize.NAME:
            if token.string not in _FUNCTIONS and (len(token.string) > 1 or not token.string.isalpha() or called):
                return False
        elif token.type != tokenize.NUMBER and not (token.type == tokenize.OP and token.string in _OPERATORS):
            return False  # a point is not allowed, so there are no attributes
        elif token.string in (")", "]") and called:
            return False
    return True
