"""Does VP2O stabilize a policy that is updated too far?

Eight updates per rollout batch without a clip, two learning rates.

The paper credits stability to the geometric trust region. It bounds how far experts and routers move from those that
sampled, while PPO's clip bounds the ratio of a token. The arms therefore have no clip, and more updates per rollout
batch than they can bear: GRPO and VP2O, each with and without the trust region, and GRPO with its clip for
comparison.
"""

from __future__ import annotations

from pathlib import Path

from ablations import Ablation, Figures, Settings, mean_of, metric_lines, quarters, warm_start
from curves import Panel

UPDATES = 8
SEEDS = 3
TASK: Settings = {"data.task": "number_zigzag"}
UNCLIPPED: Settings = {"algorithm.clip_low": "null", "algorithm.clip_high": "null"}
ALONE: Settings = {"vp2o.neighbors": 1, "vp2o.repulsion": 0, "vp2o.orthogonality": 0}
"""Settings that measure VP2O's metrics without changing gradients."""
PAPER: Settings = {"vp2o.orthogonality_form": "projection"}
COSINE: Settings = {"vp2o.orthogonality_form": "cosine"}
REGION: Settings = {"vp2o.trust_region": 0.01, "vp2o.on_violation": "backtrack"}
ARMS: dict[str, Settings] = {
    "GRPO, clipped": ALONE,
    "GRPO": ALONE | UNCLIPPED,
    "GRPO + region": ALONE | UNCLIPPED | REGION,
    "VP2O": UNCLIPPED | PAPER,
    "VP2O + region": UNCLIPPED | PAPER | REGION,
    "VP2O by cosines": UNCLIPPED | COSINE,
}
RATES = {"edge": 1e-4, "beyond": 2.5e-4}
COMMON: Settings = TASK | {
    "batch.updates_per_step": UPDATES,
    "vp2o.enabled": "true",
    "optimizer.warmup_steps": UPDATES,
    "optimizer.decay": "constant",
    # A limit that is never reached: KL and ESS are measured after each step, and the pushes do not change.
    "sync.refresh.when": "drift",
    "sync.refresh.kl": 1e-9,
    "correction.bypass": "true",
    "eval.every": 4,
    "eval.prompts": 100,
    "eval.greedy": "false",
}
COLUMNS = {
    "before": ("score before", ".3f"),
    "peak": ("peak", ".3f"),
    "score": ("score", ".3f"),
    "drop": ("drop from the peak", ".3f"),
    "first/sync/kl": ("KL to the sampler after a step, first quarter", ".4f"),
    "last/sync/kl": ("last quarter", ".4f"),
    "last/sync/ess": ("ESS, last quarter", ".3f"),
    "loss/ratio_tail": ("ratio outside [1/2, 2]", ".4f"),
    "entropy": ("entropy, last quarter", ".3f"),
    "vp2o/shift": ("shift of the barycenter", ".3f"),
    "rejected": ("updates left out", ".1f"),
    "update/lr": ("learning rate, mean x 1e6", ".1f"),
}
PANELS = (
    Panel("Score", "eval/score"),
    Panel("KL(sampler || policy) after a step, nats per token", "sync/kl", log=True, smooth=3),
    Panel("ESS of the ratios after a step", "sync/ess", smooth=3),
    Panel("Entropy of the policy, nats per token", "entropy", smooth=3),
)


def figures(folder: Path) -> Figures:
    """Return a run's figures; None for a figure that does not apply."""
    steps, evaluated = metric_lines(folder)
    scores = [line["eval/score"] for line in evaluated]
    first, last = quarters(steps)
    return {
        "before": scores[0],
        "peak": max(scores),
        "score": scores[-1],
        "drop": max(scores) - scores[-1],
        "first/sync/kl": mean_of("sync/kl", first),
        "last/sync/kl": mean_of("sync/kl", last),
        "last/sync/ess": mean_of("sync/ess", last),
        "loss/ratio_tail": mean_of("loss/ratio_tail", steps),
        "entropy": mean_of("entropy", last),
        "vp2o/shift": mean_of("vp2o/shift", steps),
        "rejected": sum(line.get("update/rejected") or 0.0 for line in steps),
        "update/lr": None if (lr := mean_of("update/lr", steps)) is None else lr * 1e6,
    }


ABLATION = Ablation(
    name="vp2o_stability",
    steps=24,
    arms={
        f"{arm}, lr {rate:g}": settings | {"optimizer.lr": rate}
        for rate in RATES.values()
        for arm, settings in ARMS.items()
    },
    common=COMMON,
    figures=figures,
    columns=COLUMNS,
    panels=PANELS,
    title="GRPO and VP2O without a clip over steps",
    differences=[
        (f"{a}, lr {rate:g}", f"{b}, lr {rate:g}")
        for rate in RATES.values()
        for a, b in (*((arm, "GRPO") for arm in ARMS if arm != "GRPO"), ("VP2O by cosines", "VP2O"))
    ],
    seeds=SEEDS,
    pictured=[
        f"{arm}, lr {rate:g}"
        for arm in ("GRPO, clipped", "GRPO", "GRPO + region", "VP2O + region")
        for rate in RATES.values()
    ],
)


if __name__ == "__main__":
    ABLATION.main(__doc__, lambda runs: warm_start(runs, settings=TASK))
