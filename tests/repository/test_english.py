"""Pages and docstrings keep the rules of CONTRIBUTING's "Plain English" that a machine can hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.repository import english

REPOSITORY = Path(__file__).resolve().parents[2]
FILES = [
    REPOSITORY / "README.md",
    REPOSITORY / "CONTRIBUTING.md",
    *sorted((REPOSITORY / "docs").rglob("*.md")),
    *sorted((REPOSITORY / "megatron_rl").rglob("*.py")),
    *sorted(
        path
        for top in ("sglang_plugin", "tools", "examples", "benchmarks")
        for path in (REPOSITORY / top).rglob("*.py")
    ),
    *(
        REPOSITORY / name
        for name in ("setup.py", "examples/README.md", "sglang_plugin/README.md", "tests/gpu/README.md")
    ),
]


def test_pages_and_docstrings_keep_the_rules():
    found = [line for path in FILES for line in english.findings(path)]
    assert len(FILES) > 300 and not found, "\n".join(found)


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ('"""Of a module."""\nX = 1\n"""What X is."""\ndef f():\n    """Whether."""\n    return "That"\n', [1, 3, 5]),
        ('"""Offers."""\ndef f():\n    """Return what it is."""\n', []),
        ('"""Return the sum, of course."""\n', [1]),
        (f'"""Return {"a very " * 20}long list."""\n', [1]),
        (f'"""Return {"a very " * 8}long list: {"and " * 30}so on."""\n', []),
    ],
)
def test_faults_of_docstrings_are_found(source, lines, tmp_path):
    path = tmp_path / "module.py"
    path.write_text(source)
    assert [int(line.split(":")[1]) for line in english.findings(path)] == lines


def test_faults_of_pages_are_found_and_code_is_left_alone(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# Title\n\nIt is obviously so.\n\n    megatron-rl simply run\n\n```\nof course\n```\n\n"
        "- An item `of course` here.\n- Another, the latter\n  of two.\n\n| a | respectively |\n"
    )
    assert [int(line.split(":")[1]) for line in english.findings(page)] == [3, 12, 15]
