"""The runs of mismatch_ablation.sh: RLOO under FP8, naive and with each cure, as in figure 1 of the paper behind DVP.

The trainer computes in simulated per-tensor FP8, the engine in bf16. The tiny model lacks the outliers that make that hard
for large ones, so one is planted in the down projection of each expert, at a unit whose gate and up rows are zero. In bf16 it
changes nothing, as the unit stays dead and without gradient; in FP8 it takes so much of the range that the other weights of
its matrix become 0 or plus or minus 1.14 times the largest of them. Every run has the paper's veto; the paper's threshold of
0.2 is read as ratios from 0.8 to 1.2.
"""

from __future__ import annotations

import shutil
import statistics
from dataclasses import dataclass
from pathlib import Path

from ablations import (
    REPOSITORY,
    Settings,
    check_names,
    last_step,
    make_parser,
    markdown,
    mean_of,
    run_all,
    save,
    use_all_cores,
    warm_start,
)
from curves import Panel, write_curves
from safetensors.torch import load_file, save_file

from megatron_rl.metrics.logger import METRICS_FILE, read_json_lines

MIS: Settings = {"correction.mode": "mask", "correction.low": 0.8, "correction.high": 1.2}
DVP: Settings = {"pruning.enabled": "true", "pruning.rho": 0.01}
"""The paper's rho, e^-13, is for vocabularies of 150,000; of 64 tokens hardly one is ever below it."""
METHODS: dict[str, Settings] = {
    "RLOO in bf16": {"precision.train": "bf16"},
    "RLOO": {},
    "TIS": {"correction.mode": "truncate", "correction.high": 1.2},
    "MIS": MIS,
    "DVP": DVP,
    "MIS + DVP": MIS | DVP,
    "DVP at e^-13": {"pruning.enabled": "true"},
}
OF_ONE_SEED = ("DVP at e^-13",)
COMMON: Settings = {
    "algorithm.advantage": "rloo",
    "algorithm.loss": "reinforce",
    "correction.veto": 1e-4,
    "correction.denominator": "sampled",  # the default of the release that the results are of
    "precision.train": "fp8_tensorwise",
    "precision.rollout": "bf16",
    "rollout.agreement_floor": "null",  # a method that collapses is a result
    "optimizer.lr": 4e-4,
    "optimizer.warmup_steps": 4,
    "optimizer.decay": "constant",
    "eval.every": 10,
    "eval.prompts": 100,
}
OUTLIER = 2.0**18
"""Times the largest weight of the matrix."""
COLUMNS = {
    "before": ("score before", ".3f"),
    "eval/score": ("score", ".3f"),
    "best": ("best score", ".3f"),
    "greedy": ("greedy score", ".3f"),
    "first/kl": ("KL, first quarter", ".4f"),
    "last/kl": ("KL, last quarter", ".4f"),
    "corrected/kl": ("KL after correction", ".4f"),
    "corrected/ess": ("ESS after", ".3f"),
    "mismatch/ratio_max": ("largest ratio of a step", ".1f"),
    "mismatch/ess": ("ESS", ".3f"),
    "mismatch/sequence_ess": ("ESS of sequences", ".3f"),
    "corrected/vetoed": ("vetoed", ".4f"),
    "corrected/masked": ("weight 0", ".4f"),
    "pruning/pruned_mass": ("pruned mass", ".6f"),
    "pruning/out_of_set": ("out of set, tokens a step", ".2f"),
    "mismatch/tail_bias": ("tail bias", "+.3f"),
    "update/grad_norm": ("gradient norm, median", ".2f"),
    "update/skipped": ("skipped updates", ".2f"),
}

PANELS = (
    Panel("KL(engine || trainer), nats per token inside both supports", "mismatch/kl", log=True, smooth=5),
    Panel("Score", "eval/score"),
)


@dataclass(frozen=True)
class RunPlan:
    method: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.method.lower().replace(' + ', '-').replace(' ', '-').replace('^', '')}-seed{self.seed}"


def make_plan(*, full: bool) -> list[RunPlan]:
    """Seeds outermost, so that whatever is stopped has all methods side by side."""
    return [
        RunPlan(method, seed)
        for seed in range(3)
        for method in METHODS
        if full or seed == 0 or method not in OF_ONE_SEED
    ]


def plant_outliers(source: Path, out: Path) -> Path:
    """A copy of the model folder in which unit 0 of every expert is dead and has the outlier; made once."""
    if out.is_dir():
        return out
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(source, partial)
    for path in partial.glob("*.safetensors"):
        weights = load_file(path)
        for name, down in weights.items():
            if name.endswith("down_proj.weight"):
                expert = name.removesuffix("down_proj.weight")
                for part in ("gate_proj.weight", "up_proj.weight"):
                    weights[expert + part][0] = 0.0
                down[0, 0] = OUTLIER * down.abs().max()
        save_file(weights, path, metadata={"format": "pt"})
    partial.rename(out)
    return out


def figures(folder: Path) -> dict[str, float | None]:
    """A run's figures: the score at its end and its best, everything else as means over the steps.

    None where a figure does not apply.
    """
    lines = read_json_lines(folder / METRICS_FILE)
    steps = [line for line in lines if line["step"] > 0]

    quarter = -(-len(steps) // 4)
    evaluated = [line for line in lines if line.get("eval/score") is not None]
    scores = [line["eval/score"] for line in evaluated]
    found = {name: mean_of(name, steps) for name in COLUMNS if not name.startswith(("eval/", "first/", "last/"))}
    return found | {
        "before": scores[0],
        "eval/score": scores[-1],
        "best": max(scores),
        "greedy": evaluated[-1]["eval/greedy"],
        "first/kl": mean_of("mismatch/kl", steps[:quarter]),
        "last/kl": mean_of("mismatch/kl", steps[-quarter:]),
        "update/grad_norm": statistics.median(n for line in steps if (n := line["update/grad_norm"]) is not None),
    }


def table(results: dict[str, dict]) -> str:
    """Mean and, over several seeds, the standard deviation."""
    runs = {method: [r["figures"] for r in results.values() if r["method"] == method] for method in METHODS}
    return markdown(("method",), COLUMNS, [((method,), found) for method, found in runs.items() if found])


def write_results(root: Path, out: Path, steps: int, minutes: dict[str, float]) -> None:
    """out/mismatch-ablation.json, .md and .svg of the runs that are done."""
    done = [plan for plan in make_plan(full=True) if last_step(root / plan.name) == steps]
    if not done:
        return
    results = {
        plan.name: {"method": plan.method, "seed": plan.seed, "figures": figures(root / plan.name)} for plan in done
    }
    save(out, "mismatch-ablation", steps, minutes, results, table(results))
    groups = {
        method: [root / plan.name for plan in done if plan.method == method]
        for method in METHODS
        if method not in OF_ONE_SEED
    }
    curves = {method: folders for method, folders in groups.items() if folders}
    write_curves(curves, PANELS, out / "mismatch-ablation.svg", title="Mismatch and score over steps")


def main() -> None:
    parser = make_parser("mismatch_ablation", __doc__.splitlines()[0], steps=40)
    parser.add_argument("--full", action="store_true", help="three seeds everywhere")
    args = parser.parse_args()
    every = {plan.name: plan for plan in make_plan(full=True)}
    check_names(parser, args, list(every))
    use_all_cores()
    runs = (REPOSITORY / args.runs).resolve()
    model = plant_outliers(warm_start(runs), runs / "with_outliers")
    plans = [every[name] for name in args.only] if args.only else make_plan(full=args.full)
    settings = {
        p.name: COMMON | {"model.path": model, "seed": p.seed, "data.seed": p.seed} | METHODS[p.method] for p in plans
    }
    run_all(args, settings, write_results)


if __name__ == "__main__":
    main()
