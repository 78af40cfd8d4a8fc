"""Make the table of compress_quickstart.sh: score, size and speed of the teacher, the pruned and the distilled student.

    python examples/compress_table.py runs/compress-seed0 [runs/compress-seed1 ...]

Speed is measured as the trainer's forward pass over one batch of the task's demonstrations: the three models take turns, and
the table has the median of several rounds. The tool writes compression.json and compression.md into each folder.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

from megatron_rl.algorithms.sampling_support import SamplingSupport
from megatron_rl.config.load import build_config
from megatron_rl.data.sequence import Sequence
from megatron_rl.distributed import parallel
from megatron_rl.distributed.parallel import Ranks
from megatron_rl.metrics.logger import METRICS_FILE, SCORES_FILE, read_json_lines
from megatron_rl.models.parallel_check import read_hf_config
from megatron_rl.models.shape import Shape, count, whole_model
from megatron_rl.rollout.program import SingleTurn
from megatron_rl.tasks.from_config import build_task
from megatron_rl.trainer.trainer import Trainer, build_trainer

MODELS = {"teacher": "teacher", "pruned": "prune/hf", "distilled": "student"}
ROUNDS, SAMPLES = 15, 256
WINDOW = 20
"""Number of steps over which the divergence is averaged; a single step has only few sampled responses."""


def scoring(folder: Path, ranks: Ranks | None) -> Trainer:
    """Return a model for forward passes. ranks: the ranks of the first model, which all models share."""
    config = build_config(
        {
            "model": {"path": str(folder)},
            "data": {"task": "number_sorting"},
            "batch": {"tokens_per_micro_batch": 4096},
            "precision": {"train": "fp32"},
        }
    )
    ranks = ranks or parallel.initialize(config.parallel, 0)
    return build_trainer(config, ranks, total_updates=None, support=SamplingSupport())


def demonstrations(trainer: Trainer, tokenizer_of: Path) -> list[Sequence]:
    from transformers import AutoTokenizer

    task = build_task(trainer.config.data, demonstrations=True)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_of)
    program = SingleTurn(trainer.config, tokenizer, task, trainer.ranks)
    rng = random.Random(0)
    return [program.demonstration(program.encode(prompt), rng) for prompt in task.prompts("train")[:SAMPLES]]


def measured(root: Path) -> dict[str, Any]:
    """Return the figures of each model in one run of the script, and the divergence from the teacher by step."""
    trainers: dict[str, Trainer] = {}
    for name, folder in MODELS.items():
        trainers[name] = scoring(root / folder, trainers["teacher"].ranks if trainers else None)
    samples = demonstrations(trainers["teacher"], root / MODELS["teacher"])
    seconds: dict[str, list[float]] = {name: [] for name in MODELS}
    for _ in range(ROUNDS + 1):
        for name in random.sample([*MODELS], len(MODELS)):
            start = time.perf_counter()
            trainers[name].compute_log_probs(trainers[name].pack(samples))
            seconds[name].append(time.perf_counter() - start)
    parallel.shutdown()
    rows = {}
    for name, folder in MODELS.items():
        weights = whole_model(Shape.from_config(read_hf_config(root / folder)))
        scores = read_json_lines(root / "scores" / name / SCORES_FILE)[-1]
        rows[name] = {
            "score": scores["eval/score"],
            "greedy": scores["eval/greedy"],
            "parameters": count(weights),
            "expert_parameters": count(weights, "experts"),
            "megabytes": sum(file.stat().st_size for file in (root / folder).glob("*.safetensors")) / 1e6,
            "tokens_per_s": sum(s.inputs for s in samples) / statistics.median(seconds[name][1:]),
        }
    lines = read_json_lines(root / "distill" / METRICS_FILE)
    kl = [line["distillation/kl"] for line in lines if line.get("distillation/kl") is not None]
    return {"models": rows, "kl_to_teacher": kl, "kl_of_windows": windows(kl)}


def windows(values: list[float]) -> list[float]:
    """Return means over WINDOW steps."""
    return [statistics.mean(values[start : start + WINDOW]) for start in range(0, len(values), WINDOW)]


def table(runs: list[dict[str, Any]]) -> str:
    """Return a table of means over the runs, and of standard deviations for several runs."""

    def figure(name: str, key: str, form: str) -> str:
        values = [run["models"][name][key] for run in runs]
        more = f" ± {format(statistics.stdev(values), form)}" if len(values) > 1 and key in ("score", "greedy") else ""
        return format(statistics.mean(values), form) + more

    columns = {"score": ".3f", "greedy": ".3f", "parameters": ",.0f", "expert_parameters": ",.0f", "megabytes": ".1f"}
    columns["tokens_per_s"] = ",.0f"
    text = "| | score | greedy | parameters | of experts | MB | forward, tokens/s |\n|---|---|---|---|---|---|---|\n"
    for name in MODELS:
        text += f"| {name} | " + " | ".join(figure(name, *column) for column in columns.items()) + " |\n"
    return text


def main() -> None:
    """Print the table and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="folders of the script's runs, one for each seed")
    parser.add_argument("--json", type=Path, help="write the figures of all runs to this file")
    arguments = parser.parse_args()
    found = {}
    for root in arguments.runs:
        found[root.name] = measured(root)
        (root / "compression.json").write_text(json.dumps(found[root.name], indent=2) + "\n")
        (root / "compression.md").write_text(table([found[root.name]]))
    print(table([*found.values()]), end="")
    for name, run in found.items():
        fall = " ".join(f"{value:.3f}" for value in run["kl_of_windows"])
        print(f"{name}: KL(student, teacher), means of {WINDOW} steps: {fall}")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
