"""What the documents name exists: every path, every command and flag, every config key, every environment script."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import typing
from pathlib import Path
from typing import Literal

import pytest

from megatron_rl.algorithms.advantages import ADVANTAGES
from megatron_rl.algorithms.losses import POLICY_LOSSES
from megatron_rl.cli import make_parser
from megatron_rl.config import OF_TOKENS
from megatron_rl.config.load import build_config, key_paths, load_config
from tests.program import output_of_script

REPOSITORY = Path(__file__).resolve().parents[2]
TOP_LEVEL = ("megatron_rl", "csrc", "examples", "tools", "configs", "tests", "docs", "benchmarks", "requirements")
DOCUMENTS = sorted([*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md"), REPOSITORY / "tests/gpu/README.md"])
SCRIPTS = sorted([*(REPOSITORY / "examples").rglob("*.sh"), *(REPOSITORY / "examples").rglob("*.sbatch")])
OF_USERS = ("rewards.py", "reversal.py")
"""Files of examples, which a user would write."""
TOOL_FLAGS = re.compile(r"--[a-z][a-z_.-]*")


def commands() -> dict[str, set[str]]:
    """Subcommand -> its own flags."""
    parser = make_parser()
    choices = next(a for a in parser._actions if hasattr(a, "choices") and a.choices).choices
    return {name: {o for a in sub._actions for o in a.option_strings} for name, sub in choices.items()}


def name_of(document: Path) -> str:
    return str(document.relative_to(REPOSITORY)) if document.name == "README.md" else document.name


def anchors(document: Path) -> set[str]:
    """What its headings can be linked by."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_paths_exist(document):
    text = document.read_text()
    for link, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?[^)]*\)", text):
        if not link.startswith(("http", "mailto")):
            target = document.parent / link if link else document
            assert target.exists(), f"{document.name} links to {link}"
            assert not anchor or anchor in anchors(target), f"{document.name} links to {link}#{anchor}"
    pattern = rf"`((?:{'|'.join(TOP_LEVEL)})/[\w./-]*)`"
    for path in re.findall(pattern, text):
        assert (REPOSITORY / path).exists(), f"{document.name} names {path}"
    names = {path.name for top in TOP_LEVEL for path in (REPOSITORY / top).rglob("*.py")} | {"setup.py"}
    for name in re.findall(r"`(\w+\.py)`", text):
        assert name in names or name in OF_USERS, f"{document.name} names {name}"


@pytest.mark.parametrize("document", DOCUMENTS + SCRIPTS, ids=name_of)
def test_commands_and_flags_exist(document):
    known = commands()
    keys = key_paths()
    text = document.read_text().replace("\\\n", " ")
    for command, rest in re.findall(r"megatron-rl ([a-z]+(?:-[a-z]+)?)([^\n`|;&]*)", text):
        assert command in known, f"{document.name}: megatron-rl {command}"
        for flag in TOOL_FLAGS.findall(rest):
            ours = (
                flag in known[command]
                or flag[2:] in keys
                or flag[2:].startswith(("data.options.", "eval.sets.", "rewards.models."))
            )
            assert ours or flag == "--help", f"{document.name}: megatron-rl {command} has no {flag}"


@pytest.mark.slow
def test_flags_of_python_tools_exist():
    help_of: dict[str, str] = {}
    for document in DOCUMENTS + SCRIPTS:
        text = document.read_text().replace("\\\n", " ")
        for tool, rest in re.findall(r"python ((?:tools|benchmarks)/\w+\.py)([^\n`|;&]*)", text):
            if tool not in help_of:
                help_of[tool] = output_of_script(REPOSITORY / tool, "--help")
            for flag in TOOL_FLAGS.findall(rest):
                assert flag in help_of[tool], f"{document.name}: {tool} has no {flag}"


def test_sources_are_cited_by_their_names():
    """Nobody has a folder of papers beside the repository: a source is its authors, year and number at arXiv."""
    if not (REPOSITORY / ".git").exists():
        pytest.skip("a copy without its history: what is tracked is not known")
    tracked = subprocess.run(
        ["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, check=True, timeout=60
    ).stdout
    files = [REPOSITORY / name for name in tracked.decode().split("\0") if name]
    assert len(files) > 500
    cited = "papers" + "/0"
    found = [str(file) for file in files if file.is_file() and cited.encode() in file.read_bytes()]
    assert not found, f"{found[0]} cites {cited}..., which is in no repository"


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_a_row_of_a_table_is_one_line(document):
    """A row that is wrapped ends the table for whoever renders it."""
    text = re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL)
    for line in map(str.strip, text.splitlines()):
        assert line.startswith("| ") == line.endswith(" |"), f"{document.name}: a row that is not one line: {line[:80]}"


def test_config_keys_exist():
    """`section.key` in backquotes is a key of the config."""
    sections = {key.split(".")[0] for key in key_paths() if "." in key}
    for document in DOCUMENTS:
        for name in re.findall(r"`([a-z]+(?:\.[a-z_0-9]+)+)`", document.read_text()):
            if name.split(".")[0] in sections and not name.endswith((".py", ".sh", ".md", ".yaml")):
                known = any(k == name or k.startswith(f"{name}.") for k in key_paths())
                assert known or name.startswith("data.options."), f"{document.name} names config key {name}"


def texts(module: Path) -> list[str]:
    """The strings of a module, docstrings too; what an f-string fills in is left blank."""
    found = []
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.JoinedStr):
            found.append(" ".join(part.value for part in node.values if isinstance(part, ast.Constant)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return found


def test_values_exist():
    """What an error or a document tells the user to set, `section.key: value`, is a value that the key takes."""
    choices = {key: typing.get_args(kind) for key, kind in key_paths().items() if typing.get_origin(kind) is Literal}
    choices |= {"algorithm.loss": (*POLICY_LOSSES,), "algorithm.advantage": (*ADVANTAGES, "tilt", *OF_TOKENS)}
    checked = 0
    for file in [*DOCUMENTS, *(REPOSITORY / "megatron_rl").rglob("*.py")]:
        for text in texts(file) if file.suffix == ".py" else [file.read_text()]:
            for key, value in re.findall(
                r"\b([a-z][a-z0-9_]*(?:\.[a-z0-9_]+)+)(?::| =) ([a-z][a-z0-9_]*)\b(?!:)", text
            ):
                if key in choices:
                    assert value in choices[key], f"{file.name}: {key} has no value {value}"
                    checked += 1
    assert checked > 30


def test_the_configuration_page_is_current():
    page = subprocess.run(
        [sys.executable, str(REPOSITORY / "tools" / "config_reference.py")], capture_output=True, text=True, timeout=60
    )
    assert page.stdout == (REPOSITORY / "docs" / "configuration.md").read_text(), (
        "run: python tools/config_reference.py > docs/configuration.md"
    )


@pytest.mark.parametrize("path", sorted((REPOSITORY / "configs").glob("*.yaml")), ids=name_of)
def test_configs_are_valid(path):
    assert load_config(path) != build_config({})
