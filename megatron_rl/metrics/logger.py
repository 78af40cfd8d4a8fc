"""The run's log: metrics.jsonl and samples.jsonl, trackers, Prometheus, and the progress line."""

from __future__ import annotations

import hmac
import json
import math
import operator
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from megatron_rl.config import Config
from megatron_rl.credentials import bearer, key_of
from megatron_rl.errors import UserError
from megatron_rl.metrics.trackers import TrackedRun, Trackers, tracker_class

METRICS_FILE = "metrics.jsonl"
SCORES_FILE = "evals/scores.jsonl"
"""Path of the file with the scores of a model folder, which `megatron-rl eval` writes: one line as in metrics.jsonl."""
SAMPLES_FILE = "samples.jsonl"
NOTE_EVERY_S = 30.0
"""Seconds between two progress lines within a step, if the output is not a terminal."""
TIMES = ("rollout", "sleep", "wake", "reward", "log_probs", "train", "sync", "eval", "checkpoint", "other", "step")
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
"""Names that every line of metrics.jsonl has; null if a metric does not apply."""


class JsonLines:
    """An append-only file of JSON objects with a "step". It is opened at the first write, and each line is flushed to the disk.

    If a run continues after `resume_step`, it will write the lines of later steps again, so opening the file removes them. For
    resume_step 0, opening removes all lines. It also removes a last line that a crash left incomplete.
    """

    def __init__(self, path: Path, resume_step: int) -> None:
        self.path = path
        self._resume_step = resume_step
        self._file: TextIO | None = None

    def write(self, record: Mapping[str, Any]) -> None:
        """Write a record. Errors: UserError naming the file if it cannot be written, for example to a full disk."""
        try:
            if self._file is None:
                self._cut()
                self._file = self.path.open("a")
            self._file.write(json.dumps(record, allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            with suppress(OSError, UserError):  # what it still holds cannot be written either
                self.close()
            raise UserError(
                f"{self.path}: {error.strerror}; free some space and start the run again to go on"
            ) from None

    def _cut(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        stay = [r for r in read_json_lines(self.path) if self._resume_step > 0 and r["step"] <= self._resume_step]
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(r) + "\n" for r in stay))
        os.replace(temporary, self.path)

    def close(self) -> None:
        """Close the file if it is open. Errors: UserError if buffered lines cannot be written."""
        file, self._file = self._file, None
        if file is None:
            return
        try:
            file.close()
        except OSError as error:
            raise UserError(f"{self.path}: {error.strerror}; its last line is lost") from None


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Read the records of a log that may still be growing. An incomplete last line is left out; a missing file is empty.

    Errors: UserError naming file and line if an earlier line is not a JSON object with a step.
    """
    if not path.exists():
        return []
    lines = path.read_text(errors="replace").splitlines()
    records = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            operator.index(record["step"])
        except (ValueError, TypeError, KeyError, RecursionError):
            if number == len(lines):
                break
            raise UserError(f"{path}, line {number}: not a JSON object with a step; remove this line") from None
        records.append(record)
    return records


class RunLogger:
    """Writes the log of one run. It does nothing on ranks that are not `active`."""

    def __init__(
        self, run_dir: Path, config: Config, *, resume_step: int = 0, active: bool = True, exports: bool = True
    ) -> None:
        """Create it. resume_step: step after which the run continues; the first write removes lines of later steps.

        exports: False for a command that may run at the same time as the run itself, whose Prometheus port it must not use.
        Errors: UserError if a tracker does not exist or its package is missing.
        """
        self.run_dir = Path(run_dir)
        self.config = config
        self.active = active
        self._resume_step = resume_step
        self._metrics = JsonLines(self.run_dir / METRICS_FILE, resume_step)
        self._samples = JsonLines(self.run_dir / SAMPLES_FILE, resume_step)
        self._progress = _ProgressLine(config.steps, resume_step, active=active, shown=config.logging.progress)
        self._started: Trackers | None = None
        self._open = ExitStack()
        for part in (self._samples, self._metrics, self._progress):
            self._open.callback(part.close)
        self._pending: Mapping[str, Any] = {}
        self._warned: set[str] = set()
        for name in config.logging.trackers if active else []:
            tracker_class(name)
        self._exported = self._prometheus() if active and exports and config.logging.prometheus_port else None

    def say(self, line: str) -> None:
        """Print a line for the user above the progress line."""
        self._progress.say(line)

    def progress(self, done: int, wanted: int, what: str = "responses") -> None:
        """Show the progress of the current part of a step in the progress line. Without a terminal, print it rarely."""
        self._progress.note(done, wanted, what)

    def log_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write a line of metrics.jsonl: `metrics` (numbers, 0-dim tensors or None), and the evaluation scores of this step."""
        if self.active:
            values = self._write(step, {**metrics, **self._pending})
            self._pending = {}
            self._progress.step(step, values)

    def log_eval(self, step: int, scores: Mapping[str, Any]) -> None:
        """Add scores to the line that `log_step` writes for the same step. Before the first step, write a separate line."""
        if not self.active or not scores:
            return
        said = ", ".join(f"{name.removeprefix('eval/')} {value:.4g}" for name, value in scores.items())
        self.say(f"eval at step {step}: {said}")
        if step > 0:
            self._pending = scores
        else:
            self._write(step, scores)

    def log_samples(self, step: int, samples: Iterable[Mapping[str, Any]]) -> None:
        """Write some responses of a step, which report/samples.py chooses, to samples.jsonl.

        Each response has prompt, response, reward, finish, count, reward/PART, and any other keys that are given.
        """
        if self.active:
            plain = [_plain(sample) for sample in samples]
            for sample in plain:
                self._samples.write({"step": step, **sample})
            self._trackers().log_samples(plain, step)

    def close(self) -> None:
        """Close all files and services."""
        self._open.close()

    def __enter__(self) -> RunLogger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, step: int, metrics: Mapping[str, Any]) -> dict[str, float | None]:
        """Write a line and return its values. Values that are not finite become None and are counted.

        The first such value of each name causes a warning.
        """
        values = {name: _plain(value) for name, value in {**dict.fromkeys(STANDARD), **metrics}.items()}
        wrong = [name for name, value in metrics.items() if value is not None and values[name] is None]
        for name in wrong:
            if name not in self._warned:
                number = float(metrics[name])
                self.say(f"warning: {name} is {number} at step {step}; the log has null in its place")
        self._warned.update(wrong)
        values["log/not_finite"] = len(wrong)
        self._metrics.write({"step": step, **values})
        numbers = {name: value for name, value in values.items() if value is not None}
        self._trackers().log(numbers, step)
        if self._exported:
            self._exported(numbers, step)
        return values

    def _trackers(self) -> Trackers:
        """Return the trackers. They start with the log's first line, so that a run that fails early leaves no empty run."""
        if self._started is None:
            run = TrackedRun.from_config(self.config, self.run_dir, self._resume_step)
            self._started = Trackers(run, self.config.logging.trackers, self.say)
            self._open.callback(self._started.close)
        return self._started

    def _prometheus(self) -> Callable[[Mapping[str, float], int], None]:
        """Start the Prometheus exporter. Errors: UserError if the port is taken."""
        from prometheus_client import CollectorRegistry, Gauge, make_wsgi_app, start_http_server

        registry = CollectorRegistry()
        newest = Gauge(
            "megatron_rl_metric", "Newest value, by its name in metrics.jsonl", ["run", "metric"], registry=registry
        )
        at = Gauge("megatron_rl_step", "Steps that have been made", ["run"], registry=registry)
        when = Gauge("megatron_rl_last_step_timestamp_seconds", "When the last one ended", ["run"], registry=registry)
        run, port = self.config.name, self.config.logging.prometheus_port or 0
        address, setting = self.config.logging.prometheus_address, "logging.prometheus_api_key"
        key = key_of(self.config.logging.prometheus_api_key, setting)
        from megatron_rl.distributed.processes import is_loopback

        if not key and not is_loopback(address):
            raise UserError(
                f"config: {setting}: everybody who reaches {address} would see the metrics; set it to where a key is"
                " (env:NAME or file:PATH)"
            )
        try:
            server, thread = start_http_server(port, address, registry=registry)
        except OSError as error:
            raise UserError(
                f"config: logging.prometheus_port: {port}: {error.strerror}; set it to a free one of this machine's address"
                f" {address} (logging.prometheus_address)"
            ) from None
        server.set_app(_for_holders_of(key, make_wsgi_app(registry)))
        self._open.callback(thread.join, 5.0)
        self._open.callback(server.server_close)
        self._open.callback(server.shutdown)

        def log(values: Mapping[str, float], step: int) -> None:
            at.labels(run).set(step)
            when.labels(run).set_to_current_time()
            for name, value in values.items():
                newest.labels(run, name).set(value)

        return log


def _for_holders_of(key: str, app: Callable[..., Iterable[bytes]]) -> Callable[..., Iterable[bytes]]:
    """Return a WSGI application that answers only requests with the key; an empty key allows all requests."""
    wanted = bearer(key).get("Authorization", "")

    def checked(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if key and not hmac.compare_digest(environ.get("HTTP_AUTHORIZATION", "").encode(), wanted.encode()):
            start_response("401 Unauthorized", [("WWW-Authenticate", "Bearer")])
            return [b""]
        return app(environ, start_response)

    return checked


def _plain(value: Any) -> Any:
    """Return a value that JSON can hold: None for NaN, numbers for numpy and tensor scalars."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    number = value.item() if hasattr(value, "item") else value
    return None if isinstance(number, float) and not math.isfinite(number) else number


class _ProgressLine:
    """Progress as a live line on a terminal, or as plain lines: step, reward, mismatch KL, tokens/s, time left."""

    def __init__(self, steps: int, resume_step: int, *, active: bool, shown: bool) -> None:
        self._steps = steps
        self._first = resume_step
        self._start: float | None = None
        self._text = ""
        """Text about the progress of the last step."""
        self._noted = time.monotonic()
        """Time of the last printed line, in seconds of the monotonic clock."""
        self._on = active and shown
        self._console = Console(file=sys.stdout, highlight=False, soft_wrap=True, quiet=not active)
        columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(24), TextColumn("{task.description}"))
        # Not `console.is_terminal`, which takes a pipe for a terminal if FORCE_COLOR is set, as in notebooks.
        live = self._on and self._console.file.isatty()
        self._live = Progress(*columns, console=self._console) if live else None

    def say(self, line: str) -> None:
        self._print(line)
        self._start = self._start or self._noted

    def step(self, step: int, values: Mapping[str, float | None]) -> None:
        if not self._on:
            return
        now = time.monotonic()
        # Where nothing was said before the first step, that step's own time is the best estimate.
        self._start = self._start or now - (values.get("time/step_s") or 0.0)
        left = (now - self._start) / max(step - self._first, 1) * (self._steps - step)
        self._text = "  ".join([*_summary(values), f"left {_clock(left)}"])
        if not self._show(self._text, step):
            self._print(f"step {step}/{self._steps}  {self._text}")

    def note(self, done: int, wanted: int, what: str) -> None:
        noted = f"{what} {done}/{wanted}"
        if self._show(f"{self._text}  {noted}".strip()):
            return
        if self._on and time.monotonic() - self._noted >= NOTE_EVERY_S:
            self._print(noted)

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False)
        self._noted = time.monotonic()

    def _show(self, text: str, step: int | None = None) -> bool:
        if self._live is None:
            return False
        if not self._live.tasks:
            self._live.start()
            self._live.add_task("", total=self._steps, completed=self._first)
        self._live.update(self._live.tasks[0].id, completed=step, description=text)
        return True

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()


def _summary(values: Mapping[str, float | None]) -> list[str]:
    shown = (
        ("reward/mean", "reward {:.3f}"),
        ("eval/score", "eval {:.3f}"),
        ("eval/loss", "eval loss {:.4f}"),
        ("eval/bits_per_byte", "{:.3f} bits/byte"),
        ("loss/policy", "loss {:.4f}"),
        ("preference/loss", "loss {:.4f}"),
        ("preference/accuracy", "accuracy {:.3f}"),
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
