"""Any data set of reasoning-gym with its own scorer: data.task: reasoning_gym:NAME."""

from __future__ import annotations

import dataclasses
import json
import math
import warnings
from functools import cache
from typing import Any

from megatron_rl.config import DataConfig
from megatron_rl.environments.procedural import HELD_OUT_SIZE, ProceduralPrompts
from megatron_rl.environments.task import Prompt, Split, Task
from megatron_rl.environments.verifiers import PooledCalls, extract_answer
from megatron_rl.errors import UserError
from megatron_rl.registry import nearest

DEFAULT_SIZE = 10_000
_NONSENSE = ("no answer", "#")


class ReasoningGym(Task):
    parts = ("score", "answered")
    main_parts = ("score",)

    verifier = "reasoning_gym"

    def __init__(self, data: DataConfig, demonstrations: bool = False):
        super().__init__(data, demonstrations)
        options = dict(data.options)
        self.dataset = data.task.partition(":")[2]
        self.timeout_s = float(options.pop("verifier_timeout_s", 5.0))
        self.size = int(options.pop("size", DEFAULT_SIZE))
        self.options = json.dumps(options, sort_keys=True)
        self.template, self.chat = data.template, data.chat
        # entry i of a data set is usually drawn with seed + i
        self._first_seed = data.seed * 1_000_003 * self.size
        self._check(options)
        self._verifier: PooledCalls | None = None

    def _check(self, options: dict[str, Any]) -> None:
        configs = _registry()
        if self.dataset not in configs:
            raise UserError(f"config: data.task: reasoning-gym has no '{self.dataset}'{nearest(self.dataset, configs)}")
        fields = [f.name for f in dataclasses.fields(configs[self.dataset][1])]
        for name in options:
            if name not in fields:
                raise UserError(f"config: unknown key 'data.options.{name}' of {self.name}{nearest(name, fields)}")
        try:
            entries = [self._block(0)[i] for i in range(4)]
        except (AssertionError, ValueError, TypeError) as error:
            raise UserError(f"config: data.options of {self.name}: {error}") from None
        if all(score(self.dataset, self.options, entry, text) == 1.0 for entry in entries for text in _NONSENSE):
            raise UserError(
                f"config: data.task: the scorer of {self.name} pays 1.0 for any text, so nothing can be learnt"
                " from it; choose another data set"
            )

    def _block(self, block: int):
        return _dataset(self.dataset, self.options, self.size, (self._first_seed + block * self.size) % 2**31)

    def prompts(self, split: Split) -> ProceduralPrompts:
        return ProceduralPrompts(
            self._generate, split, self.size if split == "train" else min(self.size, HELD_OUT_SIZE)
        )

    def _generate(self, block: int, index: int) -> Prompt:
        entry = self._block(block)[index]
        text = self.template.replace("{prompt}", entry["question"])
        messages = [{"role": "user", "content": text}] if self.chat else None
        return Prompt(
            f"{self.name}:{block * self.size + index}", text, entry["answer"], None, messages, {"entry": entry}
        )

    def extract(self, text: str) -> str:
        return extract_answer(text, multiline=True)

    def demonstration(self, prompt: Prompt, rng) -> str:
        if prompt.answer is None:
            raise UserError(f"data.task '{self.name}' gives no answers, so it has no demonstrations for SFT")
        return str(prompt.answer)

    def score(self, prompts, texts, truncated=None):
        if self._verifier is None:
            target = f"{__name__}:score_parts"
            self._verifier = PooledCalls(target, self.parts, timeout_s=self.timeout_s, imports=["reasoning_gym"])
        calls = []
        for prompt, text in zip(prompts, texts, strict=True):
            answer = extract_answer(text, multiline="\n" in str(prompt.answer).strip())
            calls.append((self.dataset, self.options, prompt.metadata["entry"], answer))
        return self._verifier.score(prompts, calls)

    def close(self) -> None:
        if self._verifier is not None:
            self._verifier.close()


def _registry() -> dict[str, tuple[type, type]]:
    """Name -> (data set class, config class)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # cellpylib's SyntaxWarnings
        import reasoning_gym  # noqa: F401 (registers its data sets)
    from reasoning_gym.factory import DATASETS

    return DATASETS


@cache
def _dataset(name: str, options: str, size: int, seed: int):
    _registry()
    from reasoning_gym.factory import create_dataset

    return create_dataset(name, **json.loads(options), size=size, seed=seed)


def score(name: str, options: str, entry: dict[str, Any], answer: str) -> float:
    """The data set's own score of an extracted answer; 0 for none, and where the scorer raises."""
    if not answer:
        return 0.0
    try:
        value = float(_dataset(name, options, 10, 0).score_answer(answer, entry))
    except Exception:  # the scorers parse free text, and many raise on garbage
        return 0.0
    return value if math.isfinite(value) else 0.0


def score_parts(name: str, options: str, entry: dict[str, Any], answer: str) -> dict[str, float]:
    """`score` with the other part, as a worker calls it."""
    return {"score": score(name, options, entry, answer), "answered": float(bool(answer))}
