"""Resident memory of a run while it saves a checkpoint: all its processes, including the SGLang server.

    python benchmarks/checkpoint_memory.py --json docs/results/checkpoint-memory.json
    python benchmarks/checkpoint_memory.py --async-save

The model is a Qwen3-MoE of 402 M parameters with random weights (30 layers, 2 of 4 experts), in fp32. One trainer process runs
next to a server with a cache of 65,536 tokens, for two steps of a few tokens, with a checkpoint after each step. The script
reads /proc every 20 ms. A page that two processes share counts twice, so the sums are upper bounds. If the run was killed,
exit_status shows it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import yaml

from megatron_rl.metrics.logger import read_json_lines

REPOSITORY = Path(__file__).resolve().parent.parent
SHAPE = {
    "hidden": 576,
    "layers": 30,
    "heads": 9,
    "kv-heads": 3,
    "head-dim": 64,
    "expert-intermediate": 1536,
    "experts": 4,
    "topk": 2,
    "vocab": 49152,
}
STEPS = 2


def make_model(folder: Path) -> Path:
    flags = [flag for name, value in SHAPE.items() for flag in (f"--{name}", str(value))]
    command = [sys.executable, str(REPOSITORY / "tools" / "make_tiny_model.py"), "qwen3_moe", str(folder), *flags]
    subprocess.run([*command, "--tokenizer", "numbers"], check=True, stdout=sys.stderr, timeout=600)
    return folder


def config_of(args: argparse.Namespace, folder: Path, model: Path) -> Path:
    config = {
        "name": "run",
        "runs_dir": str(folder),
        "steps": STEPS,
        "model": {"path": str(model)},
        "data": {"task": "number_sorting"},
        "batch": {"prompts_per_step": 4, "samples_per_prompt": 2, "tokens_per_micro_batch": 256},
        "precision": {"train": "fp32", "rollout": "fp32"},
        "rollout": {
            "max_new_tokens": 7,
            "context_length": 32,
            "server": {"memory_fraction": 0.3, "max_total_tokens": args.cache_tokens},
        },
        "sync": {"transport": "tensor"},
        "checkpoint": {"every": 1, "keep": 1} | ({"async_save": True} if args.async_save else {}),
        "eval": {"prompts": 0},
        "logging": {"trackers": []},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def resident(root: psutil.Process) -> tuple[int, int]:
    """Return the bytes of the trainer's processes and of the server's processes below `root`."""
    trainer = server = 0
    for process in [root, *root.children(recursive=True)]:
        try:
            size = process.memory_info().rss
            is_server = any("sglang" in part for part in process.cmdline()[:4]) or "sglang" in process.name()
        except psutil.Error:
            continue
        trainer, server = (trainer, server + size) if is_server else (trainer + size, server)
    return trainer, server


def watch(process: subprocess.Popen, checkpoints: Path, timeout: float) -> list[tuple[float, bool, int, int]]:
    """Return rows (time, True while a checkpoint is written, bytes of trainer, bytes of server) until the process ends."""
    rows, root, deadline = [], psutil.Process(process.pid), time.monotonic() + timeout
    try:
        while process.poll() is None:
            if time.monotonic() > deadline:
                raise SystemExit(f"benchmarks/checkpoint_memory.py: the run did not end within {timeout:g} s")
            saving = any(checkpoints.glob("step_*.tmp"))
            try:
                rows.append((time.monotonic(), saving, *resident(root)))
            except psutil.NoSuchProcess:
                break
            time.sleep(0.02)
    finally:
        process.kill()
        process.wait(30)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="model folder (default: a new random model)")
    parser.add_argument("--cache-tokens", type=int, default=65_536)
    parser.add_argument("--async-save", action="store_true")
    parser.add_argument("--timeout", type=float, default=1800.0)
    parser.add_argument(
        "--folder", type=Path, help="folder for the model and its checkpoints, 12 GB (default: a temporary folder)"
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as scratch:
        folder = Path(scratch)
        model = (args.model or make_model(folder / "model")).resolve()
        config = config_of(args, folder, model)
        checkpoints = folder / "run" / "checkpoints"
        command = [sys.executable, "-m", "megatron_rl.cli", "train", str(config)]
        process = subprocess.Popen(command, cwd=REPOSITORY, env=os.environ, stdout=sys.stderr)
        rows = watch(process, checkpoints, args.timeout)
        written = sum(file.stat().st_size for file in checkpoints.rglob("*") if file.is_file())
        log = read_json_lines(folder / "run" / "metrics.jsonl")
    if not (saving := [row for row in rows if row[1]]):
        raise SystemExit(
            f"benchmarks/checkpoint_memory.py: the run ended with status {process.returncode} before a save"
        )
    first = next(index for index, row in enumerate(rows) if row[1])
    largest = max(saving, key=lambda row: row[2] + row[3])
    gib = 2**30
    result = {
        "shape": SHAPE,
        "cache_tokens": args.cache_tokens,
        "async_save": args.async_save,
        "checkpoint_gib": written / gib,
        "before_the_first_save_gib": {"trainer": rows[first - 1][2] / gib, "server": rows[first - 1][3] / gib},
        "largest_while_saving_gib": {
            "all": (largest[2] + largest[3]) / gib,
            "trainer": max(row[2] for row in saving) / gib,
            "server": max(row[3] for row in saving) / gib,
        },
        "largest_of_the_run_gib": max(row[2] + row[3] for row in rows) / gib,
        "time/checkpoint_s": [row.get("time/checkpoint_s") for row in log],
        "samples": len(rows),
        "exit_status": process.returncode,
    }
    text = json.dumps(result, indent=2)
    print(text)
    if args.json:
        args.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
