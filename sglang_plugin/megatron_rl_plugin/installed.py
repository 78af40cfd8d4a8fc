"""Which code of this package an environment has: `python -m megatron_rl_plugin.installed` prints a hash of it, or nothing.

A copy that was installed stays as it is when its checkout moves on, and the trainer's side with it.
"""

from __future__ import annotations

import hashlib
from importlib.metadata import entry_points
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("megatron_rl_models", "megatron_rl_plugin", "sglang_on_cpu")


def code(root: Path = ROOT) -> str:
    """Hash of the names and contents of all modules below the folder that holds PACKAGES."""
    found = hashlib.sha256()
    for path in sorted(path for package in PACKAGES for path in (root / package).rglob("*.py")):
        found.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return found.hexdigest()


def installed_code() -> str | None:
    """The same of what is installed; None where SGLang does not find it: code that is merely on the path has no entry point."""
    return code() if entry_points(group="sglang.srt.plugins", name="megatron_rl") else None


if __name__ == "__main__":
    print(installed_code() or "")
