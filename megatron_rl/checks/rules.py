"""Rules by which a config is refused: a condition of a few sections, and a message. One loop goes over all of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from megatron_rl.config import Config
from megatron_rl.config.conditions import Kind, idle
from megatron_rl.errors import UserError


class Rule(NamedTuple):
    """A condition under which a config is refused, and what is said: the key, why, and the remedy."""

    when: object
    message: str


Rules = Iterator[Rule]
Check = Callable[..., Rules | None]
"""Rules of one subject, or None of what raises by itself. Its parameters name the sections that it looks at, or facts."""


def refuse(config: Config, *checks: Check, **facts: Any) -> None:
    """Errors: UserError for the first rule that holds.

    Each check is given the sections and properties of the config, and the `facts`, that its parameters name.
    """
    for check in checks:
        given = {
            name: facts[name] if name in facts else getattr(config, name)
            for name in inspect.signature(check).parameters
        }
        for rule in check(**given) or ():
            if rule.when:
                raise UserError(f"config: {rule.message}")


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
