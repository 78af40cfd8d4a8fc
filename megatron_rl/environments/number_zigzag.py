"""A task of several right answers: arrange 4 to 6 different numbers so that they go up and down in turn.

`<6 15 3 12:` begins upwards (6 15 3 12 is right, and so are four other orders), `>6 15 3 12:` downwards.
"""

from __future__ import annotations

import random

from megatron_rl.config import DataConfig
from megatron_rl.environments.number_sorting import NumberSorting
from megatron_rl.environments.task import Prompt
from megatron_rl.environments.verifiers import zigzag
from megatron_rl.errors import UserError


class NumberZigzag(NumberSorting):
    """The zigzag task, with the options of number_sorting."""

    name = "number_zigzag"
    verifier = "zigzag"
    _verify = staticmethod(zigzag)

    def __init__(self, data: DataConfig, demonstrations: bool = False):
        super().__init__(data, demonstrations)
        if self.options.times > 1:
            raise UserError(
                "config: data.options.times: number_zigzag has many right answers; it is for number_sorting"
            )
        self._values = range(self.options.min_value, self.options.max_value + 1)
        if len(self._values) < self.options.max_numbers:
            raise UserError(
                f"config: data.options: {self.options.max_numbers} different numbers of {self._values[0]} to"
                f" {self._values[-1]} are too many; raise max_value"
            )

    def _generate(self, block: int, index: int) -> Prompt:
        number = block * self.options.size + index
        rng = random.Random(self._first + number)
        numbers = rng.sample(self._values, rng.randint(self.options.min_numbers, self.options.max_numbers))
        text = f"{rng.choice('<>')}{' '.join(map(str, numbers))}:"
        return Prompt(f"{self.name}:{self.seed}:{number}", text, text)

    def _right(self, prompt: Prompt, rng: random.Random) -> list[int]:
        """The smaller half at the low places and the larger at the high ones, each in any order."""
        numbers = sorted(map(int, prompt.text[1:-1].split()))
        upwards = prompt.text[0] == "<"
        valleys = (len(numbers) + upwards) // 2
        low, high = (rng.sample(half, len(half)) for half in (numbers[:valleys], numbers[valleys:]))
        first, second = (low, high) if upwards else (high, low)
        return [half[i // 2] for i, half in zip(range(len(numbers)), [first, second] * len(numbers), strict=False)]
