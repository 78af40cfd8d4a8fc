"""A noise floor under SGLang's tail: does it make naive RLOO collapse, and which cure helps?

Section 5.5 of "Taming the Tail" (Li et al.) explains collapse by tokens so unlikely that the engine's error is larger
than their probability. This script plants the error in its simplest form: SGLang gives each token at least e^-13.3 =
1.67e-6 of the likeliest token's probability (`rollout.sampling.tail_floor`). The trainer does not know this, and both
are in fp32. With 65,536 tokens, about one sampled token in fifteen comes from the floor and spoils the answer. Naive
RLOO lowers its probability in the trainer, where the token is already nearly impossible, but never in SGLang.

The paper's own rho = e^-13 prunes the floor; rho = e^-14 lies below the floor and is a control that must fail. Except
for size, everything else is as in the paper: on-policy RLOO without a clip, thresholds of 0.2. The veto, which also
cures, is a separate arm.
"""

from __future__ import annotations

import math
import statistics
from pathlib import Path

from ablations import Ablation, Figures, Settings, mean_of, metric_lines, quarters, warm_start
from curves import Panel

FLOOR = math.exp(-13.3)
RHO = math.exp(-13)
BELOW = math.exp(-14)
MODEL = ("--preset", "quickstart", "--vocab", "65536")
VETO: Settings = {"correction.veto": 1e-4, "correction.denominator": "kept_sequences"}
MIS: Settings = {"correction.mode": "mask", "correction.low": 0.8, "correction.high": 1.2}
DVP: Settings = {"pruning.enabled": "true", "pruning.rho": RHO, "eval.unpruned": "true"}
UNPRUNED: Settings = {"pruning.measure": "true", "pruning.rho": RHO}
"""Settings that measure the mismatch on DVP's safe set without pruning."""
NONE: Settings = {"correction.veto": "null", "correction.denominator": "sampled"}
ARMS: dict[str, Settings] = {
    "no floor": UNPRUNED | {"rollout.sampling.tail_floor": "null"},
    "naive": UNPRUNED,
    "DVP": DVP,
    "DVP, rho below the floor": DVP | {"pruning.rho": BELOW},
    "veto": UNPRUNED | VETO,
    "TIS": UNPRUNED | {"correction.mode": "truncate", "correction.high": 1.2},
    "MIS of tokens": UNPRUNED | MIS,
    "MIS of sequences": UNPRUNED | MIS | {"correction.level": "sequence"},
    "DVP + veto": DVP | VETO,
    "DVP + veto + MIS": DVP | VETO | MIS,
}
MAIN = ("no floor", "naive", "DVP", "DVP, rho below the floor")
COMMON: Settings = NONE | {
    "algorithm.advantage": "rloo",
    "algorithm.loss": "reinforce",
    "optimizer.lr": 5e-4,
    "optimizer.decay": "constant",
    "rollout.sampling.tail_floor": FLOOR,
    "rollout.agreement_floor": "null",
    "eval.prompts": 100,
    "eval.every": 5,
}
COLUMNS = {
    "before": ("score before", ".3f"),
    "peak": ("peak", ".3f"),
    "lowest": ("lowest", ".3f"),
    "score": ("score", ".3f"),
    "greedy": ("greedy", ".3f"),
    "unpruned": ("score, sampled with the floor", ".3f"),
    "first/mismatch/kl_capped": ("KL, first quarter", ".4f"),
    "last/mismatch/kl_capped": ("KL, last quarter", ".4f"),
    "last/mismatch/kl_safe": ("KL of the safe set", ".5f"),
    "first/gap": ("floor tokens, engine - trainer, first step", ".2f"),
    "last/gap": ("last quarter", ".2f"),
    "floored": ("floor tokens of a step", ".0f"),
    "corrected/vetoed": ("vetoed", ".3f"),
    "loss/counted": ("counted", ".3f"),
    "update/grad_norm": ("gradient norm, median", ".3f"),
    "entropy": ("entropy, last quarter", ".3f"),
}
GAP = "mismatch/p<1e-06/abs"
"""Metric: nats between a floor token's two log-probs (below 1e-6 in the trainer, 1.67e-6 of the likeliest in SGLang)."""
PANELS = (
    Panel("Floor tokens: log-prob of the engine - of the trainer", GAP),
    Panel("KL(engine || trainer), nats per token", "mismatch/kl_capped", log=True, smooth=3),
    Panel("Score", "eval/score"),
    Panel("Entropy, nats per token", "entropy", smooth=3),
)


def figures(folder: Path) -> Figures:
    """Return a run's figures; None for a figure that does not apply."""
    steps, evaluated = metric_lines(folder)
    first, last = quarters(steps)
    scores = [line["eval/score"] for line in evaluated]
    unpruned = evaluated[-1].get("eval/score_unpruned")
    norms = [norm for line in steps if (norm := line["update/grad_norm"]) is not None]
    return {
        "before": scores[0],
        "peak": max(scores),
        "lowest": min(scores),
        "score": scores[-1],
        "greedy": evaluated[-1]["eval/greedy"],
        "unpruned": scores[-1] if unpruned is None else unpruned,
        "first/mismatch/kl_capped": mean_of("mismatch/kl_capped", first),
        "last/mismatch/kl_capped": mean_of("mismatch/kl_capped", last),
        "last/mismatch/kl_safe": mean_of("mismatch/kl_safe", last),
        "first/gap": mean_of(GAP, steps[:1]),
        "last/gap": mean_of(GAP, last),
        "floored": mean_of(GAP.replace("abs", "tokens"), steps),
        "corrected/vetoed": mean_of("corrected/vetoed", steps),
        "loss/counted": mean_of("loss/counted", steps),
        "update/grad_norm": statistics.median(norms),
        "entropy": mean_of("entropy", last),
    }


ABLATION = Ablation(
    name="noise_floor",
    steps=30,
    arms=ARMS,
    common=COMMON,
    figures=figures,
    columns=COLUMNS,
    panels=PANELS,
    title="A noise floor under the engine's tail, over steps",
    differences=[(arm, "no floor") for arm in ARMS if arm != "no floor"],
    of_one_seed=[arm for arm in ARMS if arm not in MAIN],
    pictured=[arm for arm in ARMS if not arm.startswith("DVP + veto")],  # which look like DVP
)


if __name__ == "__main__":
    ABLATION.main(__doc__, lambda runs: warm_start(runs, MODEL))
