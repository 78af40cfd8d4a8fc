"""The runs of vp2o_ablation.sh: GRPO, VP2O, and each of VP2O's parts alone, on a task of several right answers.

Four to six different numbers are to be put into an order that goes up and down in turn, for which there are 5, 16 or 61 right
answers. The warm start has seen several of them, and half of its demonstrations are wrong. All runs have GRPO's advantages
and clipped loss, and measure what VP2O measures; those without a part of it leave the gradients as they are, to the bit.
"""

from __future__ import annotations

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

from megatron_rl.metrics.logger import METRICS_FILE, read_json_lines

ATTRACTION: Settings = {"vp2o.neighbors": 4}
REPULSION: Settings = {"vp2o.repulsion": 0.1, "vp2o.repulsion_scale": "relative"}
ORTHOGONALITY: Settings = {"vp2o.orthogonality": 0.01}
# Limits that one step of GRPO (a shift of 0.012, a KL of 0.024, medians) reaches now and then, and two steps often.
TRUST_REGION: Settings = {"vp2o.trust_region": 0.02, "vp2o.on_violation": "backtrack"}
WIDE_TRUST_REGION: Settings = TRUST_REGION | {"vp2o.trust_region": 0.1}
REFRESH: Settings = {"sync.refresh.when": "drift", "sync.refresh.kl": 0.06, "sync.refresh.ess": 0.8}
METHODS: dict[str, Settings] = {
    "GRPO": {},
    "VP2O": ATTRACTION | REPULSION | ORTHOGONALITY | TRUST_REGION | REFRESH,
    "VP2O, wide trust region": ATTRACTION | REPULSION | ORTHOGONALITY | WIDE_TRUST_REGION | REFRESH,
    "attraction": ATTRACTION,
    "repulsion": REPULSION,
    "orthogonality": ORTHOGONALITY,
    "trust region": TRUST_REGION,
    "event-driven refresh": REFRESH,
}
SAMPLES = 8
"""Of an evaluation, to each prompt."""
TASK: Settings = {"data.task": "number_zigzag"}
COMMON: Settings = TASK | {
    # The refresh by drift needs it; of fresh weights the engine's log-probs are the trainer's but for rounding.
    "correction.bypass": "true",
    "vp2o.enabled": "true",
    "vp2o.neighbors": 1,
    "vp2o.repulsion": 0,
    "vp2o.orthogonality": 0,
    "optimizer.lr": 4e-4,
    "optimizer.warmup_steps": 4,
    "optimizer.decay": "constant",
    "eval.every": 10,
    "eval.prompts": 100,
    "eval.samples": SAMPLES,
}
COLUMNS = {
    "before": ("score before", ".3f"),
    "score": ("score", ".3f"),
    "greedy": ("greedy score", ".3f"),
    "pass": (f"pass@{SAMPLES}", ".3f"),
    "distinct": (f"different right answers of {SAMPLES}", ".2f"),
    "different": ("share of the right answers that differ", ".3f"),
    "length": ("response length", ".2f"),
    "entropy": ("entropy, last quarter", ".3f"),
    "routing/entropy": ("router entropy, last quarter", ".3f"),
    "routing/load_max": ("busiest expert, times the mean", ".2f"),
    "vp2o/overlap": ("prototype overlap, last quarter", ".3f"),
    "vp2o/inactive_kernel": ("kernel of inactive neighbors", "+.3f"),
    "vp2o/attraction": ("norm of the attraction", ".3f"),
    "vp2o/repulsion": ("of the repulsion", ".3f"),
    "routing/orthogonality": ("orthogonality loss", ".3f"),
    "backtracks": ("backtracks", ".1f"),
    "undone": ("undone updates", ".1f"),
    "refreshes": ("refreshes, before evaluations too", ".1f"),
    "sync/kl": ("KL to the behavior", ".4f"),
    "sync/ess": ("ESS", ".3f"),
}
OF_LAST_QUARTER = ("entropy", "routing/entropy", "routing/load_max", "routing/orthogonality", "vp2o/overlap")
OF_ALL_STEPS = ("vp2o/inactive_kernel", "vp2o/attraction", "vp2o/repulsion", "sync/kl", "sync/ess")
PANELS = (
    Panel("Score", "eval/score"),
    Panel(f"Different right answers of {SAMPLES}", f"eval/distinct@{SAMPLES}"),
    Panel("Entropy of the policy, nats per token", "entropy", smooth=5),
    Panel("Prototype overlap, mean |cos|", "vp2o/overlap"),
)


@dataclass(frozen=True)
class RunPlan:
    method: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.method.lower().replace(',', '').replace(' ', '-')}-seed{self.seed}"


def make_plan() -> list[RunPlan]:
    """Seeds outermost, so that whatever is stopped has all methods side by side."""
    return [RunPlan(method, seed) for seed in range(3) for method in METHODS]


def figures(folder: Path) -> dict[str, float | None]:
    """A run's figures: those of the last evaluation, and of its steps. None where a figure does not apply."""
    lines = read_json_lines(folder / METRICS_FILE)
    steps = [line for line in lines if line["step"] > 0]
    evaluated = [line for line in lines if line.get("eval/score") is not None]
    last = evaluated[-1]
    recent = steps[len(steps) - -(-len(steps) // 4) :]
    right = last["eval/score"] * SAMPLES
    distinct = last[f"eval/distinct@{SAMPLES}"]
    return {
        "before": evaluated[0]["eval/score"],
        "score": last["eval/score"],
        "greedy": last["eval/greedy"],
        "pass": last[f"eval/pass@{SAMPLES}"],
        "distinct": distinct,
        "different": distinct / right if right else None,
        "length": last["eval/response_length"],
        **{name: mean_of(name, recent) for name in OF_LAST_QUARTER},
        **{name: mean_of(name, steps) for name in OF_ALL_STEPS},
        "backtracks": sum(line.get("update/backtracks") or 0.0 for line in steps),
        "undone": sum(line.get("update/rejected") or 0.0 for line in steps),
        "refreshes": sum(line.get("sync/refreshed", 1.0) for line in steps),
    }


def table(results: dict[str, dict]) -> str:
    """Mean and, over several seeds, the standard deviation."""
    runs = {method: [r["figures"] for r in results.values() if r["method"] == method] for method in METHODS}
    return markdown(("method",), COLUMNS, [((method,), found) for method, found in runs.items() if found])


def write_results(root: Path, out: Path, steps: int, minutes: dict[str, float]) -> None:
    """out/vp2o-ablation.json, .md and .svg of the runs that are done."""
    done = [plan for plan in make_plan() if last_step(root / plan.name) == steps]
    if not done:
        return
    results = {
        plan.name: {"method": plan.method, "seed": plan.seed, "figures": figures(root / plan.name)} for plan in done
    }
    save(out, "vp2o-ablation", steps, minutes, results, table(results))
    groups = {method: [root / plan.name for plan in done if plan.method == method] for method in METHODS}
    curves = {method: folders for method, folders in groups.items() if folders}
    write_curves(curves, PANELS, out / "vp2o-ablation.svg", title="GRPO, VP2O and its parts over steps")


def main() -> None:
    parser = make_parser("vp2o_ablation", __doc__.splitlines()[0], steps=40)
    args = parser.parse_args()
    every = {plan.name: plan for plan in make_plan()}
    check_names(parser, args, list(every))
    use_all_cores()
    runs = (REPOSITORY / args.runs).resolve()
    model = warm_start(runs, settings=TASK)
    plans = [every[name] for name in args.only] if args.only else list(every.values())
    settings = {
        p.name: COMMON | {"model.path": model, "seed": p.seed, "data.seed": p.seed} | METHODS[p.method] for p in plans
    }
    run_all(args, settings, write_results)


if __name__ == "__main__":
    main()
