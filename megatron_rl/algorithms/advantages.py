"""Advantages: how much better a response was than its baseline. Arithmetic in fp64, results in the input's dtype."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from megatron_rl.algorithms.kl import check_positive

SUM_ERROR = 1024 * torch.finfo(torch.float64).eps
"""Bounds the relative rounding of a sum in fp64, whose order is a tree's, or a chain's over so many micro-batches and ranks."""


def _groups(rewards: torch.Tensor, group_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Group index [N], group sizes [G] and "has spread" [G].

    A group has spread when its rewards differ by more than rounding: rewards that are sums of weighted parts can differ
    in the last bit, and dividing by such a "standard deviation" would turn noise into advantages of +-1.
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
    """GRPO (Shao et al. 2024, arXiv 2402.03300, section 4.1.2): (r - group mean) / group standard deviation.

    Without `normalize` only r - mean (Dr. GRPO).

    rewards: [N], group_ids: [N] in any order -> [N]. The standard deviation is that of the group itself (divided by its
    size, not by size - 1). A group without spread, also one of a single response, gives exact zeros.
    Errors: ValueError for shapes that differ and for a reward that is not finite.
    """
    index, sizes, spread = _groups(rewards, group_ids)
    return _result(_standard(rewards.double(), index, sizes, spread, normalize), rewards)


def _standard(
    exact: torch.Tensor, index: torch.Tensor, sizes: torch.Tensor, spread: torch.Tensor, normalize: bool
) -> torch.Tensor:
    """[N] fp64: what is above the mean of its group, in its standard deviations where `normalize`; zeros without spread."""
    mean = exact.new_zeros(len(sizes)).index_add_(0, index, exact) / sizes
    centered = exact - mean[index]
    if normalize:
        variance = exact.new_zeros(len(sizes)).index_add_(0, index, centered**2) / sizes
        centered = centered / torch.where(spread, variance, 1.0).sqrt()[index]
    return torch.where(spread[index], centered, 0.0)


def process_supervision(
    scores: torch.Tensor, mask: torch.Tensor, group_ids: torch.Tensor, *, normalize: bool = True
) -> torch.Tensor:
    """GRPO with process supervision (Shao et al. 2024, section 4.1.3): the advantage of the tokens of each step.

    A step's score is normalized over all steps of all responses of its group, and a token's advantage is the sum of those of
    its own step and of the ones behind it. Without `normalize` only the mean is subtracted, as in Dr. GRPO.

    scores: [N, K], of the steps of N responses; mask: [N, K] bool, which of them are there; group_ids: [N] in any order
    -> [N, K], zeros where the mask is out. A group of which all steps have one score gives exact zeros.
    Errors: ValueError for shapes that differ and for a score that is not finite.
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
    """RLOO (Ahmadian et al. 2024): r - mean reward of the other responses of its group.

    rewards: [N], group_ids: [N] in any order -> [N]. A group without spread, also one of a single response (it has no
    baseline), gives exact zeros. Errors: as `group_relative`.
    """
    index, sizes, spread = _groups(rewards, group_ids)
    exact = rewards.double()
    total = exact.new_zeros(len(sizes)).index_add_(0, index, exact)
    others = (total[index] - exact) / (sizes[index] - 1).clamp(min=1)
    return _result(torch.where(spread[index], exact - others, 0.0), rewards)


def exponential_tilt(rewards: torch.Tensor, group_ids: torch.Tensor, *, temperature: float) -> torch.Tensor:
    """Weights of the policy exp(r / beta) pi: group size x softmax over the group of r / beta.

    beta is `temperature` (Peters and Schaal 2007, "Reinforcement learning by reward-weighted regression"; Peng et al. 2019,
    arXiv 1910.00177, with a baseline). As advantages of `reinforce` the mean over responses is the cross entropy to it, -sum of
    omega log pi with omega the softmax. They are positive, with mean 1 in each group: nothing is pushed down but by
    what rises. A group without spread, also one of a single response, gives 1 each: its omegas are equal, and the policy
    imitates its own samples, which moves it by noise alone.

    rewards: [N], group_ids: [N] in any order -> [N]. Errors: as `group_relative`, and for a temperature that is not positive.
    """
    check_positive(temperature=temperature)
    index, sizes, spread = _groups(rewards, group_ids)
    exact = rewards.double()
    best = exact.new_full((len(sizes),), -torch.inf).scatter_reduce_(0, index, exact, "amax")
    tilted = torch.exp((exact - best[index]) / temperature)
    total = tilted.new_zeros(len(sizes)).index_add_(0, index, tilted)
    return _result(torch.where(spread[index], tilted * (sizes / total)[index], 1.0), rewards)


def moments(values: torch.Tensor, mask: torch.Tensor, *, shift: torch.Tensor | float = 0.0) -> torch.Tensor:
    """Number of the masked-in values, sum of (value - shift), sum of its squares: [3] fp64.

    values, mask: any one shape. They may be added up over micro-batches and ranks if all have the same shift. The variance of
    their difference loses (mean - shift)^2 / variance of fp64's precision: where means may be large, the mean of first moments,
    added up, is the shift of second ones.
    """
    if values.shape != mask.shape:
        raise ValueError(f"values {list(values.shape)} and mask {list(mask.shape)}: must share one shape")
    away = torch.where(mask.bool(), values.double() - shift, 0.0)
    return torch.stack([mask.bool().double().sum(), away.sum(), away.square().sum()])


def mean_and_variance(moments: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean (from the shift on) and population variance, scalars, of added-up `moments` [3]; zeros without values.

    A variance that is no more than rounding of the sums is exactly 0.
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
    """(value - mean) / standard deviation, any shape; without `shift_mean` the mean is added back.

    moments: [3], added up, of that `shift`. Values whose spread is no more than rounding give zeros (or the mean).
    """
    mean, variance = mean_and_variance(moments)
    ulp = torch.finfo(values.dtype).eps if values.is_floating_point() else 0.0
    spread = variance.sqrt() > 2 * ulp * (mean + shift).abs()  # a range has at least twice its standard deviation
    whitened = (values.double() - shift - mean) / torch.where(spread, variance, 1.0).sqrt()
    whitened = torch.where(spread, whitened, 0.0)
    return _result(whitened if shift_mean else whitened + mean + shift, values)


def batch_normalized(
    values: torch.Tensor, mask: torch.Tensor, add: Callable[[torch.Tensor], torch.Tensor] = lambda mine: mine
) -> torch.Tensor:
    """(value - mean) / standard deviation over all masked-in elements; zeros elsewhere (REINFORCE++, Hu 2025; PPO's whitening).

    values, mask: any one shape, as [B, T] or [N]. The population's deviation, in two passes; values without spread are zeros.
    add: sums `moments` over ranks, each of which has a part of the elements.
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
    """Per-token rewards: -kl_coefficient KL_t, and the final reward at the last masked-in token.

    Ziegler et al. 2019 (arXiv 1909.08593, eq. 2). The KL is a number of the policy that sampled, and has no gradient.

    final_reward: [B]; mask: [B, T]; kl: [B, T], of each token, as k1 of the policy that sampled it against the reference
    -> [B, T], without gradient; zeros where the mask is out. A row without masked-in tokens has no place for its reward.

    Errors: ValueError for shapes that do not fit, and for a coefficient that is negative or has no kl.
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
    """Generalized advantage estimation (Schulman et al. 2016, arXiv 1506.02438, eq. 16): the sum of (gamma lam)^l delta_{t+l}.

    rewards, values, mask: [B, T] -> (advantages [B, T], returns = advantages + values [B, T]).
    An episode ends at its last masked-in token: nothing is bootstrapped from behind it. Masked-out tokens in between
    (tool output) are no steps of the policy: the recursion passes over them, and what they hold (reward, value) counts
    for nothing. Both results are zero there.

    bootstrap: [B], the value of the state behind the last masked-in token: of responses that were cut off, and would have gone
    on; 0 for those that ended.
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
"""(rewards [N], group_ids [N]) -> advantages [N], by the name that algorithm.advantage has for it."""


def distillation(log_probs: torch.Tensor, teacher_log_probs: torch.Tensor, coefficient: float = 1.0) -> torch.Tensor:
    """On-policy distillation: coefficient x (log teacher - log policy) of each sampled token, of any shape, without gradient.

    The mean over the policy of grad log policy x this is minus the gradient of KL(policy || teacher) at the token, times
    coefficient (Gu et al. 2024, arXiv 2306.08543, eq. 3 with one step alone; Agarwal et al. 2024, arXiv 2306.13649).
    """
    return coefficient * (teacher_log_probs - log_probs).detach()
