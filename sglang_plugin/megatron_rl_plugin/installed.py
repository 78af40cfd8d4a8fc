"""Hash of the installed code of this package: `python -m megatron_rl_plugin.installed` prints it, or an empty line.

A non-editable installation does not change when its source changes. The trainer therefore compares this hash with the hash of
its own copy.
"""

from __future__ import annotations

import hashlib
from importlib.metadata import entry_points
from pathlib import Path

ROOT = Path(__file__).parents[1]
"""Folder that holds this package and the other packages in PACKAGES."""
PACKAGES = ("megatron_rl_models", "megatron_rl_plugin", "sglang_on_cpu")


def code(root: Path = ROOT) -> str:
    """Return a hash of the names and contents of all modules of PACKAGES in the folder `root`."""
    found = hashlib.sha256()
    for path in sorted(path for package in PACKAGES for path in (root / package).rglob("*.py")):
        found.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return found.hexdigest()


def installed_code() -> str | None:
    """Return the hash of the installed code; None if SGLang cannot find the plugin (on the path, but not installed)."""
    return code() if entry_points(group="sglang.srt.plugins", name="megatron_rl") else None


if __name__ == "__main__":
    print(installed_code() or "")
