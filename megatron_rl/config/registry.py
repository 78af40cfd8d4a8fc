"""Lookup of names in a config: a name is built in, or the user's own as `module:name` or `path/to/file.py:name`."""

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
    """Return `builtin[name]`, or the user's own function or class of that name.

    kind: word for the kind of thing, such as "verifier"; key: the config key. Errors: UserError that names `key` if
    `check_name` fails, if the module cannot be imported, or if it has no callable of that name.
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
        raise UserError(
            f"config: {key}: {name} is {found!r:.60}, not a {kind}: it cannot be called; name a function or class"
        )
    return found


def check_name(kind: str, name: str, builtin: Mapping[str, Any], key: str) -> None:
    """Check that a name is built in, or that its file or module exists, without importing it. Errors: UserError."""
    if name in builtin:
        return
    source, colon, attribute = name.rpartition(":")
    hint = nearest(name, builtin) if builtin else ""
    if not (colon and source and attribute.isidentifier()):
        raise UserError(
            f"config: {key}: there is no {kind} '{name}'{hint} (for your own, write module:name or"
            " path/to/file.py:name)"
        )
    if source.endswith(".py"):
        if not Path(source).is_file():
            raise UserError(f"config: {key}: {name}: there is no file {source}")
    elif not _find(source):
        raise UserError(
            f"config: {key}: {name}: there is no module '{source}'{hint} (for a file, write path/to/file.py:name)"
        )


def nearest(name: str, names: Iterable[str]) -> str:
    """Return '; did you mean ...?' for a misspelled name, or a list of all names if none is similar."""
    names = [str(n) for n in names]
    close = get_close_matches(name, names, 1, 0.4)
    return f"; did you mean '{close[0]}'?" if close else f"; available: {', '.join(sorted(names)) or 'nothing'}"


def _find(module: str) -> bool:
    """Return whether the module exists. As with `python -m`, the working directory is searched too."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError, AttributeError):  # a missing package, or an invalid name
        return False


def _import(source: str, where: str) -> ModuleType:
    """Import a module by name, or a file (each file once). Errors: UserError with the line that failed."""
    try:
        if not source.endswith(".py"):
            return importlib.import_module(source)
        name = str(Path(source).resolve())
        if name not in sys.modules:
            spec = importlib.util.spec_from_file_location(name, name)
            assert spec and spec.loader  # both exist for a name that ends in .py
            sys.modules[name] = importlib.util.module_from_spec(spec)
            try:
                spec.loader.exec_module(sys.modules[name])
            except BaseException:
                del sys.modules[name]
                raise
        return sys.modules[name]
    except (Exception, SystemExit) as error:  # any error of the user's code
        last = traceback.extract_tb(error.__traceback__)[-1]
        line = error.lineno if isinstance(error, SyntaxError) else last.lineno
        file = (error.filename if isinstance(error, SyntaxError) else None) or last.filename
        text = " ".join(str(error).split())
        raise UserError(f"{where} cannot be imported: {type(error).__name__}: {text} ({file}:{line})") from None
