"""Pictures as SVG text: what all of them are drawn with.

An SVG stands alone on a light ground; with `inline` it leaves its colours to the page around it, which holds STYLE.
"""

from __future__ import annotations

import html
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Lines = Sequence[Mapping[str, Any]]
"""The records of one run's metrics.jsonl."""
SERIES = ("#2a6fdb", "#e07a12", "#11936a", "#8a56d6", "#cf3f79", "#0f8fa8", "#a98600", "#868b92")
LIGHT = {"ink": "#1b1c1e", "soft": "#5d6166", "line": "#c9c9c4", "grid": "#eeeeea"}
LIGHT |= {f"s{i}": color for i, color in enumerate(SERIES)}
STYLE = """
.picture text { font: 11px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: var(--soft); }
.picture .name { font-size: 12px; fill: var(--ink); }
.picture .cell { font-size: 9px; } .picture .on-dark { fill: #ffffff; } .picture .on-light { fill: #111111; }
.picture .grid { stroke: var(--grid); } .picture .axis { stroke: var(--line); }
.picture .gap { fill: none; stroke: var(--line); }
""" + " ".join(f".picture .s{i} {{ color: var(--s{i}); }}" for i in range(len(SERIES)))


def number(value: Any) -> float | None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return value if is_number else None


def over_steps(runs: Sequence[Lines], metric: str) -> list[list[float]]:
    """[[step, value], ...] of one run; of several [[step, mean, smallest, largest], ...] over those with a value."""
    at: dict[int, list[float]] = {}
    for line in (line for run in runs for line in run):
        if number(line.get(metric)) is not None:
            at.setdefault(line["step"], []).append(line[metric])
    spread = (lambda v: [min(v), max(v)]) if len(runs) > 1 else (lambda _: [])
    return [[step, statistics.fmean(at[step]), *spread(at[step])] for step in sorted(at)]


def svg(width: float, height: float, title: str, parts: Iterable[str], inline: bool) -> str:
    size = f'class="picture" viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}" role="img"'
    body = "\n".join(parts)
    if inline:
        return f'<svg {size} aria-label="{html.escape(title)}">\n{body}\n</svg>\n'
    style = re.sub(r"var\(--(\w+)\)", lambda name: LIGHT[name[1]], STYLE)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n<title>{html.escape(title)}</title>\n<style>{style}</style>\n'
        f'<rect width="{width:g}" height="{height:g}" fill="#ffffff"/>\n{body}\n</svg>\n'
    )


def text_at(x: float, y: float, text: str, anchor: str = "start", kind: str = "", more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}"{more}>{html.escape(text)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>'


def rect(x: float, y: float, width: float, height: float, paint: str, tip: str) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f"<rect {place} {paint}><title>{html.escape(tip)}</title></rect>"


def short(value: float, digits: int = 2) -> str:
    """0.0123 -> 0.012, 0.000123 -> 1.2e-4."""
    if value == 0 or abs(value) >= 1e-3:
        return f"{value:.{digits}g}"
    mantissa, power = f"{value:.{digits - 1}e}".split("e")
    return f"{mantissa.removesuffix('.0')}e{int(power)}"


def legend(labels: Mapping[int, str], left: float, width: float, y: float) -> tuple[list[str], float]:
    """Swatches {colour: label} from (left, y) on, in rows of this width; the parts, and where the last row ends."""
    parts, x = [], left
    for index, label in labels.items():
        if x > left and x + 24 + 6.4 * len(label) > left + width:
            x, y = left, y + 18
        parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="10" height="10" rx="3" class="s{index % 8}" fill="currentColor"/>'
        )
        parts.append(text_at(x + 16, y + 9.5, label, kind="name"))
        x += 34 + 6.4 * len(label)
    return parts, y + 18


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """About `count` round numbers from low to high."""
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    return [i * step for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten between two of them (as exponents), with 2 and 5 where the range is short."""
    parts = (1, 2, 5) if high - low < 2 else (1,)
    found = [p + math.log10(m) for p in range(math.floor(low), math.ceil(high) + 1) for m in parts]
    found = [tick for tick in found if low - 1e-9 <= tick <= high + 1e-9]
    return found[:: math.ceil(len(found) / 7)]


def line_panel(
    title: str,
    series: Mapping[int, list[list[float]]],
    log: bool,
    left: float,
    top: float,
    width: float,
    height: float,
) -> list[str]:
    parts = [text_at(left, top - 10, title, kind="name")]
    kept = {i: [p for p in points if not log or p[1] > 0] for i, points in series.items()}
    if not any(kept.values()):
        return [*parts, text_at(left, top + 20, "nothing above zero" if log else "no values")]
    scale = math.log10 if log else float
    steps = [p[0] for points in kept.values() for p in points]
    values = [scale(v) for points in kept.values() for p in points for v in p[1:] if not log or v > 0]
    low, high = min(values), max(values)
    room = max((high - low) * 0.06, 0.15 if log else 0.005)
    low, high = low - room, high + room if log or high > 1 else min(high + room, 1)
    first, last = min(steps), max(max(steps), min(steps) + 1)

    def x(step: float) -> float:
        return left + (step - first) / (last - first) * width

    def y(value: float) -> float:
        return top + (high - scale(value)) / (high - low) * height

    for tick in log_ticks(low, high) if log else ticks(low, high):
        at = top + (high - tick) / (high - low) * height
        parts.append(line(left, at, left + width, at, "grid"))
        parts.append(text_at(left - 8, at + 4, short(10**tick, 1) if log else f"{tick:.4g}", "end"))
    parts.append(line(left, top + height, left + width, top + height, "axis"))
    for tick in (t for t in ticks(first, last, 5) if t == int(t)):
        parts.append(text_at(x(tick), top + height + 16, f"{tick:g}", "middle"))
    parts.append(text_at(left + width / 2, top + height + 34, "step", "middle"))
    for i, points in kept.items():
        dash = ' stroke-dasharray="6 4"' if i >= 8 else ""
        band = [p for p in points if len(p) > 2 and (not log or p[2] > 0)]
        if band:
            edge = [(p[0], p[2]) for p in band] + [(p[0], p[3]) for p in reversed(band)]
            corners = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in edge)
            parts.append(f'<polygon points="{corners}" class="s{i % 8}" fill="currentColor" fill-opacity="0.15"/>')
        if len(points) == 1:
            place = f'cx="{x(points[0][0]):.1f}" cy="{y(points[0][1]):.1f}"'
            parts.append(f'<circle {place} r="3.4" class="s{i % 8}" fill="currentColor"/>')
        path = " ".join(f"{x(p[0]):.1f},{y(p[1]):.1f}" for p in points)
        stroke = f'fill="none" stroke="currentColor" stroke-width="2" stroke-linejoin="round"{dash}'
        parts.append(f'<polyline points="{path}" class="s{i % 8}" {stroke}/>')
    return parts
