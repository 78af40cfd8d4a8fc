"""Curves of several runs over steps, side by side, as one SVG file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.metrics.logger import METRICS_FILE, read_json_lines
from megatron_rl.metrics.svg import Lines, legend, line_panel, number, over_steps, svg

WIDTH, HEIGHT, PER_ROW = 880, 240, 2


@dataclass(frozen=True)
class Panel:
    title: str
    metric: str
    log: bool = False
    smooth: int = 1
    """Steps of a running mean."""


def write_curves(
    groups: Mapping[str, Sequence[Path | str]], panels: Sequence[Panel], path: Path, *, title: str
) -> None:
    """groups: label -> folders of its runs, which are averaged, with a band from the smallest to the largest."""
    logs = {label: [read_json_lines(Path(run) / METRICS_FILE) for run in runs] for label, runs in groups.items()}
    parts, top = legend(dict(enumerate(groups)), 52, WIDTH - 60, 8)
    for place, panel in enumerate(panels):
        curves = {
            i: over_steps([_smoothed(run, panel.metric, panel.smooth) for run in runs], panel.metric)
            for i, runs in enumerate(logs.values())
        }
        row, column = divmod(place, PER_ROW)
        left, each = column * WIDTH / PER_ROW + 52, WIDTH / PER_ROW - 68
        parts += line_panel(panel.title, curves, panel.log, left, top + 26 + row * (HEIGHT + 74), each, HEIGHT)
    rows = -(-len(panels) // PER_ROW)
    path.write_text(svg(WIDTH, top + rows * (HEIGHT + 74), title, parts, False), encoding="utf-8")


def _smoothed(lines: Lines, name: str, steps: int) -> list[dict[str, float]]:
    rows = [(row["step"], row[name]) for row in lines if number(row.get(name)) is not None]
    means = []
    for i, (step, _) in enumerate(rows):
        window = [value for _, value in rows[max(0, i - steps + 1) : i + 1]]
        means.append({"step": step, name: sum(window) / len(window)})
    return means
