"""`megatron-rl setup`: create the Python environments of trainer and SGLang with `tools/setup.sh`, from a checkout or a wheel.

A wheel has the other files of a checkout in `megatron_rl/source/` (SOURCE in setup.py). The command writes these files and
the installed modules as a source tree into a new folder, and runs the tree's `tools/setup.sh`. The command works without
torch.
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
"""File in the target folder that lists the files which `megatron-rl setup` wrote there."""
PLUGIN = ("megatron_rl_models", "megatron_rl_plugin", "sglang_on_cpu")
"""Packages that a checkout has in sglang_plugin/ and a wheel at the top level."""


def checkout() -> Path | None:
    """Return the checkout (source tree) that contains this package; None if the package was installed from a wheel."""
    root = PACKAGE.parent
    return root if (root / SCRIPT).is_file() else None


def at_hand(text: str) -> str:
    """Return a message with tools/setup.sh replaced by `megatron-rl setup` if there is no checkout."""
    return text if checkout() else text.replace("tools/setup.sh", "megatron-rl setup")


def setup_command(into: Path | None, flags: Sequence[str]) -> int:
    """Create the environments, and return the exit status of tools/setup.sh.

    into: folder for the source tree and its environments, by default ./megatron-rl-VERSION. A checkout uses its own folder.
    Errors: UserError if the folder holds other files, or if the package has no source.
    """
    root = checkout()
    if root is None:
        root = (into or Path(f"megatron-rl-{__version__}")).absolute()
        write_tree(root)
        print(f"setup: the source tree and its environments are in {root}", flush=True)
    elif into is not None and into.resolve() != root:
        raise UserError(
            f"setup: --into {into}: this is a checkout, so its environments are in {root}; leave out --into"
        )
    try:
        return subprocess.run([str(root / SCRIPT), *flags], check=False).returncode
    except OSError as error:
        raise UserError(f"setup: {root / SCRIPT} cannot be run ({error.strerror}): bash is needed") from None


def write_tree(root: Path) -> None:
    """Write or update the source tree. Removes files of an older wheel, and leaves unchanged files alone.

    Errors: UserError if the package has no source, or if the folder holds other files or cannot be written.
    """
    files = _sources()
    note = root / WRITTEN
    try:
        if root.exists() and not note.is_file() and any(root.iterdir()):
            raise UserError(f"setup: {root} holds other files; name a new folder with --into")
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
        raise UserError("setup: tools/setup.sh needs bash; install bash")


def _sources() -> dict[str, Path]:
    """Return {path in the source tree: installed file}. Errors: UserError if the package has no source."""
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
    """Return the files of a folder, except compiled files."""
    found = (path for path in sorted(folder.rglob("*")) if path.is_file() and "__pycache__" not in path.parts)
    return [path for path in found if path.suffix != ".so" and not path.name.endswith(".ptxas.txt")]
