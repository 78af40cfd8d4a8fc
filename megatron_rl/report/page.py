"""Self-contained HTML page about a run, finished or not, or about several runs side by side."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import vl_convert
import yaml
from jinja2 import Environment, FileSystemLoader
from rich.console import Console

from megatron_rl.errors import UserError
from megatron_rl.metrics import attribution
from megatron_rl.metrics.trackers import TrackedRun, Tracker, Trackers, tracker_class
from megatron_rl.report import charts as vega
from megatron_rl.report.charts import Chart, charts_of
from megatron_rl.report.run_folder import (
    RunLog,
    before_after,
    by_probability,
    compared,
    deviation_tails,
    evaluations,
    heat_map,
    named,
    points,
    probability_bound,
    read_run,
    repeated,
    side_by_side,
)

MOST_SAMPLE_STEPS = 12
MOST_CHARACTERS = 3000


@dataclass
class Card:
    """A chart that is ready to draw. The script of the page reads it as JSON."""

    title: str
    note: str
    spec: dict[str, Any]
    legend: list[tuple[str, str]]
    """(label, color) of each series of the chart, in the order of the fields s0, s1, ..."""
    unit: str = ""
    wide: bool = False


def report_command(folders: Sequence[Path], upload: bool = False) -> None:
    """Write the page, then print the evaluations of the runs and the path of the page.

    upload: also attach the page to each run in its trackers. Errors: UserError as for `write_report`, or if a run has no
    tracker that stores files.
    """
    page, console = write_report(folders), Console()
    for table in filter(None, [*map(before_after, folders), compared(folders)]):
        console.print(table)
    print(f"report: {page}")
    for folder in folders if upload else []:
        _upload(page, folder)


def _upload(page: Path, folder: Path) -> None:
    run = read_run(folder)
    project, names = run.setting("logging.project", "megatron_rl"), run.setting("logging.trackers", [])
    storing = [name for name in names if tracker_class(name).add_file is not Tracker.add_file]
    if not storing:
        raise UserError(f"report: --upload: no tracker of {folder} stores files (logging.trackers: {names})")
    tracked = TrackedRun(run.name, project, folder, run.last_step, run.config)
    trackers = Trackers(tracked, storing, print)
    print(f"report: attached in {', '.join(trackers.add_file(page)) or 'no tracker'}")
    trackers.close()


def write_report(run_dirs: Path | str | Sequence[Path | str]) -> Path:
    """Write the page and return its path: report.html in the run's folder, or beside the first of several run folders.

    Errors: UserError if a folder holds no run or if the page cannot be written.
    """
    folders = [Path(run_dirs)] if isinstance(run_dirs, (str, Path)) else [Path(folder) for folder in run_dirs]
    if not folders:
        raise UserError("report: no run folder is given; name at least one")
    runs = [read_run(folder) for folder in folders]
    if len({run.name for run in runs}) < len(runs):
        runs = [replace(run, name=str(run.folder)) for run in runs]
    path = (folders[0] if len(folders) == 1 else folders[0].parent) / "report.html"
    hidden = repeated([run.lines for run in runs])
    charts = charts_of(dict.fromkeys(metric for run in runs for metric in run.metrics))
    sections = {name: _section(runs, hidden, name, found) for name, found in charts.items()}
    cards = [asdict(card) for section in sections.values() for card in section["cards"]]
    page = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True)
    page.filters |= {"short": _short, "shortened": _shortened}
    text = page.get_template("report.html").render(
        runs=runs,
        facts=_facts(runs[0]) if len(runs) == 1 else [],
        tiles=_tiles(runs[0]) if len(runs) == 1 else [],
        compared=side_by_side(runs),
        evaluations=[(run, title, found) for run in runs for title, found in evaluations(run.lines)],
        differences=_differences(runs),
        sections=sections,
        cards={"config": vega.CONFIG, "cards": cards},
        attributions=[found for run in runs if (found := attribution.load(run.folder))],
        attribution=attribution,
        leading={run.name: leading(run.samples) for run in runs if run.samples},
        samples={group: rows for run in runs for group, rows in _samples(run, len(runs) > 1).items()},
        configs={
            run.name: yaml.safe_dump(run.config, sort_keys=False) if run.config else "no config.yaml" for run in runs
        },
        smoothed=any(len(run.lines) >= vega.SMOOTHED_FROM for run in runs),
        themes={"light": vega.LIGHT, "dark": vega.DARK},
        details=_details,
        library=_library(),
    )
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"report {path}: {error.strerror}") from None
    return path


@functools.cache
def _library() -> str:
    """Return Vega, Vega-Lite and Vega-Embed as one script. Building it takes about a second."""
    return vl_convert.javascript_bundle()  # pyright: ignore[reportCallIssue]  # its stub lacks the default


def _short(value: float) -> str:
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{value:.1e}"


def _shortened(text: object) -> str:
    text = str(text)
    cut, half = len(text) - MOST_CHARACTERS, MOST_CHARACTERS // 2
    return text if cut <= 0 else f"{text[:half]}\n[... {cut:,} characters ...]\n{text[-half:]}"


def _facts(run: RunLog) -> list[str]:
    facts = [
        Path(str(run.setting("model.path", ""))).name,
        run.setting("data.task", ""),
        f"{run.setting('algorithm.advantage', '')} / {run.setting('algorithm.loss', '')}".strip(" /"),
    ]
    if run.setting("batch.prompts_per_step"):
        facts.append(
            f"{run.setting('batch.prompts_per_step')} prompts x {run.setting('batch.samples_per_prompt')} samples"
        )
    if run.setting("optimizer.lr"):
        facts.append(f"lr {float(run.setting('optimizer.lr')):g}")
    sizes = {"TP": "tensor", "PP": "pipeline", "CP": "context", "EP": "expert"}
    layout = {short: run.setting(f"parallel.{key}", 1) for short, key in sizes.items()}
    facts.append(" ".join(f"{short}{size}" for short, size in layout.items() if size != 1))
    return [fact for fact in [*facts, str(run.setting("precision.train", ""))] if fact]


def _tiles(run: RunLog) -> list[tuple[str, float | None, float, str, float]]:
    """Return (label, value before, value, note, change) for each number at the top of the page."""
    tiles = []
    if scores := points(run.lines, "eval/score"):
        (first_step, first), (last_step, last) = scores[0], scores[-1]
        change, note = last - first, f"{last - first:+.3f} from step {first_step} to {last_step}"
        tiles.append(
            ("Evaluation score", first, last, note, change)
            if len(scores) > 1
            else ("Evaluation score", None, first, f"at step {first_step}", 0.0)
        )
    if rewards := [value for _, value in points(run.lines, "reward/mean")]:
        recent = rewards[-max(1, len(rewards) // 10) :]
        note = f"mean of the last {len(recent)} steps" if len(recent) > 1 else "last step"
        tiles.append(("Reward", None, statistics.fmean(recent), note, 0.0))
    for metric, label, note in (
        ("mismatch/kl", "Mismatch KL", "median, nats per token"),
        ("time/step_s", "Seconds per step", "median"),
        ("throughput/tokens_per_s", "Tokens per second", "median"),
    ):
        if values := [value for _, value in points(run.lines, metric)]:
            tiles.append((label, None, statistics.median(values), note, 0.0))
    return tiles


def _differences(runs: list[RunLog]) -> dict[str, list[Any]]:
    def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
        parts = (flat(v, f"{prefix}{k}.") if isinstance(v, dict) else {f"{prefix}{k}": v} for k, v in tree.items())
        return {key: value for part in parts for key, value in part.items()}

    configs = [flat(run.config) for run in runs]
    rows = {key: [config.get(key) for config in configs] for config in configs for key in config}
    return {k: v for k, v in rows.items() if k not in ("name", "runs_dir") and any(value != v[0] for value in v)}


def _section(runs: list[RunLog], hidden: set[str], name: str, charts: Sequence[Chart]) -> dict[str, list[Any]]:
    """Return the cards of a section, and (title, note, value) of each chart whose series are all constant."""
    cards, constants = [], []
    for chart in charts:
        if chart.kind == "areas" and len(runs) > 1:  # the stacked areas of several runs would hide each other
            chart = replace(chart, title="Step time", series={"time/step_s": "step"}, kind="lines")
        series = _series(runs, hidden, chart)
        if series and all(len({value for _, value in found}) == 1 for _, _, found in series):
            constants += [
                (chart.title + (f": {label}" if len(series) > 1 else ""), chart.note, found[0][1])
                for label, _, found in series
            ]
        elif series:
            cards.append(_card(chart, series, apart=len(runs) == 1))
    cards += {"Engine and trainer": _probability_cards, "Routing": _routing_cards}.get(name, lambda _: [])(runs)
    narrow = [card for card in cards if not card.wide]
    if len(narrow) % 2:
        narrow[-1].wide = True  # fills the empty place in the grid
    return {"cards": cards, "constants": constants}


Series = tuple[str, str, list[tuple[int, float]]]
"""One series of a chart: (label, color, points)."""


def _series(runs: list[RunLog], hidden: set[str], chart: Chart) -> list[Series]:
    """Return the series of a chart that have data: all series of a single run, or the first series of each of several runs."""
    series: list[Series] = []
    for index, run in enumerate(runs):
        names = {
            metric: label.replace("*", star)
            for pattern, label in chart.series.items()
            for metric, star in named(run.metrics, pattern).items()
            if metric not in hidden and points(run.lines, metric)
        }
        shaded = (
            chart.kind == "lines" and len(names) > 1 and any("*" in label for label in list(chart.series.values())[1:])
        )  # series of updates or layers
        for position, (metric, label) in enumerate(names.items()):
            found = points(run.lines, metric)
            if position and (len(runs) > 1 or (shaded and found == series[0][2])):  # a single update equals the mean
                continue
            if chart.log and all(value <= 0 for _, value in found):
                label += " (zero, not on a log scale)"
            if len(runs) > 1:
                series.append((run.name, vega.color(index), found))
            else:
                series.append((label, vega.shade(position, len(names) - 1) if shaded else vega.color(position), found))
    return series


def _card(chart: Chart, series: list[Series], *, apart: bool) -> Card:
    labels, colors, found = zip(*series, strict=True)
    legend = list(zip(labels, colors, strict=True))
    if chart.kind == "areas":
        return Card(chart.title, chart.note, vega.areas(found, colors), legend, chart.unit, wide=True)
    values = [value for points_of in found for _, value in points_of]
    log = 0 < 100 * min(values) <= max(values) if chart.log is None else chart.log
    spec = vega.lines(found, colors, log=log, reach=chart.reach, marks=chart.kind == "points", apart=apart)
    return Card(chart.title, chart.note, spec, legend, chart.unit)


def _probability_cards(runs: list[RunLog]) -> list[Card]:
    labels = ("mean |d|", "largest |d|", "bound 2 e (1 - p)", "mean of engine - trainer (filled if positive)")
    legend = [(label, vega.color(i)) for label, i in zip(labels, (0, 4, 1, 2), strict=True)]
    cards = []
    for run in runs:
        if classes := by_probability(run.lines):
            bounds = {below: probability_bound(run.lines, below) for below in classes}
            title = "Mismatch by probability" + (f": {run.name}" if len(runs) > 1 else "")
            note = "sampled tokens of all steps by the trainer's p; e is the logit error that bounds 99 % of the tokens"
            cards.append(Card(title, note, vega.probability(classes, bounds), legend, wide=True))
    return cards


def _routing_cards(runs: list[RunLog]) -> list[Card]:
    cards, when = [], "; mean of the last quarter of the steps"
    colors = {run.name: vega.color(i) for i, run in enumerate(runs)}
    if tails := {run.name: shares for run in runs if (shares := deviation_tails(run.lines))}:
        note = "share of the (token, layer) pairs by the number of slots in which replayed and current experts differ"
        legend = [(name, colors[name]) for name in tails]
        cards.append(Card("Deviation tails", note + when, vega.bars(tails, colors), legend, wide=True))
    for metric, title in (("agreement", "Agreement by layer and update"), ("kl", "Route KL by layer and update")):
        maps = {run.name: found for run in runs if (found := heat_map(run.lines, metric))}
        kl = metric == "kl"
        ends = vega.heat_ends([value for found in maps.values() for value in found.values()], kl=kl) if maps else (0, 1)
        for name, found in maps.items():
            note = "light cells are near to the current router" + (", log scale" if kl else "") + when
            heading = title + (f": {name}" if len(runs) > 1 else "")
            cards.append(Card(heading, note, vega.heat(found, ends, kl=kl), [], wide=True))
    return cards


def _samples(run: RunLog, many: bool) -> dict[str, list[dict[str, Any]]]:
    """Return {title of a step: its sample rollouts} for evenly spaced steps, including the first and the last step.

    many: the page shows several runs, so titles contain the name of the run.
    """
    steps = sorted({sample["step"] for sample in run.samples})
    if len(steps) > MOST_SAMPLE_STEPS:
        every = (len(steps) - 1) / (MOST_SAMPLE_STEPS - 1)
        steps = [steps[round(i * every)] for i in range(MOST_SAMPLE_STEPS)]
    prefix = f"{run.name}, " if many else ""
    return {f"{prefix}step {step}": [s for s in run.samples if s["step"] == step] for step in steps}


def _details(sample: dict[str, Any]) -> str:
    """Describe how the response ended, whether training skipped it, and its reward parts if there are several."""
    parts = {name.removeprefix("reward/"): value for name, value in sample.items() if name.startswith("reward/")}
    shown = [f"{name} {value:g}" for name, value in parts.items() if isinstance(value, (int, float))]
    masked = ["not trained on"] if sample.get("masked") else []
    return "\n".join([str(sample.get("finish", "")), *masked, *(shown if len(shown) > 1 else [])])


def leading(samples: Iterable[dict[str, Any]], most: int = 4) -> dict[str, list[dict[str, Any]]]:
    """Return two lists of a run's responses, each of at most `most`: those with the highest reward, and the most frequent.

    Each response has its number of occurrences over all steps.
    """
    found: dict[str, dict[str, Any]] = {}
    counted: set[tuple[int, str]] = set()
    for sample in samples:
        step, text, reward = sample["step"], sample["response"], sample.get("reward")
        one = found.setdefault(text, {"sample": sample, "count": 0, "best": None, "first": step})
        if (step, text) not in counted:  # a response to two prompts is listed twice, each time with the whole count
            counted.add((step, text))
            one["count"] += sample.get("count", 1)
        if reward is not None and (one["best"] is None or reward >= one["best"]):
            one |= {"sample": sample, "best": reward}
        one["last"] = step
    scored = [one for one in found.values() if one["best"] is not None]
    paid = sorted(scored, key=lambda o: (-o["best"], -o["count"], -o["last"]))
    frequent = sorted((o for o in found.values() if o["count"] > 1), key=lambda o: -o["count"])
    return {"Highest reward": paid[:most], "Most frequent": frequent[:most]}
