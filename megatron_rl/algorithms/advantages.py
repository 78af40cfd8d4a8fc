"""Advantages: how much better a response was than its baseline. Arithmetic in fp64, results in the input's dtype."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch


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
    """GRPO (Shao et al. 2024; papers/002): (r - group mean) / group standard deviation.

    Without `normalize` only r - mean (Dr. GRPO).

    rewards: [N], group_ids: [N] in any order -> [N]. The standard deviation is that of the group itself (divided by its
    size, not by size - 1). A group without spread, also one of a single response, gives exact zeros.
    Errors: ValueError for shapes that differ and for a reward that is not finite.
    """
    index, sizes, spread = _groups(rewards, group_ids)
    exact = rewards.double()
    mean = exact.new_zeros(len(sizes)).index_add_(0, index, exact) / sizes
    centered = exact - mean[index]
    if normalize:
        variance = exact.new_zeros(len(sizes)).index_add_(0, index, centered**2) / sizes
        centered = centered / torch.where(spread, variance, 1.0).sqrt()[index]
    return _result(torch.where(spread[index], centered, 0.0), rewards)


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


def generalized(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, *, gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalized advantage estimation (Schulman et al. 2016), papers/002 eq. 19-20.

    rewards, values, mask: [B, T] -> (advantages [B, T], returns = advantages + values [B, T]).
    An episode ends at its last masked-in token: nothing is bootstrapped from behind it. Masked-out tokens in between
    (tool output) are no steps of the policy: the recursion passes over them, and what they hold (reward, value) counts
    for nothing. Both results are zero there.
    """
    if not rewards.shape == values.shape == mask.shape or rewards.ndim != 2:
        shapes = [list(t.shape) for t in (rewards, values, mask)]
        raise ValueError(f"rewards, values and mask must share one shape [B, T]; found {shapes}")
    mask = mask.bool()
    exact_rewards, exact_values = rewards.double(), values.double()
    advantages = torch.zeros_like(exact_rewards)
    next_value = exact_rewards.new_zeros(rewards.shape[0])
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
