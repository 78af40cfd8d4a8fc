"""Schedule of weight pushes to the engine: after every step, or when the policy has drifted from the engine's weights.

The rule is VP2O's on-policy behavior budget (arXiv:2606.08032, Section 3.3, Eq. 11). It works with any algorithm.
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
    """Distance of the current policy from the policy that sampled."""

    kl: float
    """Mean KL(engine || policy) in nats per token: the k3 estimate over the tokens that the engine sampled."""
    ess: float
    """Effective sample size of (policy / engine)^alpha, as a share of the tokens."""


def drift_sums(log_ratios: torch.Tensor, alpha: float) -> torch.Tensor:
    """Return sums [5] in fp64 over tokens, from log r = log policy - log engine.

    The sums are: number of tokens, number of unpruned tokens, k3 of the unpruned tokens, r^alpha and r^(2 alpha). The policy
    prunes a token that its own min-p cutoff excludes (pruning.rho). A pruned token has ratio 0 and an infinite KL, however
    recent the weights are.
    """
    log_ratios = log_ratios.double()
    possible = log_ratios != -torch.inf
    weights = torch.exp(alpha * log_ratios.clamp(max=MAX_LOG_RATIO))
    bounded = log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    k3 = torch.where(possible, bounded.expm1() - bounded, 0.0)
    terms = [torch.ones_like(weights), possible.double(), k3, weights, weights.square()]
    return torch.stack([term.sum() for term in terms])


def drift_of(sums: torch.Tensor) -> Drift:
    """Return the drift from the sums of `drift_sums`; without tokens, the drift is zero."""
    tokens, possible, kl, weight, squared = sums.tolist()
    return (
        Drift(kl / max(possible, 1.0), weight**2 / (tokens * squared) if squared else 0.0)
        if tokens
        else Drift(0.0, 1.0)
    )


def drift_sample(samples: list[Sequence], config: RefreshConfig) -> list[Sequence]:
    """Return evenly spaced sequences of a rank: about `config.tokens` tokens, and at least `config.sequences` sequences.

    The sample has whole sequences: the start of a response does not represent its end, and one long response does not represent
    the others. The cost is about one forward pass over config.tokens tokens, or over config.sequences sequences if these are
    longer.
    """
    tokens = sum(len(sample.tokens) for sample in samples)
    within = len(samples) * config.tokens // max(tokens, 1)
    return [samples[i] for i in evenly_spaced(len(samples), max(within, config.sequences))]


def measure(trainer: Trainer, samples: list[Sequence], config: RefreshConfig) -> Drift | None:
    """Measure the drift after a step on some of the step's sequences; return None if `when: always` needs no drift.

    samples: sequences of this data-parallel rank. Cost: one forward pass over the sequences that `drift_sample` chooses. Every
    process calls this function and gets the same result.
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
    """Return metrics of drift and refresh, the same on all ranks; {} if the engine is refreshed after every step."""
    if drift is None:
        return {}
    return {
        "sync/kl": maximum(drift.kl),
        "sync/ess": maximum(drift.ess),
        "sync/staleness": maximum(age),
        "sync/refreshed": maximum(refreshed),
    }


class RefreshSchedule:
    """Decides after each step whether to refresh the engine."""

    def __init__(self, config: RefreshConfig) -> None:
        self.config = config
        self.refreshing = False
        """True if the drift exceeded its limit and has not yet fallen below the lower limit (hysteresis)."""

    def due(self, drift: Drift | None, *, age: int, confined: bool) -> bool:
        """Return True if the engine should be refreshed now.

        age: steps since the last refresh. confined: True if the trust region around the engine's weights refused or shortened
        an update of this step. At the border of the trust region, the next updates could not change the policy.
        """
        config = self.config
        if drift is None:
            return True
        limit = config.hysteresis if self.refreshing else 1.0
        within = drift.kl <= limit * config.kl and 1 - drift.ess <= limit * (1 - config.ess)
        self.refreshing = not within  # NaN is not within the limits
        return self.refreshing or confined or age >= config.max_staleness
