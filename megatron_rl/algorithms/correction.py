"""Importance weights between the policy that trains and the engine that sampled, and what to do with the bad ones.

With r = exp(train log-prob - rollout log-prob): truncated importance sampling (TIS, Yao et al. 2025), masked importance
sampling (MIS, Liu et al. 2025), and the token veto of "Dynamic Vocabulary Pruning" (papers/000, appendix A): a sequence
in which the trainer finds one token next to impossible (r < 1e-4) is beyond repair and leaves the update.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from megatron_rl.algorithms.kl import MAX_LOG_RATIO


@dataclass(frozen=True)
class RolloutCorrection:
    weights: torch.Tensor
    """[B, T], detached; zero where the mask is out and in rows that were dropped."""
    keep: torch.Tensor
    """[B] bool: rows that the veto did not drop."""
    metrics: dict[str, torch.Tensor]
    """Scalars over this batch."""


def effective_sample_size(log_ratios: torch.Tensor, *, alpha: float = 1.0) -> torch.Tensor:
    """(sum w)^2 / sum w^2 with w = r^alpha, r = exp(log_ratios): how many equal weights the weights are worth.

    log_ratios: any shape -> scalar between 1 and the number of elements; 0 where there is none, or none above zero.
    Computed in logs and fp64, so that no ratio overflows.
    """
    exponents = torch.where(log_ratios == -torch.inf, -torch.inf, alpha * log_ratios.detach().double()).flatten()
    if not exponents.numel():
        return exponents.new_zeros(())
    scaled = exponents - torch.nan_to_num(exponents.max(), neginf=0.0)
    weights = torch.exp(scaled)
    return weights.sum() ** 2 / weights.square().sum().clamp(min=torch.finfo(torch.float64).tiny)


def _log_ratios(train: torch.Tensor, rollout: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """train - rollout where the mask is in, 0 elsewhere; fp64. train may be -inf: a token it has pruned."""
    difference = torch.where(mask, train.double() - rollout.double(), 0.0)
    wrong = difference.isnan() | (difference == torch.inf)
    if wrong.any():
        row, token = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"row {row}, token {token}: log-probs train {float(train[row, token])},"
            f" rollout {float(rollout[row, token])}; a sampled token has a finite"
            " rollout log-prob, and the trainer's is a number below +inf"
        )
    return difference


def _bounded(ratio: torch.Tensor, mode: str, low: float | None, high: float | None) -> torch.Tensor:
    if mode == "truncate":
        if high is None:
            raise ValueError("rollout_correction: mode 'truncate' needs high")
        return ratio.clamp(max=high)
    if low is None and high is None:
        raise ValueError(f"rollout_correction: mode '{mode}' needs low, high or both")
    if mode == "clip":
        return ratio.clamp(low, high)
    if mode == "mask":
        inside = torch.ones_like(ratio, dtype=torch.bool)
        if low is not None:
            inside &= ratio >= low
        if high is not None:
            inside &= ratio <= high
        return torch.where(inside, ratio, 0.0)
    raise ValueError(f"rollout_correction: mode '{mode}': choose truncate, mask or clip")


@torch.no_grad()
def rollout_correction(
    train_log_probs: torch.Tensor,
    rollout_log_probs: torch.Tensor,
    mask: torch.Tensor,
    *,
    level: Literal["token", "sequence", "geometric"],
    mode: Literal["truncate", "mask", "clip"],
    low: float | None = None,
    high: float | None = None,
    veto: float | None = None,
) -> RolloutCorrection:
    """Detached importance weights for a batch that the engine sampled and the trainer learns from.

    train_log_probs, rollout_log_probs, mask: [B, T]. The log-ratio is train - rollout.
    level: token; sequence (its sum over the mask); geometric (its mean over the mask); both broadcast to the tokens.
    mode: truncate: min(r, high); mask: r where low <= r <= high, else 0; clip: r clamped to [low, high]. In mask and
    clip one of the bounds may be absent.
    veto: a row with any masked-in token ratio below it is dropped: keep False, all its weights 0.

    Errors: ValueError for a missing bound, an unknown level or mode, and log-probs that are not numbers (naming the
    row).
    """
    mask = mask.bool()
    if not train_log_probs.shape == rollout_log_probs.shape == mask.shape or mask.ndim != 2:
        shapes = [list(t.shape) for t in (train_log_probs, rollout_log_probs, mask)]
        raise ValueError(f"train_log_probs, rollout_log_probs and mask must share one shape [B, T]; found {shapes}")
    token = _log_ratios(train_log_probs, rollout_log_probs, mask)
    if level == "token":
        log_ratio = token
    elif level in ("sequence", "geometric"):
        lengths = mask.sum(1, keepdim=True).clamp(min=1) if level == "geometric" else 1
        log_ratio = (token.sum(1, keepdim=True) / lengths).expand_as(token)
    else:
        raise ValueError(f"rollout_correction: level '{level}': choose token, sequence or geometric")
    ratio = torch.exp(log_ratio.clamp(max=MAX_LOG_RATIO))
    bounded = _bounded(ratio, mode, low, high)
    keep = torch.ones(len(mask), dtype=torch.bool, device=mask.device)
    if veto is not None and veto > 0:
        keep = ~((token < math.log(veto)) & mask).any(1)
    used = mask & keep[:, None]
    weights = torch.where(used, bounded, 0.0).to(torch.promote_types(train_log_probs.dtype, torch.float32))

    tokens = mask.sum().clamp(min=1)
    inside = token[mask] if mask.any() else token.new_zeros(1)
    # Among the masked-in tokens: how far from 1 the ratios are, and how many of them the bounds changed.
    metrics = {
        "correction/weight_mean": weights.double().sum() / tokens,
        "correction/bounded_fraction": ((bounded != ratio) & mask).sum() / tokens,
        "correction/veto_fraction": (~keep).sum() / max(len(keep), 1),
        "correction/ratio_max": inside.max().clamp(max=MAX_LOG_RATIO).exp(),
        "correction/ratio_min": inside.min().exp(),
        "correction/ess": effective_sample_size(log_ratio[mask]) / tokens,
    }
    return RolloutCorrection(weights, keep, metrics)
