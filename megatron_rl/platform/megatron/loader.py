"""Import hook that compiles modules of `megatron.*` from their rewritten source (rules.py) and caches the bytecode."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import marshal
import os
import struct
import sys
import tempfile
import warnings
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

from megatron_rl.platform.megatron import cuda, rules

PREFIX = "megatron."
_RULES_HASH = hashlib.sha256(Path(rules.__file__).read_bytes()).hexdigest()[:12]


class RewritingLoader(SourceFileLoader):
    """Loads one module of Megatron and applies the rules for the missing parts."""

    def __init__(self, fullname: str, path: str, missing: frozenset[rules.Missing]):
        super().__init__(fullname, path)
        self.missing = missing

    def source_to_code(self, data: bytes, path: str, *, _optimize: int = -1) -> CodeType:
        """Compile the rewritten source."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # invalid escapes in Megatron's docstrings
            tree, _ = rules.rewrite(data, self.name, path, self.missing)
            return compile(tree, path, "exec", dont_inherit=True, optimize=_optimize)

    def get_code(self, fullname: str) -> CodeType:
        """Return the cached bytecode if it belongs to this source file and these rules; otherwise compile and cache it."""
        path = self.get_filename(fullname)
        stat = os.stat(path)
        header = struct.pack("<qq", stat.st_mtime_ns, stat.st_size)
        for cache in cache_paths(path, self.missing):
            with contextlib.suppress(OSError, EOFError, ValueError, TypeError):
                data = cache.read_bytes()
                if data[:16] == header:
                    return marshal.loads(data[16:])
        code = self.source_to_code(self.get_data(path), path)
        if not sys.dont_write_bytecode:
            _store(header + marshal.dumps(code), cache_paths(path, self.missing))
        return code

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Create the empty module; without a GPU, add the counterpart of torch.cuda."""
        module = ModuleType(spec.name)
        if "GPU" in self.missing:
            setattr(module, rules.SHIM, cuda)
        return module


def cache_paths(source: str, missing: frozenset[rules.Missing]) -> list[Path]:
    """Return possible paths of a module's bytecode: next to Python's own file, then the user's cache for read-only installs."""
    beside = Path(importlib.util.cache_from_source(source))
    without = "-".join(sorted(part.replace(" ", "").lower() for part in missing))
    name = f"{beside.stem}.without-{without}-{_RULES_HASH}.pyc"
    user = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatron_rl"
    folder = hashlib.sha256(str(beside.parent).encode()).hexdigest()[:16]
    return [beside.with_name(name), user / folder / name]


def _store(data: bytes, paths: list[Path]) -> None:
    """Write to the first writable path, atomically: other processes never see an incomplete file."""
    for path in paths:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem)
        except OSError:
            continue
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
            os.replace(temporary, path)
            return
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


class Finder(MetaPathFinder):
    """Finds `megatron.*` like Python does, and uses RewritingLoader for modules that may need changes."""

    def __init__(self, missing: frozenset[rules.Missing]):
        self.missing = missing

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module of Megatron that may need changes; return None for all others."""
        if not fullname.startswith(PREFIX) or not rules.concerns(fullname, self.missing):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = RewritingLoader(fullname, spec.loader.path, self.missing)
        return spec


def installed() -> Finder | None:
    """Return the finder of this process, or None if none was installed."""
    return next((finder for finder in sys.meta_path if isinstance(finder, Finder)), None)


def install(missing: frozenset[rules.Missing]) -> None:
    """Rewrite every module of Megatron that is imported from now on, for the missing parts."""
    sys.meta_path.insert(0, Finder(missing))
