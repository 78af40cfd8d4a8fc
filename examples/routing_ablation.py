"""The runs of routing_ablation.sh: plan, start what is missing, put the results together.

One warm start is shared by all. A run is done when its log has its last step; what is done is not run again, and a run that
was stopped starts anew. Results are written whenever the script ends, of all runs that are done. The learning rate falls as
1 / n for n updates a rollout batch, as in Pr2's Appendix E.1, so that the policy moves about as far over one rollout batch
whatever n.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.metrics.logger import METRICS_FILE, read_json_lines
from megatron_rl.metrics.routing_pictures import write_svg

REPOSITORY = Path(__file__).resolve().parent.parent
CLI = [sys.executable, "-m", "megatron_rl.cli"]
LONGEST_S = 3600
"""Of one run."""
METHODS: dict[str, dict[str, object]] = {
    "GRPO": {},
    "GSPO": {
        "algorithm.loss": "gspo",
        "algorithm.aggregation": "sequence_mean",
        "algorithm.clip_low": 0.02,  # responses have 7 tokens: a mean over them wanders more than over thousands
        "algorithm.clip_high": 0.03,
    },
    "R2": {"routing.source": "recorded"},
    "Pr2": {"routing.source": "predicted"},
    "R3": {"routing.source": "rollout"},
    "Pr3": {"routing.source": "predicted_rollout"},
    "Pr2 published": {
        "routing.source": "predicted",
        "routing.predictor_lr_multiplier": 1.0,
        "routing.predictor_decay": 0.0,
    },
    "Pr3 engine features": {"routing.source": "predicted_rollout", "routing.features": "engine"},
}
AT_OFF_4 = ("Pr2 published", "Pr3 engine features")
"""Variants that run at off-4 alone: predictors that forget nothing, and those that learn from what the engine saw."""
PAIRS = {"R2": "GRPO", "Pr2": "R2", "R3": "GRPO", "Pr3": "R3", "Pr2 published": "R2", "Pr3 engine features": "Pr3"}
"""Methods whose difference from another one is taken seed by seed."""
OFF = (2, 4, 8)
LR_AT_OFF_4 = 1.2e-4
MODEL = ("--experts", "16", "--topk", "4", "--expert-intermediate", "128")
"""The quickstart's model with more experts, so that routes have more than two slots in which to differ."""
COLUMNS = {
    "eval/score": ("score", ".3f"),
    "eval/greedy": ("greedy", ".3f"),
    "routing/agreement": ("agreement", ".4f"),
    "routing/agreement_unpredicted": ("agreement without prediction", ".4f"),
    "last/agreement": ("agreement, last update", ".4f"),
    "last/agreement_unpredicted": ("the same without prediction", ".4f"),
    "routing/kl": ("route KL x 1e6", ".1f"),
    "routing/drift": ("route KL without prediction x 1e6", ".1f"),
    "routing/deviation_0": ("no deviation", ".4f"),
    "loss/clip_fraction": ("clipped", ".4f"),
    "loss/ratio_tail": ("ratio outside [1/2, 2]", ".5f"),
    "mismatch/kl": ("mismatch KL x 1e6", ".1f"),
    "mismatch/ratio_max": ("largest engine ratio", ".2f"),
}


@dataclass(frozen=True)
class RunPlan:
    method: str
    off: int
    seed: int

    @property
    def name(self) -> str:
        return f"{self.method.lower().replace(' ', '-')}-off{self.off}-seed{self.seed}"


def make_plan(*, full: bool) -> list[RunPlan]:
    """Seeds outermost, so that whatever is stopped has all methods side by side."""
    return [
        RunPlan(method, off, seed)
        for seed in range(3)
        for off in (4, 2, 8)
        for method in METHODS
        if off == 4 or (method not in AT_OFF_4 and (full or seed == 0))
    ]


def call(command: list[str], log: Path) -> None:
    """Run a command with its output in a file. Errors: SystemExit with the last line of it, or where it takes too long."""
    log.parent.mkdir(parents=True, exist_ok=True)
    try:
        with log.open("w") as file:
            done = subprocess.run(
                command, cwd=REPOSITORY, stdout=file, stderr=subprocess.STDOUT, timeout=LONGEST_S, check=False
            )
    except subprocess.TimeoutExpired:
        raise SystemExit(f"routing_ablation: {' '.join(command[2:6])} took over {LONGEST_S} s [{log}]") from None
    if done.returncode:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        raise SystemExit(f"routing_ablation: {' '.join(command[2:6])} failed: {(lines or ['no output'])[-1]} [{log}]")


def flags(settings: dict[str, object]) -> list[str]:
    return [part for key, value in settings.items() for part in (f"--{key}", str(value))]


def warm_start(root: Path) -> Path:
    """The model that all runs start from, made once."""
    out = root / "sft" / "hf"
    if not out.is_dir():
        print("warm start", flush=True)
        model = root / "model"
        tool = [sys.executable, "tools/make_tiny_model.py", "--preset", "quickstart", str(model), *MODEL]
        call(tool, root / "model.log")
        settings = {"name": "sft", "runs_dir": root, "model.path": model}
        call([*CLI, "sft", "configs/quickstart_sft.yaml", *flags(settings)], root / "sft.log")
    return out


def last_step(folder: Path) -> int:
    return max((line["step"] for line in read_json_lines(folder / METRICS_FILE)), default=-1)


def run_one(plan: RunPlan, root: Path, model: Path, steps: int) -> float:
    """Seconds that it took; 0 where it was done before."""
    folder = root / plan.name
    if last_step(folder) == steps:
        return 0.0
    shutil.rmtree(folder, ignore_errors=True)
    settings = {
        "name": plan.name,
        "runs_dir": root,
        "model.path": model,
        "steps": steps,
        "seed": plan.seed,
        "data.seed": plan.seed,
        "batch.updates_per_step": plan.off,
        "optimizer.lr": LR_AT_OFF_4 * 4 / plan.off,
        "optimizer.warmup_steps": 2 * plan.off,
        "precision.rollout": "bf16",
        "rollout.routes": "true",
        "eval.every": 0,
        "logging.tensorboard": "false",
        **METHODS[plan.method],
    }
    start = time.monotonic()
    call([*CLI, "train", "configs/quickstart.yaml", *flags(settings)], root / f"{plan.name}.log")
    shutil.rmtree(folder / "checkpoints")
    return time.monotonic() - start


def figures(folder: Path, off: int) -> dict[str, float | None]:
    """A run's figures: evaluations at its end, everything else as means over the steps after the first quarter.

    None where a figure does not apply.
    """
    lines = read_json_lines(folder / METRICS_FILE)
    first, last = lines[0], lines[-1]
    steps = [line for line in lines if line["step"] > last["step"] / 4]

    def mean(name: str) -> float | None:
        values = [line[name] for line in steps if line.get(name) is not None]
        return statistics.fmean(values) if values else None

    found = {name: mean(name) for name in COLUMNS if not name.startswith(("eval/", "last/"))}
    for name in ("agreement", "agreement_unpredicted"):
        found[f"last/{name}"] = mean(f"routing/update_{off}/{name}")
    found |= {name: last[name] for name in ("eval/score", "eval/greedy")}
    found |= {"before": first["eval/score"], "reward/mean": mean("reward/mean")}
    found |= {f"routing/update_{u}/agreement": mean(f"routing/update_{u}/agreement") for u in range(1, off + 1)}
    found |= {name: mean(name) for name in ("routing/engine_agreement", "routing/update_1/drift")}
    for name in ("routing/kl", "routing/drift", "routing/update_1/drift", "mismatch/kl"):
        found[name] = None if found[name] is None else found[name] * 1e6
    return found


def mean_and_spread(values: list[float], form: str, sign: str = "") -> str:
    """Mean and, of several values, standard deviation; nothing of none."""
    spread = f" ± {statistics.stdev(values):{form}}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):{sign}{form}}{spread}" if values else ""


def table(results: dict[str, dict]) -> str:
    """Markdown; mean and, over several seeds, the standard deviation."""
    rows = ["| off-n | method | seeds | " + " | ".join(title for title, _ in COLUMNS.values()) + " |"]
    rows.append("|---" * (len(COLUMNS) + 3) + "|")
    for off in OFF:
        for method in METHODS:
            runs = [r for r in results.values() if (r["method"], r["off"]) == (method, off)]
            if not runs:
                continue
            cells = []
            for name, (_, form) in COLUMNS.items():
                values = [r["figures"][name] for r in runs if r["figures"][name] is not None]
                cells.append(mean_and_spread(values, form))
            rows.append(f"| {off} | {method} | {len(runs)} | {' | '.join(cells)} |")
    return "\n".join(rows)


def paired_table(results: dict[str, dict]) -> str:
    """Markdown; differences between two methods at the same off-n and seed, mean and standard deviation over seeds."""
    names = {name: column for name, column in COLUMNS.items() if "without prediction" not in column[0]}
    rows = ["| off-n | difference | seeds | " + " | ".join(title for title, _ in names.values()) + " |"]
    rows.append("|---" * (len(names) + 3) + "|")
    by_key = {(r["method"], r["off"], r["seed"]): r["figures"] for r in results.values()}
    for off in OFF:
        for method, other in PAIRS.items():
            seeds = [s for s in range(3) if (method, off, s) in by_key and (other, off, s) in by_key]
            if not seeds:
                continue
            cells = []
            for name, (_, form) in names.items():
                pairs = [(by_key[method, off, s][name], by_key[other, off, s][name]) for s in seeds]
                cells.append(mean_and_spread([a - b for a, b in pairs if None not in (a, b)], form, sign="+"))
            rows.append(f"| {off} | {method} - {other} | {len(seeds)} | {' | '.join(cells)} |")
    return "\n".join(rows)


def write_results(root: Path, out: Path, steps: int, minutes: dict[str, float]) -> None:
    """out/routing-ablation.json and .md, and the pictures, of the runs that are done."""
    done = [plan for plan in make_plan(full=True) if last_step(root / plan.name) == steps]
    if not done:
        return
    results = {
        plan.name: {
            "method": plan.method,
            "off": plan.off,
            "seed": plan.seed,
            "figures": figures(root / plan.name, plan.off),
        }
        for plan in done
    }
    out.mkdir(parents=True, exist_ok=True)
    taken = round(sum(minutes.get(plan.name, 0.0) for plan in done), 1)
    summary = {"steps": steps, "minutes": taken, "runs": results}
    (out / "routing-ablation.json").write_text(json.dumps(summary, indent=1) + "\n")
    text = f"{table(results)}\n\n{paired_table(results)}"
    (out / "routing-ablation.md").write_text(text + "\n")
    for off in OFF:
        groups = {
            method: [root / plan.name for plan in done if (plan.method, plan.off) == (method, off)]
            for method in METHODS
            if method not in AT_OFF_4
        }
        write_svg({method: folders for method, folders in groups.items() if folders}, out, f"routing-off{off}")
    print(text)


def main() -> None:
    parser = argparse.ArgumentParser(prog="routing_ablation.sh", description=__doc__.splitlines()[0])
    parser.add_argument("--full", action="store_true", help="three seeds everywhere")
    parser.add_argument("--steps", type=int, default=24, help="rollout batches of a run")
    parser.add_argument("--runs", type=Path, default=Path("runs/routing_ablation"), help="folder of the runs")
    parser.add_argument("--out", type=Path, default=Path("docs/results"), help="folder of the results")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="names of runs, e.g. r2-off4-seed0")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exception, with which the run that goes on is ended
    runs = (REPOSITORY / args.runs).resolve()
    every = {plan.name: plan for plan in make_plan(full=True)}
    if unknown := [name for name in args.only or () if name not in every]:
        parser.error(f"no run is called {' or '.join(unknown)}; there are {', '.join(every)}")
    plans = [every[name] for name in args.only] if args.only else make_plan(full=args.full)
    os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count() or 1))
    model = warm_start(runs)
    root = runs / f"{args.steps}_steps"  # runs of another length are others
    root.mkdir(exist_ok=True)
    taken = root / "minutes.json"
    minutes = json.loads(taken.read_text()) if taken.exists() else {}
    try:
        for number, plan in enumerate(plans, 1):
            seconds = run_one(plan, root, model, args.steps)
            if seconds:
                minutes[plan.name] = seconds / 60
                taken.write_text(json.dumps(minutes))
            print(f"{number}/{len(plans)} {plan.name}: {f'{seconds:.0f} s' if seconds else 'was done'}", flush=True)
    finally:
        write_results(root, args.out, args.steps, minutes)


if __name__ == "__main__":
    main()
