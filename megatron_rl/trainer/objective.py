"""The loss of one micro-batch, assembled from the pure functions of `algorithms` according to the config."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron_rl.algorithms import kl, losses
from megatron_rl.config import AlgorithmConfig
from megatron_rl.trainer.packing import Batch

Sums = dict[str, torch.Tensor]
"""Metric sums of one micro-batch; the same keys on every micro-batch, so that they can be added up."""


@dataclass(frozen=True)
class Scale:
    """Totals over the whole update (all micro-batches and ranks), known before its first forward."""

    tokens: int
    sequences: int


def policy_objective(
    config: AlgorithmConfig,
    scale: Scale,
    batch: Batch,
    values: torch.Tensor,
    all_reduce: Callable[[torch.Tensor], torch.Tensor],
) -> tuple[torch.Tensor, Sums]:
    """Loss sum of one micro-batch of trajectories, and its metric sums.

    values: [2, T] log-probs and entropies of the current policy. all_reduce sums a tensor over the context-parallel
    ranks that hold the other parts of the same sequences. Megatron divides the returned sum by `scale.tokens`, which it
    counts itself.
    """
    log_probs, entropy = values
    mask = batch.mask
    # One update per rollout batch: the current policy is the old one, so the ratio is 1 by construction.
    old = batch.scored.get("old", log_probs.detach())
    terms, sums = losses.policy_terms(
        config.loss,
        log_probs,
        old,
        batch.advantages,
        mask,
        batch.sequence_ids,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        num_sequences=batch.num_sequences,
        all_reduce=all_reduce,
    )
    weights = losses.loss_weights(
        mask, batch.sequence_ids, config.aggregation, sequence_lengths=batch.sequence_lengths
    ) * (scale.tokens / scale.sequences if config.aggregation == "sequence_mean" else 1.0)
    sums["loss/policy"] = (terms.detach() * weights).sum()
    total = terms
    if "reference" in batch.scored:
        estimate = kl.estimate(log_probs, batch.scored["reference"], config.kl.estimator)
        estimate = torch.where(mask, estimate, torch.zeros_like(estimate))
        sums["kl/reference"] = estimate.detach().sum()
        total = total + config.kl.coefficient * estimate
    if config.entropy_coefficient:
        total = total - config.entropy_coefficient * torch.where(mask, entropy, torch.zeros_like(entropy))
    loss = (total * weights).sum()
    sums["entropy"] = entropy.detach()[mask].sum()
    batch.scored["old"] = old.detach()  # the mismatch to the engine is that of the policy before its update
    return loss, sums


def sft_objective(batch: Batch, values: torch.Tensor) -> tuple[torch.Tensor, Sums]:
    """Negative log-likelihood of the counted labels, summed."""
    nll = -torch.where(batch.mask, values[0], torch.zeros_like(values[0])).sum()
    return nll, {"loss/policy": nll.detach(), "entropy": values[1].detach()[batch.mask].sum()}
