"""A real pretrained model, SmolLM2-135M, with a natural mismatch: SGLang in bf16 or FP8, dense and with experts.

The trainer is in fp32. The 49,152 tokens have a tail, and SGLang's rounding is not modified. The mismatch by the
probability of a token is measured on the first step, before any update, and on the later steps. The arms are RLOO, at
a learning rate at which the naive run is barely stable, and the cures. With experts (the same model upcycled, with
noise on the experts) there are also cures of routing, with two updates per rollout batch. Each arm is one run.
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
    "batch.prompts_per_step": 6,
    "batch.updates_per_step": 2,
    "optimizer.lr": 5e-5,
    "rollout.routes": "true",
}
ARMS: dict[str, Settings] = {
    "engine in fp32": {"precision.rollout": "fp32"},
    "naive": {},
    "DVP": DVP,
    "DVP + MIS": DVP | MIS,
    "FP8, naive": {"precision.rollout": "fp8"},
    "FP8, DVP": DVP | {"precision.rollout": "fp8"},
    "experts, naive": EXPERTS,
    "experts, DVP": EXPERTS | DVP,
    "experts, DVP + MIS": EXPERTS | DVP | MIS,
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
    "optimizer.lr": 1e-4,
    "eval.every": 0,
    "eval.samples": 16,
}
NOISE = "0.1"
"""Noise on the experts, as a fraction of each weight's spread. Without noise all experts are the same, and routes have
no effect."""
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
    """Return a run's figures; None for a figure that does not apply.

    first/mismatch/p<X/NAME: figures of step 1's tokens with such a probability.
    """
    steps, evaluated = metric_lines(folder)
    found = {name: mean_of(name, steps) for name in COLUMNS if "/" in name}
    for when, of in {"first": steps[:1], "later": steps[1:]}.items():
        names = [f"mismatch/p<{below}/{name}" for below in BELOW for name in ("tokens", "abs", "bias", "abs_max")]
        found |= {f"{when}/{name}": mean_of(name, of) for name in names}
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
    """Create the dense model, the model with experts, and the data."""
    for name, more in {"dense": [], "experts": ["--experts", "4", "--topk", "2", "--noise", NOISE]}.items():
        if not (runs / name).is_dir():
            call(
                [str(REPOSITORY / ".venv/bin/python"), "tools/upcycle.py", str(runs / name), *more],
                runs / f"{name}.log",
            )
    write(runs)
    return runs / "dense"


ABLATION = Ablation(
    name="smollm2_ablation",
    steps=8,
    arms=ARMS,
    common=COMMON,
    figures=figures,
    columns=COLUMNS,
    panels=PANELS,
    title="SmolLM2-135M with an engine in bf16 or FP8",
    differences=[],
    seeds=1,
    pictured=[arm for arm in ARMS if arm not in ("FP8, DVP", "experts, DVP", "experts, DVP + MIS", "experts, Pr2")],
    config="configs/smollm2.yaml",
    environment={},  # with four experts and the memory that glibc keeps, a run does not fit into 24 GiB
)


if __name__ == "__main__":
    ABLATION.main(__doc__, models)
