"""Time of the parts of a training step: tokens/s of rollout, scoring, update and sync; peak memory; comparison with TRL.

    python benchmarks/step.py --model runs/quickstart/model --steps 12 --json out.json
    python benchmarks/step.py --model MODEL --peer trl --json out.json     # needs requirements/benchmark.txt

    python benchmarks/step.py --model MODEL --updates 4 --compare r2 pr2 --json out.json
    python benchmarks/step.py --model MODEL --compare none pruned corrected critic --json out.json

The script runs the real command, `megatron-rl train`, in a separate process, and reads the times from the run's metrics.jsonl.
The peer trains the same model on the same prompts, with the same number of new tokens. The figures are medians over the steps
after the first two.

--compare adds the cost of variants of the update, compared with the first variant. Scoring and updates of the variants take
turns on one batch, and the difference is given as a share of the step. Variants are the route sources, pruned, corrected, the
variants of VP2O, critic (PPO instead of GRPO), lora (adapters instead of all weights) and identical (precision.identical). For
pruned and identical, rollouts are compared in the same way.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import yaml

REPOSITORY = Path(__file__).resolve().parent.parent
WARM_UP = 2
PARTS = ("rollout", "log_probs", "train", "sync", "other")


def make_prompts(folder: Path, tokenizer_path: str, count: int, prompt_tokens: int) -> Path:
    """Write prompts of about `prompt_tokens` tokens to a JSONL file, with answers that no response matches."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_path)
    path = folder / "prompts.jsonl"
    with path.open("w") as file:
        for i in range(count):
            numbers = [(i * 7 + k * 3) % 20 for k in range(10 * prompt_tokens)]
            text = " ".join(str(n) for n in numbers)
            ids = tokenizer.encode(text, add_special_tokens=False)[:prompt_tokens]
            file.write(json.dumps({"prompt": tokenizer.decode(ids), "answer": "none"}) + "\n")
    return path


class PeakMemory:
    """Samples the resident memory of a process tree and keeps the largest sum."""

    def __init__(self, pid: int) -> None:
        self.peak = 0
        self._root = psutil.Process(pid)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stop.wait(0.2):
            total = 0
            try:
                for process in [self._root, *self._root.children(recursive=True)]:
                    try:
                        total += process.memory_info().rss
                    except psutil.Error:
                        continue
            except psutil.Error:
                return
            self.peak = max(self.peak, total)

    def stop(self) -> float:
        self._stop.set()
        self._thread.join(5)
        return self.peak / 2**30


def run_ours(args: argparse.Namespace, folder: Path, prompts: Path) -> dict:
    sequences, sequence = args.prompts * args.samples, args.prompt_tokens + args.new_tokens
    config = {
        "name": "bench",
        "runs_dir": str(folder),
        "steps": args.steps + 1,  # the last step writes a checkpoint and is not waited for
        "model": {"path": str(Path(args.model).resolve())},
        "data": {"task": "file", "path": str(prompts), "verifier": "exact"},
        "batch": {
            "prompts_per_step": args.prompts,
            "samples_per_prompt": args.samples,
            "updates_per_step": args.updates,
            "tokens_per_micro_batch": args.micro_batch_tokens,
        },
        "precision": {"train": args.precision, "rollout": args.rollout_precision or args.precision},
        "rollout": {
            "max_new_tokens": args.new_tokens,
            "context_length": sequence + 16,
            "server": {"memory_fraction": 0.3, "max_total_tokens": 2 * sequences * sequence},
        },
        "sync": {"transport": args.transport},
        "eval": {"prompts": 0},
        "logging": {"trackers": []},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    command = [
        sys.executable,
        "-m",
        "megatron_rl.cli",
        "train",
        str(folder / "config.yaml"),
        "--nproc",
        str(args.nproc),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": str(max(1, args.threads // args.nproc))}
    process = subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=sys.stderr)
    memory = PeakMemory(process.pid)
    deadline = time.monotonic() + args.timeout
    metrics, rows = folder / "bench" / "metrics.jsonl", []
    try:
        while len(rows) < args.steps:
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"benchmarks/step.py: megatron-rl train ended with status {process.poll()}")
            time.sleep(0.2)
            lines = metrics.read_text().splitlines() if metrics.exists() else []
            rows = [row for row in map(json.loads, lines) if row["step"] > 0]
    finally:
        process.kill()  # the server ends with the run
        process.wait(30)
    peak = memory.stop()
    rows = [r for r in rows if r["step"] > WARM_UP]
    seconds = {part: statistics.median(r.get(f"time/{part}_s") or 0.0 for r in rows) for part in PARTS}
    step = statistics.median(sum(r.get(f"time/{part}_s") or 0.0 for part in PARTS) for r in rows)
    tokens = statistics.median(r["tokens"] for r in rows)
    new = statistics.median(r["response/length"] for r in rows) * args.prompts * args.samples
    return {
        "step_s": step,
        "seconds": seconds,
        "share": {part: value / step for part, value in seconds.items()},
        "tokens_per_step": tokens,
        "new_tokens_per_step": new,
        "tokens_per_s": {
            "rollout": new / seconds["rollout"],
            "score": tokens / seconds["log_probs"] if args.updates > 1 else None,
            "update": tokens / seconds["train"],
            "step": tokens / step,
        },
        "sync_megabytes_per_s": rows[-1]["sync/megabytes"] / seconds["sync"],
        "peak_gib": peak,
        "steps_measured": len(rows),
    }


def run_trl(args: argparse.Namespace, prompts: Path) -> dict:
    texts = [json.loads(line)["prompt"] for line in prompts.read_text().splitlines()]
    listed = prompts.with_suffix(".json")
    listed.write_text(json.dumps(texts))
    result = _run_json(
        args, "peer_trl.py",
        *("--model", args.model, "--prompts-file", str(listed), "--prompts", str(args.prompts)),
        *("--samples", str(args.samples), "--new-tokens", str(args.new_tokens), "--steps", str(args.steps)),
        *("--threads", str(args.threads), "--micro-batch", str(args.peer_micro_batch)),
    )  # fmt: skip
    steps = result["step_s"][WARM_UP:]
    return {
        "step_s": statistics.median(steps),
        "new_tokens_per_step": statistics.median(result["completion_tokens"][WARM_UP:]),
        "steps_measured": len(steps),
        "peak_gib": result["peak_gib"],
    }


def run_variants(args: argparse.Namespace, folder: Path, ours: dict) -> dict:
    """Measure the cost of each variant relative to the first, in seconds and as a share of the step; also of rollouts."""
    shape = [
        *("--model", str(Path(args.model).resolve()), "--rounds", str(args.compare_rounds)),
        *("--prompt-tokens", str(args.prompt_tokens), "--new-tokens", str(args.new_tokens)),
    ]
    result = _run_json(
        args, "update_overhead.py", *shape,
        *("--sequences", str(args.prompts * args.samples), "--precision", args.precision),
        *("--updates", str(args.updates), "--micro-batch-tokens", str(args.micro_batch_tokens)),
        *("--variants", *args.compare),
    )  # fmt: skip
    added = list(result["variants"].values())
    if rollouts := [variant for variant in args.compare if variant in ("pruned", "identical")]:
        result["rollout"] = _run_json(
            args, "rollout_overhead.py", *shape,
            *("--prompts", str(args.prompts), "--samples", str(args.samples)),
            *("--precision", args.rollout_precision or args.precision, "--log", str(folder / "sglang.log")),
            *("--variants", *rollouts),
        )  # fmt: skip
        added += [figures for figures in result["rollout"].values() if "added_s" in figures]
    for figures in added:
        figures["added_share_of_step"] = figures["added_s"] / ours["step_s"]
    return result


def _run_json(args: argparse.Namespace, script: str, *flags: str) -> dict:
    """Return the last line that another script of this folder prints. Errors: SystemExit with the last line of its stderr."""
    command = [sys.executable, str(REPOSITORY / "benchmarks" / script), *flags]
    environment = os.environ | {"OMP_NUM_THREADS": str(args.threads)}
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=args.timeout, check=False
    )
    if done.returncode:
        raise SystemExit(
            f"benchmarks/step.py: {script} failed: {(done.stderr.strip().splitlines() or ['no output'])[-1]}"
        )
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Hugging Face folder")
    parser.add_argument("--prompts", type=int, default=64, help="prompts per step; defaults as in the quickstart")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=7)
    parser.add_argument("--updates", type=int, default=1)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--rollout-precision", choices=("fp32", "bf16"))
    parser.add_argument("--micro-batch-tokens", type=int, default=4096)
    parser.add_argument("--transport", choices=("tensor", "distributed", "disk"), default="tensor")
    parser.add_argument("--nproc", type=int, default=1, help="number of trainer processes")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--peer", choices=("trl",))
    parser.add_argument(
        "--peer-micro-batch", type=int, default=0, help="sequences per forward-backward of the peer; 0: all"
    )
    parser.add_argument(
        "--compare",
        nargs="+",
        metavar="VARIANT",
        help="variants to compare: values of routing.source, pruned, corrected, vp2o_*, critic, lora, identical",
    )
    parser.add_argument("--compare-rounds", type=int, default=20)
    parser.add_argument("--timeout", type=float, default=3600.0)
    parser.add_argument("--json", help="output file (default: standard output)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prompts = make_prompts(folder, args.model, 4 * args.prompts, args.prompt_tokens)
        result: dict = {
            "machine": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()},
            "settings": {k: v for k, v in vars(args).items() if k not in ("json", "timeout", "model")},
            "model": "/".join(Path(args.model).parts[-2:]),
            "date": time.strftime("%Y-%m-%d"),
            "ours": run_ours(args, folder, prompts),
        }
        if args.peer:
            result["peer"] = run_trl(args, prompts)
            result["ratio"] = result["ours"]["step_s"] / result["peer"]["step_s"]
        if args.compare:
            result["compare"] = run_variants(args, folder, result["ours"])
    text = json.dumps(result, indent=2)
    if args.json:
        Path(args.json).write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
