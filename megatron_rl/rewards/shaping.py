"""Shaping of the logged rewards into the rewards that advantages use."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import torch

from megatron_rl.algorithms.advantages import batch_normalized
from megatron_rl.config import RewardsConfig
from megatron_rl.data.trajectory import OVERLONG, Trajectory
from megatron_rl.distributed.parallel import Ranks


def overlong(length: int, longest: int, buffer: int) -> float:
    """Return DAPO's length penalty (Yu et al. 2025, eq. 13): 0 up to longest - buffer tokens, then down to -1 at longest."""
    return -min(1.0, max(0.0, (length - (longest - buffer)) / buffer))


def set_outcome_rewards(
    settings: RewardsConfig,
    weights: Mapping[str, float],
    ranks: Ranks,
    trajectories: list[Trajectory],
    *,
    process: str | None,
    bootstraps: bool,
) -> None:
    """Set `outcome_reward` of this leader's trajectories. All processes call this function together.

    weights: data.rewards. process, bootstraps: process_rewards and bootstraps_truncated of `Config`.

    The outcome reward is the sample's reward without the process reward model's part, which is added at the ends of the
    response's steps. The outcome reward is clipped (rewards.clip) and whitened over the training step (rewards.whiten). Masked
    samples get 0. If `bootstraps` is set, a truncated response keeps only the length penalty, because the value of its last
    state replaces the rest of its reward.
    """
    judged = [t for t in trajectories if not t.masked and not t.part]
    cut_off = [t for t in judged if bootstraps and t.truncated]
    scored = [t for t in judged if not (bootstraps and t.truncated)]
    weight = weights.get(process or "", 1.0)
    values = torch.tensor(
        [t.reward - (weight * t.reward_parts[process] if process else 0.0) for t in scored], dtype=torch.float64
    )
    if settings.clip is not None:
        values = values.clamp(-settings.clip, settings.clip)
    if settings.whiten:
        counted = torch.ones_like(values, dtype=torch.bool)
        values = batch_normalized(values, counted, lambda mine: torch.stack(ranks.gather_from_leaders(mine)).sum(0))
    of_length = weights.get(OVERLONG, 1.0)
    penalties = torch.tensor([of_length * t.reward_parts.get(OVERLONG, 0.0) for t in cut_off])
    for some, rewards in ((scored, values), (cut_off, penalties)):
        for trajectory, reward in zip(some, rewards.float().tolist(), strict=True):
            trajectory.outcome_reward = reward
    for before, trajectory in pairwise(trajectories):
        if trajectory.part:  # further sequences of a sample follow its first sequence
            trajectory.outcome_reward = before.outcome_reward
