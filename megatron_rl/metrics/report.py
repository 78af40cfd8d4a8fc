"""One self-contained HTML page about a run, finished or not, or about several runs side by side."""

from __future__ import annotations

import html
import json
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from string import Template
from typing import Any

import yaml

from megatron_rl.config import parse_yaml
from megatron_rl.errors import UserError
from megatron_rl.metrics import attribution
from megatron_rl.metrics.charts import CHARTS, EXPERT_CHARTS, MISMATCH_CHARTS, ROUTING_CHARTS
from megatron_rl.metrics.logger import METRICS_FILE, SAMPLES_FILE, read_json_lines
from megatron_rl.metrics.mismatch_pictures import by_probability, probability_svg
from megatron_rl.metrics.routing_pictures import deviation_svg, deviation_tails, heat_maps, heatmap_svg
from megatron_rl.metrics.svg import STYLE

MOST_POINTS = 1500
"""A longer series is averaged over even pieces."""
MOST_SAMPLE_STEPS = 12
MOST_CHARACTERS = 6000

PICTURE_WIDTH = 1080


@dataclass(frozen=True)
class RunLog:
    name: str
    folder: Path
    config: dict[str, Any]
    lines: list[dict[str, Any]]
    samples: list[dict[str, Any]]

    def points(self, metric: str) -> list[list[float]]:
        """[[step, value], ...] where the metric has a value; at most MOST_POINTS, averaged over even pieces."""
        found = [[line["step"], line[metric]] for line in self.lines if isinstance(line.get(metric), (int, float))]
        size = -(-len(found) // MOST_POINTS)
        if size <= 1:
            return found
        pieces = [found[i : i + size] for i in range(0, len(found), size)]
        return [[piece[-1][0], statistics.fmean(value for _, value in piece)] for piece in pieces]

    @cached_property
    def metrics(self) -> list[str]:
        return sorted({name for line in self.lines for name in line})

    def setting(self, key: str, default: Any = None) -> Any:
        value: Any = self.config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return default if value is None else value

    @property
    def last_step(self) -> int:
        return self.lines[-1]["step"] if self.lines else 0


def write_report(run_dirs: Path | str | Sequence[Path | str], output: Path | str | None = None) -> Path:
    """Write the page and return its path: report.html in the run's folder, or beside the first of several runs.

    Errors: UserError where a folder holds no run, or the page cannot be written.
    """
    folders = [Path(run_dirs)] if isinstance(run_dirs, (str, Path)) else [Path(folder) for folder in run_dirs]
    if not folders:
        raise UserError("report: name at least one run's folder")
    runs = [_read(folder) for folder in folders]
    if len({run.name for run in runs}) < len(runs):
        runs = [replace(run, name=str(run.folder)) for run in runs]
    charts = (
        _charts(runs, CHARTS, "charts")
        + _charts(runs, MISMATCH_CHARTS, "mismatch")
        + _probability_pictures(runs)
        + _charts(runs, ROUTING_CHARTS, "routing")
        + _routing_pictures(runs)
        + _charts(runs, EXPERT_CHARTS, "experts")
    )
    path = Path(output) if output else (folders[0] if len(folders) == 1 else folders[0].parent) / "report.html"
    template = Template((Path(__file__).parent / "report.html").read_text(encoding="utf-8"))
    many = len(runs) > 1
    heading = " · ".join(_escape(run.name) for run in runs) if many else _escape(runs[0].name) + _state(runs[0])
    page = template.substitute(
        title=_escape(" · ".join(run.name for run in runs)) + " - megatron_rl",
        heading=heading,
        facts="".join(f"<span>{_escape(fact)}</span>" for fact in ([] if many else _facts(runs[0]))),
        body=_body(runs, charts),
        picture_style=STYLE,
        footer="megatron_rl · thin lines are single steps, thick ones their exponential mean"
        if any(len(run.lines) >= 25 for run in runs)
        else "megatron_rl",
        data=_script_json({"charts": charts, "samples": _samples(runs), "good": 0.5}),
    )
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UserError(f"report {path}: {error.strerror}") from None
    return path


def _read(folder: Path) -> RunLog:
    config_file = folder / "config.yaml"
    if not config_file.exists() and not (folder / METRICS_FILE).exists():
        raise UserError(f"report: {folder} holds no run (neither config.yaml nor {METRICS_FILE})")
    try:
        config = parse_yaml(config_file.read_text()) if config_file.exists() else {}
    except yaml.YAMLError as error:
        raise UserError(f"{config_file}: not YAML: {' '.join(str(error).split())}") from None
    config = config if isinstance(config, dict) else {}
    samples = [s for s in read_json_lines(folder / SAMPLES_FILE) if isinstance(s.get("response"), str)]
    name = str(config.get("name") or folder.resolve().name)
    return RunLog(name, folder, config, read_json_lines(folder / METRICS_FILE), samples)


def _escape(text: object) -> str:
    return html.escape(str(text))


def _script_json(value: Any) -> str:
    """JSON that cannot end its <script> element, whatever the rollouts contain."""
    return json.dumps(value).replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _number(value: float) -> str:
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{value:.1e}"


def _state(run: RunLog) -> str:
    total = run.setting("steps")
    if total is None or run.last_step >= total:
        return f'<span class="state">{run.last_step} steps</span>'
    return f'<span class="state open">step {run.last_step} of {_escape(total)}</span>'


def _facts(run: RunLog) -> list[str]:
    """The config in one line."""
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
    layout = [f"{short}{run.setting(f'parallel.{key}', 1)}" for short, key in sizes.items()]
    facts.append(" ".join(size for size in layout if not size.endswith("P1")) or "")
    facts.append(str(run.setting("precision.train", "")))
    return [fact for fact in facts if fact]


def _body(runs: list[RunLog], charts: list[dict[str, Any]]) -> str:
    parts = []
    if len(runs) == 1:
        parts.append(_tiles(runs[0]))
    parts.append(_eval_table(runs))
    if len(runs) > 1:
        parts.append(_differences(runs))
    if any(run.lines for run in runs):
        parts.append('<h2>Curves</h2><div class="charts" id="charts"></div>')
    else:
        parts.append('<div class="card empty" id="charts">No step has been logged yet.</div>')
    sections = (("mismatch", "Engine and trainer"), ("routing", "Routing"), ("experts", "Experts"))
    for name, title in sections:
        if any(chart["section"] == name for chart in charts):
            parts.append(f'<h2>{title}</h2><div class="charts" id="{name}"></div>')
    for run in runs:
        if found := attribution.load(run.folder):
            parts.append(attribution.section(found))
    if any(run.samples for run in runs):
        parts.append(
            '<div class="head"><h2>Sample rollouts</h2><label>from <select id="sample-step"></select></label></div>'
            '<div class="card scroll"><table class="samples"><thead><tr><th class="n" style="width:90px">reward</th>'
            '<th style="width:30%">prompt</th><th>response</th><th></th></tr></thead><tbody id="samples"></tbody>'
            "</table></div>"
        )
    for run in runs:
        config = _escape(yaml.safe_dump(run.config, sort_keys=False)) if run.config else "no config.yaml"
        parts.append(
            f'<details><summary>Config of {_escape(run.name)}</summary><pre class="card">{config}</pre></details>'
        )
    return "\n".join(part for part in parts if part)


def _tile(label: str, value: str, note: str = "", kind: str = "") -> str:
    return f'<div class="card tile"><b>{label}</b><p>{value}</p><i class="{kind}">{note or "&nbsp;"}</i></div>'


def _tiles(run: RunLog) -> str:
    tiles = []
    scores = run.points("eval/score")
    if len(scores) > 1:
        change = scores[-1][1] - scores[0][1]
        value = f"<small>{scores[0][1]:.3f} →</small> {scores[-1][1]:.3f}"
        note = f"{change:+.3f} from step {scores[0][0]} to {scores[-1][0]}"
        tiles.append(_tile("Evaluation score", value, note, "up" if change > 0 else "down" if change < 0 else ""))
    elif scores:
        tiles.append(_tile("Evaluation score", f"{scores[0][1]:.3f}", f"at step {scores[0][0]}"))
    rewards = [value for _, value in run.points("reward/mean")]
    if rewards:
        recent = rewards[-max(1, len(rewards) // 10) :]
        note = f"mean of the last {len(recent)} steps" if len(recent) > 1 else "last step"
        tiles.append(_tile("Reward", f"{statistics.fmean(recent):.3f}", note))
    for metric, label, note in (
        ("mismatch/kl", "Mismatch KL", "median, nats per token"),
        ("time/step_s", "Seconds per step", "median"),
        ("throughput/tokens_per_s", "Tokens per second", "median"),
    ):
        values = [value for _, value in run.points(metric)]
        if values:
            tiles.append(_tile(label, _number(statistics.median(values)), note))
    return f'<div class="tiles">{"".join(tiles)}</div>' if tiles else ""


def _eval_table(runs: list[RunLog]) -> str:
    """Each eval metric at the first and at the last evaluation of each run."""
    rows = []
    for run in runs:
        names = dict.fromkeys(name for line in run.lines for name in line if name.startswith("eval/"))
        for name in names:
            points = run.points(name)
            if not points or name == "eval/prompts":
                continue
            (first_step, first), (last_step, last) = points[0], points[-1]
            is_score = name != "eval/response_length"
            change = last - first
            kind = "" if not is_score or change == 0 else "up" if change > 0 else "down"
            text = f"{first:.3f}", f"{last:.3f}", f"{change:+.3f}"
            if len(points) == 1:
                text, kind = (text[0], "", ""), ""
            title = name.removeprefix("eval/").replace("_", " ")
            owner = f"<td>{_escape(run.name)}</td>" if len(runs) > 1 else ""
            rows.append(
                f'<tr>{owner}<td>{_escape(title)}</td><td class="n">{text[0]}</td><td class="n">{text[1]}</td>'
                f'<td class="n {kind}">{text[2]}</td><td class="n">{first_step} → {last_step}</td></tr>'
            )
    if not rows:
        return ""
    owner = "<th>run</th>" if len(runs) > 1 else ""
    return (
        f'<h2>Before and after</h2><div class="card scroll"><table><thead><tr>{owner}<th>held-out prompts</th>'
        '<th class="n">before</th><th class="n">after</th><th class="n">change</th><th class="n">steps</th></tr>'
        f"</thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def _differences(runs: list[RunLog]) -> str:
    """Config keys in which the runs differ."""
    configs = [_flat(run.config) for run in runs]
    keys = dict.fromkeys(key for config in configs for key in config)
    rows = []
    for key in keys:
        values = [config.get(key) for config in configs]
        if key not in ("name", "runs_dir") and any(value != values[0] for value in values):
            cells = "".join(f"<td>{_escape('' if value is None else value)}</td>" for value in values)
            rows.append(f"<tr><td>{_escape(key)}</td>{cells}</tr>")
    if not rows:
        return ""
    names = "".join(f"<th>{_escape(run.name)}</th>" for run in runs)
    return (
        '<h2>What differs</h2><div class="card scroll"><table><thead><tr><th>config</th>'
        f"{names}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _charts(runs: list[RunLog], templates: Sequence[dict[str, Any]], section: str) -> list[dict[str, Any]]:
    """The charts that have data: all of a chart's series for one run, its first one for each of several."""
    charts = []
    for chart in templates:
        if chart.get("kind") == "area" and len(runs) > 1:  # stacks of several runs would hide each other
            chart = {"title": "Time of a step", "note": "seconds", "series": {"time/step_s": "step"}, "unit": "s"}
        series: list[dict[str, Any]] = []
        for index, run in enumerate(runs):
            metrics = _expand(chart["series"], run)
            for position, (metric, label) in enumerate(metrics.items()):
                points = run.points(metric)
                if not points or (len(runs) > 1 and position > 0):
                    continue
                name, color = (label, position) if len(runs) == 1 else (run.name, index)
                in_order = any("*" in pattern for pattern in chart["series"])  # of updates, or of layers
                if section in ("routing", "experts") and len(runs) == 1 and in_order and len(metrics) > 1:
                    if series and points == series[0]["points"]:  # the only update is all of them
                        continue
                    color = _shade(position, len(metrics) - 1)
                if chart.get("scale") == "log" and all(value <= 0 for _, value in points):
                    name += " (zero, below a log scale)"
                series.append({"label": name, "color": color, "points": points})
        if series:
            charts.append({**chart, "section": section, "series": series})
    return charts


def _shade(position: int, last: int) -> str:
    """Colours of an ordered row from 1 to last; 0 is their mean's."""
    share = 100 * (position - 1) / max(last - 1, 1)
    return f"color-mix(in oklab, var(--s0), var(--s4) {share:.0f}%)" if position else "var(--ink)"


def _probability_pictures(runs: list[RunLog]) -> list[dict[str, Any]]:
    """|d log p| against p of each run; none where nothing was logged."""
    return [
        {
            "title": "Mismatch by probability" + (f": {run.name}" if len(runs) > 1 else ""),
            "note": "of sampled tokens, all steps; e is the logit error that bounds 99 % of them",
            "series": [
                {"label": run.name, "classes": [[below, row] for below, row in by_probability(run.lines).items()]}
            ],
            "svg": probability_svg(run.lines, width=PICTURE_WIDTH, inline=True),
            "section": "mismatch",
            "wide": True,
        }
        for run in runs
        if by_probability(run.lines)
    ]


def _routing_pictures(runs: list[RunLog]) -> list[dict[str, Any]]:
    """Deviation tails and heat maps: their numbers, and the picture as SVG; none where nothing was logged."""
    tails = {run.name: deviation_tails(run.lines) for run in runs}
    charts: list[dict[str, Any]] = []
    if any(tails.values()):
        charts.append(
            {
                "title": "Deviation tails",
                "note": "share of the (token, layer) pairs by the slots in which replayed and current experts differ",
                "series": [
                    {"label": name, "points": list(enumerate(shares))} for name, shares in tails.items() if shares
                ],
                "svg": deviation_svg(tails, width=PICTURE_WIDTH, inline=True),
            }
        )
    for metric, title in (("agreement", "Agreement by layer and update"), ("kl", "Route KL by layer and update")):
        layers, matrices = heat_maps({run.name: [run.lines] for run in runs}, metric)
        if matrices:
            charts.append(
                {
                    "title": title,
                    "note": "light is near to the current router" + (", log scale" if metric == "kl" else ""),
                    "layers": layers,
                    "series": [{"label": name, "matrix": matrix} for name, matrix in matrices.items()],
                    "svg": heatmap_svg(matrices, layers, kl=metric == "kl", width=PICTURE_WIDTH, inline=True),
                }
            )
    for chart in charts:
        chart |= {"section": "routing", "wide": True, "note": chart["note"] + "; mean of the last quarter of the steps"}
    return charts


def _expand(series: dict[str, str], run: RunLog) -> dict[str, str]:
    """{'eval/pass@*': 'pass@*'} -> {'eval/pass@4': 'pass@4'} by the names that the run has logged, 4 before 16."""
    expanded = {}
    for metric, label in series.items():
        start, star, end = metric.partition("*")
        if not star:
            expanded[metric] = label
            continue
        found = [name for name in run.metrics if re.fullmatch(f"{re.escape(start)}[^/]+{re.escape(end)}", name)]
        for name in sorted(found, key=lambda name: (len(name), name)):
            expanded[name] = label.replace("*", name[len(start) : len(name) - len(end)])
    return expanded


def _samples(runs: list[RunLog]) -> list[dict[str, Any]]:
    """Rollouts of evenly spaced steps, the first and the last among them."""
    kept = []
    for run in runs:
        steps = sorted({sample["step"] for sample in run.samples})
        if len(steps) > MOST_SAMPLE_STEPS:
            every = (len(steps) - 1) / (MOST_SAMPLE_STEPS - 1)
            steps = [steps[round(i * every)] for i in range(MOST_SAMPLE_STEPS)]
        for sample in run.samples:
            if sample["step"] in steps:
                group = f"step {sample['step']}" if len(runs) == 1 else f"{run.name}, step {sample['step']}"
                reward = sample.get("reward")
                kept.append(
                    {
                        "group": group,
                        "reward": reward if isinstance(reward, (int, float)) else None,
                        "prompt": _shortened(str(sample.get("prompt", ""))),
                        "response": _shortened(sample["response"]),
                        "more": _details(sample),
                    }
                )
    return kept


def _details(sample: dict[str, Any]) -> str:
    """How the response ended, and its reward's parts where there are several."""
    parts = {name.removeprefix("reward/"): value for name, value in sample.items() if name.startswith("reward/")}
    shown = [f"{name} {value:g}" for name, value in parts.items() if isinstance(value, (int, float))]
    return "\n".join([str(sample.get("finish", "")), *(shown if len(shown) > 1 else [])])


def _shortened(text: str) -> str:
    cut = len(text) - MOST_CHARACTERS
    half = MOST_CHARACTERS // 2
    return text if cut <= 0 else f"{text[:half]}\n[... {cut:,} characters ...]\n{text[-half:]}"
