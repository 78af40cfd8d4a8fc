"""Pictures of several groups of runs side by side, as SVG files for documents: curves, routing, mismatch by probability."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import vl_convert

from megatron_rl.metrics.logger import METRICS_FILE, read_json_lines
from megatron_rl.report import charts as vega
from megatron_rl.report.run_folder import Lines, deviation_tails, heat_map, mean, points

Groups = Mapping[str, Sequence[Path | str]]
"""Label -> folders of its runs, such as the seeds of one setting, which are averaged."""


@dataclass(frozen=True)
class Panel:
    title: str
    metric: str
    log: bool = False
    """Logarithmic axis; values that are not above zero are left out."""
    smooth: int = 1
    """Number of steps of a running mean."""


def write_curves(groups: Groups, panels: Sequence[Panel], path: Path, *, title: str, columns: int = 2) -> None:
    """Write a panel per metric with a line per group: the mean of its runs, in a band from the smallest to the
    largest value.
    """
    logs = _logs(groups)
    specs = [_curves(logs, panel) for panel in panels]
    if columns == 1:
        specs = [spec | {"width": 640, "height": 150} for spec in specs]
    _write(specs, path, title, columns)


def write_svg(groups: Groups, folder: Path | str, stem: str = "routing") -> list[Path]:
    """Write {stem}-agreement, -deviation, -layers and -layers-kl.svg, as in figures 4a, 4b and 6 of the Pr2 paper, if
    there are data.
    """
    logs = _logs(groups)
    colors = {label: vega.color(i) for i, label in enumerate(logs)}
    agreement = Panel("Top-k agreement", "routing/agreement"), Panel("Route KL, nats per token", "routing/kl", log=True)
    specs = {"agreement": [spec for panel in agreement if (spec := _curves(logs, panel))["data"]["values"]]}
    tails = {
        label: [mean(column) for column in zip_longest(*map(deviation_tails, runs))] for label, runs in logs.items()
    }
    if any(tails.values()):
        bars = vega.bars(tails, colors) | {"width": 780, "height": 220}
        scale = {"domain": list(colors), "range": list(colors.values())}
        bars["layer"][0]["encoding"]["color"] = {"field": "run", "scale": scale}
        specs["deviation"] = [bars]
    for name, metric in (("layers", "agreement"), ("layers-kl", "kl")):
        maps = {label: _mean_map([heat_map(run, metric) for run in runs]) for label, runs in logs.items()}
        values = [value for found in maps.values() for value in found.values()]
        ends = vega.heat_ends(values, kl=metric == "kl") if values else (0.0, 1.0)
        heats = {label: vega.heat(found, ends, kl=metric == "kl") for label, found in maps.items() if found}
        specs[name] = [heat | {"title": label, "width": 380} for label, heat in heats.items()]
    paths = {name: Path(folder) / f"{stem}-{name}.svg" for name, found in specs.items() if found}
    for name, path in paths.items():
        _write(specs[name], path, f"{stem} {name}")
    return list(paths.values())


def write_probability(groups: Mapping[str, Mapping[float, Mapping[str, float]]], path: Path, *, title: str) -> None:
    """Write a panel per label with the mismatch by the probability of a token: upper end of a class -> figures of its tokens.

    The figures are tokens, abs, abs_max and bias.
    """
    charts = {label: vega.probability(classes, dict.fromkeys(classes)) for label, classes in groups.items()}
    _write([chart | {"title": label, "width": 380, "height": 240} for label, chart in charts.items()], path, title)


def _write(specs: Sequence[vega.Spec], path: Path, title: str, columns: int = 2) -> None:
    """Write an SVG file of charts in columns, in light colors on its own background."""
    schema = "https://vega.github.io/schema/vega-lite/v6.json"
    whole = {"$schema": schema, "description": title, "concat": specs, "columns": columns}
    text = json.dumps(whole | {"config": vega.CONFIG | {"background": vega.LIGHT["card"]}})
    text = re.sub(r"var\(--([\w-]+)\)", lambda name: vega.LIGHT[name[1]], text)
    path.write_text(vl_convert.vegalite_to_svg(text), encoding="utf-8")


def _logs(groups: Groups) -> dict[str, list[Lines]]:
    return {label: [read_json_lines(Path(run) / METRICS_FILE) for run in runs] for label, runs in groups.items()}


def _mean_map(maps: Sequence[Mapping[tuple[int, int], float]]) -> dict[tuple[int, int], float]:
    return {
        place: mean(found.get(place) for found in maps) for place in dict.fromkeys(p for found in maps for p in found)
    }


def _curves(logs: Mapping[str, Sequence[Lines]], panel: Panel) -> vega.Spec:
    rows = [
        {"step": step, "value": value, "group": group, "run": i}
        for group, runs in logs.items()
        for i, run in enumerate(runs)
        for step, value in points(run, panel.metric)
        if value > 0 or not panel.log
    ]
    empty = {"title": panel.title, "width": 380, "height": 240, "data": {"values": rows}}
    if not rows:
        return empty | {"mark": "text"}
    values = [row["value"] for row in rows]
    axis: dict[str, Any] = vega.log_axis(min(values), max(values)) if panel.log else {"scale": {"zero": False}}
    y = {"type": "quantitative", **axis}
    colors = {"domain": list(logs), "range": [vega.color(i) for i in range(len(logs))]}
    names = {"mean": "mean", "min": "low", "max": "high"}
    return empty | {
        "transform": [
            {
                # Stored under another name; otherwise the next step would average means.
                "window": [{"op": "mean", "field": "value", "as": "smoothed"}],
                "frame": [1 - panel.smooth, 0],
                "sort": [{"field": "step"}],
                "groupby": ["group", "run"],
            },
            {
                "aggregate": [{"op": op, "field": "smoothed", "as": name} for op, name in names.items()],
                "groupby": ["group", "step"],
            },
        ],
        "encoding": {"x": vega.STEPS, "color": {"field": "group", "scale": colors, "type": "nominal"}},
        "layer": [
            {
                "mark": {"type": "area", "opacity": 0.15},
                "encoding": {"y": y | {"field": "low"}, "y2": {"field": "high"}},
            },
            {"mark": {"type": "line", "strokeWidth": 2}, "encoding": {"y": y | {"field": "mean"}}},
        ],
    }
