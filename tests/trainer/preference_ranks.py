"""What each rank does in test_preference_parity.py: learn from the same comparisons under one parallel layout."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch.distributed as dist
from layouts import make_config, reduce_whole, whole_gradients
from ranks import end_layout

from megatron_rl.algorithms import preference
from megatron_rl.algorithms.sampling_support import SamplingSupport
from megatron_rl.config import Config
from megatron_rl.data.sequence import Sequence
from megatron_rl.distributed import parallel
from megatron_rl.dpo import LOG_PROBS, dpo_loss, mismatched, whole_response
from megatron_rl.metrics.reduce import figures, over_ranks
from megatron_rl.reward_model import places, reward_loss
from megatron_rl.tasks.preferences import Comparison
from megatron_rl.trainer.scored_spans import ScoredSpans, UnitPasses
from megatron_rl.trainer.trainer import Trainer, build_trainer

REWARD: dict[str, tuple[str, dict[str, Any]]] = {
    "bradley_terry": ("pair", {"center": 0.1}),
    "hinge": ("pair", {"loss": "hinge", "pooling": "mean"}),
    "plackett_luce": ("list", {"loss": "plackett_luce", "pooling": "mean"}),
    "squared_error": ("point", {"loss": "squared_error"}),
    "cross_entropy": ("steps", {"loss": "cross_entropy"}),
}
"""Name -> (kind of the comparisons, keys of config.reward_model)."""
DPO: dict[str, tuple[str, dict[str, Any]]] = {
    "sigmoid": ("list", {"label_smoothing": 0.1, "sft_coefficient": 0.3}),
    "ipo": ("pair", {"loss": "ipo", "beta": 0.4, "length_normalized": True}),
    "kto": ("label", {"loss": "kto", "desirable_weight": 1.5}),
}
"""The same of config.dpo."""


def make_comparisons(seed: int, kind: Any, vocab: int = 64) -> list[Comparison]:
    """Random ones, of lengths that no micro-batch of 96 tokens holds together."""
    rng = np.random.default_rng(seed)
    sizes = {"pair": 2, "list": 3}
    found = []
    for number in range(5 if kind in sizes else 20):
        prompt = rng.integers(4, vocab, int(rng.integers(2, 12))).tolist()
        lengths = rng.integers(3, 26, sizes.get(kind, 1))
        sequences = [Sequence.demonstration(prompt, rng.integers(4, vocab, n).tolist()) for n in lengths]
        scores = {"pair": [1.0, 0.0], "list": rng.permutation(3).tolist(), "label": [float(number % 2)]}
        ends = [np.sort(rng.choice(n, 3, replace=False)).tolist() for n in lengths] if kind == "steps" else []
        found.append(
            Comparison(
                f"{kind}:{number}",
                kind,
                sequences,
                scores=scores.get(kind, [float(rng.random())]),
                margin=float(rng.normal()) if kind == "pair" and number % 2 else None,
                step_ends=ends or [[] for _ in lengths],
                step_labels=[rng.random(3).tolist() for _ in lengths],
            )
        )
    return found


def learn(trainer: Trainer, config: Config, name: str, seed: int, *, of_reward: bool) -> dict[str, Any]:
    """One update by a loss -> its metrics and gradients."""
    kind, keys = (REWARD if of_reward else DPO)[name]
    comparisons = make_comparisons(seed, kind)
    if of_reward:
        settings = replace(config.reward_model, **keys)
        table = ScoredSpans.of(comparisons, partial(places, pooling=settings.pooling))
        passes, loss, learned = UnitPasses(trainer, table), partial(reward_loss, settings, table), "values"
    else:
        settings = replace(config.dpo, **keys)
        table = ScoredSpans.of(comparisons, whole_response)
        passes, baseline, learned = UnitPasses(trainer, table), None, LOG_PROBS
        if settings.loss == "kto":
            crossed = UnitPasses(trainer, ScoredSpans.of(mismatched(comparisons), whole_response))
            sums = crossed.sums(LOG_PROBS, "reference_log_probs")
            baseline = preference.kto_baseline(sums[LOG_PROBS], sums["reference_log_probs"])
        reference = passes.sums("reference_log_probs")["reference_log_probs"]
        loss = partial(dpo_loss, settings, table, reference, baseline)
    captured: dict[str, Any] = {"micro_batches": len(passes.batches)}
    step = trainer._step
    trainer._step = lambda: (captured.update(grads=whole_gradients(trainer)), step())[1]
    update, metrics = passes.learn(loss, learned)
    trainer._step = step
    measured = figures(over_ranks(trainer.ranks, [metrics if trainer.ranks.rank == 0 else {}]))
    return captured | {"metrics": measured, "norm": figures(update.metrics)["update/grad_norm"]}


def run_layout(of_reward: bool, model: str, other: str, classifier: str, overrides: dict, seed: int) -> dict[str, Any]:
    """Updates by each loss in turn: of a reward model, or of a policy with another model as its reference."""
    config = make_config(classifier if of_reward else model, overrides)
    trainer = build_trainer(
        config,
        parallel.initialize(config.parallel, config.seed),
        total_updates=8,
        support=SamplingSupport(),
        value_head=of_reward,
        reference=None if of_reward else other,
    )
    reduce_whole(trainer)
    found: dict[str, Any] = {}
    for number, name in enumerate(REWARD if of_reward else DPO):
        found[name] = learn(trainer, config, name, seed + number, of_reward=of_reward)
    found["weights"] = {name: t.float().numpy().copy() for name, t in trainer.export_weights()}
    end_layout()
    return found if dist.get_rank() == 0 else {}


def run_layouts(runs: list[tuple], seed: int) -> list[dict[str, Any]]:
    """Several layouts of the same world size, one after the other on the same processes.

    runs: whether a reward model learns, or a policy; policy, reference, and the classifier that the reward model starts as;
    the layout.
    """
    return [run_layout(*one, seed) for one in runs]
