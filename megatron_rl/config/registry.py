"""Names of a config: something built in, or the user's own by `module:name` or `path/to/file.py:name`."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron_rl.errors import UserError


def resolve[T](kind: str, name: str, builtin: Mapping[str, T], key: str) -> T | Any:
    """`builtin[name]`, or the user's own function or class of that name.

    kind: a word for it, such as "verifier"; key: the config's. Errors: UserError naming `key`, where `check_name` has one,
    the module cannot be imported, it has nothing of that name, or that cannot be called.
    """
    check_name(kind, name, builtin, key)
    if name in builtin:
        return builtin[name]
    source, _, attribute = name.rpartition(":")
    module = _import(source, f"config: {key}: {name}")
    if not hasattr(module, attribute):
        public = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        raise UserError(f"config: {key}: {source} has no '{attribute}'{nearest(attribute, public)}")
    found = getattr(module, attribute)
    if not callable(found):
        raise UserError(f"config: {key}: {name} is {found!r:.60}, not a {kind}: nothing that can be called")
    return found


def check_name(kind: str, name: str, builtin: Mapping[str, Any], key: str) -> None:
    """Errors: UserError for a name that is not built in, and has no file or module. Imports nothing."""
    if name in builtin:
        return
    source, colon, attribute = name.rpartition(":")
    hint = nearest(name, builtin) if builtin else ""
    if not (colon and source and attribute.isidentifier()):
        raise UserError(
            f"config: {key}: there is no {kind} '{name}'{hint} (one of your own: module:name, or path/to/file.py:name)"
        )
    if source.endswith(".py"):
        if not Path(source).is_file():
            raise UserError(f"config: {key}: {name}: there is no file {source}")
    elif not _find(source):
        raise UserError(f"config: {key}: {name}: there is no module '{source}'{hint} (a file: path/to/file.py:name)")


def nearest(name: str, names: Iterable[str]) -> str:
    """'; did you mean ...?' for a misspelled name, or all names where none is near."""
    names = [str(n) for n in names]
    close = get_close_matches(name, names, 1, 0.4)
    return f"; did you mean '{close[0]}'?" if close else f"; there is: {', '.join(sorted(names)) or 'nothing'}"


def _find(module: str) -> bool:
    """True if there is such a module; as for `python -m`, the working directory is a place to look."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError, AttributeError):  # of a package that is not there, or of a name that is none
        return False


def _import(source: str, where: str) -> ModuleType:
    """A module by name, or by file (once for each file). Errors: UserError with the line in which it failed."""
    try:
        if not source.endswith(".py"):
            return importlib.import_module(source)
        name = str(Path(source).resolve())
        if name not in sys.modules:
            spec = importlib.util.spec_from_file_location(name, name)
            assert spec and spec.loader  # a name in .py has both
            sys.modules[name] = importlib.util.module_from_spec(spec)
            try:
                spec.loader.exec_module(sys.modules[name])
            except BaseException:
                del sys.modules[name]
                raise
        return sys.modules[name]
    except (Exception, SystemExit) as error:  # of the user's code
        last = traceback.extract_tb(error.__traceback__)[-1]
        line = error.lineno if isinstance(error, SyntaxError) else last.lineno
        file = (error.filename if isinstance(error, SyntaxError) else None) or last.filename
        text = " ".join(str(error).split())
        raise UserError(f"{where} fails when imported: {type(error).__name__}: {text} ({file}:{line})") from None
