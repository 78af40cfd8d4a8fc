"""Growth during a long run of a tiny model: memory, file descriptors, threads, disk, mismatch.

    python benchmarks/soak.py --json docs/results/soak.json

The script runs `megatron-rl train` with its own server, saves and evaluations, and samples the figures while the run is active.
It drops the first 600 steps, in which caches of limited size fill up (Python's cache of patterns, the task's cache of prompts).
The rest is divided into 20 blocks. A least squares fit to the medians of the blocks gives each slope per 1,000 steps, with the
standard error of the residuals. Samples within a block are correlated, blocks hardly, and a sample during a save does not
change a median. `of_level` is the slope divided by the mean. Logs grow by design and are listed separately.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import yaml

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))  # Python searches only the script's own folder

from megatron_rl.tasks.builtin import NumberSorting  # noqa: E402
from tools.make_tiny_model import Sizes, make_tiny_model  # noqa: E402

BLOCKS, WARM_UP = 20, 600
MIB = 2**20
LOGS = ("*.jsonl", "*.log", "evals/*", "report.html", "tensorboard/*")
METRICS = ("mismatch/kl", "time/step_s")


def config_of(folder: Path, model: Path, steps: int) -> dict:
    return {
        "name": "soak",
        "steps": steps,
        "runs_dir": str(folder),
        "model": {"path": str(model)},
        "data": {"task": "benchmarks/soak.py:Noise"},
        "batch": {"prompts_per_step": 8, "samples_per_prompt": 4, "updates_per_step": 2, "tokens_per_micro_batch": 256},
        "optimizer": {"lr": 2e-6},
        "precision": {"train": "bf16", "rollout": "bf16"},  # bf16 has a mismatch to observe
        "rollout": {
            "max_new_tokens": 12,
            "context_length": 32,
            "server": {"threads": 1, "max_total_tokens": 2048},
        },
        "checkpoint": {"every": 50, "keep": 2},
        "eval": {"every": 100, "prompts": 20, "samples": 1},
        "logging": {"progress": False},
    }


class Noise(NumberSorting):
    """Gives rewards from 0 to 1 without information: weights change in every update, but the policy learns nothing."""

    name = "noise"
    parts = ("correct",)
    _verify = staticmethod(lambda text, answer: {"correct": zlib.crc32(text.encode()) / 2**32})


def size(files: list[Path]) -> int:
    total = 0
    for file in files:
        try:
            total += file.stat().st_size if file.is_file() else 0
        except FileNotFoundError:  # moved or removed in the meantime
            continue
    return total


def look(trainer: psutil.Process, run: Path) -> dict[str, float]:
    """Return the current figures."""
    found = {"trainer_mib": trainer.memory_info().rss / MIB, "trainer_fds": trainer.num_fds()}
    found["trainer_threads"] = trainer.num_threads()
    memory, fds, threads, processes = 0, 0, 0, 0
    for process in trainer.children(recursive=True):
        try:
            memory += process.memory_info().rss
            fds += process.num_fds()
            threads += process.num_threads()
            processes += 1
        except psutil.NoSuchProcess:
            continue
    found |= {"server_mib": memory / MIB, "server_fds": fds, "server_threads": threads, "processes": processes}
    files, logs = [*run.rglob("*")], {file for pattern in LOGS for file in run.glob(pattern)}
    found["disk_mib"] = size([file for file in files if file not in logs]) / MIB
    return found | {"logs_mib": size([*logs]) / MIB, "shared_memory": len(os.listdir("/dev/shm"))}


def slope(steps: np.ndarray, values: np.ndarray) -> dict[str, Any]:
    """Return the slope per 1,000 steps, from the medians of BLOCKS blocks."""
    keep = steps > min(WARM_UP, steps.max() / 2)
    blocks = [*zip(np.array_split(steps[keep], BLOCKS), np.array_split(values[keep], BLOCKS), strict=True)]
    x, y = (np.array([np.median(part[i]) for part in blocks]) for i in (0, 1))
    x = x / 1000
    spread = ((x - x.mean()) ** 2).sum()
    per = ((x - x.mean()) * (y - y.mean())).sum() / spread
    rest = y - y.mean() - per * (x - x.mean())
    error = np.sqrt((rest**2).sum() / (BLOCKS - 2) / spread)
    level = float(y.mean())
    return {
        "mean": level,
        "largest": float(values.max()),
        "slope_per_1000_steps": float(per),
        "standard_error": float(error),
        "of_level": float(per / level) if level else 0.0,
        "medians": [float(f"{value:.6g}") for value in y],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--every", type=float, default=2.0, help="seconds between two samples")
    parser.add_argument("--timeout", type=float, default=7200.0)
    parser.add_argument("--json", type=Path, help="output file (default: standard output)")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that child processes end too
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        folder = Path(name)
        model = make_tiny_model("qwen3_moe", folder / "model", sizes=Sizes(layers=2), tokenizer="numbers")
        (folder / "config.yaml").write_text(yaml.safe_dump(config_of(folder, model, args.steps)))
        log, run, metrics = folder / "log", folder / "soak", folder / "soak" / "metrics.jsonl"
        with open(log, "wb") as out:
            program = subprocess.Popen(
                [sys.executable, "-m", "megatron_rl.cli", "train", str(folder / "config.yaml")],
                cwd=REPOSITORY,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                stdout=out,
                stderr=out,
            )
        seen: list[tuple[int, dict[str, float]]] = []
        start, trainer, rows = time.monotonic(), psutil.Process(program.pid), []
        try:
            while program.poll() is None:
                if time.monotonic() - start > args.timeout:
                    raise SystemExit(f"benchmarks/soak.py: not done within {args.timeout:g} s")
                time.sleep(args.every)
                lines = metrics.read_text().splitlines() if metrics.exists() else []
                rows = [row for row in map(json.loads, lines) if row["step"] > 0]
                if not rows or rows[-1]["step"] == args.steps:  # the server ends after the last step
                    continue
                try:
                    seen.append((rows[-1]["step"], look(trainer, run)))
                except psutil.NoSuchProcess:
                    break
        finally:
            program.terminate()
            program.wait(60)
        rows = [row for row in map(json.loads, metrics.read_text().splitlines()) if row["step"] > 0]
        if program.returncode or len(rows) != args.steps:
            tail = "\n".join(log.read_text().splitlines()[-20:])
            raise SystemExit(f"benchmarks/soak.py: ended with {program.returncode} after {len(rows)} steps\n{tail}")
    steps = np.array([step for step, _ in seen], float)
    figures = {key: slope(steps, np.array([one[key] for _, one in seen], float)) for key in seen[0][1]}
    for key in METRICS:
        of = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
        figures[key] = slope(*(np.array(column, float) for column in zip(*of, strict=True)))
    result = {
        "machine": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "date": time.strftime("%Y-%m-%d"),
        "steps": len(rows),
        "looks": len(seen),
        "seconds": round(time.monotonic() - start),
        "figures": figures,
    }
    text = json.dumps(result, indent=2)
    if args.json:
        args.json.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
