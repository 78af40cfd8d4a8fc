"""Shared parts of the ablation scripts: one warm start, training of missing runs, and the spread over seeds.

A run is done when its log has its last step. Finished runs are not repeated, and an interrupted run starts again from
the beginning. A script writes the results of all finished runs whenever it ends. `Ablation` is a whole script: arms,
seeds, tables and a picture.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from curves import Groups, Panel, write_curves

from megatron_rl.metrics.logger import METRICS_FILE, read_json_lines

REPOSITORY = Path(__file__).resolve().parent.parent
CLI = [sys.executable, "-m", "megatron_rl.cli"]
LONGEST_S = 3600
"""Longest time of one run, in seconds."""
ENDING_S = 60
"""Time in which a stopped run has to end, in seconds."""
KEEPS_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**34)}
"""Settings with which glibc keeps freed memory. Mapping logits over 65,536 tokens again each time took half of all
time."""
Settings = dict[str, object]
"""Dotted config keys -> values."""
Figures = Mapping[str, float | None]
"""Figures of one run; None for a figure that does not apply."""


class RunFailedError(Exception):
    """A command failed, or took too long."""


async def run_command(
    command: Sequence[str], log: Path, threads: int, environment: Mapping[str, str] = KEEPS_MEMORY
) -> None:
    """Run a command with its output in a file. Errors: RunFailedError with the last line of the output.

    If the task of a command is canceled, the command is stopped before this returns.
    """
    name = Path(sys.argv[0]).stem
    log.parent.mkdir(parents=True, exist_ok=True)
    whole = os.environ | {"OMP_NUM_THREADS": str(threads)} | environment
    with log.open("w") as file:
        process = await asyncio.create_subprocess_exec(
            *command, cwd=REPOSITORY, stdout=file, stderr=subprocess.STDOUT, env=whole
        )
        try:
            async with asyncio.timeout(LONGEST_S):
                code = await process.wait()
        except TimeoutError:
            raise RunFailedError(f"{name}: {' '.join(command[2:6])} took over {LONGEST_S} s [{log}]") from None
        finally:
            if process.returncode is None:
                await end(process)
    if code == -signal.SIGKILL:
        raise RunFailedError(
            f"{name}: {' '.join(command[2:6])} was killed; check whether the machine ran out of memory [{log}]"
        )
    if code:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        raise RunFailedError(f"{name}: {' '.join(command[2:6])} failed: {(lines or ['no output'])[-1]} [{log}]")


async def end(process: asyncio.subprocess.Process) -> None:
    """Stop a process, by force if needed. A training run first saves, and stops its servers and workers."""
    process.terminate()
    try:
        async with asyncio.timeout(ENDING_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


def call(command: Sequence[str], log: Path) -> None:
    """Call `run_command` on all cores. Errors: SystemExit."""
    try:
        asyncio.run(run_command(command, log, os.cpu_count() or 1))
    except RunFailedError as error:
        raise SystemExit(str(error)) from None


def flags(settings: Settings) -> list[str]:
    return [part for key, value in settings.items() for part in (f"--{key}", str(value))]


def warm_start(
    root: Path,
    model_flags: Sequence[str] = ("--preset", "quickstart"),
    settings: Settings | None = None,
    change: Callable[[Path], object] = lambda model: None,
) -> Path:
    """Return the quickstart's model after SFT, from which all runs start; it is created once.

    model_flags: flags of tools/make_tiny_model.py; change: edits the folder of the new model; settings: overrides of
    the SFT's config.
    """
    out = root / "sft" / "hf"
    if not out.is_dir():
        print("warm start", flush=True)
        model = root / "model"
        call([sys.executable, "tools/make_tiny_model.py", str(model), *model_flags], root / "model.log")
        change(model)
        own = {"name": "sft", "runs_dir": root, "model.path": model}
        call([*CLI, "sft", "configs/quickstart_sft.yaml", *flags(own | (settings or {}))], root / "sft.log")
    return out


def last_step(folder: Path) -> int:
    return max((line["step"] for line in read_json_lines(folder / METRICS_FILE)), default=-1)


async def train(
    name: str,
    root: Path,
    steps: int,
    settings: Settings,
    config: str,
    threads: int,
    *,
    keep: bool = False,
    environment: Mapping[str, str] = KEEPS_MEMORY,
) -> float:
    """Train one run of a config and return its time in seconds; 0 if it was already done. keep: keep its checkpoints."""
    folder = root / name
    if last_step(folder) == steps:
        return 0.0
    shutil.rmtree(folder, ignore_errors=True)
    own = {"name": name, "runs_dir": root, "steps": steps, "logging.trackers": "[]"}
    start = time.monotonic()
    await run_command([*CLI, "train", config, *flags(own | settings)], root / f"{name}.log", threads, environment)
    if not keep:
        shutil.rmtree(folder / "checkpoints")
    return time.monotonic() - start


def mean_and_spread(values: list[float], form: str, sign: str = "", *, error: bool = False) -> str:
    """Format the mean and, for several values, the standard deviation or standard error; an empty text without values."""
    divisor = math.sqrt(len(values)) if error else 1.0
    spread = f" ± {statistics.stdev(values) / divisor:{form.lstrip('+')}}" if len(values) > 1 else ""
    shown = sign + form.lstrip("+") if sign else form
    return f"{statistics.fmean(values):{shown}}{spread}" if values else ""


def mean_of(name: str, lines: Sequence[Mapping]) -> float | None:
    """Return the mean of a metric over the lines of a log that have it."""
    values = [line[name] for line in lines if line.get(name) is not None]
    return statistics.fmean(values) if values else None


def markdown(
    labels: Sequence[str],
    columns: Mapping[str, tuple[str, str]],
    rows: Iterable[tuple[Sequence[object], Sequence[Figures]]],
    sign: str = "",
    *,
    error: bool = False,
) -> str:
    """Return a table.

    columns: name of a figure -> (title, format); rows: cells of the `labels`, and the figures of each seed.
    """
    lines = ["| " + " | ".join([*labels, "seeds", *(title for title, _ in columns.values())]) + " |"]
    lines.append("|---" * (len(columns) + len(labels) + 1) + "|")
    for cells, seeds in rows:
        found = {name: [figures[name] for figures in seeds if figures[name] is not None] for name in columns}
        spreads = [mean_and_spread(found[name], form, sign, error=error) for name, (_, form) in columns.items()]
        lines.append("| " + " | ".join([*map(str, cells), str(len(seeds)), *spreads]) + " |")
    return "\n".join(lines)


def save(
    out: Path,
    stem: str,
    steps: int,
    minutes: Mapping[str, float],
    results: Mapping[str, dict],
    text: str,
    **more: object,
) -> None:
    """Write out/{stem}.json with the runs and `more`, write out/{stem}.md, and print the tables."""
    out.mkdir(parents=True, exist_ok=True)
    taken = round(sum(minutes.get(name, 0.0) for name in results), 1)
    summary = {"steps": steps, "minutes": taken, **more, "runs": results}
    (out / f"{stem}.json").write_text(json.dumps(summary, indent=1) + "\n")
    (out / f"{stem}.md").write_text(text + "\n")
    print(text)


def positive(text: str) -> int:
    """Parse a positive number of the command line. Errors: ArgumentTypeError if it is below 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number of at least 1")
    return int(text)


def make_parser(prog: str, description: str, *, steps: int) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"{prog}.sh", description=description)
    parser.add_argument("--steps", type=positive, default=steps, help="number of rollout batches of a run")
    parser.add_argument("--runs", type=Path, default=Path("runs") / prog, help="folder of the runs")
    parser.add_argument("--out", type=Path, default=Path("docs/results"), help="folder of the results")
    parser.add_argument(
        "--jobs", type=positive, default=1, help="number of runs at the same time, which share the cores"
    )
    parser.add_argument("--keep", action="store_true", help="keep the runs' checkpoints")
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="names of the runs to do, for example all of one seed"
    )
    return parser


def check_names(parser: argparse.ArgumentParser, args: argparse.Namespace, every: Sequence[str]) -> None:
    """End the program if --only names a run that does not exist."""
    if unknown := [name for name in args.only or () if name not in every]:
        parser.error(f"there is no run {' or '.join(unknown)}; the runs are {', '.join(every)}")


def run_all(
    args: argparse.Namespace,
    plans: Mapping[str, Settings],
    write_results: Callable[[Path, Path, int, dict[str, float]], None],
    config: str = "configs/quickstart.yaml",
    environment: Mapping[str, str] = KEEPS_MEMORY,
) -> None:
    """Train the missing runs of `plans` (name -> settings), then write_results(folder of the runs, out, steps, minutes).

    On SIGTERM, running runs are stopped; they start again from the beginning next time.
    """
    root = (REPOSITORY / args.runs).resolve() / f"{args.steps}_steps"  # runs of another length have another folder
    root.mkdir(parents=True, exist_ok=True)
    taken = root / "minutes.json"
    minutes = json.loads(taken.read_text()) if taken.exists() else {}
    turns = iter(enumerate(plans.items(), 1))
    threads = max((os.cpu_count() or 1) // args.jobs, 1)

    async def work() -> None:
        for number, (name, settings) in turns:
            seconds = await train(
                name, root, args.steps, settings, config, threads, keep=args.keep, environment=environment
            )
            if seconds:
                minutes[name] = seconds / 60 / args.jobs
                taken.write_text(json.dumps(minutes))
            print(f"{number}/{len(plans)} {name}: {f'{seconds:.0f} s' if seconds else 'was done'}", flush=True)

    async def all_jobs() -> None:
        everything = asyncio.gather(*(work() for _ in range(args.jobs)))
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, everything.cancel)
        await everything

    try:
        asyncio.run(all_jobs())
    except asyncio.CancelledError:
        sys.exit(143)
    except RunFailedError as error:
        raise SystemExit(str(error)) from None
    finally:
        write_results(root, args.out, args.steps, minutes)


def metric_lines(folder: Path) -> tuple[list[dict], list[dict]]:
    """Return the lines of a run's log: lines of its steps, and lines with an evaluation."""
    lines = read_json_lines(folder / METRICS_FILE)
    evaluated = [line for line in lines if any(name.startswith("eval/") and v is not None for name, v in line.items())]
    return [line for line in lines if line["step"] > 0], evaluated


def quarters(steps: Sequence[Mapping]) -> tuple[Sequence[Mapping], Sequence[Mapping]]:
    """Return the first and the last quarter of a run's steps."""
    quarter = -(-len(steps) // 4)
    return steps[:quarter], steps[-quarter:]


@dataclass(frozen=True)
class Ablation:
    """Arms with different settings, trained for several seeds from one warm start, with their tables and picture."""

    name: str
    """Name of the script; with dashes it is the name of the results."""
    steps: int
    arms: Mapping[str, Settings]
    """Label -> settings, which override `common`. RUNS in a text stands for the folder of the runs."""
    common: Settings
    figures: Callable[[Path], Figures]
    """Function that returns the figures of a run's folder, at least those of the columns."""
    columns: Mapping[str, tuple[str, str]]
    """Figure -> (title, format)."""
    panels: Sequence[Panel] = ()
    title: str = ""
    """Title of the picture with the panels."""
    pictured: Collection[str] = ()
    """Arms in the picture, at most eight, each with its own color; empty: all."""
    differences: Sequence[tuple[str, str]] = ()
    """Pairs of arms whose figures are subtracted seed by seed: first minus second."""
    seeds: int = 3
    of_one_seed: Collection[str] = ()
    """Arms that run only with seed 0."""
    config: str = "configs/quickstart.yaml"
    environment: Mapping[str, str] = field(default_factory=lambda: KEEPS_MEMORY)
    """Environment variables of the runs, in addition to the script's own."""

    @property
    def stem(self) -> str:
        return self.name.replace("_", "-")

    def runs(self) -> dict[str, tuple[str, int]]:
        """Return name -> (arm, seed).

        Seeds are the outer loop, so that an interrupted script has all arms of its first seeds.
        """
        return {
            f"{re.sub('[^a-z0-9.]+', '-', arm.lower()).strip('-')}-seed{seed}": (arm, seed)
            for seed in range(self.seeds)
            for arm in self.arms
            if seed == 0 or arm not in self.of_one_seed
        }

    def main(self, description: str, model: Callable[[Path], Path]) -> None:
        """Run the script. model: creates the folder that runs start from, below the folder of the runs."""
        parser = make_parser(self.name, description.splitlines()[0], steps=self.steps)
        args = parser.parse_args()
        every = self.runs()
        check_names(parser, args, list(every))
        runs = (REPOSITORY / args.runs).resolve()
        start = model(runs)
        plans: dict[str, Settings] = {}
        for name in args.only or every:
            arm, seed = every[name]
            settings = {"model.path": start, "seed": seed, "data.seed": seed} | self.common | self.arms[arm]
            plans[name] = {key: str(value).replace("RUNS", str(runs)) for key, value in settings.items()}
        run_all(args, plans, self.write_results, self.config, self.environment)

    def write_results(self, root: Path, out: Path, steps: int, minutes: dict[str, float]) -> None:
        """Write out/{stem}.json, .md and .svg of the finished runs."""
        done = {name: of for name, of in self.runs().items() if last_step(root / name) == steps}
        if not done:
            return
        results = {
            name: {"arm": arm, "seed": seed, "figures": self.figures(root / name)} for name, (arm, seed) in done.items()
        }
        text = "\n\n".join(table for table in (self.table(results), self.difference_table(results)) if table)
        save(out, self.stem, steps, minutes, results, text)
        groups = {
            arm: [root / name for name, (of, _) in done.items() if of == arm] for arm in self.pictured or self.arms
        }
        if found := {arm: folders for arm, folders in groups.items() if folders}:
            self.write_pictures(found, out)

    def write_pictures(self, groups: Groups, out: Path) -> None:
        """Write the pictures. groups: folders of the finished runs, by arm."""
        if self.panels:
            write_curves(groups, self.panels, out / f"{self.stem}.svg", title=self.title)

    def table(self, results: Mapping[str, dict]) -> str:
        """Return a table with means and, for several seeds, standard deviations."""
        found = {arm: [r["figures"] for r in results.values() if r["arm"] == arm] for arm in self.arms}
        return markdown(("arm",), self.columns, [((arm,), figures) for arm, figures in found.items() if figures])

    def difference_table(self, results: Mapping[str, dict]) -> str:
        """Return a table of differences between pairs of arms, seed by seed: mean and standard error."""
        of = {(r["arm"], r["seed"]): r["figures"] for r in results.values()}
        rows = []
        for a, b in self.differences:
            pairs = [(of[a, seed], of[b, seed]) for seed in range(self.seeds) if (a, seed) in of and (b, seed) in of]
            found = [{n: None if None in (x[n], y[n]) else x[n] - y[n] for n in self.columns} for x, y in pairs]
            rows += [((f"{a} - {b}",), found)] if found else []
        return markdown(("difference ± standard error",), self.columns, rows, sign="+", error=True) if rows else ""
