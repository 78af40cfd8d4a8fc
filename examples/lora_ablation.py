"""Low-rank adapters compared with all weights: GRPO of the quickstart by LoRA of several ranks, of attention only, in bf16.

Adapters are merged before a push. In bf16, SGLang then has weights that were rounded after the sum, while the trainer
adds the adapter's output to the output of the rounded weights. A comparison with training of all weights in bf16
shows what this adds to the mismatch.
"""

from __future__ import annotations

import statistics
from pathlib import Path

from ablations import Ablation, Figures, Settings, mean_of, metric_lines, quarters, warm_start
from curves import Panel

BF16: Settings = {"precision.train": "bf16", "precision.rollout": "bf16"}


def lora(rank: int, **more: object) -> Settings:
    """Return the settings of LoRA: alpha is the rank, and the learning rate is about fifteen times that for all weights."""
    return {"lora.rank": rank, "lora.alpha": rank, "optimizer.lr": 2e-3} | {f"lora.{k}": v for k, v in more.items()}


ATTENTION = '["*.self_attention.linear_*"]'
ARMS: dict[str, Settings] = {
    "all weights": {},
    "rank 16": lora(16),
    "rank 4": lora(4),
    "rank 16, attention alone": lora(16, targets=ATTENTION),
    "rank 64": lora(64),
    "rank 16, DoRA of attention": lora(16, targets=ATTENTION, kind="dora"),
    "all weights, bf16": BF16,
    "rank 16, bf16": lora(16) | BF16,
}
MAIN = ("all weights", "rank 16", "rank 4", "rank 16, attention alone")
COLUMNS = {
    "before": ("score before", ".3f"),
    "score": ("score", ".3f"),
    "gain": ("gain", ".3f"),
    "greedy": ("greedy", ".3f"),
    "kl": ("KL(engine, trainer), last quarter", ".2g"),
    "ess": ("ESS", ".4f"),
    "norm": ("gradient norm, median", ".3f"),
    "train_s": ("seconds of an update, median", ".2f"),
    "sync_s": ("of a push", ".2f"),
}
PANELS = (
    Panel("Score", "eval/score"),
    Panel("Reward", "reward/mean", smooth=5),
    Panel("KL(engine || trainer), nats per token", "mismatch/kl", log=True, smooth=3),
    Panel("Gradient norm", "update/grad_norm", log=True, smooth=3),
)


def figures(folder: Path) -> Figures:
    """Return a run's figures."""
    steps, evaluated = metric_lines(folder)
    _, last = quarters(steps)
    scores = [line["eval/score"] for line in evaluated]
    return {
        "before": scores[0],
        "score": scores[-1],
        "gain": scores[-1] - scores[0],
        "greedy": evaluated[-1]["eval/greedy"],
        "kl": mean_of("mismatch/kl", last),
        "ess": mean_of("mismatch/ess", last),
        "norm": statistics.median(line["update/grad_norm"] for line in steps),
        "train_s": statistics.median(line["time/train_s"] for line in steps),
        "sync_s": statistics.median(line["time/sync_s"] for line in steps),
    }


ABLATION = Ablation(
    name="lora_ablation",
    steps=40,
    arms=ARMS,
    common={"eval.every": 10},
    figures=figures,
    columns=COLUMNS,
    panels=PANELS,
    title="Adapters and all weights, over steps",
    differences=[(arm, "all weights") for arm in MAIN[1:]] + [("rank 16, bf16", "all weights, bf16")],
    of_one_seed=[arm for arm in ARMS if arm not in MAIN],
)


if __name__ == "__main__":
    ABLATION.main(__doc__, warm_start)
