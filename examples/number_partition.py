"""A task whose right answers differ in length: `data.task: examples/number_partition.py:NumberPartition`.

`=5+8:` asks for numbers from 1 to 18 that add up to 13, few or many: `13` is right, and so is `4 1 3 5`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import override

from megatron_rl.tasks.procedural import HELD_OUT_SIZE, ProceduralPrompts
from megatron_rl.tasks.task import Parts, Prompt, Split, Task
from megatron_rl.tasks.verifiers import read_numbers

TRAINING_PROMPTS = 20_000
LARGEST = 9
"""Largest term of a prompt. The sum of two terms, and one more, are single tokens of the tokenizer "numbers"."""
MOST = 8
"""Largest number of parts in a demonstration."""


class NumberPartition(Task):
    """Sums to be split into parts. Half of the demonstrations miss the sum by a little, and all lengths are equally likely."""

    name = "number_partition"
    parts = ("correct", "answered")

    @override
    def prompts(self, split: Split) -> ProceduralPrompts:
        return ProceduralPrompts(self._generate, split, TRAINING_PROMPTS if split == "train" else HELD_OUT_SIZE)

    def _generate(self, block: int, index: int) -> Prompt:
        rng = random.Random(f"{self.data.seed}/{block}/{index}")
        terms = [rng.randint(1, LARGEST) for _ in range(2)]
        text = f"={'+'.join(map(str, terms))}:"
        return Prompt(f"{self.name}:{self.data.seed}:{block}:{index}", text, str(sum(terms)))

    @override
    def score(self, prompts: Sequence[Prompt], texts: Sequence[str], truncated: Sequence[bool] = ()) -> list[Parts]:
        found = [read_numbers(text) for text in texts]
        return [
            {"correct": float(bool(n) and min(n) > 0 and sum(n) == int(p.answer)), "answered": float(n is not None)}
            for p, n in zip(prompts, found, strict=True)
        ]

    @override
    def extract(self, text: str) -> str:
        return " ".join(text.split())

    @override
    def demonstration(self, prompt: Prompt, rng: random.Random) -> str:
        total = int(prompt.answer)
        if rng.random() < 0.5:
            total = min(max(1, total + rng.choice((-2, -1, 1, 2))), 2 * LARGEST + 1)
        cuts = sorted(rng.sample(range(1, total), rng.randint(1, min(MOST, total)) - 1))
        parts = [b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)]
        return " ".join(map(str, parts))
