"""Seconds until `megatron-rl` reports an error in a config, and seconds of the commands that a new user calls first.

    python benchmarks/first_minute.py --model FOLDER --before ../before --json docs/results/first-minute.json

Each command runs in a separate process. The code of both checkouts runs in turns, with the packages of this checkout. Wall and
CPU seconds (including child processes) are medians. A first call, which is not counted, puts files into the system's cache.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
COMMANDS = {
    "--help": ["--help"],
    "train, a model folder that is missing": ["train", "configs/quickstart.yaml", "--model.path", "./nowhere"],
    "train, values that contradict each other": [
        *("train", "configs/quickstart.yaml", "--model.path", "MODEL"),
        *("--algorithm.on_policy", "true", "--batch.updates_per_step", "2"),
    ],
    "plan": ["plan", "configs/quickstart.yaml", "--gpus", "1", "--model.path", "MODEL"],
    "doctor": ["doctor"],
}
TIMEOUT_S = 300


def seconds(checkout: Path, arguments: list[str]) -> tuple[float, float]:
    """Return the wall and CPU seconds of a command."""
    path = f"{checkout}{os.pathsep}{checkout / 'sglang_plugin'}"
    environment = os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    began, used = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-m", "megatron_rl.cli", *arguments],
        cwd=checkout,
        env=environment,
        capture_output=True,
        timeout=TIMEOUT_S,
        check=False,  # most of these commands fail on purpose
    )
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.perf_counter() - began, now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--before", type=Path, metavar="CHECKOUT", help="another checkout to compare with, which must be set up"
    )
    parser.add_argument(
        "--model", type=Path, required=True, help="model folder for the command plan; config.json is enough"
    )
    parser.add_argument("--rounds", type=int, default=5, help="calls of each command (default 5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="output file")
    args = parser.parse_args()
    checkouts = {"now": REPOSITORY} | ({"before": args.before.resolve()} if args.before else {})
    found = {}
    for name, command in COMMANDS.items():
        command = [str(args.model.resolve()) if word == "MODEL" else word for word in command]
        timed: dict[str, list[tuple[float, float]]] = {side: [] for side in checkouts}
        for number in range(args.rounds + 1):
            for side, checkout in checkouts.items():
                took = seconds(checkout, command)
                if number:
                    timed[side].append(took)
        found[name] = {
            side: dict(zip(("wall_s", "cpu_s"), (statistics.median(of) for of in zip(*took, strict=True)), strict=True))
            for side, took in timed.items()
        }
        print(name, {side: {k: round(v, 2) for k, v in of.items()} for side, of in found[name].items()}, flush=True)
    result = {"rounds": args.rounds, "cores": os.cpu_count(), "machine": platform.machine(), "commands": found}
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
