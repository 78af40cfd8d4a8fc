"""Sums that a small model cannot do in its head: the agentic quickstart's task, to be done with a calculator."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Annotated, Any, override

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from megatron_rl.config import DataConfig
from megatron_rl.environments.procedural import HELD_OUT_SIZE, ProceduralPrompts
from megatron_rl.environments.task import Parts, Prompt, Split, Task, check_options
from megatron_rl.environments.verifiers import exact
from megatron_rl.errors import UserError


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class SumsOptions:
    """data.options of this task."""

    terms: Annotated[int, Field(ge=2)] = 3
    digits: Annotated[int, Field(ge=1, le=9)] = 3
    """Most digits of a term."""
    size: Annotated[int, Field(ge=1)] = 20_000
    """Different training prompts."""
    calls: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the demonstrations that call the calculator; the others answer at once."""


class Sums(Task):
    """`374+85+412=`, whose answer is `871`."""

    name = "sums"
    verifier = "exact"

    def __init__(self, data: DataConfig, demonstrations: bool = False):
        super().__init__(data, demonstrations)
        check_options(data, SumsOptions.__dataclass_fields__)
        try:
            self.options = TypeAdapter(SumsOptions).validate_python(data.options)
        except ValidationError as error:
            first = error.errors()[0]
            raise UserError(f"config: data.options.{'.'.join(map(str, first['loc']))}: {first['msg']}") from None

    @override
    def prompts(self, split: Split) -> ProceduralPrompts:
        return ProceduralPrompts(self._generate, split, self.options.size if split == "train" else HELD_OUT_SIZE)

    def _generate(self, block: int, index: int) -> Prompt:
        rng = random.Random(f"{self.data.seed}/{block}/{index}")
        terms = [rng.randrange(10**self.options.digits) for _ in range(self.options.terms)]
        text = self.data.template.replace("{prompt}", f"{'+'.join(map(str, terms))}=")
        messages = [{"role": "user", "content": text}] if self.data.chat else None
        return Prompt(f"{self.name}:{self.data.seed}:{block}:{index}", text, str(sum(terms)), None, messages)

    @override
    def score(self, prompts: Sequence[Prompt], texts: Sequence[str], truncated: Sequence[bool] = ()) -> list[Parts]:
        return [exact(text, prompt.answer) for prompt, text in zip(prompts, texts, strict=True)]

    @override
    def demonstration(self, prompt: Prompt, rng: random.Random) -> str | list[dict[str, Any]]:
        if rng.random() >= self.options.calls:
            return str(prompt.answer)
        call = {"name": "calculator", "arguments": {"expression": prompt.text.removesuffix("=")}}
        return [
            {"role": "assistant", "tool_calls": [{"function": call}]},
            {"role": "tool", "content": str(prompt.answer)},
            {"role": "assistant", "content": str(prompt.answer)},
        ]
