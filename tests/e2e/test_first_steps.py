"""examples/first_steps.ipynb runs from its first to its last cell, with the real trainer and SGLang, in small."""

from __future__ import annotations

import os
import re
from pathlib import Path

import nbformat
import pytest
import yaml
from nbclient import NotebookClient
from nbformat import NotebookNode

from megatron_rl import runs
from tests.preloaded import PYTHON_WITH_TRAINER

REPOSITORY = Path(__file__).resolve().parents[2]
NOTEBOOK = REPOSITORY / "examples/first_steps.ipynb"
STEPS = 4


@pytest.fixture(scope="module")
def stored() -> NotebookNode:
    return nbformat.read(NOTEBOOK, as_version=4)


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def set_parameters(notebook: NotebookNode, **values: str) -> None:
    """Replace the values in the cell that is tagged "parameters"."""
    [cell] = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    for name, value in values.items():
        cell.source, count = re.subn(rf"^{name} = [^#\n]*", f"{name} = {value}  ", cell.source, flags=re.MULTILINE)
        assert count == 1, f"the notebook has no parameter {name}"


def text_of(cell: NotebookNode) -> str:
    """All that a cell has printed and shown."""
    return "".join(o.get("text", "") or o.get("data", {}).get("text/plain", "") for o in cell.outputs)


def pictures(notebook: NotebookNode) -> int:
    return sum("image/png" in output.get("data", {}) for cell in code_cells(notebook) for output in cell.outputs)


@pytest.mark.timeout(900)
def test_every_cell_runs(stored, tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin/megatron-rl"  # the program, forked from a process that has imported its modules
    program.write_text(f'#!/bin/sh\nexec {PYTHON_WITH_TRAINER} -m megatron_rl.cli "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    work = tmp_path / "work"
    notebook = nbformat.from_dict(stored)
    set_parameters(notebook, WORK=f"Path({str(work)!r})", SFT_STEPS="16", STEPS=str(STEPS), PROMPTS="4")
    NotebookClient(notebook, timeout=280, resources={"metadata": {"path": str(NOTEBOOK.parent)}}).execute()

    metrics = {name: runs.load(work / name).metrics for name in ("exact", "in_place")}
    for name, correct, in_place in (("exact", 1.0, 0.0), ("in_place", 0.5, 0.5)):
        rewards = yaml.safe_load((work / name / "config.yaml").read_text())["data"]["rewards"]
        assert rewards == {"correct": correct, "in_place": in_place}
        trained = metrics[name].loc[1:]
        weighted = correct * trained["reward/correct"] + in_place * trained["reward/in_place"]
        assert [*trained.index] == [*range(1, STEPS + 1)] and (weighted - trained["reward/mean"]).abs().max() < 1e-6
    assert (work / "report.html").is_file() or list(work.rglob("report.html"))
    said = "".join(text_of(cell) for cell in code_cells(notebook))
    assert "error" not in said and f"step {STEPS}/{STEPS}" in said and "fits" in said
    assert pictures(notebook) == 2


def test_what_is_stored_was_run_in_order_and_names_no_machine(stored):
    cells = code_cells(stored)
    assert [cell.execution_count for cell in cells] == [*range(1, len(cells) + 1)]
    assert pictures(stored) == 2
    said = "".join(text_of(cell) for cell in cells)
    assert "error" not in said.lower() and str(Path.home()) not in said and str(REPOSITORY) not in said
