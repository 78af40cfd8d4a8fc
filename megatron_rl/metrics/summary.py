"""The first and the last evaluation of a run, and the newest ones of several runs, side by side, for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.table import Column, Table
from rich.text import Text

from megatron_rl.metrics.logger import METRICS_FILE, read_json_lines
from megatron_rl.metrics.runlog import evaluations, read_run, side_by_side


def before_after(run_dir: Path) -> Table | None:
    """Scores of a run's first and last evaluation; None where there are not two."""
    found = [(t, points) for t, points in evaluations(read_json_lines(run_dir / METRICS_FILE)) if len(points) > 1]
    if not found:
        return None
    (first, _), (last, _) = found[0][1][0], found[0][1][-1]
    numbers = [Column(heading, justify="right") for heading in (f"step {first}", f"step {last}", "change")]
    table = Table("held-out prompts", *numbers, title=Text(str(run_dir)), title_justify="left")
    for title, points in found:
        before, after = points[0][1], points[-1][1]
        table.add_row(title, f"{before:.3f}", f"{after:.3f}", f"{after - before:+.3f}")
    return table


def compared(run_dirs: Sequence[Path]) -> Table | None:
    """The newest scores of several runs, of the metrics that all of them have; None without one."""
    found = side_by_side(runs := [read_run(folder) for folder in run_dirs])
    if not found:
        return None
    table = Table("newest evaluation", *(Column(Text(run.name), justify="right") for run in runs))
    for title, values in found.items():
        table.add_row(title, *(f"{value:.3f}" for value in values))
    return table
