"""Does VP2O keep more different right answers than its controls at the same score?

Prompts with 61 right answers, 150 steps.

Six different numbers are to go up and down in turn. The warm start has seen many of the 61 orders, half of them
wrong. An arm that learns more slowly has more answers left, so the arms are compared at one score, read between two
evaluations. Besides GRPO, the controls are an entropy bonus and a lower learning rate, which cost nothing.

The paper also reports shorter answers. In the second task, a sum is to be split into few or many numbers, and all
splits are right; this task measures the length of the answers.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from ablations import Ablation, Figures, Settings, mean_of, metric_lines, quarters, warm_start
from curves import Panel

SAMPLES = 32
"""Number of responses to each prompt of an evaluation."""
SCORE, SCORE_OF_SUMS = 0.7, 0.5
"""Scores at which arms are compared."""
TASK: Settings = {"data.task": "number_zigzag", "data.options": "{min_numbers: 6}"}
ALONE: Settings = {"vp2o.neighbors": 1, "vp2o.repulsion": 0, "vp2o.orthogonality": 0}
"""Settings that measure VP2O's metrics without changing gradients."""
PAPER: Settings = {"vp2o.orthogonality_form": "projection"}
ARMS: dict[str, Settings] = {
    "GRPO": ALONE,
    "GRPO + entropy bonus": ALONE | {"algorithm.entropy_coefficient": 0.01},
    "GRPO, half the lr": ALONE | {"optimizer.lr": 1e-4},
    "VP2O": PAPER,
    "VP2O without attraction": PAPER | {"vp2o.neighbors": 1},
    "VP2O by cosines": {"vp2o.orthogonality_form": "cosine"},
}
SUMS: Settings = {
    "data.task": "examples/number_partition.py:NumberPartition",
    "data.options": "{}",
    "rollout.max_new_tokens": 12,  # the demonstrations have 9
}
ARMS |= {
    f"sums, {arm}": ARMS[arm] | SUMS | {"model.path": "RUNS/sums/sft/hf"}
    for arm in ("GRPO", "GRPO, half the lr", "VP2O")
}
COMMON: Settings = TASK | {
    "batch.prompts_per_step": 32,
    "vp2o.enabled": "true",
    "optimizer.lr": 2e-4,
    "optimizer.warmup_steps": 8,
    "optimizer.decay": "constant",
    "eval.every": 25,
    "eval.prompts": 50,
    "eval.samples": SAMPLES,
    "eval.pass_at": "[2, 4, 8, 16]",
}
OF_ONE_SCORE = {
    f"eval/pass@{SAMPLES}": (f"pass@{SAMPLES}", ".3f"),
    "eval/collision": ("two right answers are the same", ".3f"),
    f"eval/distinct@{SAMPLES}": (f"different right answers of {SAMPLES}", ".2f"),
    "eval/response_length": ("tokens of an answer", ".2f"),
}
COLUMNS = {
    "eval/score": ("score at the end", ".3f"),
    "eval/greedy": ("greedy", ".3f"),
    **{f"eval/pass@{k}": (f"pass@{k}", ".3f") for k in (2, 4, 8, 16, SAMPLES)},
    "eval/collision": ("two right answers are the same", ".3f"),
    f"eval/distinct@{SAMPLES}": (f"different right answers of {SAMPLES}", ".2f"),
    "eval/response_length": ("tokens of an answer", ".2f"),
    "entropy": ("entropy, last quarter", ".3f"),
    "vp2o/overlap": ("prototype overlap, last quarter", ".3f"),
    "step": ("step of that score", ".0f"),
    **{f"at/{name}": (f"{title} there", form) for name, (title, form) in OF_ONE_SCORE.items()},
}
PANELS = (
    Panel("Score", "eval/score"),
    Panel(f"Different right answers of {SAMPLES}", f"eval/distinct@{SAMPLES}"),
    Panel("Chance that two right answers are the same", "eval/collision"),
    Panel("Entropy of the policy, nats per token", "entropy", smooth=5),
)

OTHERS = (("", "GRPO + entropy bonus"), ("", "GRPO, half the lr"), ("sums, ", "GRPO"), ("sums, ", "GRPO, half the lr"))
"""Task and arm that VP2O is compared with, besides GRPO."""


def at_score(evaluated: list[dict], name: str, score: float) -> float | None:
    """Return a metric at the first point where the score passes `score`, between two evaluations; None if it never does."""
    for before, after in pairwise(evaluated):
        low, high = before["eval/score"], after["eval/score"]
        if low < score <= high:
            return before[name] + (after[name] - before[name]) * (score - low) / (high - low)
    return None


def figures(folder: Path) -> Figures:
    """Return a run's figures; None for a figure that does not apply."""
    steps, evaluated = metric_lines(folder)
    last, score = quarters(steps)[1], SCORE_OF_SUMS if folder.name.startswith("sums") else SCORE
    found = {name: evaluated[-1].get(name) for name in COLUMNS if name.startswith("eval/")}
    found |= {name: mean_of(name, last) for name in ("entropy", "vp2o/overlap")}
    found |= {f"at/{name}": at_score(evaluated, name, score) for name in OF_ONE_SCORE}
    return found | {"step": at_score(evaluated, "step", score)}


ABLATION = Ablation(
    name="vp2o_diversity",
    steps=150,
    arms=ARMS,
    common=COMMON,
    figures=figures,
    columns=COLUMNS,
    panels=PANELS,
    title="Score and diversity over 150 steps",
    pictured=[arm for arm in ARMS if not arm.startswith("sums")],
    differences=[(arm, "GRPO") for arm in ARMS if arm != "GRPO" and not arm.startswith("sums")]
    + [(f"{of}VP2O", f"{of}{arm}") for of, arm in OTHERS],
)


def models(runs: Path) -> Path:
    """Create the warm starts of both tasks."""
    warm_start(runs / "sums", settings=SUMS)
    return warm_start(runs, settings=TASK)


if __name__ == "__main__":
    ABLATION.main(__doc__, models)
