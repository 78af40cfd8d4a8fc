"""Mismatch metrics of one step: engine against trainer, before and after the correction, and effects of vocabulary pruning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from itertools import chain

import torch

from megatron_rl.algorithms.correction import TokenWeights, bias_bound
from megatron_rl.algorithms.segments import Segments
from megatron_rl.config import CorrectionConfig
from megatron_rl.data.packing import Batch
from megatron_rl.metrics import mismatch
from megatron_rl.metrics.reduce import Metrics, derived, maximum, mean, merge, minimum
from megatron_rl.metrics.reduce import total as count
from megatron_rl.trainer.trainer import Update


def mismatch_metrics(
    correction: CorrectionConfig,
    rollout_batch: list[list[Batch]],
    updates: list[Update],
    rewards: Mapping[str, float],
    *,
    pruned: bool,
    max_new_tokens: int,
) -> Metrics:
    """Return metrics of this process's micro-batches in a step, after their updates. Collective over context-parallel ranks.

    mismatch/* compare the policy before the updates with the engine. corrected/* are the same metrics over the tokens that
    stay in the update, and the shares of the excluded tokens. If correction.mode sets importance weights, corrected/* use
    the weights instead of the ratios. pruning/* describe what the safe set of vocabulary pruning excludes.

    rewards: weights of the parts of the reward. pruned: config key pruning.enabled. max_new_tokens: config key
    rollout.max_new_tokens.
    """
    corrects = correction.mode != "none" or bool(correction.veto) or correction.reject != "none" or pruned
    seen = chain.from_iterable(update.tokens for update in updates)
    parts: list[Metrics] = []
    for whole, tokens in zip(chain.from_iterable(rollout_batch), seen, strict=True):
        if not tokens:
            continue
        batch = _Scored.of(whole, tokens)
        log_ratios = batch.old_log_probs.double() - batch.rollout_log_probs.double()
        safe = torch.ones_like(batch.mask) if pruned else batch.safe
        found = {"mismatch": derived(mismatch.with_law, _measure(batch, batch.mask, log_ratios, safe=safe))}
        if corrects:
            weighted = correction.mode != "none"
            weights = batch.corrected.weights.log() if weighted else log_ratios
            # At a level above tokens, each token has the weight of its sequence.
            of_sequences = weighted and correction.level != "token"
            after = _measure(batch, batch.corrected.weights > 0, weights, of_sequences=of_sequences)
            found |= {"corrected": derived(mismatch.figures, after)} | _correction_metrics(batch)
        if pruned:
            largest = sum(abs(weight) for weight in rewards.values())
            found |= _pruning_metrics(batch, largest * max_new_tokens)
        parts.append(found)
    return merge(parts)


@dataclass(frozen=True)
class _Scored:
    """One micro-batch and the results of its update, as tensors [T] with one value per token.

    The tensors are in host memory, because each read of a value on a GPU would block.
    """

    mask: torch.Tensor
    rollout_log_probs: torch.Tensor
    segments: Segments
    old_log_probs: torch.Tensor
    pruned: torch.Tensor
    corrected: TokenWeights
    safe: torch.Tensor | None = None
    """True for tokens in the trainer's safe set for pruning.rho. None with pruning, or if the set was not computed."""

    @classmethod
    def of(cls, batch: Batch, tokens: Mapping[str, torch.Tensor]) -> _Scored:
        host = {name: values.cpu() for name, values in tokens.items()}
        corrected = TokenWeights(**{f.name: host.pop(f.name) for f in fields(TokenWeights)})
        segments = replace(batch.segments, ids=batch.segments.ids.cpu())
        return cls(batch.mask.cpu(), batch["rollout_log_probs"].cpu(), segments, **host, corrected=corrected)


def _measure(
    batch: _Scored,
    mask: torch.Tensor,
    log_ratios: torch.Tensor,
    *,
    of_sequences: bool = False,
    safe: torch.Tensor | None = None,
) -> mismatch.Mismatch:
    """Return the mismatch over the tokens in the mask.

    All context-parallel ranks add to the sums of a sequence, but only the first of these ranks counts the sequence.
    """
    finite = mask & log_ratios.isfinite()
    parts = (torch.where(mask, log_ratios, 0.0), torch.where(finite, log_ratios, 0.0))
    total, of_finite, tokens, finite_tokens = batch.segments.sums(*parts, mask.double(), finite.double())
    total = total / tokens.clamp(min=1) if of_sequences else total
    sequences = total[tokens > 0].tolist() if batch.segments.counts else []
    means = (of_finite / finite_tokens)[finite_tokens > 0].tolist()
    engine = batch.rollout_log_probs.double()
    return mismatch.measure(engine + log_ratios, engine, mask, sequences, safe, means)


def _correction_metrics(batch: _Scored) -> Metrics:
    """Return the metrics of the correction.

    corrected/vetoed: share of the tokens that the veto excludes. corrected/rejected: share that rejection excludes.
    corrected/bounded: share whose ratio the bounds of correction.mode change. corrected/masked: share of the
    tokens with weight 0 for any reason. corrected/weight_*: statistics of the weights.
    """
    corrected, weights = batch.corrected, batch.corrected.weights[batch.mask]
    tokens, total = len(weights), float(weights.sum())
    return {
        "corrected/vetoed": mean(int(corrected.vetoed.sum()), tokens),
        "corrected/rejected": mean(int(corrected.rejected.sum()), tokens),
        "corrected/bounded": mean(int(corrected.bounded.sum()), tokens),
        "corrected/masked": mean(int((weights == 0).sum()), tokens),
        "corrected/weight_mean": mean(total, tokens),
        "corrected/weight_max": maximum(float(weights.max()) if tokens else 0.0),
        "corrected/weight_ess": derived(_sample_size, total, float(weights.square().sum()), tokens),
    }


def _sample_size(total: float, squares: float, tokens: float) -> float:
    return total**2 / (tokens * squares) if squares else 0.0


def _pruning_metrics(batch: _Scored, largest: float) -> Metrics:
    """Return the metrics of the tokens that the safe set excludes.

    pruning/coverage: mean probability Z of the safe set; coverage_min: smallest Z. pruned_mass, pruned_mass_max: mean and
    largest 1 - Z. out_of_set: number of sampled tokens outside the trainer's safe set.

    pruning/bias_bound: R_max T (1 - Z_min). It bounds the difference in expected reward between the pruned and the unpruned
    policy (Li et al., proposition 5.5). T is rollout.max_new_tokens. Z_min is the smallest coverage in the sampled states.
    R_max is the sum of the reward weights, because each part is between 0 and 1. pruning/bias_mean: R_max T mean(1 - Z), the
    same bound with the mean instead of the minimum. It is equation 26 before the minimum is taken. largest: R_max T.
    """
    pruned = batch.pruned[batch.mask].double()  # computing 1 - Z from Z in fp32 could not resolve values below 6e-8
    tokens, total = len(pruned), float(pruned.sum())
    most = float(pruned.max()) if tokens else 0.0
    return {
        "pruning/coverage": mean(tokens - total, tokens),
        "pruning/coverage_min": minimum(1.0 - most),
        "pruning/pruned_mass": mean(total, tokens),
        "pruning/pruned_mass_max": maximum(most),
        "pruning/out_of_set": count(int((batch.mask & (batch.old_log_probs == -torch.inf)).sum())),
        "pruning/bias_bound": maximum(bias_bound(largest, 1, 1.0 - most)),
        "pruning/bias_mean": derived(_bias_mean, total, tokens, largest * tokens),
    }


def _bias_mean(total: float, tokens: float, largest: float) -> float:
    return bias_bound(largest / max(tokens, 1), 1, 1.0 - total / max(tokens, 1))
