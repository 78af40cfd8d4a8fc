"""Reads config, log records and samples from a run's folder, and summarizes the whole log."""

from __future__ import annotations

import math
import re
import statistics
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from rich.table import Column, Table
from rich.text import Text

from megatron_rl.config.load import parse_yaml, yaml_problem
from megatron_rl.credentials import hidden
from megatron_rl.errors import UserError
from megatron_rl.metrics.classes import BELOW
from megatron_rl.metrics.logger import METRICS_FILE, SAMPLES_FILE, SCORES_FILE, read_json_lines

Lines = Sequence[Mapping[str, Any]]
"""Records of one run's metrics.jsonl."""
Points = list[tuple[int, float]]
"""(step, value) pairs of a metric, for the steps at which it has a value."""


@dataclass(frozen=True)
class RunLog:
    """Config, log records and samples that a run's folder holds."""

    name: str
    folder: Path
    config: dict[str, Any]
    lines: Lines
    samples: list[dict[str, Any]]

    @cached_property
    def metrics(self) -> dict[str, None]:
        """Names that occur in any record, in order of first occurrence."""
        return metrics(self.lines)

    def setting(self, key: str, default: Any = None) -> Any:
        """Return the value of a dotted config key, or the default if the key is missing or null."""
        value: Any = self.config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return default if value is None else value

    @property
    def last_step(self) -> int:
        """Step of the last record; 0 if there is no record."""
        return self.lines[-1]["step"] if self.lines else 0


def read_run(folder: Path) -> RunLog:
    """Read a run's folder. Errors: UserError if it holds no run or if its files cannot be read."""
    config_file = folder / "config.yaml"
    if not config_file.exists() and not (folder / METRICS_FILE).exists():
        raise UserError(f"{folder} holds no run (neither config.yaml nor {METRICS_FILE})")
    try:
        config = parse_yaml(config_file.read_text()) if config_file.exists() else {}
        config = hidden(config) if isinstance(config, dict) else {}  # older runs wrote secrets into the file
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{config_file}: not YAML: {yaml_problem(error)}") from None
    samples = [s for s in read_json_lines(folder / SAMPLES_FILE) if isinstance(s.get("response"), str)]
    name = str(config.get("name") or folder.resolve().name)
    lines = read_json_lines(folder / METRICS_FILE) or read_json_lines(folder / SCORES_FILE)
    return RunLog(name, folder, config, lines, samples)


def number(value: Any) -> float | None:
    """Return the value if it is a finite number, else None."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value if is_number and abs(value) <= sys.float_info.max else None


def points(lines: Lines, metric: str) -> Points:
    """Return the (step, value) pairs of a metric, for the steps at which it has a finite value."""
    return [(line["step"], value) for line in lines if (value := number(line.get(metric))) is not None]


def metrics(lines: Lines) -> dict[str, None]:
    """Return the names that occur in any record, in order of first occurrence."""
    return dict.fromkeys(name for line in lines for name in line)


def named(names: Iterable[str], pattern: str) -> dict[str, str]:
    """Return {metric: part that * matches} for the names that match a pattern "a*b", shortest part first.

    For a pattern without *, return {pattern: ""}.
    """
    start, star, end = pattern.partition("*")
    if not star:
        return {pattern: ""}
    found = [name for name in names if re.fullmatch(f"{re.escape(start)}[^/]+{re.escape(end)}", name)]
    return {n: n[len(start) : len(n) - len(end)] for n in sorted(found, key=lambda name: (len(name), name))}


def repeated(runs: Sequence[Lines]) -> set[str]:
    """Return the eval/distinct@n metrics that equal eval/pass@n in all runs.

    They are equal if each prompt has a single right answer.
    """
    names = {name for lines in runs for name in named(metrics(lines), "eval/distinct@*")}

    def repeats(lines: Lines, name: str) -> bool:
        return points(lines, name) == points(lines, name.replace("distinct", "pass"))

    return {name for name in names if all(repeats(lines, name) for lines in runs)}


def evaluations(lines: Lines) -> list[tuple[str, Points]]:
    """Return (title, points) of each evaluation metric."""
    hidden = {"eval/prompts", *repeated([lines])}
    names = [name for name in metrics(lines) if name.startswith("eval/") and name not in hidden]
    return [(n.removeprefix("eval/").replace("_", " "), values) for n in names if (values := points(lines, n))]


def side_by_side(runs: Sequence[RunLog]) -> dict[str, list[float]]:
    """Return {title: newest value of each run} for the evaluation metrics that all runs have; empty for a single run."""
    found = [{title: values[-1][1] for title, values in evaluations(run.lines)} for run in runs]
    shared = [title for title in found[0] if all(title in of_run for of_run in found)] if len(runs) > 1 else []
    return {title: [of_run[title] for of_run in found] for title in shared}


def mean_of_last_quarter(lines: Lines, names: Collection[str]) -> dict[str, float]:
    """Return the mean of each metric over the last quarter of the steps that have any of the metrics (rounded up).

    A metric without a value in these steps is left out.
    """
    found = [line for line in lines if any(number(line.get(name)) is not None for name in names)]
    recent = found[-math.ceil(len(found) / 4) :]
    means = {name: mean(number(line.get(name)) for line in recent) for name in names}
    return {name: value for name, value in means.items() if value is not None}


def mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that are not None, or None if all are."""
    present = [value for value in values if value is not None]
    return statistics.fmean(present) if present else None


def deviation_tails(lines: Lines) -> list[float | None]:
    """Return, for J = 0 .. k, the share of (token, layer) pairs with J replayed experts that the current router would not pick.

    Each share is a mean over the last quarter of the steps. The list is empty if the run logged no shares. Figure 4b of the
    Pr2 paper shows such shares.
    """
    slots = named(metrics(lines), "routing/deviation_*")
    shares = {int(slots[name]): share for name, share in mean_of_last_quarter(lines, slots).items()}
    return [shares.get(j) for j in range(max(shares, default=-1) + 1)]


def heat_map(lines: Lines, metric: str = "agreement") -> dict[tuple[int, int], float]:
    """Return {(model layer, update): value} of the metric "agreement" or "kl", as means over the last quarter of the steps.

    Figure 6 of the Pr2 paper shows such values.
    """
    pattern = re.compile(rf"routing/layer_(\d+)/update_(\d+)/{metric}")
    places = {name: match for name in metrics(lines) if (match := pattern.fullmatch(name))}
    values = mean_of_last_quarter(lines, places)
    return {(int(places[name][1]), int(places[name][2])): value for name, value in values.items()}


def by_probability(lines: Lines) -> dict[float, dict[str, float]]:
    """Return {upper end: statistics} for each class of sampled tokens by their probability p, over all steps.

    tokens: number of tokens. abs, abs_max: mean and largest |d log p|, the difference between engine and trainer. bias: mean of
    engine - trainer. Empty classes are left out.
    """
    found = {}
    for below in BELOW:
        names = [f"mismatch/p<{below:g}/{name}" for name in ("tokens", "abs", "bias", "abs_max")]
        complete = [line for line in lines if all(number(line.get(name)) is not None for name in names)]
        rows = [[line[name] for name in names] for line in complete if line[names[0]]]
        if rows:
            tokens = sum(row[0] for row in rows)
            size, bias = (sum(row[0] * row[i] for row in rows) / tokens for i in (1, 2))
            found[below] = {"tokens": tokens, "abs": size, "bias": bias, "abs_max": max(row[3] for row in rows)}
    return found


def probability_bound(lines: Lines, below: float) -> float | None:
    """Return the largest |d log p| that logit errors of size e cause at the middle probability p of a class: 2 e (1 - p).

    e is the median of mismatch/epsilon_p99 over the steps. The middle is geometric up to 0.1 and arithmetic above 0.1.
    """
    epsilons = sorted(value for _, value in points(lines, "mismatch/epsilon_p99"))
    if not epsilons:
        return None
    index = BELOW.index(below)
    above = BELOW[index - 1] if index else below / 10
    middle = math.sqrt(above * below) if below <= 0.1 else (above + below) / 2
    return 2 * epsilons[len(epsilons) // 2] * (1 - middle)


# -- summary -------------------------------------------------------------------------------------------------------------
# The first and the last evaluation of a run, and the newest evaluations of several runs side by side, for the terminal.


def before_after(run_dir: Path) -> Table | None:
    """Return a table with the scores of a run's first and last evaluation; None if the run has fewer than two evaluations."""
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
    """Return a table with the newest scores of several runs; None if no evaluation metric occurs in all runs."""
    found = side_by_side(runs := [read_run(folder) for folder in run_dirs])
    if not found:
        return None
    table = Table("newest evaluation", *(Column(Text(run.name), justify="right") for run in runs))
    for title, values in found.items():
        table.add_row(title, *(f"{value:.3f}" for value in values))
    return table
