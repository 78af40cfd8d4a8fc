"""What tests, tools and examples import is there: much of it is first imported by a process of a test that takes long."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def _imported() -> list[tuple[str, str, str]]:
    """(file and line, module, name) of all that files outside the package import from it."""
    found = []
    for path in (
        p for folder in ("tests", "tools", "benchmarks", "examples") for p in (REPOSITORY / folder).rglob("*.py")
    ):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "megatron_rl":
                place = f"{path.relative_to(REPOSITORY)}:{node.lineno}"
                found += [(place, str(node.module), alias.name) for alias in node.names]
    return found


def test_what_tests_and_tools_import_exists():
    def exists(module: str, name: str) -> bool:
        if hasattr(importlib.import_module(module), name):
            return True
        try:
            importlib.import_module(f"{module}.{name}")
        except ModuleNotFoundError:
            return False
        return True

    imported = _imported()
    assert len(imported) > 500
    assert [f"{place}: {module} has no {name}" for place, module, name in imported if not exists(module, name)] == []
