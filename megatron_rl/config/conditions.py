"""Conditions under which a config key is read: declared beside the key, shown in its documentation, checked by one function."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator
from typing import Any, Literal

Kind = Literal["train", "sft", "reward", "dpo", "prune", "score", "quantize", "sample"]
"""Kinds of runs. A run of kind `sample` (the commands eval and rollout) only sends requests to SGLang. All kinds except
sample and quantize build the trainer; prune and score (eval.likelihood) use it for forward passes only."""
LEARNING: tuple[Kind, ...] = ("train", "sft", "reward", "dpo")
"""Kinds that train. The other kinds accept the config of any run unchanged."""


@dataclasses.dataclass(frozen=True)
class ReadBy:
    """The commands that read a key or a section. A key's own declaration overrides that of its section."""

    commands: tuple[Kind, ...]


@dataclasses.dataclass(frozen=True)
class Condition:
    """A condition on other keys. If the condition does not hold, the key that declares it is not read.

    keys: dotted names from the root; a name that begins with a dot is in the same section. At least one of these keys must be
    set. values: allowed values of the first key; empty: any value except its default. excluded: True inverts the condition. The
    key must then not have these values, or must have its default if `values` is empty. example: value that the
    error message suggests.
    """

    keys: tuple[str, ...]
    values: tuple[Any, ...] = ()
    excluded: bool = False
    example: Any = True

    def text(self) -> str:
        """Return the condition as the documentation shows it."""
        names = _either([key.lstrip(".") for key in self.keys])
        where = f"{names}: {_either([_shown(value) for value in self.values])}" if self.values else names
        return f"{'not ' if self.excluded else 'only '}with {where}"

    def problem(self, config: Any, key: str) -> str | None:
        """Return why `key` is not read, and how to correct this; None if `key` is read."""
        names = [f"{key.rpartition('.')[0]}{name}" if name.startswith(".") else name for name in self.keys]
        found = [value_at(config, name) for name in names]
        if self.values:
            if (found[0] in self.values) != self.excluded:
                return None
            valid = [self.example] if self.excluded else self.values
            remedy = f"set {names[0]}: {_either([_shown(value) for value in valid])}"
            return f"with {names[0]} = {_shown(found[0])}; {remedy}, or leave it out"
        is_set = [value != default_at(config, name) for name, value in zip(names, found, strict=True)]
        if any(is_set) != self.excluded:
            return None
        if self.excluded:
            return f"beside {names[0]}; set one of the two"
        remedy = _either(names) if len(names) > 1 else f"{names[0]}: {_shown(self.example)}"
        return f"without {_either(names)}; set {remedy}, or leave it out"


def read_by(*commands: Kind) -> ReadBy:
    """Declare the commands that read a key or a section."""
    return ReadBy(commands)


def only_with(key: str, *values: Any, example: Any = True) -> Condition:
    """Declare that a key is read only if another key has one of these values, or (without values) differs from its default."""
    return Condition((key,), values, example=example)


def only_with_any(*keys: str) -> Condition:
    """Declare that a key is read only if at least one of these other keys differs from its default."""
    return Condition(keys)


def not_with(key: str, *values: Any, example: Any = None) -> Condition:
    """Declare that a key is not read if another key has one of these values, or (without values) differs from its default."""
    return Condition((key,), values, excluded=True, example=example)


@dataclasses.dataclass(frozen=True)
class Declared:
    """A key with its value, its default, and the declarations of the key and of its sections."""

    key: str
    value: Any
    default: Any
    commands: tuple[Kind, ...] | None
    conditions: tuple[Condition, ...]


def declarations(section: type) -> dict[str, tuple[ReadBy | Condition, ...]]:
    """Return the declarations (ReadBy and Condition) of a section's fields by name, for fields that have any."""
    hints = typing.get_type_hints(section, include_extras=True).items()
    found = {name: getattr(kind, "__metadata__", ()) for name, kind in hints}
    return {name: kept for name, all_ in found.items() if (kept := tuple(m for m in all_ if _is_ours(m)))}


def changed(section: Any, default: Any | None = None) -> list[str]:
    """Return the names of the fields of a section that differ from their defaults."""
    default = type(section)() if default is None else default
    return [name for name in vars(default) if getattr(section, name) != getattr(default, name)]


def walk(
    section: Any,
    prefix: str = "",
    commands: tuple[Kind, ...] | None = None,
    conditions: tuple[Condition, ...] = (),
) -> Iterator[Declared]:
    """Yield all keys of a section, of its nested sections, and of the named sections in its mappings."""
    declared, default = declarations(type(section)), type(section)()
    for field in dataclasses.fields(section):
        key, value = f"{prefix}{field.name}", getattr(section, field.name)
        own = declared.get(field.name, ())
        read = next((one.commands for one in own if isinstance(one, ReadBy)), commands)
        needs = conditions + tuple(one for one in own if isinstance(one, Condition))
        if dataclasses.is_dataclass(value):
            yield from walk(value, f"{key}.", read, needs)
            continue
        yield Declared(key, value, getattr(default, field.name), read, needs)
        for name, inner in value.items() if isinstance(value, dict) else ():
            if dataclasses.is_dataclass(inner):
                yield from walk(inner, f"{key}.{name}.", read, needs)


def unread(config: Any, command: str) -> list[str]:
    """Return the keys that differ from their defaults and that a training command never reads."""
    if command not in LEARNING:
        return []
    found = (one for one in walk(config) if one.commands is not None and command not in one.commands)
    return [one.key for one in found if one.value != one.default and not _in_mapping(config, one.key)]


def idle(config: Any, command: str, under: str = "") -> str | None:
    """Find the first key below `under` that `command` reads but that has no effect. Return the reason and the remedy, or None.

    Only keys that differ from their defaults count.
    """
    for one in walk(config):
        if one.value == one.default or not one.key.startswith(under):
            continue
        if one.commands is not None and command not in one.commands:
            continue
        for condition in one.conditions:
            if one.key not in condition.keys and (problem := condition.problem(config, one.key)):
                return f"{one.key} = {_shown(one.value)} does nothing {problem}"
    return None


def value_at(config: Any, key: str) -> Any:
    """Return the value of a dotted key; its parts may be names in a mapping."""
    for part in key.split("."):
        config = config[part] if isinstance(config, dict) else getattr(config, part)
    return config


def default_at(config: Any, key: str) -> Any:
    """Return the default of a dotted key."""
    above, _, last = key.rpartition(".")
    section = value_at(config, above) if above else config
    return getattr(type(section)(), last)


def _is_ours(metadata: Any) -> bool:
    return isinstance(metadata, ReadBy | Condition)


def _in_mapping(config: Any, key: str) -> bool:
    parts = key.split(".")
    return any(isinstance(value_at(config, ".".join(parts[:n])), dict) for n in range(1, len(parts)))


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)


def _either(names: list[str]) -> str:
    return " or ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
