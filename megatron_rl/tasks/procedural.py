"""Prompts that a generator makes on demand. The hash of a prompt's text decides whether it is for training or held out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from megatron_rl.errors import UserError
from megatron_rl.tasks.task import Prompt, Split, is_held_out

GENERATED_HELD_OUT_SHARE = 0.25
HELD_OUT_SIZE = 1000
_MAX_PROBES = 200


class ProceduralPrompts(Sequence[Prompt]):
    """Sequence of `size` prompts of one split. A prompt is generated when it is first used.

    generate(block, index) makes prompt `index` of a block of prompts. If the hash of its text assigns the prompt to the other
    split, the same index of the next block is tried. The splits are therefore disjoint for any sizes.
    """

    def __init__(self, generate: Callable[[int, int], Prompt], split: Split, size: int):
        self._generate = generate
        self._eval = split == "eval"
        self._size = size
        self._prompt = lru_cache(maxsize=HELD_OUT_SIZE)(self._find)  # each evaluation asks for the same prompts

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._size))]
        if not -self._size <= index < self._size:
            raise IndexError(index)
        return self._prompt(index % self._size)

    def _find(self, index: int) -> Prompt:
        for block in range(_MAX_PROBES):
            prompt = self._generate(block, index)
            if is_held_out(prompt.identity, GENERATED_HELD_OUT_SHARE) == self._eval:
                return prompt
        side = "held-out" if self._eval else "training"
        raise UserError(
            f"data: {_MAX_PROBES} tries gave no {side} prompt (last: {prompt.prompt_id}), because the task has too few"
            " different questions; widen data.options"
        )
