"""Training of reward models on preferences (`megatron-rl reward`). A reward model scores a response, or each of its steps."""

from __future__ import annotations

import random
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from megatron_rl.algorithms import preference
from megatron_rl.config import Config, RewardModelConfig
from megatron_rl.data.sequence import Sequence
from megatron_rl.errors import UserError
from megatron_rl.metrics.preference_metrics import label_metrics, pair_metrics
from megatron_rl.metrics.reduce import Metrics, figures, mean
from megatron_rl.offline import StepResult, check_kind, train_offline
from megatron_rl.run.run import Run
from megatron_rl.tasks.preferences import Comparison, Kind
from megatron_rl.tasks.stream import held_out_comparisons
from megatron_rl.trainer.scored_spans import Places, ScoredSpans, UnitPasses, with_last_state

PAIRWISE = ("bradley_terry", "hinge", "squared_gap", "plackett_luce")
"""Losses that compare responses to the same prompt. The other losses use each response alone."""
TAKES: dict[str, tuple[Kind, ...]] = {
    **dict.fromkeys(PAIRWISE, ("pair", "list")),
    "squared_error": ("point", "label", "list", "steps"),
    "cross_entropy": ("label", "point", "steps"),
}
"""{loss: kinds of preferences that it can learn from}."""


def reward(config: Config) -> None:
    """Run config.steps updates on batch.prompts_per_step comparisons each. Writes a classifier folder `hf/`."""
    with Run(config, kind="reward") as run:
        kind = check_kind(run, TAKES, "reward_model.loss", config.reward_model.loss)
        trainer = run.build()
        trainer.part_steps_by(config.data.step_separator if kind == "steps" else None)
        mark = partial(places, pooling=config.reward_model.pooling)
        held_out = held_out_comparisons(run.eval_sets[0].held_out, run.program, config.rollout.context_length)

        def learn() -> StepResult:
            rng = random.Random(f"{config.seed}/{run.step}")
            table = ScoredSpans.of(run.stream.next_comparisons(config.batch.prompts_per_step, rng), mark)
            passes = UnitPasses(trainer, table)
            update, measured = passes.learn(partial(reward_loss, config.reward_model, table), "values")
            return StepResult(update, passes.mine, measured)

        def evaluate() -> dict[str, float]:
            if not held_out:
                return {}
            table = ScoredSpans.of(held_out, mark)
            found = figures(reward_loss(config.reward_model, table, UnitPasses(trainer, table).sums("values"))[1])
            return {f"eval/{name.rpartition('/')[2]}": value for name, value in found.items()}

        train_offline(run, learn, evaluate)


def places(comparison: Comparison, index: int, pooling: str) -> tuple[Sequence, list[tuple[Places, float]]]:
    """Return a response and the positions that are scored: after its last token, after each token, or after each step."""
    sequence = with_last_state(comparison.sequences[index])
    if ends := comparison.step_ends[index]:
        return sequence, [([end + 1], label) for end, label in zip(ends, comparison.step_labels[index], strict=True)]
    own = np.flatnonzero(comparison.sequences[index]["loss_mask"]) + 1  # behind the response's tokens, not tool results
    return sequence, [(own if pooling == "mean" else own[-1:], comparison.scores[index])]


def reward_loss(config: RewardModelConfig, table: ScoredSpans, sums: dict[str, Tensor]) -> tuple[Tensor, Metrics]:
    """Return the configured loss of the scores, and its metrics. Errors: UserError for invalid labels."""
    scores = sums["values"] / sums["labels"]
    if config.loss in PAIRWISE:
        better, worse, weights = preference.pairs(table.groups, -table.scores)
        chosen, rejected = scores[better], scores[worse]
        margins = table.margins[better]
        wanted = config.margin if config.margin is not None else 0.0 if config.loss == "bradley_terry" else 1.0
        margin = torch.where(margins.isnan(), wanted, margins)
        if config.loss == "bradley_terry":
            more = {"center": config.center, "label_smoothing": config.label_smoothing, "weights": weights}
            loss = preference.bradley_terry(chosen, rejected, margin=margin, **more)
        elif config.loss == "hinge":
            loss = preference.hinge(chosen, rejected, margin=margin, weights=weights)
        elif config.loss == "squared_gap":
            loss = preference.squared_gap(chosen, rejected, gap=margin, weights=weights)
        else:
            loss = preference.plackett_luce(scores, table.groups, -table.scores, top=config.top)
        metrics = pair_metrics(chosen, rejected)
    elif config.loss == "squared_error":
        loss = F.mse_loss(scores, table.scores)
        metrics = {"preference/error": mean((scores - table.scores).detach().abs().sum(), len(scores))}
    else:
        if wrong := table.scores[(table.scores < 0) | (table.scores > 1)].tolist():
            raise UserError(
                f"data: a label is {wrong[0]:g}, but reward_model.loss = cross_entropy takes labels from 0 to 1"
            )
        loss = F.binary_cross_entropy_with_logits(scores, table.scores)
        metrics = label_metrics(scores, table.scores)
    level = {"preference/mean": mean(scores.detach().sum(), len(scores))}
    return loss, {"preference/loss": mean(loss.detach(), 1)} | metrics | level
