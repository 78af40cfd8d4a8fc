"""The three pictures of routing: their numbers from metrics.jsonl, and the pictures as SVG text.

Agreement and route KL over steps, deviation tails, and the layer x update heat map: figures 4a, 4b and 6 of the Pr2 paper.
The numbers are pure functions of a run's log lines.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from megatron_rl.metrics.logger import METRICS_FILE, read_json_lines
from megatron_rl.metrics.svg import (
    Lines,
    legend,
    line,
    line_panel,
    log_ticks,
    number,
    over_steps,
    rect,
    short,
    svg,
    text_at,
)

Matrix = list[list[float | None]]
"""[layer][update - 1]; rows may be of different lengths."""

RAMP = ((68, 1, 84), (65, 68, 135), (42, 120, 142), (34, 168, 132), (122, 209, 81), (253, 231, 37))
"""Viridis: even steps for the eye, and from dark to light, so that it reads in grey too."""


# Numbers


def _logged(lines: Lines, pattern: str) -> dict[str, tuple[int, ...]]:
    """The metrics whose name is of this pattern, and the numbers in the name."""
    names = dict.fromkeys(name for line in lines for name in line)
    matches = {name: re.fullmatch(pattern, name) for name in names}
    return {name: tuple(map(int, match.groups())) for name, match in matches.items() if match}


def mean_of_last_quarter(lines: Lines, names: Iterable[str]) -> dict[str, float | None]:
    """Mean of each metric over the last quarter (rounded up) of the steps that have any of them; null is left out."""
    names = list(names)
    found = [line for line in lines if any(number(line.get(name)) is not None for name in names)]
    recent = found[-math.ceil(len(found) / 4) :]
    return {name: mean([number(line.get(name)) for line in recent]) for name in names}


def mean(parts: Iterable[Any]) -> Any:
    """Mean of numbers, or element by element of nested lists of any lengths, without what is None; None of nothing."""
    present = [part for part in parts if part is not None]
    if present and isinstance(present[0], list):
        return [mean(column) for column in zip_longest(*present)]
    return statistics.fmean(present) if present else None


def deviation_tails(lines: Lines) -> list[float | None]:
    """Share of the (token, layer) pairs with J replayed experts that the current router would not pick, J = 0 .. k.

    Mean over the last quarter of the steps; empty where the run logged none.
    """
    slots = _logged(lines, r"routing/deviation_(\d+)")
    shares = {slots[name][0]: share for name, share in mean_of_last_quarter(lines, slots).items()}
    if all(share is None for share in shares.values()):
        return []
    return [shares.get(j) for j in range(max(shares) + 1)]


def heat_map(lines: Lines, metric: str = "agreement") -> dict[int, list[float | None]]:
    """{model layer: [value at update 1, 2, ...]} of "agreement" or "kl"; mean over the last quarter of the steps."""
    places = _logged(lines, rf"routing/layer_(\d+)/update_(\d+)/{metric}")
    values = {places[name]: value for name, value in mean_of_last_quarter(lines, places).items()}
    if all(value is None for value in values.values()):
        return {}
    updates = range(1, max(update for _, update in values) + 1)
    return {
        layer: [values.get((layer, update)) for update in updates] for layer in sorted({place[0] for place in values})
    }


def heat_maps(groups: Mapping[str, Sequence[Lines]], metric: str = "agreement") -> tuple[list[int], dict[str, Matrix]]:
    """The layers of all groups, and for each group with data the mean of its runs' heat maps, a row for each layer."""
    maps = {label: [rows for run in runs if (rows := heat_map(run, metric))] for label, runs in groups.items()}
    layers = sorted({layer for runs in maps.values() for rows in runs for layer in rows})
    return layers, {
        label: [mean([rows.get(layer, []) for rows in runs]) for layer in layers]
        for label, runs in maps.items()
        if runs
    }


# Pictures


def write_svg(groups: Mapping[str, Sequence[Path | str]], folder: Path | str, stem: str = "routing") -> list[Path]:
    """The pictures as {stem}-agreement, -deviation, -layers, and -layers-kl.svg; those without data are left out.

    groups: label -> folders of its runs (the seeds of one setting, say), which are averaged.
    """
    logs = {label: [read_json_lines(Path(run) / METRICS_FILE) for run in runs] for label, runs in groups.items()}
    agreement, kl = (
        {label: over_steps(runs, f"routing/{metric}") for label, runs in logs.items()} for metric in ("agreement", "kl")
    )
    tails = {label: mean([deviation_tails(run) for run in runs]) or [] for label, runs in logs.items()}
    pictures = {"agreement": agreement_svg(agreement, kl) if any([*agreement.values(), *kl.values()]) else ""}
    pictures["deviation"] = deviation_svg(tails) if any(tails.values()) else ""
    for name, metric in (("layers", "agreement"), ("layers-kl", "kl")):
        layers, matrices = heat_maps(logs, metric)
        pictures[name] = heatmap_svg(matrices, layers, kl=metric == "kl") if matrices else ""
    paths = []
    for name, picture in pictures.items():
        if picture:
            paths.append(Path(folder) / f"{stem}-{name}.svg")
            paths[-1].write_text(picture, encoding="utf-8")
    return paths


def agreement_svg(
    series: Mapping[str, list[list[float]]],
    kl: Mapping[str, list[list[float]]] | None = None,
    *,
    width: float = 880,
    inline: bool = False,
) -> str:
    """Lines of agreement over steps and, beside them, of the route KL on a log scale (what is not above zero is left out).

    A series is [[step, value], ...]; points [step, value, low, high] draw a band too.
    """
    labels = list(dict.fromkeys([*series, *(kl or {})]))
    parts, top = legend(dict(enumerate(labels)), 52, width - 60, 8)
    panels = [("Top-k agreement", series, False)] + ([("Route KL, nats per token and layer", kl, True)] if kl else [])
    each = width / len(panels)
    for i, (title, lines, log) in enumerate(panels):
        colored = {labels.index(label): points for label, points in lines.items()}
        parts += line_panel(title, colored, log, i * each + 52, top + 26, each - 68, 220)
    return svg(width, top + 294, "Agreement of the replayed routes with the current router", parts, inline)


def deviation_svg(tails: Mapping[str, list[float | None]], *, width: float = 880, inline: bool = False) -> str:
    """Bars on a log axis: for each number of slots J one bar a run, its share written on it where there is room.

    tails: [share at J = 0, 1, ...]; a share of zero has a label and no bar.
    """
    shown = {i: label for i, label in enumerate(tails) if tails[label]}
    parts, top = legend(shown, 52, width - 60, 8)
    left, top, height, right = 52, top + 36, 220, width - 10
    positive = [share for shares in tails.values() for share in shares if share]
    low = min(math.floor(math.log10(min(positive, default=1)) - 0.1), -1)
    count = max((len(shares) for shares in tails.values()), default=1) or 1

    def y(share: float) -> float:
        return top + math.log10(share) / low * height

    for tick in log_ticks(low, 0):
        parts.append(line(left, y(10**tick), right, y(10**tick), "grid"))
        parts.append(text_at(left - 8, y(10**tick) + 4, short(10**tick, 1), "end"))
    each = (right - left) / count
    bar = min(each * 0.84 / max(len(shown), 1), 60)
    for j in range(count):
        middle = left + (j + 0.5) * each
        parts.append(text_at(middle, top + height + 16, str(j), "middle"))
        for position, (i, label) in enumerate(shown.items()):
            share = tails[label][j] if j < len(tails[label]) else None
            if share is None:
                continue
            x, end = middle + (position - len(shown) / 2) * bar, y(share) if share else top + height
            paint = f'class="s{i % 8}" fill="currentColor"'
            parts.append(rect(x, end, bar - 1, top + height - end, paint, f"{label}: {short(share, 3)} with {j} slots"))
            text, at = short(share), x + bar / 2
            if 5.8 * len(text) < bar:
                parts.append(text_at(at, end - 4, text, "middle"))
            elif bar >= 11:
                parts.append(
                    text_at(at + 4, end - 4, text, more=f' transform="rotate(-90 {at + 4:.1f} {end - 4:.1f})"')
                )
    parts.append(line(left, top + height, right, top + height, "axis"))
    caption = "share of the (token, layer) pairs by the slots in which replayed and current experts differ"
    parts.append(text_at((left + right) / 2, top + height + 34, caption, "middle"))
    return svg(width, top + height + 44, "Share of (token, layer) pairs by differing slots", parts, inline)


def heatmap_svg(
    matrices: Mapping[str, Matrix],
    layers: Sequence[int],
    *,
    kl: bool = False,
    width: float = 880,
    inline: bool = False,
) -> str:
    """A heat map a run, layers from left to right and updates from top to bottom, all on one colour scale.

    matrices: [layer][update - 1], None where there is no value. Light is near to the current router in both scales:
    agreement (linear, 0.05 at the least from end to end) and, with `kl`, the KL (log; zero is at its light end).
    """
    values = [value for rows in matrices.values() for row in rows for value in row if value is not None]
    low, high = _heat_range(values, kl)

    def shade(value: float) -> float:  # 0 dark, 1 light
        if kl:
            return (high - math.log10(value)) / (high - low) if value > 0 else 1.0
        return (value - low) / (high - low)

    left, row_height = 34, 20
    cell = min((width - left - 14) / max(len(layers), 1), 60)
    panel = left + cell * len(layers) + 14
    across = max(1, int(width // panel))
    ends = [10**high, 10**low] if kl else [low, high]
    parts = _colour_bar("route KL" if kl else "agreement", [short(end) for end in ends], left)
    texts = _cell_texts(values, kl, cell - 3)
    x, y, tallest = 0.0, 34.0, 0
    for i, (label, rows) in enumerate(matrices.items()):
        if i and i % across == 0:
            x, y, tallest = 0.0, y + tallest * row_height + 52, 0
        updates = max((len(row) for row in rows), default=0)
        tallest = max(tallest, updates)
        parts.append(text_at(x + left, y + 16, label, kind="name"))
        for update in range(updates):
            at = y + 24 + update * row_height
            parts.append(text_at(x + left - 6, at + 14, str(update + 1), "end"))
            for column, (layer, row) in enumerate(zip(layers, rows, strict=True)):
                value = row[update] if update < len(row) else None
                where = f"layer {layer}, update {update + 1}: "
                place = (x + left + column * cell, at, cell - 1, row_height - 1)
                if value is None:
                    parts.append(rect(*place, 'class="gap" stroke-dasharray="2 3"', where + "no value"))
                    continue
                red, green, blue = _colour(shade(value))
                parts.append(rect(*place, f'fill="#{red:02x}{green:02x}{blue:02x}"', where + f"{value:.4g}"))
                if value in texts:
                    kind = "cell on-light" if 0.3 * red + 0.59 * green + 0.11 * blue > 120 else "cell on-dark"
                    parts.append(text_at(place[0] + (cell - 1) / 2, at + 12.5, texts[value], "middle", kind))
        bottom = y + 24 + updates * row_height
        every = math.ceil((6 * len(str(max(layers, default=0))) + 3) / cell)
        for column in range(0, len(layers), every):
            parts.append(text_at(x + left + (column + 0.5) * cell, bottom + 13, str(layers[column]), "middle"))
        x += panel
    title = "Route KL" if kl else "Agreement"
    return svg(width, y + tallest * row_height + 44, f"{title} by layer and update", parts, inline)


def _heat_range(values: Sequence[float], kl: bool) -> tuple[float, float]:
    """Round ends of the colour scale; of the KL as exponents of ten."""
    if kl:
        powers = [math.log10(value) for value in values if value > 0] or [-1.0]
        return math.floor(min(powers)), max(math.ceil(max(powers)), math.floor(min(powers)) + 1)
    low, high = min(values, default=0.0), max(values, default=1.0)
    low = math.floor(low * 20 + 1e-9) / 20
    high = max(math.ceil(high * 20 - 1e-9) / 20, low)
    return (low - 0.05, high) if high == low else (low, high)


def _colour(shade: float) -> tuple[int, int, int]:
    place = min(max(shade, 0.0), 1.0) * (len(RAMP) - 1)
    i = min(int(place), len(RAMP) - 2)
    red, green, blue = (round(a + (b - a) * (place - i)) for a, b in zip(RAMP[i], RAMP[i + 1], strict=True))
    return red, green, blue


def _colour_bar(name: str, ends: Sequence[str], left: float) -> list[str]:
    parts = [text_at(left, 17, f"{name}   {ends[0]}")]
    start = left + 6 * len(name + ends[0]) + 14
    for i in range(24):
        red, green, blue = _colour(i / 23)
        parts.append(
            f'<rect x="{start + 5 * i:.1f}" y="8" width="5.2" height="11" fill="#{red:02x}{green:02x}{blue:02x}"/>'
        )
    return [*parts, text_at(start + 126, 17, f"{ends[1]}   (layers from left to right, updates from top to bottom)")]


def _cell_texts(values: Iterable[float], kl: bool, room: float) -> dict[float, str]:
    """What stands in the cells, as exactly as there is room for in all of them; nothing where there is none.

    An agreement below one never reads as one.
    """

    def text(value: float, digits: int) -> str:
        if kl:
            return short(value, digits)
        return f"{value:g}" if value in (0, 1) else f"{min(value, 1 - 10**-digits):.{digits}f}".removeprefix("0")

    for digits in (3, 2, 1):
        texts = {value: text(value, digits) for value in values}
        if all(5.2 * len(text) - 2.5 * ("." in text) <= room for text in texts.values()):
            return texts
    return {}
