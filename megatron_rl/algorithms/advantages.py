"""Advantages: how much better a response is than a baseline. Arithmetic is in fp64; results have the dtype of the input."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from megatron_rl.algorithms.kl import check_positive

SUM_ERROR = 1024 * torch.finfo(torch.float64).eps
"""Bound of the relative rounding error of an fp64 sum. It holds for a tree of additions, or a chain of up to 1024 micro-batches
and ranks."""


def _groups(rewards: torch.Tensor, group_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (group index of each response [N], group sizes [G], True for groups with spread [G]).

    A group has spread if its rewards differ by more than rounding. Rewards that are sums of weighted parts can differ in the
    last bit. A division by such a "standard deviation" would turn noise into advantages of +-1.
    """
    if rewards.ndim != 1 or rewards.shape != group_ids.shape:
        raise ValueError(f"rewards {list(rewards.shape)} and group_ids {list(group_ids.shape)}: both must be [N]")
    if rewards.numel() and not torch.isfinite(rewards).all():
        bad = int((~torch.isfinite(rewards)).nonzero()[0])
        raise ValueError(f"rewards[{bad}] = {float(rewards[bad])} (group {int(group_ids[bad])}) is not a finite number")
    unique, index, sizes = group_ids.unique(return_inverse=True, return_counts=True)
    exact = rewards.double()
    low = exact.new_full((len(unique),), torch.inf).scatter_reduce_(0, index, exact, "amin")
    high = exact.new_full((len(unique),), -torch.inf).scatter_reduce_(0, index, exact, "amax")
    ulp = torch.finfo(rewards.dtype).eps if rewards.is_floating_point() else 0.0
    spread = high - low > 4 * ulp * torch.maximum(high.abs(), low.abs())
    return index, sizes, spread


def _result(advantages: torch.Tensor, rewards: torch.Tensor) -> torch.Tensor:
    return advantages.to(rewards.dtype if rewards.is_floating_point() else torch.float32)


def group_relative(rewards: torch.Tensor, group_ids: torch.Tensor, *, normalize: bool = True) -> torch.Tensor:
    """Return GRPO's advantages: (r - group mean) / group standard deviation. Without `normalize`: r - mean (Dr. GRPO).

    Source: Shao et al. 2024, arXiv 2402.03300, section 4.1.2.

    rewards: [N], group_ids: [N] in any order -> [N]. The standard deviation is the population's (divided by the group size, not
    by size - 1). A group without spread gives exact zeros; a group of a single response has no spread.
    Errors: ValueError if the shapes differ or a reward is not finite.
    """
    index, sizes, spread = _groups(rewards, group_ids)
    return _result(_standard(rewards.double(), index, sizes, spread, normalize), rewards)


def _standard(
    exact: torch.Tensor, index: torch.Tensor, sizes: torch.Tensor, spread: torch.Tensor, normalize: bool
) -> torch.Tensor:
    """Return each value minus its group's mean, [N] fp64, and with `normalize` divided by the group's standard deviation."""
    mean = exact.new_zeros(len(sizes)).index_add_(0, index, exact) / sizes
    centered = exact - mean[index]
    if normalize:
        variance = exact.new_zeros(len(sizes)).index_add_(0, index, centered**2) / sizes
        centered = centered / torch.where(spread, variance, 1.0).sqrt()[index]
    return torch.where(spread[index], centered, 0.0)


def process_supervision(
    scores: torch.Tensor, mask: torch.Tensor, group_ids: torch.Tensor, *, normalize: bool = True
) -> torch.Tensor:
    """Return GRPO's advantages with process supervision: one for the tokens of each step (Shao et al. 2024, section 4.1.3).

    A step's score is normalized over all steps of all responses of its group. A token's advantage is the sum of the normalized
    scores of its own step and of all later steps. Without `normalize` only the mean is subtracted (Dr. GRPO).

    scores: [N, K], scores of the steps of N responses; mask: [N, K] bool, True if the response has this step; group_ids: [N] in
    any order -> [N, K], zeros outside of the mask. A group whose steps all have the same score gives exact zeros.
    Errors: ValueError if the shapes differ or a score is not finite.
    """
    mask = mask.bool()
    if scores.ndim != 2 or scores.shape != mask.shape or scores.shape[:1] != group_ids.shape:
        shapes = [list(t.shape) for t in (scores, mask, group_ids)]
        raise ValueError(f"scores, mask and group_ids must be [N, K], [N, K] and [N]; found {shapes}")
    relative = torch.zeros(scores.shape, dtype=torch.float64, device=scores.device)
    of_steps = group_ids[:, None].expand(scores.shape)[mask]
    index, sizes, spread = _groups(scores[mask], of_steps)
    relative[mask] = _standard(scores[mask].double(), index, sizes, spread, normalize)
    to_come = relative.flip(1).cumsum(1).flip(1)
    return _result(torch.where(mask, to_come, 0.0), scores)


def leave_one_out(rewards: torch.Tensor, group_ids: torch.Tensor) -> torch.Tensor:
    """Return RLOO's advantages (Ahmadian et al. 2024): r - mean reward of the other responses of the group.

    rewards: [N], group_ids: [N] in any order -> [N]. A group without spread gives exact zeros. A group of a single response has
    no baseline and gives zero too. Errors: as in `group_relative`.
    """
    index, sizes, spread = _groups(rewards, group_ids)
    exact = rewards.double()
    total = exact.new_zeros(len(sizes)).index_add_(0, index, exact)
    others = (total[index] - exact) / (sizes[index] - 1).clamp(min=1)
    return _result(torch.where(spread[index], exact - others, 0.0), rewards)


def exponential_tilt(rewards: torch.Tensor, group_ids: torch.Tensor, *, temperature: float) -> torch.Tensor:
    """Return group size x softmax(r / beta) over each group: weights for imitating the policy exp(r / beta) pi.

    beta is `temperature` (Peters and Schaal 2007, "Reinforcement learning by reward-weighted regression"; Peng et al. 2019,
    arXiv 1910.00177, with a baseline). Let omega be the softmax. If the loss `reinforce` uses these weights as advantages, its
    mean over responses is the cross entropy to that policy: -sum of omega log pi.

    The weights are positive, with mean 1 in each group. The loss lowers no response's probability directly; a response becomes
    less likely only because others become more likely. A group without spread gives the weight 1 to each response; a group of
    a single response has no spread. Such a group imitates its own samples, which adds nothing but noise.

    rewards: [N], group_ids: [N] in any order -> [N]. Errors: as in `group_relative`, and if the temperature is not positive.
    """
    check_positive(temperature=temperature)
    index, sizes, spread = _groups(rewards, group_ids)
    exact = rewards.double()
    best = exact.new_full((len(sizes),), -torch.inf).scatter_reduce_(0, index, exact, "amax")
    tilted = torch.exp((exact - best[index]) / temperature)
    total = tilted.new_zeros(len(sizes)).index_add_(0, index, tilted)
    return _result(torch.where(spread[index], tilted * (sizes / total)[index], 1.0), rewards)


def moments(values: torch.Tensor, mask: torch.Tensor, *, shift: torch.Tensor | float = 0.0) -> torch.Tensor:
    """Return the number of masked-in values, the sum of (value - shift) and the sum of (value - shift)^2: [3] fp64.

    values, mask: any shape, the same for both. Results may be added over micro-batches and ranks if all use the same shift. A
    variance from these sums loses precision by a factor of (mean - shift)^2 / variance. If means may be large, compute moments
    twice: first without a shift, then with the mean of the first result (added over all ranks) as the shift.
    """
    if values.shape != mask.shape:
        raise ValueError(f"values {list(values.shape)} and mask {list(mask.shape)}: must share one shape")
    away = torch.where(mask.bool(), values.double() - shift, 0.0)
    return torch.stack([mask.bool().double().sum(), away.sum(), away.square().sum()])


def mean_and_variance(moments: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean (relative to the shift) and the population variance, two scalars. moments: [3], summed over all parts.

    Both are 0 if there are no values. A variance that is no larger than the rounding error of the sums is exactly 0.
    """
    count, total, squares = moments
    mean, square = total / count.clamp(min=1), squares / count.clamp(min=1)
    variance = square - mean.square()
    return mean, torch.where(variance > SUM_ERROR * square, variance, 0.0)


def whiten(
    values: torch.Tensor,
    moments: torch.Tensor,
    *,
    shift: torch.Tensor | float = 0.0,
    shift_mean: bool = True,
) -> torch.Tensor:
    """Return (value - mean) / standard deviation, of any shape. Without `shift_mean` the mean is added back.

    moments: [3], summed over all parts of the data, computed with the same `shift`. If the values differ by no more than
    rounding, the result is zeros (without `shift_mean`: the mean).
    """
    mean, variance = mean_and_variance(moments)
    ulp = torch.finfo(values.dtype).eps if values.is_floating_point() else 0.0
    spread = variance.sqrt() > 2 * ulp * (mean + shift).abs()  # a range is at least twice the standard deviation
    whitened = (values.double() - shift - mean) / torch.where(spread, variance, 1.0).sqrt()
    whitened = torch.where(spread, whitened, 0.0)
    return _result(whitened if shift_mean else whitened + mean + shift, values)


def batch_normalized(
    values: torch.Tensor, mask: torch.Tensor, add: Callable[[torch.Tensor], torch.Tensor] = lambda mine: mine
) -> torch.Tensor:
    """Return (value - mean) / standard deviation over all masked-in elements, and zeros elsewhere.

    Source: REINFORCE++ (Hu 2025); PPO's whitening. The standard deviation is the population's, computed in two passes. Values
    without spread give zeros.

    values, mask: any shape, the same for both, for example [B, T] or [N].
    add: function that sums `moments` over the ranks, if each rank holds a part of the elements.
    """
    shift, _ = mean_and_variance(add(moments(values, mask)))
    return torch.where(mask.bool(), whiten(values, add(moments(values, mask, shift=shift)), shift=shift), 0.0)


def token_rewards(
    final_reward: torch.Tensor,
    mask: torch.Tensor,
    *,
    kl: torch.Tensor | None = None,
    kl_coefficient: float = 0.0,
) -> torch.Tensor:
    """Return per-token rewards: -kl_coefficient KL_t at each token, plus the final reward at the last masked-in token.

    Source: Ziegler et al. 2019 (arXiv 1909.08593, eq. 2). The KL is measured on the policy that sampled; it has no gradient.

    final_reward: [B]; mask: [B, T]; kl: [B, T], the KL of each token, for example k1 of the sampling policy against the
    reference -> [B, T], without gradient, zeros outside of the mask. A row without masked-in tokens gets no reward.

    Errors: ValueError if shapes do not fit, if the coefficient is negative, or if it is above 0 and `kl` is missing.
    """
    mask = mask.bool()
    if mask.ndim != 2 or final_reward.shape != mask.shape[:1]:
        raise ValueError(f"final_reward {list(final_reward.shape)} and mask {list(mask.shape)}: must be [B] and [B, T]")
    if not kl_coefficient >= 0:
        raise ValueError(f"kl_coefficient = {kl_coefficient:g}: must not be negative")
    last = mask & (mask.flip(1).cumsum(1).flip(1) == 1)
    rewards = torch.where(last, final_reward.detach().double()[:, None], 0.0)
    if kl_coefficient:
        if kl is None:
            raise ValueError(f"kl_coefficient = {kl_coefficient:g} needs kl")
        if kl.shape != mask.shape:
            raise ValueError(f"kl {list(kl.shape)} and mask {list(mask.shape)}: must share one shape [B, T]")
        rewards = rewards - torch.where(mask, kl_coefficient * kl.detach().double(), 0.0)
    return _result(rewards, final_reward)


def generalized(
    rewards: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    *,
    gamma: float,
    lam: float,
    bootstrap: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (generalized advantage estimates, returns). An estimate is the sum over l of (gamma lam)^l delta_{t+l}.

    Source: Schulman et al. 2016, arXiv 1506.02438, eq. 16.

    rewards, values, mask: [B, T] -> (advantages [B, T], returns = advantages + values [B, T]). An episode ends at its last
    masked-in token; without `bootstrap` the value after this token is 0. Masked-out tokens before the end (tool output) are not
    steps of the policy: the recursion skips them and ignores their rewards and values. Both results are zero at these tokens.

    bootstrap: [B], value of the state after the last masked-in token: nonzero for responses that were cut off, 0 for responses
    that ended by themselves.
    """
    if not rewards.shape == values.shape == mask.shape or rewards.ndim != 2:
        shapes = [list(t.shape) for t in (rewards, values, mask)]
        raise ValueError(f"rewards, values and mask must share one shape [B, T]; found {shapes}")
    mask = mask.bool()
    exact_rewards, exact_values = rewards.double(), values.double()
    advantages = torch.zeros_like(exact_rewards)
    if bootstrap is not None and bootstrap.shape != rewards.shape[:1]:
        raise ValueError(f"bootstrap {list(bootstrap.shape)}: must be [B] = {list(rewards.shape[:1])}")
    next_value = exact_rewards.new_zeros(rewards.shape[0]) if bootstrap is None else bootstrap.double()
    running = torch.zeros_like(next_value)
    for t in reversed(range(rewards.shape[1])):
        inside = mask[:, t]
        delta = exact_rewards[:, t] + gamma * next_value - exact_values[:, t]
        running = torch.where(inside, delta + gamma * lam * running, running)
        next_value = torch.where(inside, exact_values[:, t], next_value)
        advantages[:, t] = torch.where(inside, running, 0.0)
    returns = torch.where(mask, advantages + exact_values, 0.0)
    return _result(advantages, values), _result(returns, values)


ADVANTAGES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "grpo": group_relative,
    "dr_grpo": partial(group_relative, normalize=False),
    "rloo": leave_one_out,
}
"""Functions (rewards [N], group_ids [N]) -> advantages [N], by their name in `algorithm.advantage`."""


def distillation(log_probs: torch.Tensor, teacher_log_probs: torch.Tensor, coefficient: float = 1.0) -> torch.Tensor:
    """Return on-policy distillation's advantages: coefficient x (log teacher - log policy) of each sampled token.

    Source: Gu et al. 2024, arXiv 2306.08543, eq. 3 (only its single-step part); Agarwal et al. 2024, arXiv 2306.13649.

    The arguments have any shape; the result has no gradient. Under the policy, the mean of grad log policy x this advantage
    is -coefficient x the gradient of KL(policy || teacher) at the token.
    """
    return coefficient * (teacher_log_probs - log_probs).detach()
