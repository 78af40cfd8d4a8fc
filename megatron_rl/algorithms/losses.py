"""Policy losses, per token. A term is what gradient descent minimises; averaging is the caller's, with `loss_weights`.

Packed tensors are [T]: many sequences one after another, `sequence_ids` says which sequence a token belongs to (-1:
padding). Terms are zero where the mask is out, whatever the other tensors hold there, NaN included.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from megatron_rl.algorithms.kl import MAX_LOG_RATIO

AllReduce = Callable[[torch.Tensor], torch.Tensor]

POINTWISE = ("ppo", "reinforce")
"""Losses of `policy_terms` whose terms look at one token's log-prob each."""


@dataclass(frozen=True)
class SurrogateLoss:
    loss: torch.Tensor
    """Scalar, differentiable."""
    clip_fraction: torch.Tensor
    """Scalar: share of the masked-in tokens where the clipped branch was the smaller one, so that no gradient flows."""


def token_terms(
    log_probs: torch.Tensor, old_log_probs: torch.Tensor, advantages: torch.Tensor, *, clip_low: float, clip_high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """PPO's clipped surrogate (Schulman et al. 2017, eq. 7) and DAPO's two bounds: -min(r A, clip(r, 1-low, 1+high) A).

    All arguments of one shape. -> (terms, clipped bool), both of that shape. With old_log_probs = log_probs.detach()
    the ratio is exactly 1 and the gradient exactly -A * grad log_probs, the on-policy policy gradient.
    """
    ratio = torch.exp((log_probs - old_log_probs.detach()).clamp(max=MAX_LOG_RATIO))
    free = ratio * advantages
    fenced = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    return -torch.minimum(free, fenced), (fenced < free).detach()


def sequence_sums(values: torch.Tensor, sequence_ids: torch.Tensor, num_sequences: int) -> torch.Tensor:
    """Sum of [T] values within each sequence -> [num_sequences]. Padding (id -1) counts for nothing."""
    places = torch.where(sequence_ids >= 0, sequence_ids, num_sequences)  # the last one is padding's
    return values.new_zeros(num_sequences + 1).index_add(0, places, values)[:num_sequences]


def _count_sequences(sequence_ids: torch.Tensor) -> int:
    return int(sequence_ids.max()) + 1 if sequence_ids.numel() else 0


def gspo_terms(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    sequence_ids: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    num_sequences: int | None = None,
    all_reduce: AllReduce | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """GSPO-token (Zheng et al. 2025, eq. 13-16): the ratio of a whole sequence, the gradient of each of its tokens.

    s = exp(mean over the sequence's masked-in tokens of the log-ratio), without gradient; a token's ratio is
    s * exp(log_prob - stopgrad(log_prob)): its value is s, its gradient s * grad log_prob. With one advantage per
    sequence and `sequence_mean` aggregation that is GSPO's own value and gradient; advantages may also differ between
    tokens.

    All tensors [T] -> (terms [T], clipped [T] bool). all_reduce sums a tensor over the ranks that hold the other parts
    of the same sequences (context parallelism); with it num_sequences must be given, the same on all of these ranks.
    """
    if num_sequences is None:
        if all_reduce is not None:
            raise ValueError("gspo_terms: num_sequences is needed with all_reduce; ranks may hold different sequences")
        num_sequences = _count_sequences(sequence_ids)
    log_probs = torch.where(mask, log_probs, 0.0)
    with torch.no_grad():
        log_ratio = torch.where(mask, log_probs - old_log_probs, 0.0)
        pair = [sequence_sums(v, sequence_ids, num_sequences) for v in (log_ratio, mask.to(log_ratio.dtype))]
        sums, counts = all_reduce(torch.stack(pair)) if all_reduce else pair
        # A padded token reads the zero that is put behind the last sequence.
        log_s = torch.cat([sums / counts.clamp(min=1), sums.new_zeros(1)])[sequence_ids]
    # old = stopgrad(log_prob) - log s makes token_terms' ratio s * exp(log_prob - stopgrad(log_prob)).
    old = log_probs.detach() - log_s
    terms, clipped = token_terms(log_probs, old, advantages, clip_low=clip_low, clip_high=clip_high)
    return torch.where(mask, terms, 0.0), clipped & mask


def policy_terms(
    loss: Literal["ppo", "gspo", "reinforce"],
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    sequence_ids: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    num_sequences: int | None = None,
    all_reduce: AllReduce | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The configured loss, not averaged. All tensors [T] -> (terms [T], sums of metrics over the masked-in tokens).

    Sums (detached scalars, to be divided by the number of tokens): `loss/clip_fraction`, `loss/old_kl` (k3 estimate of
    the KL from the old policy to the current one), `loss/ratio`, `loss/ratio_tail` (ratio outside [1/2, 2]).
    """
    # Masked-out tokens may hold anything; zeros in their place keep NaN out of the gradient too.
    log_probs = torch.where(mask, log_probs, 0.0)
    old_log_probs = torch.where(mask, old_log_probs.detach(), 0.0)
    advantages = torch.where(mask, advantages, 0.0)
    clips = {"clip_low": clip_low, "clip_high": clip_high}
    if loss == "ppo":
        terms, clipped = token_terms(log_probs, old_log_probs, advantages, **clips)
    elif loss == "gspo":
        terms, clipped = gspo_terms(
            log_probs,
            old_log_probs,
            advantages,
            mask,
            sequence_ids,
            **clips,
            num_sequences=num_sequences,
            all_reduce=all_reduce,
        )
    elif loss == "reinforce":
        terms, clipped = -advantages * log_probs, torch.zeros_like(mask)
    else:
        raise ValueError(f"policy loss '{loss}': choose clipped, gspo or reinforce")
    with torch.no_grad():
        log_ratio = (log_probs - old_log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        ratio = torch.exp(log_ratio)
        sums = {
            "loss/clip_fraction": clipped.sum(),
            "loss/old_kl": (ratio - 1.0 - log_ratio).sum(),
            "loss/ratio": torch.where(mask, ratio, 0.0).sum(),
            "loss/ratio_tail": (log_ratio.abs() > math.log(2.0)).sum(),
        }
    return terms, sums


def loss_weights(
    mask: torch.Tensor,
    sequence_ids: torch.Tensor,
    aggregation: Literal["token_mean", "sequence_mean"],
    *,
    sequence_lengths: torch.Tensor | None = None,
) -> torch.Tensor:
    """Weight [T] of each token's term, before the division by the update's total.

    token_mean: 1 for each masked-in token; sum(terms * weights) over the whole update / its masked-in tokens is the
    mean over tokens. sequence_mean: 1 / (masked-in tokens of its sequence); the same sum / number of sequences is the
    mean over sequences of each one's token mean (GRPO's and GSPO's own).

    sequence_lengths: [num_sequences], masked-in tokens of each whole sequence (context parallelism spreads a sequence
    over ranks); counted from `mask` when absent.
    """
    weights = mask.to(torch.float32)
    if aggregation == "token_mean":
        return weights
    if aggregation != "sequence_mean":
        raise ValueError(f"aggregation '{aggregation}': choose token_mean or sequence_mean")
    if sequence_lengths is None:
        sequence_lengths = sequence_sums(weights, sequence_ids, _count_sequences(sequence_ids))
    lengths = torch.cat([sequence_lengths.to(weights), weights.new_ones(1)])  # the last is for padding's id -1
    return weights / lengths[sequence_ids].clamp(min=1)


def clipped_surrogate(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> SurrogateLoss:
    """Minus the mean over masked-in tokens of min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = exp(new - old).

    All [B, T]. An empty mask gives loss 0 with zero gradients.
    """
    mask = mask.bool()
    terms, clipped = token_terms(
        torch.where(mask, log_probs, 0.0),
        torch.where(mask, old_log_probs, 0.0),
        torch.where(mask, advantages, 0.0),
        clip_low=clip_low,
        clip_high=clip_high,
    )
    tokens = mask.sum().clamp(min=1)
    return SurrogateLoss(terms.sum() / tokens, (clipped & mask).sum() / tokens)
