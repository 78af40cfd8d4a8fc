"""Estimators of KL(policy || reference) from one sampled token, and controllers of the KL coefficient.

With d = log policy - log reference at a token that the policy sampled (Schulman, "Approximating KL divergence", 2020):

    k1 = d                    unbiased, signed, high variance
    k2 = d^2 / 2              biased value, low variance
    k3 = exp(-d) - 1 + d      unbiased, never negative

An estimator with a good value need not have a good gradient. The gradient of the KL is E[d * grad log policy]. The gradients of
the three estimators, used as loss terms, are:

    k2: d * grad log policy. Its expectation is exactly the gradient of the KL.
    k3: (1 - exp(-d)) * grad log policy. This gradient equals k2's to first order in d. Its expectation is the gradient of the
        *forward* KL. GRPO trains with this gradient, so `estimate` keeps it.
    k1: grad log policy. Its expectation is zero, so as a loss term it would only add noise.
        `estimate` therefore gives k1 the gradient of k2. The value is still k1.
"""

from __future__ import annotations

import math
from typing import Literal

import torch

MAX_LOG_RATIO = 20.0
"""Upper limit of log-ratios before exp. e^20 = 5e8 is far above any meaningful ratio and far below overflow."""


def check_positive(**numbers: float) -> None:
    """Check that all numbers are positive and finite. Errors: ValueError that names the first number that is not."""
    for name, number in numbers.items():
        if not 0 < number < math.inf:
            raise ValueError(f"{name} = {number:g}: must be a positive number")


def estimate(
    log_probs: torch.Tensor, reference_log_probs: torch.Tensor, estimator: Literal["k1", "k2", "k3"]
) -> torch.Tensor:
    """Return per-token estimates of KL(policy || reference), differentiable in `log_probs`.

    log_probs, reference_log_probs: any shape, the same for both -> this shape. The module's docstring explains the gradients.
    Errors: ValueError for an unknown estimator.
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
    """Constant KL coefficient, with the interface of `AdaptiveController`.

    Errors: ValueError if the value is negative or not finite.
    """

    def __init__(self, value: float) -> None:
        if not 0 <= value < math.inf:
            raise ValueError(f"value = {value:g}: must be a finite number, not below 0")
        self.value = value

    def update(self, kl: float, samples: int) -> float:
        """Return the constant value; the measured KL has no effect."""
        del kl, samples
        return self.value

    def state_dict(self) -> dict[str, float]:
        """Return the value, in the form that an `AdaptiveController` can load."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Do nothing: the value comes from the config, not from the checkpoint."""


class AdaptiveController:
    """Adapts the KL coefficient so that the KL approaches its target (Ziegler et al. 2019, section 2.2).

    The update rule is value *= 1 + clip(kl / target - 1, -0.2, 0.2) x samples / horizon: a change of at most 20 % in `horizon`
    samples.

    value: initial coefficient; target: KL, in the unit of the `kl` given to `update`; horizon: number of samples.
    Errors: ValueError if one of them is not positive.
    """

    def __init__(self, value: float, target: float, horizon: float) -> None:
        check_positive(value=value, target=target, horizon=horizon)
        self.value = value
        self.target = target
        self.horizon = horizon

    def update(self, kl: float, samples: int) -> float:
        """Update the value with the KL measured over `samples` samples, and return the new value.

        Errors: ValueError if the KL is not finite, or if `samples` is below 0 or at least 5 x horizon. An update over five
        horizons could lower the value by 5 x 20 %, to 0.
        """
        if not math.isfinite(kl):
            raise ValueError(f"kl = {kl}: must be a finite number")
        if not 0 <= samples < 5 * self.horizon:
            raise ValueError(f"samples = {samples}: must be at least 0 and below five horizons of {self.horizon:g}")
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        self.value *= 1.0 + error * samples / self.horizon
        return self.value

    def state_dict(self) -> dict[str, float]:
        """Return the value, for a checkpoint. Target and horizon come from the config."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Set the value from a `state_dict`. Errors: ValueError if it is not positive."""
        check_positive(value=state["value"])
        self.value = state["value"]
