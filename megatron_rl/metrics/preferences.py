"""Metrics of pairs: how often, by how much and how surely the better one has the higher score."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_rl.algorithms.preference import calibration_error, pair_calibration
from megatron_rl.metrics.reduce import Metrics, derived, mean


def pair_metrics(chosen: Tensor, rejected: Tensor, prefix: str = "preference") -> Metrics:
    """Of pairs [P] of scores. The names are TRL's, where it has them.

    accuracy: share of the pairs in which the chosen one has the higher score, equal ones counting half; margin: mean
    difference; chosen, rejected: mean scores; calibration_error: how far the share of right pairs is from what the model gives
    them, sigmoid(difference), mean over ten bins of it.
    """
    chosen, rejected, count = chosen.detach(), rejected.detach(), len(chosen)
    right = ((chosen - rejected).sign() + 1) / 2
    return {
        f"{prefix}/accuracy": mean(right.sum(), count),
        f"{prefix}/margin": mean((chosen - rejected).sum(), count),
        f"{prefix}/chosen": mean(chosen.sum(), count),
        f"{prefix}/rejected": mean(rejected.sum(), count),
        f"{prefix}/calibration_error": derived(_calibration, pair_calibration(chosen, rejected).numpy()),
    }


def _calibration(sums: Any) -> float:
    return float(calibration_error(torch.as_tensor(sums)))
