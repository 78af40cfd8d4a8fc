"""Which keys of a run's config are others than when its folder was last written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

FREE = ("steps", "runs_dir", "name")
"""Keys whose change needs no mention."""


def changed_keys(file: Path, now: str) -> list[str]:
    """'optimizer.lr: 1e-05 -> 2e-05' for each key that differs between a config.yaml and the one to be written (as YAML).

    A key that one of the two lacks is 'absent' there. A file that is missing or no YAML has nothing to compare.
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
