"""Every cure alone and all of them together, one run each, in a setting with all kinds of mismatch; and their cost.

SGLang has the noise floor of noise_floor.py and computes in bf16, while the trainer is in fp32. The model has 64
experts, of which 8 are chosen, and a rollout batch has eight updates at a learning rate that is not divided by their
number. "No fault" is the same run with SGLang in fp32 and without a floor; its routers still drift.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from ablations import Ablation, Figures, Settings, mean_of, metric_lines, quarters, warm_start
from curves import Panel
from noise_floor import DVP, FLOOR, MIS, NONE, UNPRUNED, VETO

UPDATES = 8
MODEL = ("--preset", "quickstart", "--vocab", "65536", "--experts", "64", "--topk", "8", "--expert-intermediate", "64")
MASKED: Settings = VETO | MIS
ARMS: dict[str, Settings] = {
    "no fault": UNPRUNED | {"rollout.sampling.tail_floor": "null", "precision.rollout": "fp32"},
    "no cure": UNPRUNED,
    "veto + MIS": UNPRUNED | MASKED,
    "DVP": DVP,
    "R2": UNPRUNED | {"routing.source": "r2"},
    "R3": UNPRUNED | {"routing.source": "r3"},
    "Pr3": UNPRUNED | {"routing.source": "pr3"},
    "VP2O": UNPRUNED | {"vp2o.enabled": "true"},
    "VP2O, orthogonality as printed": UNPRUNED | {"vp2o.enabled": "true", "vp2o.orthogonality_form": "projection"},
    "DVP + MIS": DVP | MASKED,
    "all": DVP | MASKED | {"routing.source": "pr3", "vp2o.enabled": "true"},
}
COMMON: Settings = NONE | {
    "batch.updates_per_step": UPDATES,
    "algorithm.advantage": "rloo",
    "algorithm.loss": "ppo",
    "optimizer.lr": 1e-4,
    "optimizer.warmup_steps": UPDATES,
    "optimizer.decay": "constant",
    "precision.rollout": "bf16",
    "rollout.sampling.tail_floor": FLOOR,
    "rollout.agreement_floor": "null",
    "rollout.routes": "true",
    "eval.prompts": 100,
    "eval.every": 10,
}
COLUMNS = {
    "before": ("score before", ".3f"),
    "score": ("score", ".3f"),
    "greedy": ("greedy", ".3f"),
    "unpruned": ("score, sampled with the floor", ".3f"),
    "mismatch/kl_capped": ("KL", ".4f"),
    "mismatch/kl_safe": ("KL of the safe set x 1e3", ".3f"),
    "mismatch/ess": ("ESS", ".3f"),
    "loss/clip_fraction": ("clipped", ".4f"),
    "loss/ratio_tail": ("ratio outside [1/2, 2]", ".5f"),
    "routing/later/agreement": ("agreement, updates 2 on", ".4f"),
    "update/grad_norm": ("gradient norm", ".2f"),
    "entropy": ("entropy, last quarter", ".3f"),
    "step_s": ("seconds a step", ".1f"),
    "train_s": ("of them updates", ".1f"),
}
PANELS = (
    Panel("Reward of the samples", "reward/mean", smooth=5),
    Panel("KL(engine || trainer), nats per token", "mismatch/kl_capped", log=True, smooth=3),
    Panel("Top-k agreement, updates 2 on", "routing/later/agreement"),
    Panel("Greedy score", "eval/greedy"),
)


def median_of(name: str, lines: Sequence[Mapping]) -> float | None:
    """Return the median of a metric over the lines of a log that have it."""
    values = [line[name] for line in lines if line.get(name) is not None]
    return statistics.median(values) if values else None


def figures(folder: Path) -> Figures:
    """Return a run's figures: means over all steps, and medians of seconds over steps without an evaluation.

    A figure that does not apply is None.
    """
    steps, evaluated = metric_lines(folder)
    found = {name: mean_of(name, steps) for name in COLUMNS if "/" in name}
    safe = found["mismatch/kl_safe"]
    unpruned = evaluated[-1].get("eval/score_unpruned")
    plain = [line for line in steps if line.get("eval/score") is None]
    return found | {
        "mismatch/kl_safe": None if safe is None else safe * 1e3,
        "before": evaluated[0].get("eval/score"),
        "score": evaluated[-1].get("eval/score"),
        "greedy": evaluated[-1].get("eval/greedy"),
        "unpruned": evaluated[-1].get("eval/score") if unpruned is None else unpruned,
        "entropy": mean_of("entropy", quarters(steps)[1]),
        "step_s": median_of("time/step_s", plain),
        "train_s": median_of("time/train_s", plain),
    }


ABLATION = Ablation(
    name="all_cures",
    steps=30,
    arms=ARMS,
    common=COMMON,
    figures=figures,
    columns=COLUMNS,
    panels=PANELS,
    title="Every cure alone, and all of them",
    seeds=1,
    pictured=[arm for arm in ARMS if arm not in ("veto + MIS", "R2", "DVP + MIS")],
)


if __name__ == "__main__":
    ABLATION.main(__doc__, lambda runs: warm_start(runs, MODEL))
