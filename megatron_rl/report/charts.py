"""Charts of the report: the declared charts, one more chart for each other metric, and their Vega-Lite specifications."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from megatron_rl.metrics.logger import TIMES
from megatron_rl.report.run_folder import Points


@dataclass(frozen=True)
class Chart:
    """A chart of the report. The page leaves out a chart without data."""

    title: str
    note: str
    series: dict[str, str]
    """{metric: label}. The pattern "a*b" stands for all metrics "a" + anything + "b"; a * in the label is the matched part. If
    the page shows several runs, the chart has only the first series of each run."""
    log: bool | None = False
    """True for a log scale. None: a log scale if all values are above zero and spread over two powers of ten."""
    reach: tuple[float, float] | None = None
    """Range that the value axis covers at least; values outside it extend the axis."""
    kind: Literal["lines", "points", "areas"] = "lines"
    """lines; points (lines with a mark at each value, without smoothing); areas (stacked)."""
    unit: str = ""


def _updates(title: str, note: str, metric: str, **more) -> Chart:
    """Return the chart of a routing metric: its mean over the updates of a rollout batch, and its value in each update."""
    return Chart(title, note, {f"routing/{metric}": "all updates", f"routing/update_*/{metric}": "update *"}, **more)


# fmt: off
SECTIONS: dict[str, tuple[Chart, ...]] = {
    "Curves": (
        Chart("Evaluation", "held-out prompts: mean reward, best of n samples, greedy decoding",
              {"eval/score": "score", "eval/pass@*": "pass@*", "eval/greedy": "greedy"}, reach=(0, 1), kind="points"),
        Chart("Evaluation sets", "mean reward at the sampling temperature, for each set of eval.sets",
              {"eval/*/score": "*"}, reach=(0, 1), kind="points"),
        Chart("Evaluation sets, greedy", "mean reward of one greedy response", {"eval/*/greedy": "*"},
              reach=(0, 1), kind="points"),
        Chart("Different right answers", "among the n responses to a prompt in an evaluation",
              {"eval/distinct@*": "among *"}, kind="points"),
        Chart("Reward", "mean over the rollouts of the step", {"reward/mean": "reward"}),
        Chart("Entropy", "entropy of the policy, nats per token", {"entropy": "entropy"}),
        Chart("Mismatch", "KL divergence from rollout engine to trainer, nats per token",
              {"mismatch/kl": "KL (k3)", "corrected/kl": "tokens that stay in the update"}, log=True),
        Chart("Clip fraction", "share of the tokens with clipped ratio", {"loss/clip_fraction": "clipped"}, reach=(0, 0.01)),
        Chart("Loss", "policy loss of the training; in SFT also the loss on held-out demonstrations",
              {"loss/policy": "loss", "eval/loss": "held out"}),
        Chart("Perplexity", "per token of held-out demonstrations or texts: exp(loss)",
              {"eval/perplexity": "held out"}, log=True, kind="points"),
        Chart("Bits per byte", "on held-out demonstrations or texts; does not depend on the tokenizer",
              {"eval/bits_per_byte": "held out"}, kind="points"),
        Chart("KL to the reference", "nats per token",
              {"kl/reference": "policy before the updates", "kl/sampled": "policy that sampled"}),
        Chart("Gradient norm", "before clipping", {"update/grad_norm": "norm"}, log=True),
        Chart("Throughput", "prompt and response tokens per second",
              {"throughput/tokens_per_s": "tokens/s", "throughput/tokens_per_s_per_gpu": "per GPU of the trainer"}),
        Chart("GPU utilization", "MFU of the updates: model FLOPs as a share of the bf16 peak", {"throughput/mfu": "MFU"}),
        Chart("GPU memory", "GB, in the trainer process that uses most",
              {"memory/peak_gb": "allocated, peak", "memory/reserved_gb": "reserved, peak"}, unit="GB"),
        Chart("Step time by phase", "seconds",
              {f"time/{part}_s": part for part in TIMES if part != "step"}, kind="areas", unit="s"),
    ),
    "Preferences": (
        Chart("Preference loss", "training loss, and loss on held-out comparisons",
              {"preference/loss": "loss", "eval/loss": "held out"}),
        Chart("Accuracy", "share of the pairs whose better response has the higher score",
              {"preference/accuracy": "trained on", "eval/accuracy": "held out"}, reach=(0, 1)),
        Chart("Scores", "of chosen and rejected responses; a policy's score is beta x log-ratio to the reference",
              {"preference/chosen": "chosen", "preference/rejected": "rejected"}),
        Chart("Margin", "score of the chosen response minus score of the rejected response",
              {"preference/margin": "trained on", "eval/margin": "held out"}),
        Chart("Calibration error", "of sigmoid(margin), read as the probability that the chosen response is better",
              {"preference/calibration_error": "trained on", "eval/calibration_error": "held out"}),
        Chart("Log-probs", "sums over whole responses, nats", {
            "preference/chosen_log_probs": "chosen", "preference/rejected_log_probs": "rejected"}),
    ),
    "Conversations": (Chart("Ends of conversations", "shares by reason", {"agent/end_*": "*"}, reach=(0, 1)),),
    "Engine and trainer": (
        Chart("Effective sample size", "of the importance ratios, as a share of the tokens or of the sequences",
              {"mismatch/ess": "tokens", "mismatch/sequence_ess": "sequences"}, reach=(0.95, 1)),
        Chart("Chi-square divergence", "of the trainer from the engine: mean of (ratio - 1)^2",
              {"mismatch/chi2": "all tokens", "corrected/chi2": "tokens that stay in the update"}, log=True),
        Chart("Tokens excluded from the update", "share of the tokens",
              {"corrected/masked": "weight 0", "corrected/vetoed": "by the veto", "corrected/rejected": "by rejection",
               "corrected/bounded": "ratio changed by a bound"},
              reach=(0, 0.01)),
        Chart("Drift of the policy", "KL(engine || policy) after a step, nats per token; it triggers weight syncs",
              {"sync/kl": "KL (k3)"}, log=True),
    ),
    "Routing": (
        _updates("Routing agreement", "experts that replayed route and current router share, mean over tokens and layers",
                 "agreement", reach=(0.98, 1)),
        _updates("Route KL", "recorded router against current router, nats per token and layer", "kl", log=True),
        Chart("Agreement after the first update", "as above, for the updates that follow a change of the routers",
              {"routing/later/agreement": "replayed", "routing/later/agreement_unpredicted": "without prediction"}),
        Chart("Route KL after the first update", "as above, for the updates that follow a change of the routers",
              {"routing/later/kl": "replayed", "routing/later/kl_unpredicted": "without prediction"}, log=True),
        _updates("Predictor loss", "training loss of the predictors, from the second update on", "predictor_loss", log=True),
        Chart("Routing staleness", "soft total variation between recorded router and current router, 0 to 1",
              {"routing/staleness": "staleness"}),
        Chart("Engine agreement", "share of the experts that rollout engine and trainer have in common",
              {"routing/engine_agreement": "share"}, reach=(0.98, 1)),
        Chart("Tokens without a route", "the trainer's router chooses their experts", {"routing/fallback_tokens": "tokens"}),
    ),
    "Experts": (),
    "Other metrics": (),
}
# fmt: on
HEADINGS = {"agent": "Conversations", "preference": "Preferences", "routing": "Routing", "vp2o": "Experts"}
HEADINGS |= dict.fromkeys(("mismatch", "corrected", "pruning", "sync"), "Engine and trainer")
HEADINGS |= dict.fromkeys(("reward", "advantage", "response", "rollout", "loss", "kl", "update", "eval"), "Curves")
"""{first part of a metric's name: heading}, for the metrics that `SECTIONS` does not name."""
NO_CURVES = ("step", "time/step_s", "log/not_finite", "eval/prompts", "mismatch/p<*/*", "routing/deviation_*")
NO_CURVES += ("routing/layer_*/update_*/*",)
_DECLARED = [pattern for charts in SECTIONS.values() for chart in charts for pattern in chart.series]
_DRAWN = re.compile("|".join(re.escape(pattern).replace(r"\*", "[^/]+") for pattern in (*_DECLARED, *NO_CURVES)))
_PART = re.compile(r"/(layer|update)_\d+/")
_STATISTIC = re.compile(r"[_/](mean|median|std|max|min|p\d+)$")


def charts_of(names: Iterable[str]) -> dict[str, list[Chart]]:
    """Return {heading: charts} for the metrics of a run: the charts of `SECTIONS`, and one chart for each other metric.

    The values of a metric for each layer or update, and its statistics (mean, max, p99, ...), share one chart.
    """
    groups: dict[str, dict[str, str]] = {}
    for name in names:
        part, whole = _PART.search(name), _PART.sub("/", name)
        if not _DRAWN.fullmatch(name) and not _DRAWN.fullmatch(whole):
            series = groups.setdefault(_STATISTIC.sub("", whole), {})
            statistic = _STATISTIC.search(whole)
            series.setdefault(whole, statistic[1] if statistic else whole.rpartition("/")[2])
            if part:
                series[name.replace(part[0], f"/{part[1]}_*/")] = f"{part[1]} *"
    charts = {heading: list(declared) for heading, declared in SECTIONS.items()}
    for stem, series in groups.items():
        whole = [metric for metric in series if "*" not in metric]
        title, room = whole[0] if len(whole) == 1 else stem, stem.partition("/")[0]
        kind = "points" if room == "eval" else "lines"
        charts[HEADINGS.get(room, "Other metrics")].append(Chart(title, "", series, log=None, kind=kind))
    return charts


# -- vega ----------------------------------------------------------------------------------------------------------------
# Charts as Vega-Lite specifications: JSON that the page draws in the browser.
# Colors are CSS variables of the page, so that light and dark mode share a specification.

Spec = dict[str, Any]

SERIES = ("#2a6fdb", "#e07a12", "#11936a", "#8a56d6", "#cf3f79", "#0f8fa8", "#a98600", "#868b92")
LIGHT = {"page": "#f6f6f3", "card": "#ffffff", "ink": "#1b1c1e", "soft": "#5d6166", "faint": "#8b9096"}
LIGHT |= {"line": "#e4e4df", "grid": "#eeeeea", "good": "#0b7a4f", "good-soft": "#e2f3ea"}
LIGHT |= {"bad": "#b3382c", "bad-soft": "#fbe9e6"} | {f"s{i}": color for i, color in enumerate(SERIES)}
DARK = {"page": "#131416", "card": "#1c1e21", "ink": "#eceded", "soft": "#a6abb1", "faint": "#7c8187"}
DARK |= {"line": "#2e3135", "grid": "#26292d", "good": "#58cf9b", "good-soft": "#16352a"}
DARK |= {"bad": "#f08a7e", "bad-soft": "#3d211d", "s0": "#6aa2f7", "s1": "#f5a04c", "s2": "#41c394", "s3": "#b48ef2"}
DARK |= {"s4": "#ee77a6", "s5": "#47bfd6", "s6": "#d9ba3f", "s7": "#9a9fa6"}

LABEL = (
    "datum.value && (abs(datum.value) < 1e-3 || abs(datum.value) >= 1e9)"
    " ? format(datum.value, '.3~e') : format(datum.value, ',')"
)
"""Vega expression for tick labels: all digits, but scientific notation for values below 1e-3 or from 1e9 on."""
CONFIG: Spec = {
    "background": None,
    "font": 'system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif',
    "view": {"stroke": None},
    "axis": {"labelColor": "var(--faint)", "labelFontSize": 11, "labelPadding": 6, "title": None, "ticks": False},
    "axisX": {"grid": False, "domainColor": "var(--line)", "labelOverlap": True},
    "axisY": {"domain": False, "gridColor": "var(--grid)", "tickCount": 4, "labelExpr": LABEL},
    "axisQuantitative": {"labelFlush": False},
    "text": {"fill": "var(--soft)", "fontSize": 11},
    "title": {"color": "var(--ink)", "fontSize": 12, "fontWeight": 500, "anchor": "start"},
    "legend": {"labelColor": "var(--ink)", "title": None, "orient": "top", "columns": 4, "labelLimit": 300},
}
STEPS = {"field": "step", "type": "quantitative", "axis": {"labelExpr": LABEL, "tickMinStep": 1, "tickCount": 6}}
STEPS |= {"scale": {"nice": False, "zero": False}}
SMOOTHED_FROM = 25
"""Smallest number of points at which a series is shown with its running mean."""
ROUNDED = ("share", "value", "abs", "abs_max", "bound", "bias")
MOST_ROWS, MOST_VALUES = 1000, 3000
"""Limits on the steps and on the values of a chart. Above these, a chart shows means over equal groups of successive steps."""


def color(index: int) -> str:
    """Return the CSS color of series `index`; colors repeat after the last one."""
    return f"var(--s{index % len(SERIES)})"


def shade(position: int, last: int) -> str:
    """Return the CSS color of series `position` (1 to `last`) in a gradient over layers or updates; 0 stands for their mean."""
    share = 100 * (position - 1) / max(last - 1, 1)
    return f"color-mix(in oklab, var(--s0), var(--s4) {share:.0f}%)" if position else "var(--ink)"


def table(series: Sequence[Points]) -> list[dict[str, float]]:
    """Return rows {"step", "s0", "s1", ...}; a key is missing if its series has no value at the step.

    If there are too many steps, each row is the mean over a group of consecutive steps.
    """
    at: dict[int, dict[str, float]] = {}
    for i, found in enumerate(series):
        for step, value in found:
            at.setdefault(step, {"step": step})[f"s{i}"] = value
    rows = [at[step] for step in sorted(at)]
    most = min(MOST_ROWS, max(60, MOST_VALUES // max(len(series), 1)))
    size = -(-len(rows) // most)
    pieces = [rows[i : i + size] for i in range(0, len(rows), size)] if rows else []
    return [
        {name: piece[-1]["step"] if name == "step" else _mean(piece, name) for name in _names(piece)}
        for piece in pieces
    ]


def _names(piece: Sequence[Mapping[str, float]]) -> dict[str, None]:
    return dict.fromkeys(name for row in piece for name in row)


def _mean(piece: Sequence[Mapping[str, float]], name: str) -> float:
    return float(f"{statistics.fmean(row[name] for row in piece if name in row):.6g}")


def lines(
    series: Sequence[Points],
    colors: Sequence[str],
    *,
    log: bool,
    reach: Sequence[float] | None,
    marks: bool,
    apart: bool = False,
) -> Spec:
    """Return a line chart over steps, with a vertical line at the step under the mouse.

    A long series is a thin line with its running mean drawn over it. log: the value axis is logarithmic, if the largest value
    is at least 5 times the smallest. reach: range that the value axis covers at least. marks: each value has a mark and nothing
    is smoothed. apart: with marks, the second line is broad and pale and lies below the first, and later lines are dashed.
    Equal lines therefore stay visible.
    """
    rows, fields = table(series), [f"s{i}" for i in range(len(series))]
    values = [value for found in series for _, value in found if value > 0 or not log]
    log = log and bool(values) and max(values) >= 5 * min(values)
    y: Spec = {"field": "value", "type": "quantitative"}
    y |= log_axis(min(values), max(values)) if log else {"scale": {"zero": _from_zero(values), "nice": True}}
    if reach:
        y["scale"] |= {"domain": [min(*reach, *values), max(*reach, *values)]}
    above = " && datum.value > 0" if log else ""
    fold = [{"fold": fields, "as": ["series", "value"]}, {"filter": f"isValid(datum.value){above}"}]
    paint = {"field": "series", "type": "nominal", "legend": None, "scale": {"domain": fields, "range": list(colors)}}
    mark = {"type": "line", "strokeWidth": 2, "strokeJoin": "round", "strokeCap": "round"}
    thin = {"strokeWidth": 1, "opacity": 0.32 if len(series) <= 4 else 0.15}
    if marks:
        styles: list[Spec] = [{"point": {"size": 36, "filled": True}} for _ in fields]
        if apart:
            for style in styles[1:2]:
                style |= {"strokeWidth": 7, "opacity": 0.4}
            for style in styles[2:]:
                style |= {"strokeDash": [3, 5]}
        only = [[{"filter": f"datum.series == '{field}'"}] for field in fields]
        layers = [{"mark": mark | style, "transform": one} for style, one in zip(styles, only, strict=True)]
        layers[:2] = layers[1::-1] if apart else layers[:2]  # the broad line is drawn first, below the others
    elif max(map(len, series)) >= SMOOTHED_FROM:
        half = max(1, round(0.025 * len(rows)))
        window = {"window": [{"op": "mean", "field": "value", "as": "mean"}], "frame": [-half, half]}
        window |= {"sort": [{"field": "step"}], "groupby": ["series"]}
        smooth = {"mark": mark, "transform": [window], "encoding": {"y": y | {"field": "mean"}}}
        layers = [{"mark": mark | thin}, smooth]
    else:
        layers = [{"mark": mark}]
    shared = {"x": STEPS, "y": y, "color": paint}
    return _over_steps(rows, fold, [layer | {"encoding": shared | layer.get("encoding", {})} for layer in layers])


def log_axis(low: float, high: float) -> Spec:
    """Return a log scale with grid lines at powers of ten; a short range also has lines at 2 and 5 times these powers."""
    parts = (1, 2, 5) if high < 300 * low else (1,)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [tick for p in powers for m in parts if low <= (tick := float(f"{m}e{p}")) <= high]
    axis = {"values": ticks[:: math.ceil(len(ticks) / 7) or 1]}
    return {"scale": {"type": "log", "nice": False, "padding": 10}, "axis": axis}


def areas(series: Sequence[Points], colors: Sequence[str]) -> Spec:
    """Return a chart over steps with the series as stacked areas."""
    fields = [f"s{i}" for i in range(len(series))]
    encoding = {
        "x": STEPS,
        "y": {"field": "value", "type": "quantitative", "stack": "zero"},
        "color": {"field": "series", "legend": None, "scale": {"domain": fields, "range": list(colors)}},
        "order": {"field": "series"},
    }
    mark = {"type": "area", "interpolate": "step", "opacity": 0.86}
    stacked = [{"fold": fields, "as": ["series", "value"]}, {"calculate": "datum.value || 0", "as": "value"}]
    return _over_steps(table(series), stacked, [{"mark": mark, "encoding": encoding}])


def _over_steps(rows: list[dict[str, float]], transform: list[Spec], layers: list[Spec]) -> Spec:
    near = {"name": "near", "select": {"type": "point", "fields": ["step"], "nearest": True}}
    near["select"] |= {"on": "pointermove", "clear": "pointerout"}
    rule = {
        "mark": {"type": "rule", "color": "var(--faint)", "tooltip": {"content": "data"}},
        "params": [near],
        "encoding": {"x": STEPS, "opacity": {"condition": {"param": "near", "empty": False, "value": 1}, "value": 0}},
    }
    layers = [layer | {"transform": transform + layer.get("transform", [])} for layer in layers]
    return {"data": {"values": rows}, "layer": [*layers, rule]}


def _from_zero(values: Sequence[float]) -> bool:
    return min(values) <= 0 <= max(values) or 0 < min(values) < 0.4 * max(values)


def bars(tails: Mapping[str, Sequence[float | None]], colors: Mapping[str, str]) -> Spec:
    """Return a bar chart of shares on a log axis: one bar per run for each number J in `deviation_tails`.

    tails: {run: shares from `deviation_tails`}. Each bar shows its share as text. A share of zero has no bar.
    """
    ids = {run: f"s{i}" for i, run in enumerate(colors)}  # names of runs could break a Vega expression
    rows = [
        {"slots": j, "run": run, "series": ids[run], "share": share, "text": short(share)}
        for run, shares in tails.items()
        for j, share in enumerate(shares)
        if share is not None
    ]
    low = min([row["share"] for row in rows if row["share"]], default=0.1) / 3
    scale = {"domain": list(ids.values()), "range": list(colors.values())}
    paint = {"field": "series", "legend": None, "scale": scale}
    y: Spec = {"field": "top", "type": "quantitative", **log_axis(low, 1.0)}
    y["scale"] |= {"domain": [low, 1], "padding": 0}
    bar = {"mark": "bar", "transform": [{"filter": "datum.share > 0"}]}
    return {
        "data": {"values": rows},
        "transform": [{"calculate": f"max(datum.share, {low})", "as": "top"}],
        "encoding": {
            "x": {"field": "slots", "type": "ordinal", "axis": {"labelAngle": 0}},
            "xOffset": {"field": "series", "sort": list(ids.values())},
            "y": y,
            "tooltip": _tip("run", "slots", "share"),
        },
        "layer": [
            bar | {"encoding": {"y2": {"datum": low}, "color": paint}},
            {"mark": {"type": "text", "dy": -7}, "encoding": {"text": {"field": "text"}}},
        ],
    }


def _tip(*fields: str) -> list[Spec]:
    return [{"field": field, "format": ".4~g"} if field in ROUNDED else {"field": field} for field in fields]


def heat(values: Mapping[tuple[int, int], float], ends: tuple[float, float], *, kl: bool) -> Spec:
    """Return a heat map with a cell for each (layer, update). Light cells are near to the current router.

    kl: True: values are KL divergences (log color scale, small values are light); False: values are agreements.
    ends: ends of the color scale (`heat_ends`).
    """
    rows = [
        {"layer": layer, "update": update, "value": value, "text": cell_text(value, kl=kl)}
        for (layer, update), value in sorted(values.items())
    ]
    layers, updates = (len({row[name] for row in rows}) for name in ("layer", "update"))
    scale = {"domain": list(ends), "scheme": "viridis", "reverse": kl, "clamp": True, "type": "log" if kl else "linear"}
    legend = {"orient": "top", "direction": "horizontal", "gradientLength": 160, "gradientThickness": 10}
    legend |= {"labelColor": "var(--faint)", "values": list(ends), "labelExpr": LABEL}
    shown = {"field": "shown", "type": "quantitative", "scale": scale, "legend": legend}
    middle = math.sqrt(ends[0] * ends[1]) if kl else sum(ends) / 2
    ink = {"condition": {"test": f"datum.shown {'>' if kl else '<'} {middle}", "value": "#fff"}, "value": "#111"}
    cell = {"mark": {"type": "rect", "stroke": "var(--card)"}, "encoding": {"color": shown}}
    text = {"mark": {"type": "text", "fontSize": 9}, "encoding": {"text": {"field": "text"}, "color": ink}}
    return {
        "data": {"values": rows},
        "height": 21 * updates,
        "transform": [{"calculate": f"max(datum.value, {ends[0]})", "as": "shown"}],  # a KL of zero is at the light end
        "encoding": {
            "x": {"field": "layer", "type": "ordinal", "axis": {"labelAngle": 0, "labelOverlap": True}},
            "y": {"field": "update", "type": "ordinal", "axis": {"labelExpr": "datum.label"}},
            "tooltip": _tip("layer", "update", "value"),
        },
        "layer": [cell, text] if layers <= 24 else [cell],
    }


def heat_ends(values: Sequence[float], *, kl: bool) -> tuple[float, float]:
    """Return round ends of a color scale: powers of ten for a KL divergence, multiples of 0.05 for an agreement."""
    if kl:
        powers = [math.log10(value) for value in values if value > 0] or [-1.0]
        low = math.floor(min(powers))
        return 10.0**low, 10.0 ** max(math.ceil(max(powers)), low + 1)
    low, high = math.floor(min(values) * 20 + 1e-9), math.ceil(max(values) * 20 - 1e-9)
    return (low if low < high else low - 1) / 20, max(low, high) / 20


def cell_text(value: float, *, kl: bool) -> str:
    """Format a value with three digits (a KL divergence with two). An agreement below 1 never reads as 1."""
    if kl:
        return short(value)
    return f"{value:g}" if value in (0, 1) else f"{min(value, 0.999):.3f}".removeprefix("0")


def short(value: float) -> str:
    """Format a number with two digits: 0.0123 -> 0.012, 0.000123 -> 1.2e-4."""
    if value == 0 or abs(value) >= 1e-3:
        return f"{value:.2g}"
    mantissa, power = f"{value:.1e}".split("e")
    return f"{mantissa.removesuffix('.0')}e{int(power)}"


def probability(classes: Mapping[float, Mapping[str, float]], bounds: Mapping[float, float | None]) -> Spec:
    """Return the chart of |d log p| of sampled tokens by their probability (figure 1 of "Taming the Tail", Li et al.).

    For each class of probabilities, marks show the mean and the largest value, and a dashed line shows the bound. A dot shows
    the absolute value of the mean difference engine - trainer. The dot is filled if the mean difference is above 0.
    """
    rows = [
        {"class": f"< {below:g}|{found['tokens']:,.0f}", **found, "bound": bounds[below], "size": abs(found["bias"])}
        for below, found in classes.items()
    ]
    heights = [row[name] for row in rows for name in ("abs", "abs_max", "bound") if row[name]] or [1.0]
    low, high = (10.0 ** cut(math.log10(end)) for cut, end in ((math.floor, min(heights)), (math.ceil, max(heights))))
    axis = log_axis(low, high)
    axis["scale"] |= {"domain": [low, high], "clamp": True}

    def layer(field: str, index: int, **mark: Any) -> Spec:
        y = {"field": field, "type": "quantitative", **axis}
        return {
            "mark": {"color": color(index), "opacity": 1, **mark},
            "transform": [{"filter": f"datum.{field} > 0"}],
            "encoding": {"y": y},
        }

    dot = layer("size", 2, type="point", size=60)
    dot["encoding"]["fill"] = {"condition": {"test": "datum.bias > 0", "value": color(2)}, "value": "transparent"}
    x = {
        "field": "class",
        "type": "ordinal",
        "sort": None,
        "axis": {"labelAngle": 0, "labelExpr": "split(datum.label, '|')"},
    }
    return {
        "data": {"values": rows},
        "encoding": {"x": x, "tooltip": _tip("tokens", "abs", "abs_max", "bound", "bias")},
        "layer": [
            layer("bound", 1, type="line", strokeDash=[5, 4], strokeWidth=1.5),
            layer("abs", 0, type="tick", thickness=3, width=28),
            layer("abs_max", 4, type="tick", thickness=3, width=18),
            dot,
        ],
    }
