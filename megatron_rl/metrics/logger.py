"""The run's log: metrics.jsonl and samples.jsonl, TensorBoard, Weights & Biases, and the progress line."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import os
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from megatron_rl.config import Config
from megatron_rl.errors import UserError

METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"
NOTE_EVERY_S = 30.0
"""Where there is no terminal, how often progress within a step is said."""
TIMES = ("rollout", "sleep", "wake", "log_probs", "train", "sync", "eval", "checkpoint", "other", "step")
STANDARD = (
    "reward/mean",
    "eval/score",
    "loss/policy",
    "entropy",
    "mismatch/kl",
    "mismatch/ess",
    "mismatch/ratio_max",
    "routing/agreement",
    *(f"time/{part}_s" for part in TIMES),
    "throughput/tokens_per_s",
    "throughput/tokens_per_s_per_gpu",
    "throughput/mfu",
    "memory/peak_gb",
    "memory/reserved_gb",
)
"""Names that every line of metrics.jsonl has, null where one does not apply."""


class JsonLines:
    """An append-only file of JSON objects with a "step", opened at its first write; each line reaches the disk at once.

    Opening cuts off what a run that goes on at `resume_step` will write again (later steps; everything where it is 0),
    and a last line that a crash left half-written.
    """

    def __init__(self, path: Path, resume_step: int) -> None:
        self.path = path
        self._resume_step = resume_step
        self._file: TextIO | None = None

    def write(self, record: Mapping[str, Any]) -> None:
        """Errors: UserError naming the file where it cannot be written (a full disk)."""
        try:
            if self._file is None:
                self._cut()
                self._file = self.path.open("a")
            self._file.write(json.dumps(record, allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise UserError(
                f"{self.path}: {error.strerror}; free some space and start the run again to go on"
            ) from None

    def _cut(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        kept = [r for r in read_json_lines(self.path) if self._resume_step > 0 and r["step"] <= self._resume_step]
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(r) + "\n" for r in kept))
        os.replace(temporary, self.path)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a log that may still be growing: an incomplete last line is left out, a missing file is empty.

    Errors: UserError naming file and line for one in the middle that is no JSON object with a step.
    """
    if not path.exists():
        return []
    lines = path.read_text(errors="replace").splitlines()
    records = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            record["step"] + 0
        except (ValueError, TypeError, KeyError):
            if number == len(lines):
                break
            raise UserError(f"{path}, line {number}: not a JSON object with a step; remove this line") from None
        records.append(record)
    return records


class RunLogger:
    """Writes the log of one run; does nothing on ranks that are not `active`."""

    def __init__(self, run_dir: Path, config: Config, *, resume_step: int = 0, active: bool = True) -> None:
        """resume_step: the step after which the run goes on; lines of later steps are cut off at the first write.

        Errors: UserError where a package that the config asks for is missing.
        """
        self.run_dir = Path(run_dir)
        self.config = config
        self.active = active
        self._resume_step = resume_step
        self._metrics = JsonLines(self.run_dir / METRICS_FILE, resume_step)
        self._samples = JsonLines(self.run_dir / SAMPLES_FILE, resume_step)
        self._pending: dict[str, Any] = {}
        self._warned: set[str] = set()
        self._tensorboard = None
        self._wandb = None
        self._progress = _ProgressLine(config, resume_step) if active else None
        if active:
            _require("wandb", "logging.wandb_project", config.logging.wandb_project is not None)
            _require("tensorboard", "logging.tensorboard", config.logging.tensorboard)

    def say(self, line: str) -> None:
        """A line for the user, above the progress line."""
        if self.active:
            self._progress.say(line)

    def progress(self, done: int, wanted: int, what: str = "responses") -> None:
        """How far the part of a step that is under way has come, in the progress line; seldom where that is no terminal."""
        if self.active:
            self._progress.note(done, wanted, what)

    def log_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """One line of metrics.jsonl: `metrics` (numbers, 0-dim tensors or None), and the step's evaluation."""
        if not self.active:
            return
        evaluation = self._pending
        self._pending = {}
        values = self._clean(step, {**dict.fromkeys(STANDARD), **metrics, **evaluation})
        self._metrics.write({"step": step, **values})
        self._publish(step, values)
        self._progress.step(step, values)

    def log_eval(self, step: int, scores: Mapping[str, Any]) -> None:
        """Scores that `log_step` of the same step puts into its line; before the first step they are a line of their
        own."""
        if not self.active or not scores:
            return
        self._progress.say(
            f"eval at step {step}: " + ", ".join(f"{k.removeprefix('eval/')} {v:.4g}" for k, v in scores.items())
        )
        if step > 0:
            self._pending = dict(scores)
            return
        values = self._clean(step, {**dict.fromkeys(STANDARD), **scores})
        self._metrics.write({"step": step, **values})
        self._publish(step, values)

    def log_samples(self, step: int, samples: Iterable[Mapping[str, Any]]) -> None:
        """Rollouts of a step (metrics/samples.py chooses them) into samples.jsonl: prompt, response, reward, finish, count,
        reward/PART, and whatever else is given."""
        if self.active:
            for sample in samples:
                self._samples.write(_plain({"step": step, **sample}))

    def close(self) -> None:
        if not self.active:
            return
        self._progress.close()
        self._metrics.close()
        self._samples.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()

    def __enter__(self) -> RunLogger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _clean(self, step: int, metrics: Mapping[str, Any]) -> dict[str, float | int | None]:
        """Plain numbers; what is not finite becomes None, is counted, and is said once for each name."""
        values, wrong = {}, 0
        for name, value in metrics.items():
            number = value.item() if hasattr(value, "item") else value
            if isinstance(number, float) and not math.isfinite(number):
                wrong += 1
                if name not in self._warned:
                    self._warned.add(name)
                    self._progress.say(f"warning: {name} is {number} at step {step}; the log has null in its place")
                number = None
            values[name] = number
        return {**values, "log/not_finite": wrong}

    def _publish(self, step: int, values: Mapping[str, float | None]) -> None:
        present = {name: value for name, value in values.items() if value is not None}
        if self.config.logging.tensorboard:
            if self._tensorboard is None:
                from torch.utils.tensorboard import SummaryWriter

                purge = self._resume_step + 1 if self._resume_step else 0
                self._tensorboard = SummaryWriter(str(self.run_dir / "tensorboard"), purge_step=purge)
            for name, value in present.items():
                self._tensorboard.add_scalar(name, value, step)
            self._tensorboard.flush()
        if self.config.logging.wandb_project:
            if self._wandb is None:
                self._wandb = self._start_wandb()
            self._wandb.log(present, step=step)

    def _start_wandb(self):
        import wandb

        id_file = self.run_dir / "wandb_id"
        if not id_file.exists():
            id_file.write_text(wandb.util.generate_id())
        return wandb.init(
            project=self.config.logging.wandb_project,
            name=self.config.name,
            id=id_file.read_text(),
            resume="allow",
            dir=str(self.run_dir),
            config=dataclasses.asdict(self.config),
        )


def _require(package: str, key: str, wanted: bool) -> None:
    if wanted and importlib.util.find_spec(package) is None:
        raise UserError(f"config: {key} needs the package {package}: pip install {package}, or turn it off")


def _plain(value: Any) -> Any:
    """JSON without NaN; numpy and tensor scalars become numbers."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    number = value.item() if hasattr(value, "item") else value
    return None if isinstance(number, float) and not math.isfinite(number) else number


class _ProgressLine:
    """A live line on a terminal, plain lines elsewhere: step, reward, mismatch KL, tokens/s, time left."""

    def __init__(self, config: Config, resume_step: int) -> None:
        self._steps = config.steps
        self._first = resume_step
        self._start: float | None = None
        self._text = ""
        """Of the last step."""
        self._noted = time.monotonic()
        """When something was said last."""
        self._on = config.logging.progress
        self._console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
        self._live: Progress | None = None
        if self._on and self._console.is_terminal:
            columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(24), TextColumn("{task.description}"))
            self._live = Progress(*columns, console=self._console)

    def say(self, line: str) -> None:
        self._console.print(line, markup=False)
        self._noted = time.monotonic()
        self._start = self._start or time.monotonic()

    def step(self, step: int, values: Mapping[str, float | None]) -> None:
        if not self._on:
            return
        now = time.monotonic()
        # Where nothing was said before the first step, that step's own time is the best estimate.
        self._start = self._start or now - (values.get("time/step_s") or 0.0)
        left = (now - self._start) / max(step - self._first, 1) * (self._steps - step)
        text = "  ".join([*_summary(values), f"left {_clock(left)}"])
        if self._live is None:
            self._noted = now
            self._console.print(f"step {step}/{self._steps}  {text}", markup=False)
            return
        self._text = text
        self._show(step, text)

    def note(self, done: int, wanted: int, what: str) -> None:
        if not self._on:
            return
        if self._live is not None:
            self._show(None, f"{self._text}  {what} {done}/{wanted}".strip())
            return
        now = time.monotonic()
        if now - self._noted < NOTE_EVERY_S:
            return
        self._noted = now
        self._console.print(f"{what} {done}/{wanted}", markup=False)

    def _show(self, step: int | None, text: str) -> None:
        if not self._live.tasks:
            self._live.start()
            self._live.add_task("", total=self._steps, completed=self._first)
        self._live.update(self._live.tasks[0].id, completed=step, description=text)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()


def _summary(values: Mapping[str, float | None]) -> list[str]:
    shown = (
        ("reward/mean", "reward {:.3f}"),
        ("eval/score", "eval {:.3f}"),
        ("eval/loss", "eval loss {:.4f}"),
        ("loss/policy", "loss {:.4f}"),
        ("mismatch/kl", "mismatch KL {:.1e}"),
        ("entropy", "entropy {:.2f}"),
        ("throughput/tokens_per_s", "{:,.0f} tok/s"),
        ("time/step_s", "{:.1f} s/step"),
    )
    return [text.format(values[name]) for name, text in shown if values.get(name) is not None]


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
