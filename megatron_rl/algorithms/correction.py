"""Importance weights between the trainer's policy and the engine that sampled, and rules that drop bad samples.

With r = exp(train log-prob - rollout log-prob), this module implements truncated importance sampling (TIS, Yao et al. 2025),
masked importance sampling (MIS, Liu et al. 2025), and the token veto of "Dynamic Vocabulary Pruning: Stable LLM-RL by Taming
the Tail" (Li et al., appendix A). The veto drops a sequence from the update if one of its tokens is nearly impossible under the
trainer's policy (for example r < 1e-4).

A token outside of the trainer's safe set has the train log-prob -inf and therefore the ratio 0 (theorem 5.3 of Li et al.).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, cast

import torch

from megatron_rl.algorithms.correction_choice import Correction, Level
from megatron_rl.algorithms.kl import MAX_LOG_RATIO
from megatron_rl.algorithms.segments import Segments


@dataclass(frozen=True)
class TokenWeights:
    """Weights of packed tokens, and the reasons for them. All fields are [T], without gradient."""

    weights: torch.Tensor
    """Importance weight of each token, fp64; 0 outside of the mask."""
    log_ratios: torch.Tensor
    """log r at the level of the correction (token, sequence or geometric), fp64; 0 outside of the mask."""
    bounded: torch.Tensor
    """bool: True if `Correction.mode` changed the ratio."""
    vetoed: torch.Tensor
    """bool: True if the veto dropped the token's sequence."""
    rejected: torch.Tensor
    """bool: True if the token was dropped because its own or its sequence's statistic is above `reject_above`."""


def divergence(log_ratios: torch.Tensor, statistic: Literal["abs_log_ratio", "k2", "k3"]) -> torch.Tensor:
    """Return |log r| (abs_log_ratio), (log r)^2 / 2 (k2) or r - 1 - log r (k3), of any shape; +inf for r = 0."""
    if statistic == "abs_log_ratio":
        return log_ratios.abs()
    if statistic == "k2":
        return log_ratios.square() / 2
    return log_ratios.clamp(max=MAX_LOG_RATIO).expm1() - log_ratios


@torch.no_grad()
def token_weights(
    log_ratios: torch.Tensor,
    mask: torch.Tensor,
    segments: Segments,
    correction: Correction,
) -> TokenWeights:
    """Return the weights of packed tokens. log_ratios: [T], train - rollout log-probs, below +inf; mask: [T] bool."""
    token = torch.where(mask, log_ratios.double(), 0.0)
    sums: list[torch.Tensor] = []
    if not correction.per_token:
        parts = [token, mask.double(), torch.zeros_like(token), torch.zeros_like(token)]
        if correction.veto:
            parts[2] = (mask & (token < math.log(correction.veto))).double()
        if correction.reject != "none":
            parts[3] = torch.where(mask, divergence(token, correction.reject), 0.0)
        sums = [segments.spread_out(found) for found in segments.sums(*parts)]
        sums[1] = sums[1].clamp(min=1)

    def at(level: Level, own: torch.Tensor, row: int) -> torch.Tensor:
        if level == "token":
            return own
        return sums[row] / sums[1] if level == "geometric" else sums[row]

    log_ratio = at(correction.level, token, 0)
    ratio = torch.exp(log_ratio.clamp(max=MAX_LOG_RATIO))
    weight = torch.ones_like(ratio) if correction.mode == "none" else _bounded(ratio, correction)
    bounded = mask & (weight != ratio) if correction.mode != "none" else torch.zeros_like(mask)
    out = torch.zeros_like(mask)
    vetoed = mask & (sums[2] > 0) if correction.veto else out
    rejected = out
    if correction.reject != "none":
        found = at(correction.reject_level, divergence(token, correction.reject), 3)
        rejected = mask & (found > cast("float", correction.reject_above))  # `Correction` checks that it is set
    # A ratio of 0 means that the trainer cannot sample the token. Its weight stays 0, whatever the lower bound.
    used = mask & ~vetoed & ~rejected & (token > -torch.inf) & (log_ratio > -torch.inf)
    weights, log_ratios = torch.where(used, weight, 0.0), torch.where(mask, log_ratio, 0.0)
    return TokenWeights(weights, log_ratios, bounded, vetoed, rejected)


@torch.no_grad()
def counts(found: TokenWeights, mask: torch.Tensor, correction: Correction) -> torch.Tensor:
    """Return the contribution of each token to the denominator of the loss, [T] fp64, as `correction.denominator` says.

    found: weights of the loss terms. The denominators are:
    sampled: 1 for each token of the mask, whatever its weight (the mean in theorem 5.3 of "Taming the Tail").
    kept_sequences: 0 for tokens of a sequence that the veto or the rejection dropped as a whole, 1 for the others. Tokens that
    are masked by the mode or outside of the safe set still count, with ratio 0 (theorem 5.3 with the veto of appendix A, as in
    the paper).
    kept_tokens: 1 if the weight is not 0.
    weights: the weight itself (self-normalized importance sampling).
    """
    if correction.denominator == "weights":
        return found.weights
    if correction.denominator == "kept_tokens":
        return (found.weights != 0).double()
    if correction.denominator == "sampled":
        return mask.double()
    whole = found.vetoed if correction.reject_level == "token" else found.vetoed | found.rejected
    return (mask & ~whole).double()


def _bounded(ratio: torch.Tensor, correction: Correction) -> torch.Tensor:
    low, high = correction.low, correction.high
    if correction.mode == "truncate":
        return ratio.clamp(max=high)
    if correction.mode == "clip":
        return ratio.clamp(low, high)
    inside = (ratio >= (low or 0.0)) & (ratio <= (math.inf if high is None else high))
    return torch.where(inside, ratio, 0.0)


@dataclass(frozen=True)
class RolloutCorrection:
    """Result of `rollout_correction`: importance weights of a padded batch."""

    weights: torch.Tensor
    """Importance weights [B, T], without gradient; zero outside of the mask and in dropped rows."""
    keep: torch.Tensor
    """Rows that the veto did not drop, [B] bool."""
    metrics: dict[str, torch.Tensor]
    """Metrics of this batch, as scalars."""


def effective_sample_size(log_ratios: torch.Tensor, *, alpha: float = 1.0) -> torch.Tensor:
    """Return (sum w)^2 / sum w^2: the number of equally weighted samples with the same variance.

    The weights are w = r^alpha with r = exp(log_ratios). The computation uses logarithms in fp64, so that no ratio overflows.
    log_ratios: any shape -> scalar between 1 and the number of elements; 0 if there are no elements or all weights are 0.
    """
    exponents = torch.where(log_ratios == -torch.inf, -torch.inf, alpha * log_ratios.detach().double()).flatten()
    if not exponents.numel():
        return exponents.new_zeros(())
    scaled = exponents - torch.nan_to_num(exponents.max(), neginf=0.0)
    weights = torch.exp(scaled)
    return weights.sum() ** 2 / weights.square().sum().clamp(min=torch.finfo(torch.float64).tiny)


def _log_ratios(train: torch.Tensor, rollout: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return train - rollout log-probs in the mask and 0 elsewhere, fp64. Tokens that the trainer pruned have train = -inf."""
    difference = torch.where(mask, train.double() - rollout.double(), 0.0)
    wrong = difference.isnan() | (difference == torch.inf)
    if wrong.any():
        row, token = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"row {row}, token {token}: log-probs train {float(train[row, token])},"
            f" rollout {float(rollout[row, token])}; the rollout log-prob of a sampled token must be finite,"
            " and the train log-prob must be a number below +inf"
        )
    return difference


@torch.no_grad()
def rollout_correction(
    train_log_probs: torch.Tensor,
    rollout_log_probs: torch.Tensor,
    mask: torch.Tensor,
    *,
    level: Literal["token", "sequence", "geometric"],
    mode: Literal["none", "truncate", "mask", "clip"],
    low: float | None = None,
    high: float | None = None,
    veto: float | None = None,
) -> RolloutCorrection:
    """Return detached importance weights for a batch that the engine sampled and the trainer learns from.

    train_log_probs, rollout_log_probs, mask: [B, T]. The log-ratio is train - rollout.
    level: token; sequence (sum over the mask); geometric (mean over the mask). The last two give all tokens of a row the
    same ratio.
    mode: none: weight 1; truncate: min(r, high); mask: r if low <= r <= high, else 0; clip: r clamped to [low, high].
    The modes mask and clip need only one of the two bounds. In every mode a ratio of 0 has the weight 0.
    veto: smallest allowed ratio. If any masked-in token of a row is below it, keep is False and all weights of the row are 0.

    Errors: ValueError if a bound is missing, if the level or the mode is unknown, or if log-probs are not valid numbers (the
    message names the row).
    """
    mask = mask.bool()
    if not train_log_probs.shape == rollout_log_probs.shape == mask.shape or mask.ndim != 2:
        shapes = [list(t.shape) for t in (train_log_probs, rollout_log_probs, mask)]
        raise ValueError(f"train_log_probs, rollout_log_probs and mask must share one shape [B, T]; found {shapes}")
    correction = Correction(mode=mode, level=level, low=low, high=high, veto=veto)
    token = _log_ratios(train_log_probs, rollout_log_probs, mask)
    rows = torch.arange(len(mask), device=mask.device)[:, None].expand_as(mask)
    flat = token_weights(token.flatten(), mask.flatten(), Segments(rows.flatten(), len(mask)), correction)
    weights, bounded, vetoed = (getattr(flat, name).view_as(mask) for name in ("weights", "bounded", "vetoed"))
    keep = ~vetoed.any(1)

    tokens = mask.sum().clamp(min=1)
    inside = token[mask] if mask.any() else token.new_zeros(1)
    # Over the masked-in tokens: how far the ratios are from 1, and how many of them the bounds changed.
    metrics = {
        "correction/weight_mean": weights.sum() / tokens,
        "correction/bounded_fraction": bounded.sum() / tokens,
        "correction/veto_fraction": (~keep).sum() / max(len(keep), 1),
        "correction/ratio_max": inside.max().clamp(max=MAX_LOG_RATIO).exp(),
        "correction/ratio_min": inside.min().exp(),
        "correction/ess": effective_sample_size(flat.log_ratios.view_as(mask)[mask]) / tokens,
    }
    return RolloutCorrection(weights.to(torch.promote_types(train_log_probs.dtype, torch.float32)), keep, metrics)


# -- vocabulary pruning --------------------------------------------------------------------------------------------------
# The cost of vocabulary pruning (Li et al., "Taming the Tail"), which `ops.masked_log_softmax` implements.


def bias_bound(largest_reward: float, horizon: int, coverage: float) -> float:
    """Return R_max T (1 - Z), an upper bound of |J_pruned - J|: the change of the expected reward (proposition 5.5).

    largest_reward: R_max, if rewards lie between 0 and R_max (or the width of their range). horizon: T, the longest response in
    tokens. coverage: Z, the smallest probability mass that a safe set holds in any state. If Z is the mean over the states that
    either policy visits, the bound is tighter (eq. 26).
    """
    return largest_reward * horizon * (1.0 - coverage)
