"""Built-in tasks. The quickstart's task is to sort 4 to 6 numbers from 0 to 19, up (`<6 15 3 12:`) or down (`>6 15 3 12:`)."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import random
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, override

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from megatron_rl.config import DataConfig
from megatron_rl.errors import UserError
from megatron_rl.tasks.procedural import HELD_OUT_SIZE, ProceduralPrompts
from megatron_rl.tasks.task import Parts, Prompt, Split, Task, read_options
from megatron_rl.tasks.verifiers import exact, number_list, read_numbers, zigzag


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class NumberSortingOptions:
    """data.options of the tasks number_sorting and number_zigzag."""

    min_numbers: Annotated[int, Field(ge=2)] = 4
    max_numbers: Annotated[int, Field(ge=2)] = 6
    min_value: int = 0
    max_value: int = 19
    size: Annotated[int, Field(ge=1)] = 20_000
    """Number of different training prompts."""
    corrupt: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the demonstrations in which two neighboring numbers are swapped. SFT on such demonstrations gives a start that
    RL can improve."""
    times: Annotated[int, Field(ge=1)] = 1
    """Number of times that the answer contains the sorted list. A larger number makes longer answers, in which every token
    matters."""

    def __post_init__(self):
        if self.min_numbers > self.max_numbers or self.min_value >= self.max_value:
            raise ValueError("min_numbers may not exceed max_numbers, and min_value must be below max_value")


class NumberSorting(Task):
    """Task of sorting numbers."""

    name = "number_sorting"
    parts = ("correct", "answered")
    verifier = "number_list"
    _verify = staticmethod(number_list)

    def __init__(self, data: DataConfig, demonstrations: bool = False):
        super().__init__(data, demonstrations)
        self.options = read_options(data, NumberSortingOptions)
        self.seed = data.seed
        # Entry i of the generator is drawn with seed i, so runs with different seeds use entries that are far apart.
        self._first = self.seed * 1_000_003 * self.options.size
        self._dataset = _dataset(self.options)

    @override
    def prompts(self, split: Split) -> ProceduralPrompts:
        return ProceduralPrompts(self._generate, split, self.options.size if split == "train" else HELD_OUT_SIZE)

    def _generate(self, block: int, index: int) -> Prompt:
        number = block * self.options.size + index
        metadata = self._dataset[self._first + number]["metadata"]
        numbers = [_integer(n) for n in metadata["original_numbers"]]
        answer = [_integer(n) for n in metadata["sorted_numbers"]]
        sign = "<" if metadata["direction"] == "ascending" else ">"
        return Prompt(f"{self.name}:{self.seed}:{number}", f"{sign}{' '.join(map(str, numbers))}:", answer)

    @override
    def score(self, prompts: Sequence[Prompt], texts: Sequence[str], truncated: Sequence[bool] = ()) -> list[Parts]:
        wanted = [prompt.answer * self.options.times for prompt in prompts]
        return [self._verify(text, answer) for text, answer in zip(texts, wanted, strict=True)]

    @override
    def extract(self, text: str) -> str:
        numbers = read_numbers(text)
        return text.strip() if numbers is None else " ".join(f"{float(n):g}" for n in numbers)

    @override
    def demonstration(self, prompt: Prompt, rng: random.Random) -> str:
        answer = self._right(prompt, rng)
        pairs = [i for i in range(len(answer) - 1) if answer[i] != answer[i + 1]]
        if pairs and rng.random() < self.options.corrupt:
            i = rng.choice(pairs)
            answer[i], answer[i + 1] = answer[i + 1], answer[i]
        return " ".join(map(str, answer * self.options.times))

    def _right(self, prompt: Prompt, rng: random.Random) -> list[int]:
        return list(prompt.answer)


def _integer(text: str) -> int:
    """Parse an integer that reasoning-gym writes as '6.0' (or '-0.0')."""
    return int(float(text))


def _dataset(options: NumberSortingOptions) -> Sequence[dict]:
    with _without_package_imports("reasoning_gym", "reasoning_gym.algorithmic"):
        module = importlib.import_module("reasoning_gym.algorithmic.number_sorting")
    config = module.NumberSortingConfig(
        min_numbers=options.min_numbers,
        max_numbers=options.max_numbers,
        min_decimals=0,
        max_decimals=0,
        min_value=options.min_value,
        max_value=options.max_value,
        seed=0,
        size=options.size,
    )
    return module.NumberSortingDataset(config)


@contextlib.contextmanager
def _without_package_imports(*packages: str) -> Iterator[None]:
    """Context in which submodules of the packages can be imported without running the packages' `__init__`.

    reasoning_gym's `__init__` imports all 106 tasks with matplotlib and sympy, which takes 3.6 s on every rank. The needed
    submodule alone takes 0.3 s. The package's modules are removed from sys.modules afterwards, so that a later `import
    reasoning_gym` works as usual.
    """
    root = packages[0]
    if root in sys.modules:
        yield
        return
    try:
        for name in packages:
            spec = importlib.util.find_spec(name)
            if spec is None:
                raise UserError(f"data.task number_sorting needs the package {root}: run tools/setup.sh")
            package = types.ModuleType(name)
            package.__spec__, package.__path__ = spec, spec.submodule_search_locations or []
            sys.modules[name] = package
        yield
    finally:
        for name in [n for n in sys.modules if n == root or n.startswith(f"{root}.")]:
            del sys.modules[name]


# -- number zigzag -------------------------------------------------------------------------------------------------------
# A task with several right answers: order 4 to 6 different numbers so that they alternately rise and fall.
# `<6 15 3 12:` begins with a rise (6 15 3 12 is right, like four other orders), `>6 15 3 12:` with a fall.


class NumberZigzag(NumberSorting):
    """Task of ordering numbers so that they alternately rise and fall. It has the options of number_sorting."""

    name = "number_zigzag"
    verifier = "zigzag"
    _verify = staticmethod(zigzag)

    def __init__(self, data: DataConfig, demonstrations: bool = False):
        super().__init__(data, demonstrations)
        if self.options.times > 1:
            raise UserError(
                "config: data.options.times: number_zigzag supports only 1; use number_sorting for longer answers"
            )
        self._values = range(self.options.min_value, self.options.max_value + 1)
        if len(self._values) < self.options.max_numbers:
            raise UserError(
                f"config: data.options: there are not {self.options.max_numbers} different numbers from {self._values[0]} to"
                f" {self._values[-1]}; raise max_value or lower max_numbers"
            )

    def _generate(self, block: int, index: int) -> Prompt:
        number = block * self.options.size + index
        rng = random.Random(self._first + number)
        numbers = rng.sample(self._values, rng.randint(self.options.min_numbers, self.options.max_numbers))
        text = f"{rng.choice('<>')}{' '.join(map(str, numbers))}:"
        return Prompt(f"{self.name}:{self.seed}:{number}", text, text)

    def _right(self, prompt: Prompt, rng: random.Random) -> list[int]:
        """Return a right answer: the smaller half of the numbers in the valleys and the larger half in the peaks, shuffled."""
        numbers = sorted(map(int, prompt.text[1:-1].split()))
        upwards = prompt.text[0] == "<"
        valleys = (len(numbers) + upwards) // 2
        low, high = (rng.sample(half, len(half)) for half in (numbers[:valleys], numbers[valleys:]))
        first, second = (low, high) if upwards else (high, low)
        return [half[i // 2] for i, half in zip(range(len(numbers)), [first, second] * len(numbers), strict=False)]


# -- sums ----------------------------------------------------------------------------------------------------------------
# Task of the agentic quickstart: sums that a small model cannot compute without a calculator.


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class SumsOptions:
    """data.options of the task sums."""

    terms: Annotated[int, Field(ge=2)] = 3
    digits: Annotated[int, Field(ge=1, le=9)] = 3
    """Largest number of digits of a term."""
    size: Annotated[int, Field(ge=1)] = 20_000
    """Number of different training prompts."""
    calls: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the demonstrations that call the calculator; the others answer directly."""


class Sums(Task):
    """Task of adding numbers, for example `374+85+412=` with the answer `871`."""

    name = "sums"
    verifier = "exact"

    def __init__(self, data: DataConfig, demonstrations: bool = False):
        super().__init__(data, demonstrations)
        self.options = read_options(data, SumsOptions)

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
