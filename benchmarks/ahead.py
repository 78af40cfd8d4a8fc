"""Speed gained and score lost if the server samples ahead of the trainer: the quickstart at several values of max_staleness.

    python benchmarks/ahead.py --json docs/results/ahead.json

In every run trainer and server have one core each (taskset), like two groups of GPUs. All runs of a seed start from the same
warm start and use the same prompts in the same order, with the same number of responses. Only rollout.max_staleness differs.
The order of the runs changes from seed to seed. Seconds are medians over the steps of a run after the first two, without
evaluations and saves.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

from cores import REPOSITORY, call, finish, train_beside_server

WARM_UP = 2
PARTS = ("rollout", "log_probs", "train", "sync", "eval", "checkpoint")
MEANS = ("rollout/staleness", "mismatch/ess", "mismatch/sequence_ess", "mismatch/kl", "corrected/weight_ess")


def warm_start(seed: int, folder: Path, timeout: float) -> Path:
    """Make the quickstart's warm start by supervised fine-tuning."""
    log = folder / f"sft-{seed}.log"
    tool = [str(REPOSITORY / "tools" / "make_tiny_model.py"), "--preset", "quickstart"]
    finish(call(0, *tool, str(folder / f"model-{seed}"), "--seed", str(seed), log=log), "the model", log, timeout)
    options = ["--name", f"sft-{seed}", "--seed", str(seed), "--data.seed", str(seed), "--runs_dir", str(folder)]
    sft = ["-m", "megatron_rl.cli", "sft", "configs/quickstart_sft.yaml", *options]
    finish(call(0, *sft, "--model.path", str(folder / f"model-{seed}"), log=log), "the warm start", log, timeout)
    return folder / f"sft-{seed}" / "hf"


def run(seed: int, staleness: int, model: Path, folder: Path, args: argparse.Namespace) -> dict:
    """Run the training once, with its own server on the second core."""
    name = f"seed{seed}-staleness{staleness}"
    addresses, log = folder / f"{name}-addresses", folder / f"{name}.log"
    options = [
        *("--name", name, "--seed", str(seed), "--data.seed", str(seed), "--runs_dir", str(folder)),
        *("--model.path", str(model), "--steps", str(args.steps), "--eval.every", str(args.steps)),
        *("--eval.samples", str(args.eval_samples)),
        *("--rollout.max_staleness", str(staleness), "--rollout.record", "true", "--sync.transport", "distributed"),
        *("--correction.mode", "truncate", "--correction.high", "2.0"),
        *("--logging.trackers", "[]", "--checkpoint.every", "0"),
    ]
    train_beside_server("configs/quickstart.yaml", options, addresses, log, args.timeout)
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row.get("time/step_s") is not None]
    evals = [row["eval/score"] for row in rows if row.get("eval/score") is not None]
    steady = steps[WARM_UP : len(steps) - staleness]  # fewer requests are ahead in the last steps
    seconds = {part: statistics.median(row.get(f"time/{part}_s") or 0 for row in steady) for part in PARTS}
    step = statistics.median(
        row["time/step_s"] - sum(row.get(f"time/{part}_s") or 0 for part in ("eval", "checkpoint")) for row in steady
    )
    means = {key: statistics.fmean(row[key] for row in steady if row.get(key) is not None) for key in MEANS}
    return {
        "seed": seed,
        "max_staleness": staleness,
        "step_s": step,
        "steps_per_s": 1 / step,
        "seconds": seconds,
        "score_before": evals[0],
        "score_after": evals[-1],
        "means": means | {"rollout/staleness_max": max(row["rollout/staleness_max"] for row in steps)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--staleness",
        type=int,
        nargs="+",
        default=[0, 1],
        help="values of max_staleness; all are compared with the first",
    )
    parser.add_argument(
        "--steps", type=int, default=40, help="training steps of a run (default: 40, as in the quickstart)"
    )
    parser.add_argument("--eval-samples", type=int, default=4, help="samples for each of 200 evaluation prompts")
    parser.add_argument("--timeout", type=float, default=1800.0, help="time limit of a run, in seconds")
    parser.add_argument("--folder", type=Path, help="folder of the runs, which is kept (default: a temporary folder)")
    parser.add_argument("--json", type=Path, help="output file (default: standard output)")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that child processes end too
    if (os.cpu_count() or 1) < 2:
        raise SystemExit("benchmarks/ahead.py: needs at least two cores, one for the trainer and one for the server")
    folder = args.folder or Path(tempfile.mkdtemp(prefix="ahead-"))
    folder.mkdir(exist_ok=True)
    runs = []
    for turn, seed in enumerate(args.seeds):
        model = warm_start(seed, folder, args.timeout)
        shift = turn % len(args.staleness)
        for staleness in args.staleness[shift:] + args.staleness[:shift]:
            runs.append(run(seed, staleness, model, folder, args))
            print(json.dumps(runs[-1]), file=sys.stderr, flush=True)
    of = {(one["seed"], one["max_staleness"]): one for one in runs}
    base, *others = args.staleness
    compared = []
    for staleness in others:
        ratios = [of[seed, staleness]["steps_per_s"] / of[seed, base]["steps_per_s"] for seed in args.seeds]
        scores = [of[seed, staleness]["score_after"] - of[seed, base]["score_after"] for seed in args.seeds]
        compared.append(
            {
                "max_staleness": staleness,
                "against": base,
                "steps_per_s_ratio": {"each": ratios, "median": statistics.median(ratios)},
                "score_difference": {"each": scores, "mean": statistics.fmean(scores)},
            }
        )
    result = {
        "machine": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "date": time.strftime("%Y-%m-%d"),
        "compared": compared,
        "runs": sorted(runs, key=lambda one: (one["seed"], one["max_staleness"])),
    }
    text = json.dumps(result, indent=2)
    if args.json:
        args.json.write_text(text + "\n")
    print(text)
    if args.folder is None:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
