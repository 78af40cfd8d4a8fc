"""The picture of the mismatch: where in the distribution it sits (papers/000, figure 1)."""

from __future__ import annotations

import math

from megatron_rl.metrics.mismatch import BELOW
from megatron_rl.metrics.svg import Lines, legend, line, log_ticks, number, short, svg, text_at

SHOWN = ("tokens", "abs", "abs_max", "bias")


def by_probability(lines: Lines) -> dict[float, dict[str, float]]:
    """{upper end of a class of p: tokens, abs, abs_max, bias} over all steps; classes without a token are left out."""
    found = {}
    for below in BELOW:
        rows = [[number(row.get(f"mismatch/p<{below:g}/{name}")) for name in SHOWN] for row in lines]
        rows = [row for row in rows if None not in row and row[0]]
        if rows:
            tokens = sum(row[0] for row in rows)
            means = {n: sum(r[0] * r[i] for r in rows) / tokens for i, n in enumerate(SHOWN) if n in ("abs", "bias")}
            found[below] = {"tokens": tokens, "abs_max": max(row[2] for row in rows), **means}
    return found


def probability_svg(lines: Lines, *, width: float = 880, inline: bool = False) -> str:
    """|d log p| of sampled tokens by their probability: mean and largest of each class, the bound 2 e (1 - p) through 99 %
    of the tokens, and the mean of engine - trainer as a mark, filled where the engine says more."""
    classes = by_probability(lines)
    shown = {0: "mean |d|", 4: "largest |d|", 1: "bound 2 e (1 - p)", 2: "mean of engine - trainer (filled: above 0)"}
    parts, top = legend(shown, 52, width - 60, 8)
    left, top, height, right = 52, top + 14, 240, width - 10
    epsilons = [e for row in lines if (e := number(row.get("mismatch/epsilon_p99"))) is not None]
    epsilon = sorted(epsilons)[len(epsilons) // 2] if epsilons else None
    bounds = {below: 2 * epsilon * (1 - _middle(below)) for below in classes} if epsilon else {}
    values = [c[name] for c in classes.values() for name in ("abs", "abs_max")] + list(bounds.values())
    values = [value for value in values if value > 0] or [1.0]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)) + 0.01)

    def y(value: float) -> float:
        return top + (high - math.log10(max(value, 10.0**low))) / (high - low) * height

    for tick in log_ticks(low, high):
        parts.append(line(left, y(10**tick), right, y(10**tick), "grid"))
        parts.append(text_at(left - 8, y(10**tick) + 4, short(10**tick, 1), "end"))
    each = (right - left) / len(BELOW)
    for i, below in enumerate(BELOW):
        x = left + (i + 0.5) * each
        parts.append(text_at(x, top + height + 16, f"< {below:g}", "middle"))
        if below not in classes:
            continue
        found = classes[below]
        tip = f"p < {below:g}: {found['tokens']:,.0f} tokens, " + ", ".join(f"{n} {found[n]:.3g}" for n in SHOWN[1:])
        for name, color, half in (("abs", 0, 14), ("abs_max", 4, 9)):
            stroke = f'class="s{color}" stroke="currentColor" stroke-width="3"'
            at = f'x1="{x - half:.1f}" x2="{x + half:.1f}" y1="{y(found[name]):.1f}" y2="{y(found[name]):.1f}"'
            parts.append(f"<line {at} {stroke}><title>{tip}</title></line>")
        if found["bias"]:
            fill = "currentColor" if found["bias"] > 0 else "none"
            place = f'cx="{x:.1f}" cy="{y(abs(found["bias"])):.1f}" r="4"'
            parts.append(
                f'<circle {place} class="s2" fill="{fill}" stroke="currentColor"><title>{tip}</title></circle>'
            )
        parts.append(text_at(x, top + height + 30, f"{found['tokens']:,.0f}", "middle", "cell"))
    points = " ".join(
        f"{left + (BELOW.index(below) + 0.5) * each:.1f},{y(value):.1f}" for below, value in bounds.items()
    )
    stroke = 'fill="none" stroke="currentColor" stroke-width="1.5" stroke-dasharray="5 4"'
    parts.append(f'<polyline points="{points}" class="s1" {stroke}/>')
    parts.append(line(left, top + height, right, top + height, "axis"))
    caption = "class of the trainer's probability p of the sampled token; below it the number of tokens"
    parts.append(text_at((left + right) / 2, top + height + 48, caption, "middle"))
    return svg(width, top + height + 58, "Difference of log-probs by probability", parts, inline)


def _middle(below: float) -> float:
    """A probability of the class: the geometric middle of the tail's, the arithmetic one above 0.1."""
    index = BELOW.index(below)
    above = BELOW[index - 1] if index else below / 10
    return math.sqrt(above * below) if below <= 0.1 else (above + below) / 2
