"""Losses of policies and critics, per token. Gradient descent minimizes the terms; the caller averages them.

A policy loss is a function of `LossInputs`: packed tensors [T] that hold many sequences one after another. The config names a
loss by its key in `POLICY_LOSSES` or as `module:name`. `loss_weights` returns the weights of the average. Terms are zero
outside of the mask, whatever the other tensors hold there, even NaN.
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
    """Inputs of a policy loss; all tensors are [T]."""

    log_probs: Tensor
    """Log-probs of the current policy, differentiable."""
    old_log_probs: Tensor
    """Log-probs of the old policy, the denominator of the ratio; without gradient."""
    advantages: Tensor
    """Advantage of each token."""
    mask: Tensor
    """Tokens that the loss includes, bool."""
    segments: Segments
    """Assignment of the tokens to sequences."""
    clip_low: float
    """Clip bound: a ratio below 1 - clip_low is clipped. Infinite: no lower clip."""
    clip_high: float
    """Clip bound: a ratio above 1 + clip_high is clipped. Infinite: no upper clip."""
    tau_pos: float = 1.0
    """SAPO's temperature for advantages above 0."""
    tau_neg: float = 1.05
    """SAPO's temperature for all other advantages."""


@dataclass(frozen=True)
class LossTerms:
    """Results of a policy loss; both tensors are [T]."""

    terms: Tensor
    """Terms of the loss, differentiable."""
    clipped: Tensor
    """Tokens whose term the clip changed, bool."""


@dataclass(frozen=True)
class PolicyLoss:
    """A policy loss: the function that computes its terms, and properties that the trainer uses."""

    terms: Callable[[LossInputs], LossTerms]
    """Function that computes the terms."""
    per_token: bool = True
    """True if each term depends on the log-prob of one token only. The output head can then compute gradients by chunk."""
    has_ratio: bool = True
    """True if the loss uses the ratio of current to old probabilities."""

    def __call__(self, inputs: LossInputs) -> LossTerms:
        """Return the loss terms of packed tokens."""
        return self.terms(inputs)


@dataclass(frozen=True)
class SurrogateLoss:
    """A clipped loss and the share of clipped tokens."""

    loss: Tensor
    """Mean loss, a differentiable scalar."""
    clip_fraction: Tensor
    """Share of masked-in tokens for which the clipped term is the larger loss, so that they have no gradient. A scalar."""


def token_terms(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """Return PPO's clipped surrogate with DAPO's two bounds: -min(r A, clip(r, 1-low, 1+high) A).

    Source: Schulman et al. 2017, eq. 7. All arguments have one shape; the results (terms, clipped bool) have it too. If
    old_log_probs = log_probs.detach(), the ratio is exactly 1 and the gradient is exactly -A * grad log_probs, the on-policy
    policy gradient.
    """
    ratio = torch.exp((log_probs - old_log_probs.detach()).clamp(max=MAX_LOG_RATIO))
    free = ratio * advantages
    fenced = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    return -torch.minimum(free, fenced), (fenced < free).detach()


def ppo(inputs: LossInputs) -> LossTerms:
    """Return the terms of PPO's clipped surrogate (Schulman et al. 2017, eq. 7), with DAPO's two bounds."""
    x = inputs
    bounds = {"clip_low": x.clip_low, "clip_high": x.clip_high}
    return LossTerms(*token_terms(x.log_probs, x.old_log_probs, x.advantages, **bounds))


def gspo(inputs: LossInputs) -> LossTerms:
    """Return the terms of GSPO-token (Zheng et al. 2025, eq. 13-16): the ratio belongs to the whole sequence.

    s = exp(mean of the log-ratio over the masked-in tokens of the sequence), without gradient. The ratio of a token is
    s * exp(log_prob - stopgrad(log_prob)). Its value is s, and its gradient is s * grad log_prob. With one advantage per
    sequence and `sequence_mean` aggregation, this is the loss of GSPO. Advantages may also differ between tokens.
    """
    x = inputs
    with torch.no_grad():
        log_ratio = torch.where(x.mask, x.log_probs - x.old_log_probs, 0.0)
        sums, counts = x.segments.sums(log_ratio, x.mask.to(log_ratio.dtype))
        log_s = x.segments.spread_out(sums / counts.clamp(min=1))
    # With old = stopgrad(log_prob) - log s the ratio of the token is s * exp(log_prob - stopgrad(log_prob)).
    found = ppo(replace(x, old_log_probs=x.log_probs.detach() - log_s))
    return LossTerms(torch.where(x.mask, found.terms, 0.0), found.clipped & x.mask)


def reinforce(inputs: LossInputs) -> LossTerms:
    """Return the terms -A log_prob (Williams 1992), without ratio and clip."""
    return LossTerms(-inputs.advantages * inputs.log_probs, torch.zeros_like(inputs.mask))


def cispo(inputs: LossInputs) -> LossTerms:
    """Return the terms of CISPO: -stopgrad(clip(r, 1-low, 1+high)) A log_prob.

    Source: MiniMax-M1, arXiv:2506.13585, eq. 4 and 5. The clip bounds the weight of a token but does not remove its gradient,
    so every token takes part in the update.
    """
    x = inputs
    ratio = torch.exp((x.log_probs.detach() - x.old_log_probs).clamp(max=MAX_LOG_RATIO))
    weight = ratio.clamp(1.0 - x.clip_low, 1.0 + x.clip_high)
    return LossTerms(-weight * x.advantages * x.log_probs, weight != ratio)


def sapo(inputs: LossInputs) -> LossTerms:
    """Return the terms of SAPO, soft adaptive policy optimization: -f(r) A with f(r) = 4 / tau sigmoid(tau (r - 1)).

    Source: Gao et al. 2025, arXiv:2511.20347. tau is tau_pos if A > 0, else tau_neg. The weight of a token's gradient is
    f'(r) r. This weight is 1 at r = 1, as without a clip, and falls smoothly toward 0 for ratios far from 1. The value f(1) is
    2 / tau, not 1.
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
"""Policy losses by their name in `algorithm.loss`."""


def policy_terms(loss: PolicyLoss, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """Return (loss terms [T], not averaged; sums of metrics over the masked-in tokens).

    The sums are detached scalars; divide them by the number of tokens. They are `loss/clip_fraction`, `loss/old_kl` (k3
    estimate of the KL from the old policy to the current one), `loss/ratio` and `loss/ratio_tail` (ratio outside of [1/2, 2]).
    """
    mask = inputs.mask
    # Masked-out tokens may hold any value. Zeros instead of these values keep NaN out of the gradient.
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
    """Return the weight [T] of each token's term, before the division by the total of the update.

    The loss of an update is sum(terms * weights) over the whole update, divided by a total. Aggregations:
    token_mean: the weight is 1, the total is the number of masked-in tokens. The loss is a mean over tokens.
    sequence_mean: the weight is 1 / (masked-in tokens of the sequence), the total is the number of sequences. The loss is the
    mean over sequences of their token means (GRPO, GSPO).
    sequence_sum: the weight is 1, the total is `constant_total`. The loss is the mean over sequences of their token sums / a
    constant (Dr. GRPO, Liu et al. 2025, arXiv:2503.20783).

    sequence_lengths: [sequences], masked-in tokens of each whole sequence; counted from `mask` if not given.
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
    """Return this batch's contribution to the total of `sequence_sum`: `length` per counted sequence, fp64 scalar.

    count: [T], 1 at the masked-in tokens of counted sequences, 0 elsewhere; sequence_lengths: [sequences], all masked-in tokens
    of each sequence. Each token adds `length` / (masked-in tokens of its sequence), so that the parts of a sequence on several
    ranks add up to `length`.
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
    """Return -mean over masked-in tokens of min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = exp(new - old).

    All tensors are [B, T]. An empty mask gives loss 0 with zero gradients.
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
    """A critic's loss and the share of clipped tokens."""

    loss: Tensor
    """Mean loss, a differentiable scalar."""
    clip_fraction: Tensor
    """Share of masked-in tokens whose clipped error is the larger one, so that they have no gradient. A scalar."""


def value_terms(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float | None) -> tuple[Tensor, Tensor]:
    """Return PPO's critic loss, max((v - R)^2, (clip(v, old - clip, old + clip) - R)^2) / 2, differentiable in `values`.

    Source: the critic loss of Schulman et al. 2017 (arXiv 1707.06347, eq. 9), halved, with the clip of OpenAI's baselines and
    of Ziegler et al. 2019's code. If a value has moved from the old value toward the return by more than `clip`, it has no
    gradient. Without a clip (None) the loss is (v - R)^2 / 2.

    All arguments have one shape; the results (terms, at least fp32; clipped, bool) have it too. Errors: ValueError if the clip
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
    """Return the mean of `value_terms` over masked-in tokens: half the mean of the larger of the two squared errors.

    All tensors are [B, T]. An empty mask gives loss 0 with zero gradients. Errors: as in `value_terms`.
    """
    mask = mask.bool()
    held = (torch.where(mask, tensor, 0.0) for tensor in (values, old_values, returns))
    terms, clipped = value_terms(*held, clip=clip)
    tokens = mask.sum().clamp(min=1)
    return ValueLoss(terms.sum() / tokens, (clipped & mask).sum() / tokens)


@torch.no_grad()
def explained_variance_sums(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """Return sums over the masked-in tokens for `explained_variance`, [5] fp64, to be added over micro-batches and ranks.

    With values v and returns R, they are the sums of 1, R, R^2, R - v and (R - v)^2. All arguments have the same shape.
    """
    return torch.cat([moments(returns, mask), moments(returns.double() - values.double(), mask)[1:]])


def explained_variance(sums: Tensor) -> Tensor:
    """Return 1 - Var(return - value) / Var(return), a scalar: 1 for a perfect critic, 0 for one that knows only the mean.

    sums: [5] of `explained_variance_sums`, added over micro-batches and ranks. NaN if the returns have no variance beyond the
    rounding error of these sums.
    """
    _, variance = mean_and_variance(sums[:3])
    _, unexplained = mean_and_variance(sums[[0, 3, 4]])
    return torch.where(variance > 0, 1.0 - unexplained / variance, torch.nan)
