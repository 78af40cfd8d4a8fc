"""The first and the last evaluation of a run, side by side, for the terminal."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table

from megatron_rl.metrics.logger import METRICS_FILE, read_json_lines


def before_after(run_dir: Path) -> Table | None:
    """Scores of a run's first and last evaluation; None where there are not two."""
    rows = [r for r in read_json_lines(run_dir / METRICS_FILE) if r.get("eval/score") is not None]
    if len(rows) < 2:
        return None
    first, last = rows[0], rows[-1]
    table = Table(title=str(run_dir), title_justify="left")
    table.add_column("held-out prompts")
    for heading in (f"step {first['step']}", f"step {last['step']}", "change"):
        table.add_column(heading, justify="right")
    for name in (n for n in last if n.startswith("eval/") and n != "eval/prompts"):
        if isinstance(first.get(name), (int, float)) and isinstance(last[name], (int, float)):
            change = last[name] - first[name]
            table.add_row(name, f"{first[name]:.3f}", f"{last[name]:.3f}", f"{change:+.3f}")
    return table
