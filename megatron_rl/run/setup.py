"""`megatron-rl setup`: makes the environments of trainer and engine with `tools/setup.sh`, from a checkout or from a wheel.

A wheel holds what a checkout has beside the packages in `megatron_rl/source/` (setup.py, SOURCE). Together with the installed
modules it becomes a source tree in a folder of its own; from there all is as in a checkout. No torch here.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from megatron_rl import __version__
from megatron_rl.errors import UserError

PACKAGE = Path(__file__).parents[1]
SCRIPT = Path("tools/setup.sh")
WRITTEN = ".megatron-rl-setup.json"
"""Names of the files that a set-up has written into its folder."""
PLUGIN = ("megatron_rl_models", "megatron_rl_plugin", "sglang_on_cpu")
"""Packages that a checkout has in sglang_plugin/, and a wheel beside megatron_rl."""


def checkout() -> Path | None:
    """The checkout that this package is of; None: it was installed."""
    root = PACKAGE.parent
    return root if (root / SCRIPT).is_file() else None


def at_hand(text: str) -> str:
    """A message that names tools/setup.sh, as it should be where there is none: the command in its place."""
    return text if checkout() else text.replace("tools/setup.sh", "megatron-rl setup")


def setup_command(into: Path | None, flags: Sequence[str]) -> int:
    """Make the environments. Returns the script's exit status.

    into: the folder that gets a source tree and its environments, by default ./megatron-rl-VERSION; a checkout has its own.
    Errors: UserError for a folder of something else, or a package without its source.
    """
    root = checkout()
    if root is None:
        root = (into or Path(f"megatron-rl-{__version__}")).absolute()
        write_tree(root)
        print(f"setup: the source tree and its environments are in {root}", flush=True)
    elif into is not None and into.resolve() != root:
        raise UserError(
            f"setup: --into {into}: this is a checkout, whose environments are made in {root}; leave it out"
        )
    try:
        return subprocess.run([str(root / SCRIPT), *flags], check=False).returncode
    except OSError as error:
        raise UserError(f"setup: {root / SCRIPT} cannot be run ({error.strerror}): bash is needed") from None


def write_tree(root: Path) -> None:
    """Write the source tree, or bring it up to date: files of an older wheel go, and what is as it should be stays.

    Errors: UserError where the package has no source, or the folder holds something else or cannot be written.
    """
    files = _sources()
    note = root / WRITTEN
    try:
        if root.exists() and not note.is_file() and any(root.iterdir()):
            raise UserError(f"setup: {root} holds other things: name a new folder with --into")
        root.mkdir(parents=True, exist_ok=True)
        known = set(json.loads(note.read_text())) if note.is_file() else set()
        note.write_text(json.dumps(sorted(known | files.keys()), indent=0))
        for name in sorted(known - files.keys()):
            (root / name).unlink(missing_ok=True)
        for name, source in files.items():
            target, content = root / name, source.read_bytes()
            if not target.is_file() or target.read_bytes() != content:
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content)
            if target.suffix == ".sh":
                target.chmod(0o755)
        note.write_text(json.dumps(sorted(files), indent=0))
    except (OSError, ValueError) as error:
        raise UserError(f"setup: {root} cannot be written ({error})") from None
    if shutil.which("bash") is None:
        raise UserError("setup: bash is missing, which tools/setup.sh needs: install it")


def _sources() -> dict[str, Path]:
    """Path in the source tree -> the installed file. Errors: UserError for a package without its source."""
    source = PACKAGE / "source"
    if not (source / SCRIPT).is_file():
        raise UserError(f"setup: {PACKAGE} has no {SCRIPT}: install megatron_rl from its wheel, or use a checkout")
    found = {str(path.relative_to(source)): path for path in _files(source)}
    found |= {f"megatron_rl/{p.relative_to(PACKAGE)}": p for p in _files(PACKAGE) if source not in p.parents}
    for name in PLUGIN:
        spec = find_spec(name)
        if spec is None or not spec.submodule_search_locations:
            raise UserError(f"setup: the package {name} is missing: install megatron_rl from its wheel again")
        folder = Path(spec.submodule_search_locations[0])
        found |= {f"sglang_plugin/{name}/{path.relative_to(folder)}": path for path in _files(folder)}
    return found


def _files(folder: Path) -> list[Path]:
    """Files that a build takes: no compiled ones."""
    found = (path for path in sorted(folder.rglob("*")) if path.is_file() and "__pycache__" not in path.parts)
    return [path for path in found if path.suffix != ".so" and not path.name.endswith(".ptxas.txt")]
