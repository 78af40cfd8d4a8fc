"""The runs of routing_ablation.sh: plan, start what is missing, put the results together.

The learning rate falls as 1 / n for n updates a rollout batch, as in Pr2's Appendix E.1, so that the policy moves about as
far over one rollout batch whatever n.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ablations import (
    REPOSITORY,
    Figures,
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
from curves import write_svg

from megatron_rl.metrics.logger import METRICS_FILE, read_json_lines

PREDICTORS: dict[str, object] = {
    "routing.predictor_horizon": "constant",
    "routing.predictor_lr_multiplier": 0.2,
    "routing.predictor_decay": 0.2,
}
"""The defaults of the release that the results are of."""
METHODS: dict[str, dict[str, object]] = {
    "GRPO": {},
    "GSPO": {
        "algorithm.loss": "gspo",
        "algorithm.aggregation": "sequence_mean",
        "algorithm.clip_low": 0.02,  # responses have 7 tokens: a mean over them wanders more than over thousands
        "algorithm.clip_high": 0.03,
    },
    "R2": {"routing.source": "r2"},
    "Pr2": PREDICTORS | {"routing.source": "pr2"},
    "R3": {"routing.source": "r3"},
    "Pr3": PREDICTORS | {"routing.source": "pr3"},
    "Pr2 published": {
        "routing.source": "pr2",
        "routing.predictor_horizon": "constant",
        "routing.predictor_lr_multiplier": 1.0,
        "routing.predictor_decay": 0.0,
    },
    "Pr3 engine features": PREDICTORS | {"routing.source": "pr3", "routing.features": "engine"},
}
AT_OFF_4 = ("Pr2 published", "Pr3 engine features")
"""Variants that run at off-4 alone: predictors that forget nothing, and those that learn from what the engine saw."""
PAIRS = {"R2": "GRPO", "Pr2": "R2", "R3": "GRPO", "Pr3": "R3", "Pr2 published": "R2", "Pr3 engine features": "Pr3"}
"""Methods whose difference from another one is taken seed by seed."""
OFF = (2, 4, 8)
LR_AT_OFF_4 = 1.2e-4
MODEL = ("--preset", "quickstart", "--experts", "16", "--topk", "4", "--expert-intermediate", "128")
"""The quickstart's model with more experts, so that routes have more than two slots in which to differ."""
COLUMNS = {
    "eval/score": ("score", ".3f"),
    "eval/greedy": ("greedy", ".3f"),
    "routing/agreement": ("agreement", ".4f"),
    "routing/agreement_unpredicted": ("agreement without prediction", ".4f"),
    "last/agreement": ("agreement, last update", ".4f"),
    "last/agreement_unpredicted": ("the same without prediction", ".4f"),
    "routing/kl": ("route KL x 1e6", ".1f"),
    "routing/kl_unpredicted": ("route KL without prediction x 1e6", ".1f"),
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


def settings_of(plan: RunPlan, model: Path) -> Settings:
    return {
        "model.path": model,
        "seed": plan.seed,
        "data.seed": plan.seed,
        "batch.updates_per_step": plan.off,
        "optimizer.lr": LR_AT_OFF_4 * 4 / plan.off,
        "optimizer.warmup_steps": 2 * plan.off,
        "precision.rollout": "bf16",
        "rollout.routes": "true",
        "eval.every": 0,
        **METHODS[plan.method],
    }


def figures(folder: Path, off: int) -> dict[str, float | None]:
    """A run's figures: evaluations at its end, everything else as means over the steps after the first quarter.

    None where a figure does not apply.
    """
    lines = read_json_lines(folder / METRICS_FILE)
    first, last = lines[0], lines[-1]
    steps = [line for line in lines if line["step"] > last["step"] / 4]

    mean = partial(mean_of, lines=steps)
    found = {name: mean(name) for name in COLUMNS if not name.startswith(("eval/", "last/"))}
    for name in ("agreement", "agreement_unpredicted"):
        found[f"last/{name}"] = mean(f"routing/update_{off}/{name}")
    found |= {name: last[name] for name in ("eval/score", "eval/greedy")}
    found |= {"before": first["eval/score"], "reward/mean": mean("reward/mean")}
    found |= {f"routing/update_{u}/agreement": mean(f"routing/update_{u}/agreement") for u in range(1, off + 1)}
    found |= {name: mean(name) for name in ("routing/engine_agreement", "routing/update_1/kl_unpredicted")}
    for name in ("routing/kl", "routing/kl_unpredicted", "routing/update_1/kl_unpredicted", "mismatch/kl"):
        found[name] = None if found[name] is None else found[name] * 1e6
    return found


def table(results: dict[str, dict]) -> str:
    """Mean and, over several seeds, the standard deviation."""
    runs = {(off, method): [] for off in OFF for method in METHODS}
    for result in results.values():
        runs[result["off"], result["method"]].append(result["figures"])
    return markdown(("off-n", "method"), COLUMNS, [(key, found) for key, found in runs.items() if found])


def paired_table(results: dict[str, dict]) -> str:
    """Differences between two methods at the same off-n and seed, mean and standard deviation over seeds."""
    names = {name: column for name, column in COLUMNS.items() if "without prediction" not in column[0]}
    by_key = {(r["method"], r["off"], r["seed"]): r["figures"] for r in results.values()}
    rows = []
    for off in OFF:
        for method, other in PAIRS.items():
            seeds = [s for s in range(3) if (method, off, s) in by_key and (other, off, s) in by_key]
            found = [difference(by_key[method, off, s], by_key[other, off, s], names) for s in seeds]
            rows += [((off, f"{method} - {other}"), found)] if found else []
    return markdown(("off-n", "difference"), names, rows, sign="+")


def difference(a: Figures, b: Figures, names: Iterable[str]) -> Figures:
    return {name: None if None in (a[name], b[name]) else a[name] - b[name] for name in names}


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
    save(out, "routing-ablation", steps, minutes, results, f"{table(results)}\n\n{paired_table(results)}")
    for off in OFF:
        groups = {
            method: [root / plan.name for plan in done if (plan.method, plan.off) == (method, off)]
            for method in METHODS
            if method not in AT_OFF_4
        }
        write_svg({method: folders for method, folders in groups.items() if folders}, out, f"routing-off{off}")


def main() -> None:
    parser = make_parser("routing_ablation", __doc__.splitlines()[0], steps=24)
    parser.add_argument("--full", action="store_true", help="three seeds everywhere")
    args = parser.parse_args()
    every = {plan.name: plan for plan in make_plan(full=True)}
    check_names(parser, args, list(every))
    use_all_cores()
    model = warm_start((REPOSITORY / args.runs).resolve(), MODEL)
    plans = [every[name] for name in args.only] if args.only else make_plan(full=args.full)
    run_all(args, {plan.name: settings_of(plan, model) for plan in plans}, write_results)


if __name__ == "__main__":
    main()
