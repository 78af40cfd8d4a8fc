"""The loss of one micro-batch, assembled from the pure functions of `algorithms` according to the config."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

import torch

from megatron_rl.algorithms import kl, losses
from megatron_rl.algorithms.correction import Correction, TokenWeights, token_weights
from megatron_rl.algorithms.losses import AllReduce
from megatron_rl.config import Config
from megatron_rl.data.packing import Batch
from megatron_rl.trainer.agreement import CLOSE

Sums = dict[str, torch.Tensor]
"""Metric sums of one micro-batch; the same keys on every micro-batch, so that they can be added up."""


@dataclass(frozen=True)
class Scale:
    """Totals over the whole update (all micro-batches and ranks), known before its first forward."""

    tokens: int
    sequences: int
    weight: float = 1.0
    """By which importance weights are divided: their mean over the tokens, with correction.normalize."""


def correction_of(config: Config) -> Correction:
    """The configured correction. Errors: ValueError."""
    return Correction(**{f.name: getattr(config.correction, f.name) for f in fields(Correction)})


def is_pointwise(config: Config) -> bool:
    """Whether the loss is a sum of terms that look at one token's log-prob each (`ops.linear_log_probs`)."""
    return config.algorithm.loss in losses.POINTWISE and correction_of(config).per_token


def log_probs_before(config: Config) -> str | None:
    """What has to be scored before the updates of a rollout batch, by its name in `Batch.scored`.

    old: log-probs that differ from those that an update starts with; normalizer: no more than what `Trainer.scale` needs for
    the mean weight, so that a single update still has a ratio of exactly 1.
    """
    if config.batch.updates_per_step > 1 and not config.correction.bypass:
        return "old"
    return "normalizer" if config.correction.normalize else None


def importance_weights(config: Config, batch: Batch, train: torch.Tensor, all_reduce: AllReduce) -> TokenWeights:
    """Weights [T] of a micro-batch between the engine and the trainer's log-probs `train` [T]; not normalised."""
    return token_weights(
        train - batch.rollout_log_probs,
        batch.mask,
        batch.sequence_ids,
        correction_of(config),
        num_sequences=batch.num_sequences,
        all_reduce=all_reduce,
    )


def policy_objective(
    config: Config, scale: Scale, batch: Batch, values: torch.Tensor, all_reduce: AllReduce
) -> tuple[torch.Tensor, Sums]:
    """Loss sum of one micro-batch of trajectories, and its metric sums.

    values: [3, T] log-probs, entropies and coverage of the current policy, as the head gives them. Megatron divides the
    returned sum by `scale.tokens`, which it counts itself.
    """
    algorithm = config.algorithm
    log_probs, entropy, coverage = values
    mask = batch.mask
    # One update per rollout batch: the current policy is the old one, so the ratio is 1 by construction.
    old = batch.scored.get("old", log_probs.detach())
    # A token outside the safe set, now or then, has ratio 0: no term, and a weight of 0 (papers/000, theorem 5.3).
    inside = mask & (log_probs > -torch.inf) & (old > -torch.inf)
    corrected = importance_weights(config, batch, old, all_reduce)
    gone = mask & ~inside
    if algorithm.loss == "gspo":  # whose ratio is its sequence's
        in_sequence = all_reduce(losses.sequence_sums(gone.float(), batch.sequence_ids, batch.num_sequences))
        gone = mask & (torch.cat([in_sequence, in_sequence.new_zeros(1)])[batch.sequence_ids] > 0)
    corrected = replace(corrected, weights=torch.where(gone, 0.0, corrected.weights))
    terms, sums = losses.policy_terms(
        algorithm.loss,
        log_probs,
        batch.rollout_log_probs if config.correction.bypass else old,
        batch.advantages,
        inside,
        batch.sequence_ids,
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
        num_sequences=batch.num_sequences,
        all_reduce=all_reduce,
    )
    terms = terms * (corrected.weights / scale.weight).to(terms)
    weights = losses.loss_weights(
        mask, batch.sequence_ids, algorithm.aggregation, sequence_lengths=batch.sequence_lengths
    ) * (scale.tokens / scale.sequences if algorithm.aggregation == "sequence_mean" else 1.0)
    sums["loss/policy"] = (terms.detach() * weights).sum()
    total = terms
    # What is dropped leaves the whole update: where the trainer finds a token next to impossible, its KL explodes too.
    stays = mask & ~corrected.vetoed & ~corrected.rejected
    if "reference" in batch.scored:
        estimate = kl.estimate(log_probs, batch.scored["reference"], algorithm.kl.estimator)
        estimate = torch.where(inside, estimate, torch.zeros_like(estimate))
        sums["kl/reference"] = estimate.detach().sum()
        total = total + algorithm.kl.coefficient * torch.where(stays, estimate, torch.zeros_like(estimate))
    if algorithm.entropy_coefficient:
        total = total - algorithm.entropy_coefficient * torch.where(stays, entropy, torch.zeros_like(entropy))
    loss = (total * weights).sum()
    sums["entropy"] = torch.where(mask, entropy.detach(), 0.0).sum()
    sums[CLOSE] = (mask & ((old - batch.rollout_log_probs).abs() <= math.log(2))).sum()
    # For the metrics: the mismatch to the engine is that of the policy before its update.
    batch.scored |= {"old": old.detach(), "coverage": coverage.detach()}
    batch.corrected = corrected
    return loss, sums


def sft_objective(batch: Batch, values: torch.Tensor) -> tuple[torch.Tensor, Sums]:
    """Negative log-likelihood of the counted labels, summed."""
    nll = -torch.where(batch.mask, values[0], torch.zeros_like(values[0])).sum()
    return nll, {"loss/policy": nll.detach(), "entropy": torch.where(batch.mask, values[1].detach(), 0.0).sum()}
