"""Estimators of KL(policy || reference) from one sampled token (Schulman, "Approximating KL divergence", 2020).

With d = log policy - log reference at a token that the policy sampled:

    k1 = d                    unbiased, signed, high variance
    k2 = d^2 / 2              biased value, low variance
    k3 = exp(-d) - 1 + d      unbiased, never negative

Value and gradient are two questions. The gradient of the KL is E[d * grad log policy]. As terms of a loss:

    k2's own gradient is d * grad log policy: exactly that.
    k3's own gradient is (1 - exp(-d)) * grad log policy: equal to first order in d, in expectation the gradient of the
        *forward* KL. It is what GRPO trains with, so it is kept.
    k1's own gradient is grad log policy, whose expectation is zero: as a loss term it would do nothing but add noise.
        `estimate` therefore gives k1 the gradient of k2 (the value stays k1's).
"""

from __future__ import annotations

from typing import Literal

import torch

MAX_LOG_RATIO = 20.0
"""Log-ratios are cut here before exp: e^20 = 5e8, far beyond any ratio that means something, far below overflow."""


def estimate(
    log_probs: torch.Tensor, reference_log_probs: torch.Tensor, estimator: Literal["k1", "k2", "k3"]
) -> torch.Tensor:
    """Per-token estimate of KL(policy || reference), differentiable in `log_probs`; see above for its gradient.

    log_probs, reference_log_probs: any one shape -> that shape. Errors: ValueError for an unknown estimator.
    """
    difference = log_probs - reference_log_probs.detach()
    if estimator == "k3":
        inverse = -difference
        return torch.exp(inverse.clamp(max=MAX_LOG_RATIO)) - 1.0 - inverse
    k2 = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).square() / 2
    if estimator == "k2":
        return k2
    if estimator == "k1":
        return k2 + (difference - k2).detach()
    raise ValueError(f"KL estimator '{estimator}': choose k1, k2 or k3")
