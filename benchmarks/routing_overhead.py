"""Scoring and updates of one rollout batch under several sources of routes, in turns on the same batch. One JSON line.

Started by `benchmarks/step.py --routing`. Sources take turns in one process, because a machine's speed wanders by more than
what is looked for; the figures are medians over rounds of each source's own seconds, and of the difference to the first
source in the same round, with its quartiles.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from dataclasses import replace
from functools import partial

import numpy as np

from megatron_rl.config import build_config
from megatron_rl.routing.replay import PREDICTING
from megatron_rl.trainer import parallel
from megatron_rl.trainer.objective import policy_objective
from megatron_rl.trainer.packing import Batch, Sample
from megatron_rl.trainer.trainer import Trainer, build_trainer

WARM_UP = 2


def make_samples(count: int, prompt: int, new: int, vocab: int) -> list[Sample]:
    rng = np.random.default_rng(0)
    return [
        Sample(
            tokens=rng.integers(4, vocab, prompt + new).astype(np.int32),
            prompt_length=prompt,
            loss_mask=np.ones(new, bool),
            rollout_log_probs=np.zeros(new, np.float32),
            advantage=float(rng.normal()),
        )
        for _ in range(count)
    ]


def one_round(trainer: Trainer, samples: list[Sample], updates: int, sources: list[str]) -> dict[str, dict[str, float]]:
    """By source: seconds of packing and scoring, and of all updates, of one rollout batch each.

    Sources take turns at every update, each time in another order: what is compared lies a fraction of a second apart.
    """
    seconds = {source: {"score": 0.0, "train": 0.0} for source in sources}
    per_update = len(samples) // updates
    packed: dict[tuple[str, int], list[Batch]] = {}

    def use(source: str) -> None:
        trainer.config = replace(trainer.config, routing=replace(trainer.config.routing, source=source))

    for index in range(updates):
        for source in random.sample(sources, len(sources)):
            use(source)
            start = time.perf_counter()
            batches = packed[source, index] = trainer.pack(samples[index * per_update : (index + 1) * per_update])
            trainer.score(batches, "old")
            seconds[source]["score"] += time.perf_counter() - start
    for index in range(updates):
        for source in random.sample(sources, len(sources)):
            use(source)
            start = time.perf_counter()
            batches = packed[source, index]
            objective = partial(
                policy_objective, trainer.config.algorithm, trainer.scale(batches), all_reduce=trainer.context_sum
            )
            learn = index > 0 and source in PREDICTING
            trainer.update(batches, objective, pointwise=True, learn_routes=learn)
            seconds[source]["train"] += time.perf_counter() - start
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--sequences", type=int, required=True)
    parser.add_argument("--prompt-tokens", type=int, required=True)
    parser.add_argument("--new-tokens", type=int, required=True)
    parser.add_argument("--updates", type=int, required=True)
    parser.add_argument("--micro-batch-tokens", type=int, required=True)
    parser.add_argument("--precision", required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--sources", nargs="+", required=True)
    args = parser.parse_args()

    # Built with predictors; a source that does not predict never looks at them.
    config = build_config(
        {
            "steps": 1_000_000,
            "model": {"path": args.model},
            "batch": {"tokens_per_micro_batch": args.micro_batch_tokens, "updates_per_step": args.updates},
            "precision": {"train": args.precision},
            "optimizer": {"lr": 1e-7},
            "routing": {"source": "predicted"},
        }
    )
    ranks = parallel.initialize(config.parallel, config.seed)
    trainer = build_trainer(config, ranks, total_updates=config.steps, temperature=1.0)
    vocab = trainer.model.hf_config.vocab_size
    samples = make_samples(args.sequences, args.prompt_tokens, args.new_tokens, vocab)
    rounds = []
    for _ in range(WARM_UP + args.rounds):
        rounds.append(one_round(trainer, samples, args.updates, args.sources))
    rounds = rounds[WARM_UP:]
    first = args.sources[0]
    result = {}
    for source in args.sources:
        whole = [sum(one[source].values()) for one in rounds]
        added = [a - sum(one[first].values()) for a, one in zip(whole, rounds, strict=True)]
        result[source] = {part: statistics.median(one[source][part] for one in rounds) for part in ("score", "train")}
        low, result[source]["added_s"], high = statistics.quantiles(added, n=4)
        result[source]["added_quartiles_s"] = [low, high]
    print(json.dumps({"rounds": len(rounds), "sources": result}))


if __name__ == "__main__":
    main()
