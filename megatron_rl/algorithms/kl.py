"""Estimators of KL(policy || reference) from one sampled token, and controllers of the coefficient that it is weighted by.

With d = log policy - log reference at a token that the policy sampled (Schulman, "Approximating KL divergence", 2020):

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

import math
from typing import Literal

import torch

MAX_LOG_RATIO = 20.0
"""Log-ratios are cut here before exp: e^20 = 5e8, far beyond any ratio that means something, far below overflow."""


def check_positive(**numbers: float) -> None:
    """Errors: ValueError that names the first of them that is not above 0, or not finite."""
    for name, number in numbers.items():
        if not 0 < number < math.inf:
            raise ValueError(f"{name} = {number:g}: must be a positive number")


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


class FixedController:
    """A coefficient that stays what it is, with the face of `AdaptiveController`.

    Errors: ValueError for a value that is negative or no finite number.
    """

    def __init__(self, value: float) -> None:
        if not 0 <= value < math.inf:
            raise ValueError(f"value = {value:g}: must be a finite number, not below 0")
        self.value = value

    def update(self, kl: float, samples: int) -> float:
        """Give the value, whatever was measured."""
        del kl, samples
        return self.value

    def state_dict(self) -> dict[str, float]:
        """Give the value, with which an adaptive one can go on."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Do nothing: its value is the one that it was made with."""


class AdaptiveController:
    """Moves the KL's coefficient until the KL is at its target (Ziegler et al. 2019, section 2.2).

    value *= 1 + clip(kl / target - 1, -0.2, 0.2) x samples / horizon: at most by 20 % in `horizon` samples.

    value: the coefficient to begin with; target: KL in the unit of what `update` is told; horizon: in samples.
    Errors: ValueError for one of them that is not positive.
    """

    def __init__(self, value: float, target: float, horizon: float) -> None:
        check_positive(value=value, target=target, horizon=horizon)
        self.value = value
        self.target = target
        self.horizon = horizon

    def update(self, kl: float, samples: int) -> float:
        """Move the value by the KL that was measured over so many samples, and give the new one.

        Errors: ValueError for a KL that is no finite number, and for samples below 0, or of five horizons and more, of which
        each may take 20 %: nothing would be left.
        """
        if not math.isfinite(kl):
            raise ValueError(f"kl = {kl}: must be a finite number")
        if not 0 <= samples < 5 * self.horizon:
            raise ValueError(f"samples = {samples}: must be at least 0 and below five horizons of {self.horizon:g}")
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        self.value *= 1.0 + error * samples / self.horizon
        return self.value

    def state_dict(self) -> dict[str, float]:
        """Give what a resumed run goes on with: the value. Target and horizon are those that it is made with."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Take the value of a `state_dict`. Errors: ValueError where it is not positive."""
        check_positive(value=state["value"])
        self.value = state["value"]
