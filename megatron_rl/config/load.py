"""Read the config of a run from YAML and the command line, and write it back.

An unknown key, an old name or an invalid value is an error that names the key and the nearest valid one.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import functools
import re
import types
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
    """Return name -> type of a section's fields."""
    return typing.get_type_hints(tree)


def key_paths(tree: Any = None, prefix: str = "") -> dict[str, Any]:
    """Return all dotted keys of the config with their types, without sections: {'batch.prompts_per_step': int, ...}."""
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
        if name not in hints and f"{prefix}{name}" in key_paths():
            section_name, _, key = f"{prefix}{name}".rpartition(".")
            raise UserError(
                f"config: '{prefix}{name}': dotted keys work only on the command line; in a file, '{section_name}' is"
                f" a section: write '{key}:' below '{section_name}:'"
            )
        if name not in hints:
            raise UserError(f"config: unknown key '{prefix}{name}'; {nearest_key(f'{prefix}{name}')}")
        if dataclasses.is_dataclass(hints[name]):
            _check_keys(value, hints[name], f"{prefix}{name}.")


KNOWN_AS = {
    "freeze_router": "use model.freeze: ['*.mlp.router.*'] instead of true; leave it out instead of false",
    "normalize": "use correction.denominator: weights instead of true; leave it out instead of false",
    **dict.fromkeys(("ppo_epochs", "num_ppo_epochs", "num_iterations", "max_epochs"), "did you mean 'batch.epochs'?"),
    "tensorboard": "use logging.trackers: [tensorboard] instead of true, [] instead of false",
    "wandb_project": "use logging.trackers: [wandb] and logging.project",
    "min_p": "use pruning.rho with pruning.enabled: true; leave it out instead of 0",
}
"""Last part of a key that other libraries use -> hint in the error message."""
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
"""Old values of a key -> their new names, for the error message."""


def nearest_key(key: str) -> str:
    """Return a hint 'did you mean ...?' for a dotted key: the nearest key in its own section, else in the whole config."""
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
    """Check that no value has an old name. Errors: UserError with the new name."""
    for key, names in RENAMED_VALUES.items():
        found: Any = values
        for part in key.split("."):
            found = found.get(part) if isinstance(found, dict) else None
        if isinstance(found, str) and found in names:
            raise UserError(f"config {source}: '{key}' = '{found}': it is called '{names[found]}' now")


class _Loader(yaml.SafeLoader):
    """YAML loader that reads numbers as in YAML 1.2: 1e-6 is a number, 010 is ten and 2:4 is a text.

    PyYAML follows YAML 1.1 and reads 1e-6 as a text, 010 as eight and 2:4 as 124.
    """


_FLOAT = r"^[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?$|^[-+]?\.(inf|Inf|INF)$|^\.(nan|NaN|NAN)$"
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in found if tag not in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")]
    for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_INT = r"^[-+]?(0b[01_]+|0o[0-7_]+|0x[0-9a-fA-F_]+|[0-9][0-9_]*)$"
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(_INT), list("-+0123456789"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(_FLOAT), list("-+0123456789."))


def _whole_number(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    """Return the integer that a YAML node such as 0o10, 0x8, 0b1000 or 8 holds.

    1_000 is 1000: YAML 1.2 lacks this form, but configs use it.
    """
    text = str(loader.construct_scalar(node)).replace("_", "")
    return int(text, 0 if text.lstrip("+-")[1:2] in ("b", "o", "x") else 10)


_Loader.add_constructor("tag:yaml.org,2002:int", _whole_number)


class _GivenTwice(yaml.MarkedYAMLError):
    """Error for a key that occurs twice in a mapping. YAML forbids this, but PyYAML keeps the last value."""


def _refuse_twice(node: yaml.Node, prefix: str = "", seen: set[int] | None = None) -> None:
    """Check that no key occurs twice. Errors: _GivenTwice, which names the key and both lines."""
    seen = set() if seen is None else seen
    if not isinstance(node, yaml.CollectionNode) or id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for one in node.value:
            _refuse_twice(one, prefix, seen)
        return
    lines: dict[tuple[str, str], int] = {}
    for key, value in node.value:
        name = str(key.value) if isinstance(key, yaml.ScalarNode) else "?"
        line = key.start_mark.line + 1
        if isinstance(key, yaml.ScalarNode) and (key.tag, name) in lines:
            first = lines[key.tag, name]
            raise _GivenTwice(problem=f"'{prefix}{name}' is given twice, in lines {first} and {line}")
        lines[key.tag, name] = line
        _refuse_twice(value, f"{prefix}{name}.", seen)


def yaml_problem(error: Exception) -> str:
    """Return the problem and its position on one line, without the text of the file, which may contain a secret."""
    if isinstance(error, _GivenTwice):
        return str(error.problem)
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return " ".join(str(error).split())
    mark = error.problem_mark
    return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"


def parse_yaml(text: str) -> Any:
    """Return the value of a YAML text, with numbers as in YAML 1.2. Errors: YAMLError, also for a key that occurs twice."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _refuse_twice(node)
        return loader.construct_document(node)
    except (AttributeError, LookupError, TypeError) as error:  # PyYAML, if a value does not fit its tag
        raise yaml.YAMLError(f"a value does not fit its tag ({error})") from None
    finally:
        loader.dispose()


_NULL = ("null", "~", "")


def _parse_value(text: str, kind: Any) -> Any:
    """Read a value of the command line. kind: type of the key; None for keys that a task or a tool defines itself.

    For a key of type text, the value is exactly the typed text; null means None if the key allows None. A list of texts is YAML
    in brackets, or a,b. All other values are YAML. For a key that a task or tool defines, a value that YAML reads as a text is
    used exactly as typed.
    """
    kinds = typing.get_args(kind) if typing.get_origin(kind) in (types.UnionType, typing.Union) else (kind,)
    if type(None) in kinds and text in _NULL:
        return None
    if str in kinds or any(typing.get_origin(one) is typing.Literal for one in kinds):
        return text
    try:
        parsed = parse_yaml(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        parsed = text
    if list[str] in kinds and not isinstance(parsed, (bool, list) if bool in kinds else list):
        return [part for part in map(str.strip, text.split(",")) if part]
    is_open = kind is None and not text.lstrip().startswith(("{", "[", "'", '"'))
    return text if is_open and isinstance(parsed, str | dict | list) else parsed


_OPEN = ("agent.mcp_servers", "agent.tool_options", "data.options")
"""Keys below which users define their own keys."""


def _kind_of(key: str) -> Any:
    """Return the type of a key; None below data.options and similar keys. Errors: UserError for an unknown key."""
    paths = key_paths()
    if key in paths:
        return paths[key]
    for path, kind in paths.items():
        if typing.get_origin(kind) is dict and key.startswith(f"{path}."):
            inner = typing.get_args(kind)[1]
            _, _, field = key.removeprefix(f"{path}.").partition(".")
            found = key_paths(inner).get(field) if dataclasses.is_dataclass(inner) else inner
            return None if found is Any else found
    raise UserError(f"config: unknown key '{key}'; {nearest_key(key)}")


def _set(tree: dict, key: str, value: Any) -> None:
    """Set a dotted key. Errors: UserError if a parent of the key is not a section."""
    *above, last = key.split(".")
    for depth, part in enumerate(above):
        if tree.get(part) is None:
            tree[part] = {}
        tree = tree[part]
        if not isinstance(tree, dict):
            name = ".".join(above[: depth + 1])
            raise UserError(f"config: '{name}' is a section: give keys below it, not {hide(repr(tree)):.60}")
    tree[last] = value


def parse_overrides(arguments: list[str], onto: dict | None = None) -> dict:
    """Turn ['--a.b', '1', '--c=x'] into {'a': {'b': 1}, 'c': 'x'}; `_parse_value` describes the values.

    onto: content of the config file, whose values the command line overrides. The value {} empties a mapping. A key below a
    mapping is added to the mapping. If a key occurs twice, the last value is used. Scripts can therefore set defaults that
    their caller may override.
    """
    tree = copy.deepcopy(onto or {})
    items = iter(arguments)
    for item in items:
        if not item.startswith("--"):
            raise UserError(f"command line: expected --key value, found '{item}'")
        key, equals, value = item[2:].partition("=")
        if not equals:
            value = next(items, None)
            if value is None:
                raise UserError(f"command line: --{key} needs a value")
        parsed = _parse_value(value, _kind_of(key))
        alone: dict = {}
        _set(alone, key, parsed)
        if key.startswith(_OPEN) and hidden(alone) != alone:
            remedy = "write env:NAME or file:PATH" if key.startswith(_OPEN[0]) else "write it in the config file"
            raise UserError(
                f"command line: --{key} contains a secret, which everybody on this machine can read: {remedy}"
            )
        _set(tree, key, parsed)
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
    """Validate a nested dict as a config. Errors: UserError that names the key, the value and the nearest choice."""
    _check_keys(values, Config)
    _check_values(values, source)
    try:
        return TypeAdapter(Config).validate_python(values)
    except ValidationError as error:
        raise UserError(_explain(error, source)) from None


def load_config(path: str | Path, overrides: list[str] | None = None) -> Config:
    """Read a YAML file and command-line overrides, such as ['--batch.prompts_per_step', '16'].

    Errors: UserError, one line that names the file; also for an empty file without overrides.
    """
    try:
        values = parse_yaml(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"config {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"config {path}: the file is not text in UTF-8: {error}") from None
    except _GivenTwice as error:
        raise UserError(f"config {path}: {yaml_problem(error)}") from None
    except (
        yaml.YAMLError,
        ValueError,
        RecursionError,
    ) as error:  # ValueError: an invalid date; RecursionError: deep nesting
        raise UserError(f"config {path}: not YAML: {yaml_problem(error)}") from None
    if values is None and not overrides:
        raise UserError(f"config {path}: the file is empty: give at least model.path")
    if not isinstance(values, dict | None):
        raise UserError(f"config {path}: expected a mapping of keys to values, found a {type(values).__name__}")
    return build_config(parse_overrides(overrides or [], values), str(path))


class _Dumper(yaml.SafeDumper):
    """YAML writer that quotes each text that YAML 1.1 or 1.2 would read as a number.

    An example is 0809: no number in YAML 1.1, but 809 for `_Loader`.
    """


_Dumper.yaml_implicit_resolvers = {
    first: [*yaml.SafeDumper.yaml_implicit_resolvers.get(first, []), *_Loader.yaml_implicit_resolvers.get(first, [])]
    for first in {*yaml.SafeDumper.yaml_implicit_resolvers, *_Loader.yaml_implicit_resolvers}
}


class _Blocks(_Dumper):
    """YAML writer that writes texts of several lines as blocks, and writes no anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Blocks.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)


def dump_yaml(*documents: Any) -> str:
    """Return plain values as YAML, one document each. Readers of YAML 1.1 and of 1.2 get the same numbers and texts."""
    return yaml.dump_all(documents, Dumper=_Blocks, sort_keys=False, width=120, allow_unicode=True)


def to_yaml(config: Config) -> str:
    """Return the whole config as YAML, with defaults and without secrets, as a run's config.yaml stores it."""
    plain = TypeAdapter(Config).dump_python(config, mode="json")
    return yaml.dump(hidden(plain), Dumper=_Dumper, sort_keys=False)


# -- changes -------------------------------------------------------------------------------------------------------------
# Keys of a run's config that have changed since its folder was last written.


FREE = ("steps", "runs_dir", "name")
"""Keys whose changes `changed_keys` does not report."""


def changed_keys(file: Path, now: str) -> list[str]:
    """Return 'optimizer.lr: 1e-05 -> 2e-05' for each key that differs between a config.yaml and the new config (as YAML).

    A key that is missing in one of them has the value 'absent' there. If the file is missing or not YAML, the result is empty.
    """
    try:
        before = yaml.safe_load(file.read_text())
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return []
    if not isinstance(before, dict):
        return []
    old, new = _flat(before), _flat(yaml.safe_load(now))
    keys = [key for key in {**new, **old} if old.get(key, _ABSENT) != new.get(key, _ABSENT) and key not in FREE]
    return [f"{key}: {_say(old.get(key, _ABSENT))} -> {_say(new.get(key, _ABSENT))}" for key in keys]


_ABSENT = object()


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        found |= _flat(value, f"{name}.") if isinstance(value, dict) and value else {name: value}
    return found


def _say(value: object) -> str:
    return "absent" if value is _ABSENT else "null" if value is None else str(value)
