"""When the rollout engine gets new weights: after every step, or when the policy has left the one that it samples from.

VP2O's on-policy behaviour budget (arXiv:2606.08032, Section 3.3, Eq. 11), for any algorithm.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_rl.algorithms.kl import MAX_LOG_RATIO
from megatron_rl.config import RefreshConfig
from megatron_rl.trainer.packing import Batch
from megatron_rl.trainer.trainer import Trainer


@dataclass(frozen=True)
class Drift:
    """Of the policy from the one that sampled, over the tokens of one update."""

    kl: float
    """Mean KL(engine || policy), nats per token: k3 of the sampled tokens, which the engine drew."""
    ess: float
    """Effective sample size of (policy / engine)^alpha, as a share of the tokens."""


def drift_sums(log_ratios: torch.Tensor, alpha: float) -> torch.Tensor:
    """[4] fp64 sums over tokens of log r = policy - engine: number, k3, r^alpha, r^(2 alpha). A ratio of 0 (a token that the
    policy has pruned) is one of e^-20."""
    log_ratios = log_ratios.double().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    weights = torch.exp(alpha * log_ratios)
    terms = [torch.ones_like(weights), log_ratios.expm1() - log_ratios, weights, weights.square()]
    return torch.stack([term.sum() for term in terms])


def drift_of(sums: torch.Tensor) -> Drift:
    """None of no token: no drift."""
    tokens, kl, weight, squared = sums.tolist()
    return Drift(kl / tokens, weight**2 / (tokens * squared)) if tokens else Drift(0.0, 1.0)


def measure(trainer: Trainer, batches: list[Batch], alpha: float) -> Drift:
    """Of the policy that began the update of these micro-batches. Every process calls it, and has the same answer."""
    mine = torch.zeros(4, dtype=torch.float64)
    for batch in batches if trainer.reports else ():
        ratios = batch.scored["current"] - batch.rollout_log_probs
        mine += drift_sums(ratios[batch.mask], alpha).cpu()
    return drift_of(torch.stack(trainer.ranks.gather(mine)).sum(0))


class RefreshSchedule:
    """Decides after each step whether the engine is to be refreshed."""

    def __init__(self, config: RefreshConfig) -> None:
        self.config = config
        self.refreshing = False
        """Whether the drift went beyond its limit, and has not come back to calm since."""

    def due(self, drift: Drift, *, age: int, confined: bool) -> bool:
        """age: steps since the last refresh. confined: the trust region, which is around the engine's weights, refused or
        shortened an update of this step; at its border it would leave nothing of the next ones."""
        config = self.config
        if config.when == "always":
            return True
        limit = config.calm if self.refreshing else 1.0
        self.refreshing = drift.kl > limit * config.kl or 1 - drift.ess > limit * (1 - config.ess)
        return self.refreshing or confined or age >= config.max_age
