"""The table of compress_quickstart.sh: score, size and speed of teacher, pruned and distilled student.

    python examples/compress_table.py runs/compress-seed0

Speed is that of the trainer's forward pass over one batch of the task's demonstrations: the three models take turns, and the
median of several rounds counts. Writes compression.json and compression.md into the folder.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path

from megatron_rl.config_file import build_config
from megatron_rl.data.sequence import Sequence
from megatron_rl.environments.build import build_task
from megatron_rl.metrics.logger import SCORES_FILE, read_json_lines
from megatron_rl.models.parallel_check import read_hf_config
from megatron_rl.models.sizes import Shape, count, whole_model
from megatron_rl.rollout.program import SingleTurn
from megatron_rl.rollout.sampling import SamplingSupport
from megatron_rl.trainer import parallel
from megatron_rl.trainer.trainer import Trainer, build_trainer

MODELS = {"teacher": "teacher", "pruned": "prune/hf", "distilled": "student"}
ROUNDS, SAMPLES = 15, 256


def scoring(folder: Path) -> Trainer:
    config = build_config(
        {
            "model": {"path": str(folder)},
            "data": {"task": "number_sorting"},
            "batch": {"tokens_per_micro_batch": 4096},
            "precision": {"train": "fp32"},
        }
    )
    ranks = parallel.initialize(config.parallel, 0)
    return build_trainer(config, ranks, total_updates=None, support=SamplingSupport())


def demonstrations(trainer: Trainer, tokenizer_of: Path) -> list[Sequence]:
    from transformers import AutoTokenizer

    task = build_task(trainer.config.data, demonstrations=True)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_of)
    program = SingleTurn(trainer.config, tokenizer, task, trainer.ranks)
    rng = random.Random(0)
    return [program.demonstration(program.encode(prompt), rng) for prompt in task.prompts("train")[:SAMPLES]]


def main() -> None:
    """Print the table, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of the script's runs")
    root = parser.parse_args().run
    trainers = {name: scoring(root / folder) for name, folder in MODELS.items()}
    samples = demonstrations(trainers["teacher"], root / MODELS["teacher"])
    seconds: dict[str, list[float]] = {name: [] for name in MODELS}
    for _ in range(ROUNDS + 1):
        for name in random.sample([*MODELS], len(MODELS)):
            start = time.perf_counter()
            trainers[name].compute_log_probs(trainers[name].pack(samples))
            seconds[name].append(time.perf_counter() - start)
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
    kl = [
        line["distillation/kl"]
        for line in read_json_lines(root / "distill" / "metrics.jsonl")
        if "distillation/kl" in line
    ]
    (root / "compression.json").write_text(json.dumps({"models": rows, "kl_to_teacher": kl}, indent=2) + "\n")
    text = "| | score | greedy | parameters | of experts | MB | forward, tokens/s |\n|---|---|---|---|---|---|---|\n"
    for name, row in rows.items():
        text += (
            f"| {name} | {row['score']:.3f} | {row['greedy']:.3f} | {row['parameters']:,} | {row['expert_parameters']:,} |"
            f" {row['megabytes']:.1f} | {row['tokens_per_s']:,.0f} |\n"
        )
    (root / "compression.md").write_text(text)
    print(text, end="")


if __name__ == "__main__":
    main()
