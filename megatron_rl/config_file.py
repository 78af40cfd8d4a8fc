"""A run's config from YAML and the command line, and back.

An unknown key, an old name or a bad value is an error that names the key and the nearest valid one.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
import typing
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from megatron_rl.config import Config
from megatron_rl.credentials import hidden, hide, is_secret
from megatron_rl.errors import UserError


@functools.cache
def _fields(tree: Any) -> dict[str, Any]:
    """Name -> type of a section's fields."""
    return typing.get_type_hints(tree)


def key_paths(tree: Any = None, prefix: str = "") -> dict[str, Any]:
    """All dotted keys of the tree with their types, sections left out: {'batch.prompts_per_step': int, ...}."""
    paths = {}
    for name, kind in _fields(tree or Config).items():
        if dataclasses.is_dataclass(kind):
            paths |= key_paths(kind, f"{prefix}{name}.")
        else:
            paths[f"{prefix}{name}"] = kind
    return paths


def _check_keys(values: Any, tree: Any, prefix: str = "") -> None:
    if not isinstance(values, dict):
        raise UserError(f"config: '{prefix[:-1]}' is a section: give keys below it, not {hide(repr(values)):.60}")
    hints = _fields(tree)
    for name, value in values.items():
        if name not in hints:
            raise UserError(f"config: unknown key '{prefix}{name}'; {nearest_key(f'{prefix}{name}')}")
        if dataclasses.is_dataclass(hints[name]):
            _check_keys(value, hints[name], f"{prefix}{name}.")


KNOWN_AS = {
    "freeze_router": "that is model.freeze: ['*.mlp.router.*']; leave it out where it is false",
    "normalize": "that is correction.denominator: weights; leave it out where it is false",
    "min_p": "that is pruning.rho, with pruning.enabled: true; leave it out where it is 0",
}
"""Another name of a key (its last part) -> what the error says about it."""
RENAMED_KEYS = {
    "rollout.replay": "rollout.load",
    "sync.refresh.calm": "sync.refresh.hysteresis",
    "sync.refresh.max_age": "sync.refresh.max_staleness",
    "vp2o.on_excess": "vp2o.on_violation",
    "vp2o.power_steps": "vp2o.power_iterations",
    "vp2o.strangers": "vp2o.inactive_neighbors",
}
RENAMED_VALUES = {
    "algorithm.advantage": {"group_relative": "grpo", "group_baseline": "dr_grpo", "leave_one_out": "rloo"},
    "algorithm.loss": {"clipped": "ppo"},
    "correction.reject": {"k1": "abs_log_ratio"},
    "routing.source": {
        "free": "none",
        "recorded": "r2",
        "rollout": "r3",
        "predicted": "pr2",
        "predicted_rollout": "pr3",
    },
    "vp2o.on_violation": {"undo": "reject", "halve": "backtrack"},
}
"""Old values of a key -> their new names, for the error."""


def nearest_key(key: str) -> str:
    """A hint 'did you mean ...?' for a dotted key: the nearest in its own section, else anywhere in the tree."""
    paths = list(key_paths())
    if elsewhere := KNOWN_AS.get(key.rpartition(".")[2]):
        return elsewhere
    if new := RENAMED_KEYS.get(key):
        return f"it is called '{new}' now"
    section_name = key.rpartition(".")[0]
    siblings = [p for p in paths if p.rpartition(".")[0] == section_name]
    close = difflib.get_close_matches(key, siblings, 1, 0.5) or difflib.get_close_matches(key, paths, 1, 0.4)
    leaf = [p for p in paths if p.rpartition(".")[2] == key.rpartition(".")[2]]
    near = (leaf or close or [None])[0]
    return f"did you mean '{near}'?" if near else "docs/configuration.md lists all keys"


def _check_values(values: dict, source: str) -> None:
    """Errors: UserError for a value that has another name now."""
    for key, names in RENAMED_VALUES.items():
        found: Any = values
        for part in key.split("."):
            found = found.get(part) if isinstance(found, dict) else None
        if isinstance(found, str) and found in names:
            raise UserError(f"config {source}: '{key}' = '{found}': it is called '{names[found]}' now")


def _merge(base: dict, over: dict) -> dict:
    merged = dict(base)
    for key, value in over.items():
        both_dicts = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both_dicts else value
    return merged


class _Loader(yaml.SafeLoader):
    """YAML 1.2's numbers: 1e-6 is one and 2:4 is none (PyYAML reads YAML 1.1, where these are a string and 124)."""


_FLOAT = r"^[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?$|^[-+]?\.(inf|Inf|INF)$|^\.(nan|NaN|NAN)$"
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in found if tag not in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")]
    for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_INT = r"^[-+]?(0b[01_]+|0x[0-9a-fA-F_]+|0[0-7_]+|0|[1-9][0-9_]*)$"
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(_INT), list("-+0123456789"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(_FLOAT), list("-+0123456789."))


def yaml_problem(error: Exception) -> str:
    """The problem and its place, on one line: without the line itself, as PyYAML shows it, which may have a secret in it."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return " ".join(str(error).split())
    mark = error.problem_mark
    return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"


def parse_yaml(text: str) -> Any:
    """The value of a YAML text, with floats as in YAML 1.2."""
    return yaml.load(text, _Loader)


def _parse_value(text: str, kind: Any) -> Any:
    """Read a value of the command line.

    It is YAML, but where a text is wanted what YAML takes for something else stays one, such as {prompt} or 7; a list of
    texts may be given as a,b.
    """
    try:
        parsed = parse_yaml(text)
    except yaml.YAMLError:
        parsed = text
    if kind == list[str] and isinstance(parsed, str):
        return [part.strip() for part in parsed.split(",")]
    optional = type(None) in typing.get_args(kind)
    wants_text = kind is str or (optional and str in typing.get_args(kind))
    return text if wants_text and not isinstance(parsed, str) and not (optional and parsed is None) else parsed


_OPEN = ("agent.mcp_servers", "agent.tool_options", "data.options")
"""Keys below which users have keys of their own."""


def parse_overrides(arguments: list[str]) -> dict:
    """Turn ['--a.b', '1', '--c=x'] into {'a': {'b': 1}, 'c': 'x'}; values are YAML (`_parse_value`)."""
    tree: dict = {}
    items = iter(arguments)
    for item in items:
        if not item.startswith("--"):
            raise UserError(f"command line: expected --key value, found '{item}'")
        key, equals, value = item[2:].partition("=")
        if not equals:
            value = next(items, None)
            if value is None:
                raise UserError(f"command line: --{key} needs a value")
        paths = key_paths()
        in_options = any(key.startswith(f"{p}.") for p, kind in paths.items() if typing.get_origin(kind) is dict)
        if key not in paths and not in_options:
            raise UserError(f"config: unknown key '{key}'; {nearest_key(key)}")
        parsed = _parse_value(value, paths.get(key))
        for part in reversed(key.split(".")):
            parsed = {part: parsed}
        if key.startswith(_OPEN) and hidden(parsed) != parsed:
            remedy = "write env:NAME or file:PATH" if key.startswith(_OPEN[0]) else "write it in the config file"
            raise UserError(
                f"command line: --{key} has a secret in it, which everybody on this machine can read: {remedy}"
            )
        tree = _merge(tree, parsed)
    return tree


def _explain(error: ValidationError, source: str) -> str:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"] if not str(part).startswith("function-"))
    near = ""
    if first["type"] == "literal_error":
        choices = [c.strip("' ") for c in first.get("ctx", {})["expected"].replace(" or ", ",").split(",")]
        close = difflib.get_close_matches(str(first["input"]), choices, 1, 0.3)
        near = f"; did you mean '{close[0]}'?" if close else ""
    secret = key.startswith("agent.mcp_servers") or any(is_secret(str(part)) for part in first["loc"])
    given = "" if secret else f" = {hide(repr(first['input']))}"
    return f"config {source}: '{key}'{given}: {first['msg'][0].lower()}{first['msg'][1:]}{near}"


def build_config(values: dict, source: str = "") -> Config:
    """Validate a nested dict against the tree. Errors: UserError that names the key, the value and the nearest choice."""
    _check_keys(values, Config)
    _check_values(values, source)
    try:
        return TypeAdapter(Config).validate_python(values)
    except ValidationError as error:
        raise UserError(_explain(error, source)) from None


def load_config(path: str | Path, overrides: list[str] | None = None) -> Config:
    """Read a YAML file and command-line overrides (['--batch.prompts_per_step', '16'])."""
    try:
        values = parse_yaml(Path(path).read_text()) or {}
    except OSError as error:
        raise UserError(f"config {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"config {path}: no text: {error}") from None
    except (
        yaml.YAMLError,
        ValueError,
        RecursionError,
    ) as error:  # the latter of dates that are none, and of deep nests
        raise UserError(f"config {path}: not YAML: {yaml_problem(error)}") from None
    if not isinstance(values, dict):
        raise UserError(f"config {path}: it has no mapping of keys to values, but a {type(values).__name__}")
    return build_config(_merge(values, parse_overrides(overrides or [])), str(path))


def to_yaml(config: Config) -> str:
    """The whole tree in YAML, defaults included, as it is stored in a run's config.yaml: without secrets."""
    plain = TypeAdapter(Config).dump_python(config, mode="json")
    return yaml.safe_dump(hidden(plain), sort_keys=False)
