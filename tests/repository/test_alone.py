"""A file of tests runs alone: what it imports lies in its own folder or in tests/, whatever other folders are collected."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]


def imported(file: Path) -> set[str]:
    """Names of the modules that a file imports absolutely."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
    return found


def test_helpers_of_another_folder_are_imported_by_their_whole_name():
    folders = defaultdict(set)
    for file in TESTS.rglob("*.py"):
        folders[file.stem].add(file.parent)
    wrong = [
        f"{file.relative_to(TESTS)} imports {name}"
        for file in TESTS.rglob("*.py")
        if file.parent.name != "gpu"  # whose conftest.py adds to the path
        for name in imported(file)
        if folders[name] and not folders[name] & {file.parent, TESTS} and "sys.path" not in file.read_text()
    ]
    assert not wrong
