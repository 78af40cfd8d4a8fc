"""What the ablation scripts share: one warm start, runs that are started where they are missing, and their seeds' spread.

A run is done when its log has its last step; what is done is not run again, and a run that was stopped starts anew. Results
are written whenever a script ends, of all runs that are done. `Ablation` is a whole one: arms, seeds, tables and a picture.
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
"""Of one run."""
ENDING_S = 60
"""Within which a run that is stopped has to end."""
KEEPS_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**34)}
"""glibc keeps what is freed: logits over 65,536 tokens that are mapped anew each time took half of all time in the kernel."""
Settings = dict[str, object]
"""Dotted config keys -> values."""
Figures = Mapping[str, float | None]
"""Of one run; None where one does not apply."""


class RunFailedError(Exception):
    """A command failed, or took too long."""


async def run_command(
    command: Sequence[str], log: Path, threads: int, environment: Mapping[str, str] = KEEPS_MEMORY
) -> None:
    """Run a command with its output in a file. Errors: RunFailedError, with the last line of it.

    A command whose task is canceled is ended before this returns.
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
        raise RunFailedError(f"{name}: {' '.join(command[2:6])} was killed; had the machine no memory left? [{log}]")
    if code:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        raise RunFailedError(f"{name}: {' '.join(command[2:6])} failed: {(lines or ['no output'])[-1]} [{log}]")


async def end(process: asyncio.subprocess.Process) -> None:
    """Ask a process to end, and make it: a run of training saves first, and ends its servers and workers."""
    process.terminate()
    try:
        async with asyncio.timeout(ENDING_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


def call(command: Sequence[str], log: Path) -> None:
    """`run_command` on all cores. Errors: SystemExit."""
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
    """The quickstart's model after its SFT, made once: what all runs start from.

    model_flags: of tools/make_tiny_model.py; change: what is done to the fresh model's folder; settings: of the SFT, beside its
    own.
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
    """One run of a config; keep: its checkpoints. Seconds that it took; 0 where it was done before."""
    folder = root / name
    if last_step(folder) == steps:
        return 0.0
    shutil.rmtree(folder, ignore_errors=True)
    own = {"name": name, "runs_dir": root, "steps": steps, "logging.tensorboard": "false"}
    start = time.monotonic()
    await run_command([*CLI, "train", config, *flags(own | settings)], root / f"{name}.log", threads, environment)
    if not keep:
        shutil.rmtree(folder / "checkpoints")
    return time.monotonic() - start


def mean_and_spread(values: list[float], form: str, sign: str = "", *, error: bool = False) -> str:
    """Mean and, of several values, standard deviation, or the mean's standard error; nothing of none."""
    divisor = math.sqrt(len(values)) if error else 1.0
    spread = f" ± {statistics.stdev(values) / divisor:{form.lstrip('+')}}" if len(values) > 1 else ""
    shown = sign + form.lstrip("+") if sign else form
    return f"{statistics.fmean(values):{shown}}{spread}" if values else ""


def mean_of(name: str, lines: Sequence[Mapping]) -> float | None:
    """Of a metric over the lines of a log that have it."""
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
    """A table. columns: name of a figure -> (title, format); rows: cells of the `labels`, and the figures of each seed."""
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
    """Write out/{stem}.json, run by run, `more` beside the runs, and out/{stem}.md; and print the tables."""
    out.mkdir(parents=True, exist_ok=True)
    taken = round(sum(minutes.get(name, 0.0) for name in results), 1)
    summary = {"steps": steps, "minutes": taken, **more, "runs": results}
    (out / f"{stem}.json").write_text(json.dumps(summary, indent=1) + "\n")
    (out / f"{stem}.md").write_text(text + "\n")
    print(text)


def positive(text: str) -> int:
    """A number of the command line. Errors: ArgumentTypeError where it is below 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no number from 1 on")
    return int(text)


def make_parser(prog: str, description: str, *, steps: int) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"{prog}.sh", description=description)
    parser.add_argument("--steps", type=positive, default=steps, help="rollout batches of a run")
    parser.add_argument("--runs", type=Path, default=Path("runs") / prog, help="folder of the runs")
    parser.add_argument("--out", type=Path, default=Path("docs/results"), help="folder of the results")
    parser.add_argument("--jobs", type=positive, default=1, help="runs side by side, which share the cores")
    parser.add_argument("--keep", action="store_true", help="keep the runs' checkpoints")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="names of runs, e.g. those of one seed")
    return parser


def check_names(parser: argparse.ArgumentParser, args: argparse.Namespace, every: Sequence[str]) -> None:
    """Ends the program where --only names a run that does not exist."""
    if unknown := [name for name in args.only or () if name not in every]:
        parser.error(f"no run is called {' or '.join(unknown)}; there are {', '.join(every)}")


def run_all(
    args: argparse.Namespace,
    plans: Mapping[str, Settings],
    write_results: Callable[[Path, Path, int, dict[str, float]], None],
    config: str = "configs/quickstart.yaml",
    environment: Mapping[str, str] = KEEPS_MEMORY,
) -> None:
    """Train what is missing of `plans` (name -> settings), then write_results(folder of the runs, out, steps, minutes).

    Ends in order on SIGTERM: runs that go on are ended, and start anew next time.
    """
    root = (REPOSITORY / args.runs).resolve() / f"{args.steps}_steps"  # runs of another length are others
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
    """Lines of a run's log: those of its steps, and those that have an evaluation."""
    lines = read_json_lines(folder / METRICS_FILE)
    evaluated = [line for line in lines if any(name.startswith("eval/") and v is not None for name, v in line.items())]
    return [line for line in lines if line["step"] > 0], evaluated


def quarters(steps: Sequence[Mapping]) -> tuple[Sequence[Mapping], Sequence[Mapping]]:
    """First and last quarter of a run's steps."""
    quarter = -(-len(steps) // 4)
    return steps[:quarter], steps[-quarter:]


@dataclass(frozen=True)
class Ablation:
    """Arms that differ in their settings, seed by seed from one warm start, and what is shown of them."""

    name: str
    """Of the script; with dashes that of the results."""
    steps: int
    arms: Mapping[str, Settings]
    """Label -> settings, which override `common`. RUNS in a text stands for the folder of the runs."""
    common: Settings
    figures: Callable[[Path], Figures]
    """Of the folder of one run; at least those of the columns."""
    columns: Mapping[str, tuple[str, str]]
    """Figure -> (title, format)."""
    panels: Sequence[Panel] = ()
    title: str = ""
    """Of the picture of the panels."""
    pictured: Collection[str] = ()
    """Arms in it, at most eight, of which each has a color of its own; none: all."""
    differences: Sequence[tuple[str, str]] = ()
    """Pairs of arms whose figures are subtracted seed by seed: the first's minus the second's."""
    seeds: int = 3
    of_one_seed: Collection[str] = ()
    """Arms of seed 0 alone."""
    config: str = "configs/quickstart.yaml"
    environment: Mapping[str, str] = field(default_factory=lambda: KEEPS_MEMORY)
    """Variables of the runs, beside the script's own."""

    @property
    def stem(self) -> str:
        return self.name.replace("_", "-")

    def runs(self) -> dict[str, tuple[str, int]]:
        """Name -> (arm, seed). Seeds outermost, so that whatever is stopped has all arms side by side."""
        return {
            f"{re.sub('[^a-z0-9.]+', '-', arm.lower()).strip('-')}-seed{seed}": (arm, seed)
            for seed in range(self.seeds)
            for arm in self.arms
            if seed == 0 or arm not in self.of_one_seed
        }

    def main(self, description: str, model: Callable[[Path], Path]) -> None:
        """The script. model: makes the folder that runs start from, below the folder of the runs."""
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
        """out/{stem}.json, .md and .svg of the runs that are done."""
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
        """groups: folders of the runs that are done, by arm."""
        if self.panels:
            write_curves(groups, self.panels, out / f"{self.stem}.svg", title=self.title)

    def table(self, results: Mapping[str, dict]) -> str:
        """Mean and, over several seeds, the standard deviation."""
        found = {arm: [r["figures"] for r in results.values() if r["arm"] == arm] for arm in self.arms}
        return markdown(("arm",), self.columns, [((arm,), figures) for arm, figures in found.items() if figures])

    def difference_table(self, results: Mapping[str, dict]) -> str:
        """Of pairs of arms, seed by seed: mean and standard error."""
        of = {(r["arm"], r["seed"]): r["figures"] for r in results.values()}
        rows = []
        for a, b in self.differences:
            pairs = [(of[a, seed], of[b, seed]) for seed in range(self.seeds) if (a, seed) in of and (b, seed) in of]
            found = [{n: None if None in (x[n], y[n]) else x[n] - y[n] for n in self.columns} for x, y in pairs]
            rows += [((f"{a} - {b}",), found)] if found else []
        return markdown(("difference ± standard error",), self.columns, rows, sign="+", error=True) if rows else ""
