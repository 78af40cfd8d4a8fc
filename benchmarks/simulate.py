"""Error of the simulator's step times: costs are measured in some runs, and five other runs are predicted from them.

    python benchmarks/simulate.py --json docs/results/simulate.json

The model is untrained and has the quickstart's sizes; trainer and server have one core each (taskset). Every setting runs once
per round, because the speed of a machine changes over minutes. Costs are computed by `megatron-rl simulate --from` from all
runs of the first kind. Errors are computed as by `--compare`, from medians of a run's steady steps, and averaged over rounds.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import shutil
import signal
import statistics
import sys
import tempfile
import time
from itertools import zip_longest
from pathlib import Path

from cores import REPOSITORY, call, finish, train_beside_server

# Prompts per step, samples per prompt, largest number of tokens per response, updates per step, rollout.max_staleness.
MEASURED = {
    "few-short": (16, 4, 6, 1, 0),
    "many-short": (96, 8, 6, 1, 0),
    "few-long": (16, 4, 28, 1, 0),
    "many-long": (48, 8, 24, 1, 0),
    "many-prompts": (112, 2, 6, 1, 0),  # separates the cost of a prompt from the cost of a response
    "both-at-once": (64, 8, 8, 1, 1),  # measures how much trainer and server slow each other down
}
PREDICTED = {
    "medium": (48, 4, 16, 1, 0),
    "wide": (128, 4, 8, 1, 0),
    "long": (24, 8, 28, 1, 0),
    "two-updates": (32, 8, 12, 2, 0),
    "one-step-off": (48, 8, 16, 1, 1),
}


def run(name: str, sizes: tuple[int, ...], model: Path, folder: Path, args: argparse.Namespace) -> Path:
    prompts, samples, tokens, updates, staleness = sizes
    metrics = folder / name / "metrics.jsonl"
    if metrics.exists() and f'"step": {args.steps},' in metrics.read_text():
        return folder / name
    options = [
        *("--name", name, "--runs_dir", str(folder), "--model.path", str(model), "--steps", str(args.steps)),
        *("--batch.prompts_per_step", str(prompts), "--batch.samples_per_prompt", str(samples)),
        *("--batch.updates_per_step", str(updates), "--rollout.max_new_tokens", str(tokens)),
        *("--rollout.context_length", "64", "--rollout.max_staleness", str(staleness), "--rollout.record", "true"),
        *("--sync.transport", "distributed", "--correction.mode", "truncate", "--correction.high", "2.0"),
        *("--optimizer.warmup_steps", "0", "--optimizer.decay", "constant", "--optimizer.lr", "1e-6"),
        *("--eval.prompts", "0", "--logging.trackers", "[]", "--checkpoint.every", "0"),
    ]
    train_beside_server(
        "configs/quickstart.yaml", options, folder / f"{name}-addresses", folder / f"{name}.log", args.timeout
    )
    return folder / name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=900.0, help="time limit of a run, in seconds")
    parser.add_argument(
        "--folder",
        type=Path,
        help="folder of the runs, which is kept; finished runs are not repeated (default: a temporary folder)",
    )
    parser.add_argument("--json", type=Path, help="output file (default: standard output)")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that child processes end too
    if (os.cpu_count() or 1) < 2:
        raise SystemExit("benchmarks/simulate.py: needs at least two cores, one for the trainer and one for the server")
    sys.path.insert(0, str(REPOSITORY))
    from megatron_rl.simulate.measured import Measured, calibrate, compare, read_measured

    folder = args.folder or Path(tempfile.mkdtemp(prefix="simulate-"))
    folder.mkdir(exist_ok=True)
    model, log = folder / "model", folder / "model.log"
    tool = [str(REPOSITORY / "tools" / "make_tiny_model.py"), "--preset", "quickstart", str(model)]
    if not model.exists():
        finish(call(0, *tool, log=log), "the model", log, args.timeout)
    settings = MEASURED | PREDICTED
    runs: dict[str, list[Measured]] = {name: [] for name in settings}
    in_turns = [name for pair in zip_longest(MEASURED, PREDICTED) for name in pair if name]
    for number in range(args.rounds):
        for name in in_turns if number % 2 == 0 else in_turns[::-1]:
            runs[name].append(read_measured(run(f"{name}-{number}", settings[name], model, folder, args)))
            print(f"round {number + 1}: {name} ran", file=sys.stderr, flush=True)
    costs = calibrate([one for name in MEASURED for one in runs[name]])
    rows = []
    for name in PREDICTED:
        found = [compare(one, costs) for one in runs[name]]
        for part in zip(*found, strict=True):
            measured, predicted = (statistics.fmean(getattr(row, k) for row in part) for k in ("measured", "predicted"))
            each = [row.measured for row in part]
            rows.append(
                {"name": name, "part": part[0].part, "measured_s": measured, "each_s": each, "predicted_s": predicted}
            )
    errors = {row["name"]: row["predicted_s"] / row["measured_s"] - 1 for row in rows if row["part"] == "step"}
    result = {
        "machine": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "date": time.strftime("%Y-%m-%d"),
        "sizes": {"measured": MEASURED, "predicted": PREDICTED},
        "costs": dataclasses.asdict(costs),
        "compared": rows,
        "errors": errors,
        "largest_error": max(map(abs, errors.values())),
    }
    text = json.dumps(result, indent=2)
    if args.json:
        args.json.write_text(text + "\n")
    print(text)
    if args.folder is None:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
