"""When the rollout engine gets new weights: after every step, or when the policy has moved away from the engine's.

VP2O's on-policy behavior budget (arXiv:2606.08032, Section 3.3, Eq. 11), for any algorithm.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch

from megatron_rl.algorithms.kl import MAX_LOG_RATIO
from megatron_rl.config import RefreshConfig
from megatron_rl.data.sequence import Sequence
from megatron_rl.metrics.reduce import Metrics, maximum
from megatron_rl.routing.table import evenly_spaced
from megatron_rl.trainer.trainer import Trainer


@dataclass(frozen=True)
class Drift:
    """Distance of the current policy from the one that sampled."""

    kl: float
    """Mean KL(engine || policy), nats per token: k3 of the sampled tokens, which the engine drew."""
    ess: float
    """Effective sample size of (policy / engine)^alpha, as a share of the tokens."""


def drift_sums(log_ratios: torch.Tensor, alpha: float) -> torch.Tensor:
    """Sums [5] fp64 over tokens, from log r = log policy - log engine.

    Number of tokens, number that the policy has not pruned, k3 of these, r^alpha, r^(2 alpha). A pruned token has ratio 0,
    and an infinite KL however new the weights are.
    """
    log_ratios = log_ratios.double()
    possible = log_ratios != -torch.inf
    weights = torch.exp(alpha * log_ratios.clamp(max=MAX_LOG_RATIO))
    bounded = log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    k3 = torch.where(possible, bounded.expm1() - bounded, 0.0)
    terms = [torch.ones_like(weights), possible.double(), k3, weights, weights.square()]
    return torch.stack([term.sum() for term in terms])


def drift_of(sums: torch.Tensor) -> Drift:
    """The drift from the sums of `drift_sums`; without tokens there is none."""
    tokens, possible, kl, weight, squared = sums.tolist()
    return (
        Drift(kl / max(possible, 1.0), weight**2 / (tokens * squared) if squared else 0.0)
        if tokens
        else Drift(0.0, 1.0)
    )


def drift_sample(samples: list[Sequence], config: RefreshConfig) -> list[Sequence]:
    """Evenly spaced ones of a rank's sequences: about `config.tokens` tokens, and at least `config.sequences` sequences.

    Whole ones: the start of a response, which is all that a prefix knows, does not speak for its end, and one long response
    not for the others. They cost at most a forward over config.tokens + 1 tokens' sequences, or config.sequences of them.
    """
    tokens = sum(len(sample.tokens) for sample in samples)
    within = len(samples) * config.tokens // max(tokens, 1)
    return [samples[i] for i in evenly_spaced(len(samples), max(within, config.sequences))]


def measure(trainer: Trainer, samples: list[Sequence], config: RefreshConfig) -> Drift | None:
    """Measure the drift after a step, over some of the step's sequences; None where `when: always` needs none.

    samples: this data-parallel rank's. One forward pass over `drift_sample` of them. Every process calls it, and has the same
    answer.
    """
    if config.when == "always":
        return None
    batches = trainer.pack(drift_sample(samples, config))
    found = trainer.compute_log_probs(batches)
    mine = torch.zeros(5, dtype=torch.float64)
    for batch, log_probs in zip(batches, found, strict=True) if trainer.reports else ():
        ratios = (cast("torch.Tensor", log_probs) - batch["rollout_log_probs"]).cpu()  # a rank that reports has both
        mine += drift_sums(ratios[batch.mask.cpu()], config.alpha)
    return drift_of(torch.stack(trainer.ranks.gather(mine)).sum(0))


def refresh_metrics(drift: Drift | None, age: int, refreshed: bool) -> Metrics:
    """Metrics of the drift and the refresh, which all ranks have alike; none where the engine is refreshed after every step."""
    if drift is None:
        return {}
    return {
        "sync/kl": maximum(drift.kl),
        "sync/ess": maximum(drift.ess),
        "sync/staleness": maximum(age),
        "sync/refreshed": maximum(refreshed),
    }


class RefreshSchedule:
    """Decides after each step whether the engine is to be refreshed."""

    def __init__(self, config: RefreshConfig) -> None:
        self.config = config
        self.refreshing = False
        """True if the drift went beyond its limit and has not yet come back below the lower one."""

    def due(self, drift: Drift | None, *, age: int, confined: bool) -> bool:
        """True if to refresh now.

        age: steps since the last refresh. confined: whether the trust region, which is around the engine's weights, refused
        or shortened an update of this step; at its border it would leave nothing of the next ones.
        """
        config = self.config
        if drift is None:
            return True
        limit = config.hysteresis if self.refreshing else 1.0
        within = drift.kl <= limit * config.kl and 1 - drift.ess <= limit * (1 - config.ess)
        self.refreshing = not within  # what is no number is not within
        return self.refreshing or confined or age >= config.max_staleness
