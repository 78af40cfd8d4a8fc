"""Any data set of reasoning-gym with its own scorer: data.task: reasoning_gym:NAME."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, override

from megatron_rl.config import DataConfig
from megatron_rl.environments.environment import Environment, Said
from megatron_rl.environments.event_loop import in_thread
from megatron_rl.environments.procedural import HELD_OUT_SIZE, ProceduralPrompts
from megatron_rl.environments.task import Parts, Prompt, Split, Task, check_options
from megatron_rl.environments.verifiers import PooledCalls, extract_answer
from megatron_rl.errors import UserError
from megatron_rl.registry import nearest

if TYPE_CHECKING:
    from megatron_rl.environments.toolbox import Toolbox

DEFAULT_SIZE = 10_000
_OURS = ("verifier_timeout_s", "size", "attempts")
"""Keys of data.options that are not the data set's."""
_NONSENSE = ("no answer", "#")


class ReasoningGym(Task):
    """A data set that reasoning-gym generates."""

    parts = ("score", "answered")
    main_parts = ("score",)
    verifier = "reasoning_gym"

    def __init__(self, data: DataConfig, demonstrations: bool = False):
        super().__init__(data, demonstrations)
        self.dataset = data.task.partition(":")[2]
        self.size = int(data.options.get("size", DEFAULT_SIZE))
        own = {name: value for name, value in data.options.items() if name not in _OURS}
        self.attempts = int(data.options.get("attempts", 1))
        """Answers that a conversation may give under rollout.program: agent; the last one counts."""
        self.options = json.dumps(own, sort_keys=True)
        # entry i of a data set is usually drawn with seed + i
        self._first_seed = data.seed * 1_000_003 * self.size
        self._check()
        timeout_s = float(data.options.get("verifier_timeout_s", 5.0))
        self._verifier = PooledCalls(f"{__name__}:score", self.parts, timeout_s=timeout_s, imports=["reasoning_gym"])

    def _check(self) -> None:
        configs = _registry()
        if self.dataset not in configs:
            raise UserError(f"config: data.task: reasoning-gym has no '{self.dataset}'{nearest(self.dataset, configs)}")
        check_options(self.data, [*_OURS, *(field.name for field in dataclasses.fields(configs[self.dataset][1]))])
        try:
            entries = [self._block(0)[i] for i in range(4)]
        except (AssertionError, ValueError, TypeError) as error:
            raise UserError(f"config: data.options of {self.name}: {error}") from None
        scores = [score(self.dataset, self.options, entry, text) for entry in entries for text in _NONSENSE]
        if all(parts["score"] == 1.0 for parts in scores):
            raise UserError(
                f"config: data.task: the scorer of {self.name} pays 1.0 for any text, so nothing can be learned"
                " from it; choose another data set"
            )

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
            calls.append((self.dataset, self.options, prompt.metadata["entry"], answer))
        return self._verifier.score(prompts, calls)

    @override
    def environment(self, prompt: Prompt, toolbox: Toolbox) -> Environment:
        return Attempts(toolbox, task=self, prompt=prompt, left=self.attempts)

    @override
    def close(self) -> None:
        self._verifier.close()


@dataclass
class Attempts(Environment):
    """An answer that is wrong may be given again, after the score of the one before."""

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
    """Name -> (data set class, config class)."""
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


def score(name: str, options: str, entry: dict[str, Any], answer: str) -> dict[str, float]:
    """The data set's own score of an extracted answer, 0 for none and where the scorer raises. A worker calls it."""
    try:
        value = float(_dataset(name, options, 10, 0).score_answer(answer, entry)) if answer else 0.0
    except Exception:  # the scorers parse free text, and many raise on garbage
        value = 0.0
    return {"score": value if math.isfinite(value) else 0.0, "answered": float(bool(answer))}
