"""Rules by which a config is refused: a condition of a few sections, and a message. One loop goes over all of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron_rl.config import Config
from megatron_rl.config.conditions import Kind, idle
from megatron_rl.errors import UserError


class Refusal(NamedTuple):
    """The outcome of one comparison: true if it refuses the config, and the message."""

    refused: object
    message: str


@dataclass(frozen=True)
class Rule:
    """Keys that contradict each other. Parameters of functions name the sections, or facts from outside, that they look at."""

    when: Callable[..., object]
    message: str | Callable[..., str]
    """The key, why, and the remedy. {section.key} in a text stands for its value."""
    also: Callable[..., object] = lambda: True
    """A second condition, which several rules have in common; it is looked at first."""

    def apply(self, values: Values) -> Iterator[Refusal]:
        """Its refusal, if both conditions hold."""
        if values.call(self.also) and values.call(self.when):
            text = self.message
            yield Refusal(True, text.format_map(values) if isinstance(text, str) else values.call(text))


Check = Callable[..., Iterator[Refusal] | None]
"""A check that has to compute first, of models and the machine; None: it raises by itself. Parameters: as of `Rule`."""


@dataclass(frozen=True)
class Values:
    """Sections and properties of a config, and facts from outside of it, by name."""

    config: Config
    facts: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.facts[name] if name in self.facts else getattr(self.config, name)

    def call[T](self, function: Callable[..., T]) -> T:
        """The function's result for what its parameters name."""
        return function(**{name: self[name] for name in inspect.signature(function).parameters})


def refuse(config: Config, *checks: Rule | Check, **facts: Any) -> None:
    """Errors: UserError for the first of the checks that refuses the config."""
    values = Values(config, facts)
    for check in checks:
        for refused, message in (check.apply(values) if isinstance(check, Rule) else values.call(check)) or ():
            if refused:
                raise UserError(f"config: {message}")


def refuse_idle(config: Config, kind: Kind, under: str = "") -> None:
    """Errors: UserError naming a key below `under` that is set, and that a command reads only with others (conditions.py)."""
    if problem := idle(config, kind, under):
        raise UserError(f"config: {problem}")


@contextmanager
def errors_of(what: str) -> Iterator[None]:
    """Add to the message of a UserError what it is about, such as the critic, whose keys have the policy's names."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{error} ({what})") from None
