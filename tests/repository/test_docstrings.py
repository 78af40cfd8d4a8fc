"""Docstrings are sentences, or name a thing."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
RIDDLES = ("Of", "What", "Those", "That", "Whether", "By")
"""First words of docstrings that leave the reader to find the thing that they speak of."""


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of each text that stands as a statement of its own."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def riddles(source: str) -> list[tuple[int, str]]:
    return [
        (line, text)
        for line, text in docstrings(source)
        if text.split()[:1] and text.split()[0].rstrip(",.:;") in RIDDLES
    ]


def test_no_docstring_begins_with_a_function_word():
    files = sorted((REPOSITORY / "megatron_rl").rglob("*.py"))
    found = [(str(file.relative_to(REPOSITORY)), *riddle) for file in files for riddle in riddles(file.read_text())]
    assert len(files) > 100 and not found


def test_a_riddle_is_found_wherever_it_stands():
    source = '"""Of a module."""\nX = 1\n"""What X is."""\ndef f():\n    """Whether."""\n    return "That"\n'
    assert [line for line, _ in riddles(source)] == [1, 3, 5]
    assert not riddles('"""Offers."""\ndef f():\n    """Return what it is."""\n')
