"""The runs of sink_ablation.sh: GRPO on a gpt-oss whose trainer trains its attention sinks, freezes them, or has none.

The script follows figures 3 to 7 of "Unlocking Agentic RL Training for GPT-OSS". There the trainer's FlashAttention 2
did not support sinks, which SGLang applied. The cures tried before the kernel was fixed are included: importance
weights of tokens and of sequences, and frozen attention. Runs start from one of two warm starts with trained sinks.
Large sinks take a seventh to a half of a layer's attention; small sinks cause a milder mismatch.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
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
    warm_start,
)
from curves import Panel, write_curves
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_rl.config import DataConfig
from megatron_rl.metrics.logger import METRICS_FILE, read_json_lines
from megatron_rl.tasks.from_config import build_task

SINKS = {"large": 2.0, "small": 0.0}
"""Initial values of sinks. A sink of 2 weighs as much as seven keys of score 0, about the number of tokens before a
token of this task."""
WITHOUT: Settings = {"model.attention_sinks": "ignored"}
FROZEN_ATTENTION: Settings = {"model.freeze": '["*.self_attention.*"]'}
METHODS: dict[str, Settings] = {
    "sinks trained": {},
    "sinks frozen": {"model.freeze": '["*.softmax_offset"]'},
    "attention frozen": FROZEN_ATTENTION,
    "no sinks": WITHOUT,
    "no sinks, attention frozen": WITHOUT | FROZEN_ATTENTION,
    "no sinks, TIS of tokens": WITHOUT | {"correction.mode": "truncate", "correction.high": 2.0},
    "no sinks, TIS of sequences": WITHOUT
    | {"correction.mode": "truncate", "correction.level": "sequence", "correction.high": 2.0},
}
"""Settings of the trainer's sinks; in all runs SGLang applies the sinks that are pushed to it."""
WITH_SMALL_SINKS = ("sinks trained", "no sinks", "no sinks, TIS of tokens", "no sinks, TIS of sequences")
COMMON: Settings = {
    "rollout.agreement_floor": "null",  # the script measures a mismatch that would stop a normal run
    "eval.every": 10,
    "eval.prompts": 100,
}
COLUMNS = {
    "before": ("score before", ".3f"),
    "eval/score": ("score", ".3f"),
    "best": ("best score", ".3f"),
    "greedy_before": ("greedy score before", ".3f"),
    "greedy": ("greedy score", ".3f"),
    "reward": ("reward, last quarter", ".3f"),
    "first/kl": ("KL, first quarter", ".2g"),
    "last/kl": ("KL, last quarter", ".2g"),
    "mismatch/ess": ("ESS", ".3f"),
    "mismatch/sequence_ess": ("ESS of sequences", ".3f"),
    "mismatch/ratio_max": ("largest ratio of a step", ".2g"),
    "entropy": ("entropy, last quarter", ".3f"),
    "update/grad_norm": ("gradient norm, median", ".2f"),
    "grad_norm_max": ("gradient norm, largest", ".2f"),
}
PANELS = (
    Panel("KL(engine || trainer), nats per token", "mismatch/kl", log=True, smooth=3),
    Panel("Gradient norm", "update/grad_norm", log=True),
    Panel("Reward", "reward/mean", smooth=5),
    Panel("Score", "eval/score"),
)


@dataclass(frozen=True)
class RunPlan:
    sinks: str
    method: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.sinks}-{self.method.replace(',', '').replace(' ', '-').lower()}-seed{self.seed}"


def make_plan() -> list[RunPlan]:
    """Return the runs. Seeds are the outer loop, so that an interrupted script has all methods of its first seeds."""
    arms = [("large", method) for method in METHODS] + [("small", method) for method in WITH_SMALL_SINKS]
    return [RunPlan(sinks, method, seed) for seed in range(3) for sinks, method in arms]


def add_to_sinks(value: float, folder: Path) -> None:
    """Add a number to the sinks of a model folder."""
    path = folder / "model.safetensors"
    weights = load_file(path)
    for name, tensor in weights.items():
        if name.endswith(".self_attn.sinks"):
            tensor += value
    save_file(weights, path, metadata={"format": "pt"})


@torch.no_grad()
def attention_to_sinks(folder: Path, prompts: int = 64) -> list[float]:
    """Return the share of each layer's attention on its sinks: a mean over heads and the tokens that predict a right answer."""
    task = build_task(DataConfig(task="number_sorting"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    left = []
    for prompt, _ in zip(task.prompts("eval"), range(prompts), strict=False):
        asked, answered = (tokenizer(text)["input_ids"] for text in (prompt.text, " ".join(map(str, prompt.answer))))
        attentions = model(torch.tensor([asked + answered]), output_attentions=True).attentions
        shares = torch.stack([1 - layer[0].sum(-1).mean(0) for layer in attentions])  # [heads, tokens, keys]
        left.append(shares[:, len(asked) - 1 :])
    return torch.cat(left, dim=1).mean(1).tolist()


def figures(folder: Path) -> dict[str, float | None]:
    """Return a run's figures: the score at its end and its best score, and means over the steps for all others.

    A figure that does not apply is None.
    """
    lines = read_json_lines(folder / METRICS_FILE)
    steps = [line for line in lines if line["step"] > 0]
    quarter = -(-len(steps) // 4)
    evaluated = [line for line in lines if line.get("eval/score") is not None]
    scores = [line["eval/score"] for line in evaluated]
    norms = [n for line in steps if (n := line["update/grad_norm"]) is not None]
    return {
        "before": scores[0],
        "eval/score": scores[-1],
        "best": max(scores),
        "greedy_before": evaluated[0]["eval/greedy"],
        "greedy": evaluated[-1]["eval/greedy"],
        "reward": mean_of("reward/mean", steps[-quarter:]),
        "first/kl": mean_of("mismatch/kl", steps[:quarter]),
        "last/kl": mean_of("mismatch/kl", steps[-quarter:]),
        "entropy": mean_of("entropy", steps[-quarter:]),
        "update/grad_norm": statistics.median(norms),
        "grad_norm_max": max(norms),
        **{name: mean_of(name, steps) for name in COLUMNS if name.startswith("mismatch/")},
    }


def table(results: dict[str, dict]) -> str:
    """Return a table with means and, for several seeds, standard deviations."""
    arms: dict[tuple[str, str], list] = {}
    for result in results.values():
        arms.setdefault((result["sinks"], result["method"]), []).append(result["figures"])
    order = list(dict.fromkeys((p.sinks, p.method) for p in make_plan()))
    return markdown(("sinks", "trainer"), COLUMNS, [(arm, arms[arm]) for arm in order if arm in arms])


def write_results(
    shares: Mapping[str, Sequence[float]], root: Path, out: Path, steps: int, minutes: dict[str, float]
) -> None:
    """Write out/sink-ablation.json and .md of the finished runs, and an .svg for each kind of sinks.

    shares: kind of sinks -> `attention_to_sinks` of the warm start.
    """
    done = [plan for plan in make_plan() if last_step(root / plan.name) == steps]
    if not done:
        return
    results = {
        p.name: {"sinks": p.sinks, "method": p.method, "seed": p.seed, "figures": figures(root / p.name)} for p in done
    }
    save(out, "sink-ablation", steps, minutes, results, table(results), attention_to_sinks=shares)
    for sinks in SINKS:
        curves: dict[str, list[Path]] = {}
        for plan in done:
            if plan.sinks == sinks:
                curves.setdefault(plan.method, []).append(root / plan.name)
        if curves:
            title = f"{sinks.capitalize()} sinks: mismatch, gradient norm and reward over steps"
            write_curves(curves, PANELS, out / f"sink-ablation-{sinks}.svg", title=title)


def main() -> None:
    parser = make_parser("sink_ablation", __doc__.splitlines()[0], steps=40)
    args = parser.parse_args()
    every = {plan.name: plan for plan in make_plan()}
    check_names(parser, args, list(every))
    runs = (REPOSITORY / args.runs).resolve()
    plans = [every[name] for name in args.only] if args.only else list(every.values())
    flags = ("--preset", "gptoss_quickstart", "--tokenizer", "numbers", "--window", "8")
    models = {
        sinks: warm_start(runs / sinks, flags, change=partial(add_to_sinks, SINKS[sinks]))
        for sinks in dict.fromkeys(plan.sinks for plan in plans)
    }
    settings = {
        p.name: COMMON | {"model.path": models[p.sinks], "seed": p.seed, "data.seed": p.seed} | METHODS[p.method]
        for p in plans
    }
    starts = {sinks: runs / sinks / "sft" / "hf" for sinks in SINKS}  # all finished runs, not only those of --only
    shares = {sinks: attention_to_sinks(start) for sinks, start in starts.items() if start.is_dir()}
    run_all(args, settings, partial(write_results, shares))


if __name__ == "__main__":
    main()
