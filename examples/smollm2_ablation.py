"""A real pretrained model, SmolLM2-135M, and a mismatch that nobody planted: an engine in bf16 or FP8, dense and with experts.

The trainer is in fp32. The 49,152 tokens have a tail, and the engine's rounding is what it is. First without an update: how far
the two are apart by the probability of a token, in bf16 and with weights rounded to FP8. Then RLOO at a learning rate at which
the naive run is at its edge, and the cures beside it; with experts (the same model upcycled, routers with noise) also those of
routing, four updates a rollout batch. One run each.
"""

from __future__ import annotations

from pathlib import Path

from ablations import REPOSITORY, Ablation, Figures, Settings, call, mean_of, metric_lines, quarters
from curves import Panel
from digit_sums import write
from noise_floor import MIS

DVP: Settings = {"pruning.enabled": "true", "pruning.measure": "false"}
EXPERTS: Settings = {
    "model.path": "RUNS/experts",
    "algorithm.loss": "ppo",
    "batch.updates_per_step": 4,
    "rollout.routes": "true",
}
STILL: Settings = {"optimizer.lr": 1e-12}
"""No number of a weight changes: what is measured is the mismatch itself."""
ARMS: dict[str, Settings] = {
    "no training, bf16": STILL,
    "no training, FP8": STILL | {"precision.rollout": "fp8"},
    "naive": {},
    "DVP": DVP,
    "DVP + MIS": DVP | MIS,
    "FP8, naive": {"precision.rollout": "fp8"},
    "FP8, DVP": DVP | {"precision.rollout": "fp8"},
    "experts, naive": EXPERTS,
    "experts, DVP": EXPERTS | DVP,
    "experts, R2": EXPERTS | {"routing.source": "r2"},
    "experts, R3": EXPERTS | {"routing.source": "r3"},
    "experts, Pr2": EXPERTS | {"routing.source": "pr2"},
}
COMMON: Settings = {
    "data.path": "RUNS/train.jsonl",
    "data.eval_path": "RUNS/test.jsonl",
    "algorithm.advantage": "rloo",
    "algorithm.loss": "reinforce",
    "precision.rollout": "bf16",
    "pruning.measure": "true",
    "optimizer.lr": 3e-5,
    "eval.every": 0,
    "eval.samples": 16,
}
BELOW = ("1e-06", "1e-05", "0.0001", "0.001", "0.01", "0.1", "0.5", "0.9", "0.99", "1")
COLUMNS = {
    "before": ("score before", ".3f"),
    "score": ("score", ".3f"),
    "greedy": ("greedy", ".3f"),
    "reward": ("reward, last quarter", ".3f"),
    "mismatch/kl": ("KL x 1e3", ".3f"),
    "mismatch/ess": ("ESS", ".4f"),
    "mismatch/ratio_max": ("largest ratio of a step", ".2f"),
    "mismatch/tail_bias": ("tail bias", "+.3f"),
    "corrected/masked": ("weight 0", ".4f"),
    "routing/engine_agreement": ("engine's experts that agree", ".4f"),
    "routing/later/agreement": ("agreement, updates 2 on", ".4f"),
    "update/grad_norm": ("gradient norm", ".2f"),
    "step_s": ("seconds a step", ".1f"),
}
PANELS = (
    Panel("Reward", "reward/mean", smooth=3),
    Panel("KL(engine || trainer), nats per token", "mismatch/kl", log=True),
    Panel("Largest ratio of a step", "mismatch/ratio_max", log=True),
    Panel("Entropy, nats per token", "entropy"),
)


def figures(folder: Path) -> Figures:
    """A run's figures; None where one does not apply. mismatch/p<X/NAME: of the tokens with such a probability."""
    steps, evaluated = metric_lines(folder)
    found = {name: mean_of(name, steps) for name in COLUMNS if "/" in name}
    for below in BELOW:
        found |= {
            f"mismatch/p<{below}/{name}": mean_of(f"mismatch/p<{below}/{name}", steps)
            for name in ("tokens", "abs", "bias")
        }
    found["mismatch/kl"] = None if found["mismatch/kl"] is None else found["mismatch/kl"] * 1e3
    return found | {
        "before": evaluated[0].get("eval/score"),
        "score": evaluated[-1].get("eval/score"),
        "greedy": evaluated[-1].get("eval/greedy"),
        "reward": mean_of("reward/mean", quarters(steps)[1]),
        "entropy": mean_of("entropy", quarters(steps)[1]),
        "step_s": mean_of("time/step_s", steps),
    }


def models(runs: Path) -> Path:
    """The dense model; beside it that with experts, and the data."""
    for name, more in {"dense": [], "experts": ["--experts", "4", "--topk", "2"]}.items():
        if not (runs / name).is_dir():
            call(
                [str(REPOSITORY / ".venv/bin/python"), "tools/upcycle.py", str(runs / name), *more],
                runs / f"{name}.log",
            )
    write(runs)
    return runs / "dense"


ABLATION = Ablation(
    name="smollm2_ablation",
    steps=10,
    arms=ARMS,
    common=COMMON,
    figures=figures,
    columns=COLUMNS,
    panels=PANELS,
    title="SmolLM2-135M with an engine in bf16 or FP8",
    differences=[],
    seeds=1,
    pictured=[arm for arm in ARMS if ARMS[arm].get("optimizer.lr") is None and arm not in ("FP8, DVP", "experts, DVP")],
    config="configs/smollm2.yaml",
)


if __name__ == "__main__":
    ABLATION.main(__doc__, models)
