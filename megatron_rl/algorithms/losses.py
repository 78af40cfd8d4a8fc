"""Losses of policies and of values, per token. A term is what gradient descent minimizes; averaging is the caller's.

A policy's loss is a function of `LossInputs`, packed tensors [T] of many sequences one after another, and is found by its
name in `POLICY_LOSSES` or as `module:name`; `loss_weights` averages. Terms are zero where the mask is out, whatever the other
tensors hold there, NaN included.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from megatron_rl.algorithms.advantages import mean_and_variance, moments
from megatron_rl.algorithms.kl import MAX_LOG_RATIO
from megatron_rl.algorithms.segments import Segments


@dataclass(frozen=True)
class LossInputs:
    """Inputs of a policy loss; all [T]."""

    log_probs: Tensor
    """Log-probs of the current policy, differentiable."""
    old_log_probs: Tensor
    """Log-probs of the policy that the ratio starts from, without gradient."""
    advantages: Tensor
    mask: Tensor
    """bool: tokens that count."""
    segments: Segments
    clip_low: float
    """Infinite where nothing is clipped; so is clip_high."""
    clip_high: float
    tau_pos: float = 1.0
    """SAPO's temperatures, of advantages above 0 and of others."""
    tau_neg: float = 1.05


@dataclass(frozen=True)
class LossTerms:
    """Results of a policy loss; both [T]."""

    terms: Tensor
    """Terms of the loss, differentiable."""
    clipped: Tensor
    """bool: whether the clip was in effect."""


@dataclass(frozen=True)
class PolicyLoss:
    """A policy loss as a value: its terms, and what they depend on."""

    terms: Callable[[LossInputs], LossTerms]
    per_token: bool = True
    """True if a term depends on one token's log-prob alone, so that the head may compute its gradient in chunks."""
    has_ratio: bool = True
    """True if the loss depends on the old log-probs."""

    def __call__(self, inputs: LossInputs) -> LossTerms:
        """Give the terms of the packed tokens."""
        return self.terms(inputs)


@dataclass(frozen=True)
class SurrogateLoss:
    """A clipped loss and how much of it was clipped."""

    loss: Tensor
    """Scalar, differentiable."""
    clip_fraction: Tensor
    """Scalar: share of the masked-in tokens where the clipped branch was the smaller one, so that no gradient flows."""


def token_terms(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """PPO's clipped surrogate (Schulman et al. 2017, eq. 7) and DAPO's two bounds: -min(r A, clip(r, 1-low, 1+high) A).

    All arguments of one shape. -> (terms, clipped bool), both of that shape. With old_log_probs = log_probs.detach()
    the ratio is exactly 1 and the gradient exactly -A * grad log_probs, the on-policy policy gradient.
    """
    ratio = torch.exp((log_probs - old_log_probs.detach()).clamp(max=MAX_LOG_RATIO))
    free = ratio * advantages
    fenced = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    return -torch.minimum(free, fenced), (fenced < free).detach()


def ppo(inputs: LossInputs) -> LossTerms:
    """PPO's clipped surrogate (Schulman et al. 2017, eq. 7), with DAPO's two bounds."""
    x = inputs
    bounds = {"clip_low": x.clip_low, "clip_high": x.clip_high}
    return LossTerms(*token_terms(x.log_probs, x.old_log_probs, x.advantages, **bounds))


def gspo(inputs: LossInputs) -> LossTerms:
    """GSPO-token (Zheng et al. 2025, eq. 13-16): the ratio of a whole sequence, the gradient of each of its tokens.

    s = exp(mean over the sequence's masked-in tokens of the log-ratio), without gradient; a token's ratio is
    s * exp(log_prob - stopgrad(log_prob)): its value is s, its gradient s * grad log_prob. With one advantage per
    sequence and `sequence_mean` aggregation that is GSPO's own value and gradient; advantages may also differ between
    tokens.
    """
    x = inputs
    with torch.no_grad():
        log_ratio = torch.where(x.mask, x.log_probs - x.old_log_probs, 0.0)
        sums, counts = x.segments.sums(log_ratio, x.mask.to(log_ratio.dtype))
        log_s = x.segments.spread_out(sums / counts.clamp(min=1))
    # old = stopgrad(log_prob) - log s makes the token's ratio s * exp(log_prob - stopgrad(log_prob)).
    found = ppo(replace(x, old_log_probs=x.log_probs.detach() - log_s))
    return LossTerms(torch.where(x.mask, found.terms, 0.0), found.clipped & x.mask)


def reinforce(inputs: LossInputs) -> LossTerms:
    """-A log_prob (Williams 1992): no ratio and no clip."""
    return LossTerms(-inputs.advantages * inputs.log_probs, torch.zeros_like(inputs.mask))


def cispo(inputs: LossInputs) -> LossTerms:
    """CISPO (MiniMax-M1, arXiv:2506.13585, eq. 4 and 5): -stopgrad(clip(r, 1-low, 1+high)) A log_prob.

    The clip bounds the weight of a token and never its gradient: no token is left out of the update.
    """
    x = inputs
    ratio = torch.exp((x.log_probs.detach() - x.old_log_probs).clamp(max=MAX_LOG_RATIO))
    weight = ratio.clamp(1.0 - x.clip_low, 1.0 + x.clip_high)
    return LossTerms(-weight * x.advantages * x.log_probs, weight != ratio)


def sapo(inputs: LossInputs) -> LossTerms:
    """Soft adaptive policy optimization (Gao et al. 2025, arXiv:2511.20347): -f(r) A, f(r) = 4 / tau sigmoid(tau (r - 1)).

    tau is tau_pos where A > 0, else tau_neg. The weight of a token's gradient, f'(r) r, is 1 at r = 1, as without a clip, and
    falls smoothly on both sides; f(1) = 2 / tau is a number of its own.
    """
    x = inputs
    ratio = torch.exp((x.log_probs - x.old_log_probs.detach()).clamp(max=MAX_LOG_RATIO))
    tau = torch.where(x.advantages > 0, *(ratio.new_full((), one) for one in (x.tau_pos, x.tau_neg)))
    return LossTerms(-4.0 / tau * torch.sigmoid(tau * (ratio - 1.0)) * x.advantages, torch.zeros_like(x.mask))


POLICY_LOSSES = {
    "ppo": PolicyLoss(ppo),
    "gspo": PolicyLoss(gspo, per_token=False),
    "reinforce": PolicyLoss(reinforce, has_ratio=False),
    "cispo": PolicyLoss(cispo),
    "sapo": PolicyLoss(sapo),
}
"""The losses that algorithm.loss names."""


def policy_terms(loss: PolicyLoss, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss, not averaged: (terms [T], sums of metrics over the masked-in tokens).

    Sums (detached scalars, to be divided by the number of tokens): `loss/clip_fraction`, `loss/old_kl` (k3 estimate of
    the KL from the old policy to the current one), `loss/ratio`, `loss/ratio_tail` (ratio outside [1/2, 2]).
    """
    mask = inputs.mask
    # Masked-out tokens may hold anything; zeros in their place keep NaN out of the gradient too.
    log_probs = torch.where(mask, inputs.log_probs, 0.0)
    old_log_probs = torch.where(mask, inputs.old_log_probs.detach(), 0.0)
    advantages = torch.where(mask, inputs.advantages, 0.0)
    found = loss(replace(inputs, log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages))
    with torch.no_grad():
        log_ratio = (log_probs - old_log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        ratio = torch.exp(log_ratio)
        sums = {
            "loss/clip_fraction": found.clipped.sum(),
            "loss/old_kl": (ratio - 1.0 - log_ratio).sum(),
            "loss/ratio": torch.where(mask, ratio, 0.0).sum(),
            "loss/ratio_tail": (log_ratio.abs() > math.log(2.0)).sum(),
        }
    return found.terms, sums


def loss_weights(
    mask: Tensor,
    segments: Segments,
    aggregation: Literal["token_mean", "sequence_mean", "sequence_sum"],
    *,
    sequence_lengths: Tensor | None = None,
) -> Tensor:
    """Weight [T] of each token's term, before the division by the update's total.

    token_mean: 1 for each masked-in token; sum(terms * weights) over the whole update / its masked-in tokens is the
    mean over tokens. sequence_mean: 1 / (masked-in tokens of its sequence); the same sum / number of sequences is the
    mean over sequences of each one's token mean (GRPO's and GSPO's own). sequence_sum: 1; the same sum / `constant_total` is
    the mean over sequences of each one's token sum / a constant (Dr. GRPO, Liu et al. 2025, arXiv:2503.20783).

    sequence_lengths: [sequences], masked-in tokens of each whole sequence; counted from `mask` when absent.
    """
    weights = mask.to(torch.float32)
    if aggregation in ("token_mean", "sequence_sum"):
        return weights
    if aggregation != "sequence_mean":
        raise ValueError(f"aggregation '{aggregation}': choose token_mean, sequence_mean or sequence_sum")
    if sequence_lengths is None:
        (sequence_lengths,) = segments.sums(weights)
    return weights / segments.spread_out(sequence_lengths.to(weights), padding=1.0).clamp(min=1)


def constant_total(count: Tensor, segments: Segments, sequence_lengths: Tensor, length: int) -> Tensor:
    """A part's share of the divisor of `sequence_sum` in an update, fp64 scalar: `length` for each counted sequence.

    count: [T], 1 at the masked-in tokens of the sequences that count, 0 elsewhere; sequence_lengths: [sequences], all masked-in
    tokens of each. A token adds its share of the sequence's, so that the parts of a sequence on several ranks add up.
    """
    return length * (count.double() / segments.spread_out(sequence_lengths.double(), padding=1.0).clamp(min=1)).sum()


def clipped_surrogate(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
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


@dataclass(frozen=True)
class ValueLoss:
    """A loss of values and how much of it was clipped."""

    loss: Tensor
    """Scalar, differentiable."""
    clip_fraction: Tensor
    """Scalar: share of the masked-in tokens where the clipped branch was the larger one, so that no gradient flows."""


def value_terms(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float | None) -> tuple[Tensor, Tensor]:
    """PPO's loss of a critic: max((v - R)^2, (clip(v, old - clip, old + clip) - R)^2) / 2, differentiable in `values`.

    The critic's loss of Schulman et al. 2017 (arXiv 1707.06347, eq. 9), halved; with the clip (OpenAI's baselines; Ziegler et
    al. 2019's code) a value that has gone further than `clip` from the old one, and towards the return, has no gradient.
    clip None: (v - R)^2 / 2.

    All arguments of one shape. -> (terms, fp32 at least; clipped, bool), both of that shape. Errors: ValueError for a clip that
    is not positive.
    """
    if clip is not None and not clip > 0:
        raise ValueError(f"clip = {clip:g}: must be positive, or None")
    dtype = torch.promote_types(values.dtype, torch.float32)
    values, old_values, returns = values.to(dtype), old_values.detach().to(dtype), returns.detach().to(dtype)
    free = (values - returns).square() / 2
    if clip is None:
        return free, torch.zeros_like(free, dtype=torch.bool)
    fenced = (values.clamp(old_values - clip, old_values + clip) - returns).square() / 2
    clipped = (fenced > free).detach()
    return torch.where(clipped, fenced, free), clipped


def clipped_value(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, clip: float | None
) -> ValueLoss:
    """Mean over masked-in tokens of `value_terms`: half the mean of the larger of the two squared errors.

    All [B, T]. An empty mask gives loss 0 with zero gradients. Errors: as `value_terms`.
    """
    mask = mask.bool()
    held = (torch.where(mask, tensor, 0.0) for tensor in (values, old_values, returns))
    terms, clipped = value_terms(*held, clip=clip)
    tokens = mask.sum().clamp(min=1)
    return ValueLoss(terms.sum() / tokens, (clipped & mask).sum() / tokens)


@torch.no_grad()
def explained_variance_sums(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """Sums over the masked-in tokens from which `explained_variance` is computed: [5] fp64 that may be added up.

    Sums of 1, R, R^2, R - v and (R - v)^2. values v, returns R, mask: any one shape.
    """
    return torch.cat([moments(returns, mask), moments(returns.double() - values.double(), mask)[1:]])


def explained_variance(sums: Tensor) -> Tensor:
    """1 - Var(return - value) / Var(return), a scalar: 1 is a perfect critic, 0 one that knows the mean alone.

    sums: [5] of `explained_variance_sums`, added up over micro-batches and ranks. NaN where the returns have no variance, or no
    more than rounding of these sums makes.
    """
    _, variance = mean_and_variance(sums[:3])
    _, unexplained = mean_and_variance(sums[[0, 3, 4]])
    return torch.where(variance > 0, 1.0 - unexplained / variance, torch.nan)
