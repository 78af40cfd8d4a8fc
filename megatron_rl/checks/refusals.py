"""Rules that refuse a config. Each rule has a condition on a few config sections, and a message; one loop checks all rules."""

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
    """Result of one check. `refused` is true if the check refuses the config; `message` is the error message."""

    refused: object
    message: str


@dataclass(frozen=True)
class Rule:
    """A rule about keys that contradict each other.

    The parameters of its functions name the sections of the config, or the external facts, that they read.
    """

    when: Callable[..., object]
    message: str | Callable[..., str]
    """Message with key, reason and remedy. {section.key} in the text stands for the key's value."""
    also: Callable[..., object] = lambda: True
    """Second condition, which several rules share. It is evaluated first."""

    def apply(self, values: Values) -> Iterator[Refusal]:
        """Yield the refusal if both conditions hold."""
        if values.call(self.also) and values.call(self.when):
            text = self.message
            yield Refusal(True, text.format_map(values) if isinstance(text, str) else values.call(text))


Check = Callable[..., Iterator[Refusal] | None]
"""A check that needs its own computation, on models or the machine. One form yields refusals. The other form raises its own
error, and returns None if it finds no error. The parameters have the same meaning as in `Rule`."""


@dataclass(frozen=True)
class Values:
    """Values for the parameters of rules and checks, by name: config sections, properties of the config, and external facts."""

    config: Config
    facts: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.facts[name] if name in self.facts else getattr(self.config, name)

    def call[T](self, function: Callable[..., T]) -> T:
        """Call the function with the values that its parameters name."""
        return function(**{name: self[name] for name in inspect.signature(function).parameters})


def refuse(config: Config, *checks: Rule | Check, **facts: Any) -> None:
    """Run the checks in order. Errors: UserError for the first check that refuses the config."""
    values = Values(config, facts)
    for check in checks:
        for refused, message in (check.apply(values) if isinstance(check, Rule) else values.call(check)) or ():
            if refused:
                raise UserError(f"config: {message}")


def refuse_idle(config: Config, kind: Kind, under: str = "") -> None:
    """Check for keys without effect. Errors: UserError that names a key below `under` that is set but has no effect."""
    if problem := idle(config, kind, under):
        raise UserError(f"config: {problem}")


@contextmanager
def errors_of(what: str) -> Iterator[None]:
    """Append the subject of the check (such as the critic) to a UserError, because the error has the policy's key names."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{error} ({what})") from None
