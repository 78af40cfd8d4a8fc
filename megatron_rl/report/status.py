"""`megatron-rl status`: prints the state of a run. It reads only the run's folder, on any machine that sees the folder."""

from __future__ import annotations

import fcntl
import glob
import json
import struct
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_rl.config import job_name
from megatron_rl.credentials import hide
from megatron_rl.metrics.logger import METRICS_FILE
from megatron_rl.report.run_folder import RunLog, number, read_run
from megatron_rl.run.run_lock import NAME as LOCK

FLOCK = "hhqqi4x"
"""Format of Linux's struct flock on 64 bits: type, whence, start, length, process id."""
RECENT = 10
"""Number of most recent steps from which `status` computes times."""
SHOWN = ("reward/mean", "eval/score", "loss/policy", "mismatch/kl", "mismatch/ess", "rollout/stale", "rollout/restarts")
"""Metrics whose newest values `status` shows."""


@dataclass
class Status:
    """State of a run."""

    name: str
    folder: str
    state: str
    """running | finished | stopped; unknown if the file system has no locks."""
    writer: str
    """Process that writes to the folder now, or that wrote to it last."""
    step: int
    steps: int | None
    seconds_per_step: float | None
    """Median time of a step over the most recent steps, in seconds."""
    idle_s: float | None
    """Seconds since the last write to the log."""
    left_s: float | None
    """Estimated seconds until the run's last step has ended, from `seconds_per_step`; None if unknown or not running."""
    checkpoints: list[str]
    unfinished: list[str]
    """Checkpoints that are being written, or whose writing was interrupted when the process ended."""
    metrics: dict[str, float] = field(default_factory=dict)
    times: dict[str, float] = field(default_factory=dict)
    """{phase: share of the time of the most recent steps}, without shares below 1 %."""
    logs: list[str] = field(default_factory=list)


def status_of(folder: Path) -> Status:
    """Read the state of a run from its folder. Errors: UserError if the folder holds no run."""
    log = read_run(folder)
    checkpoints = folder / "checkpoints"
    found = sorted(p.name for p in checkpoints.glob("step_*")) if checkpoints.is_dir() else []
    whole = [name for name in found if not name.endswith(".tmp")]
    steps, step = log.setting("steps"), log.last_step
    steps = steps if isinstance(steps, int) and steps > 0 else None
    writer, held = _writer(folder / LOCK)
    ended = bool(steps) and f"step_{steps:06d}" in whole
    state = "unknown" if held is None else "running" if held else "finished" if ended else "stopped"
    pace = _median([t for line in log.lines[-RECENT:] if (t := number(line.get("time/step_s"))) is not None])
    metrics = folder / METRICS_FILE
    return Status(
        name=log.name,
        folder=str(folder),
        state=state,
        writer=writer,
        step=step,
        steps=steps,
        seconds_per_step=pace,
        idle_s=time.time() - metrics.stat().st_mtime if metrics.exists() else None,
        left_s=pace * (steps - step) if pace is not None and steps and state == "running" else None,
        checkpoints=whole,
        unfinished=[name for name in found if name.endswith(".tmp")],
        metrics=_newest(log),
        times=_shares(log),
        logs=_logs(folder, log.name),
    )


def status_command(folders: Sequence[Path], as_json: bool = False) -> None:
    """Print the state of each run. Errors: UserError if a folder holds no run."""
    found = [status_of(folder) for folder in folders]
    if as_json:
        print(json.dumps([asdict(status) for status in found], indent=2))
    else:
        for status in found:
            Console().print(as_table(status))


def as_table(status: Status) -> Table:
    """Format a run's status for a terminal."""
    table = Table(show_header=False, box=None, title=Text(f"{status.name} ({status.folder})"), title_justify="left")
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    pace = "" if status.seconds_per_step is None else f", {status.seconds_per_step:.3g} s a step"
    idle = "" if status.idle_s is None else f", the last one {clock(status.idle_s)} ago"
    rows = {
        "state": status.state + (f": {status.writer.partition(':')[0]}" if status.writer else ""),
        "step": f"{status.step} of {status.steps if status.steps else 'an unknown number'}{pace}{idle}",
        "left": "" if status.left_s is None else clock(status.left_s),
        "checkpoints": ", ".join(status.checkpoints) or "none",
        "unfinished": ", ".join(status.unfinished),
        "metrics": ", ".join(f"{name} {value:.4g}" for name, value in status.metrics.items()),
        "time": ", ".join(f"{name} {share:.0%}" for name, share in status.times.items()),
        "logs": "\n".join(status.logs),
    }
    for name, text in rows.items():
        if text:
            table.add_row(name, Text(text))
    return table


def clock(seconds: float) -> str:
    """Format a duration as hours:minutes:seconds."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def _writer(path: Path) -> tuple[str, bool | None]:
    """Return (process that locked the folder last, True if it still holds the lock).

    The second value is None if the file system has no locks.
    """
    try:
        with path.open(errors="replace") as file:
            writer = hide(file.read().strip())
            # F_GETLK asks without taking the lock: otherwise a trainer that starts at this moment would find it taken.
            wanted = struct.pack(FLOCK, fcntl.F_WRLCK, 0, 0, 0, 0)
            try:
                found = struct.unpack(FLOCK, fcntl.fcntl(file, fcntl.F_GETLK, wanted))
            except OSError:
                return writer, None
            return writer, found[0] != fcntl.F_UNLCK
    except OSError:
        return "", False


def _newest(log: RunLog) -> dict[str, float]:
    found = {}
    for name in SHOWN:
        values = [value for line in log.lines if (value := number(line.get(name))) is not None]
        if values:
            found[name] = values[-1]
    return found


def _shares(log: RunLog) -> dict[str, float]:
    seconds: dict[str, float] = {}
    for line in log.lines[-RECENT:]:
        for name, value in line.items():
            if name.startswith("time/") and name != "time/step_s" and (value := number(value)) is not None:
                part = name.removeprefix("time/").removesuffix("_s")
                seconds[part] = seconds.get(part, 0.0) + value
    total = sum(seconds.values())
    shares = {part: value / total for part, value in seconds.items() if total and value / total >= 0.01}
    return dict(sorted(shares.items(), key=lambda pair: -pair[1]))


def _logs(folder: Path, name: str) -> list[str]:
    """Return the log files of the run's own servers, and the log folder of its newest Slurm job (examples/slurm/common.sh)."""
    found = [str(path) for path in sorted(folder.glob("sglang*.log"))]
    root = folder.resolve()
    for _ in Path(name).parts:
        root = root.parent
    jobs = (root.parent / "logs").glob(f"{glob.escape(job_name(name))}-*/attempt-*")
    attempts = sorted(jobs, key=lambda path: path.stat().st_mtime)
    return found + [f"{path}/" for path in attempts[-1:]]


def _median(values: list[float]) -> float | None:
    return sorted(values)[len(values) // 2] if values else None
