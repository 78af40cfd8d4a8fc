"""Metrics of pairs and of labels: how often, by how much and how surely scores are right."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_rl.algorithms.preference import area_under_curve, calibration_error, label_calibration, pair_calibration
from megatron_rl.metrics.reduce import Metrics, derived, mean


def pair_metrics(chosen: Tensor, rejected: Tensor) -> Metrics:
    """Metrics of pairs [P] of scores. The names are TRL's, where it has them.

    accuracy: share of the pairs in which the chosen one has the higher score, equal ones counting half; margin: mean
    difference; chosen, rejected: mean scores; calibration_error: how far the share of right pairs is from what the model gives
    them, sigmoid(difference), mean over ten bins of it.
    """
    chosen, rejected, count = chosen.detach(), rejected.detach(), len(chosen)
    right = ((chosen - rejected).sign() + 1) / 2
    return {
        "preference/accuracy": mean(right.sum(), count),
        "preference/margin": mean((chosen - rejected).sum(), count),
        "preference/chosen": mean(chosen.sum(), count),
        "preference/rejected": mean(rejected.sum(), count),
        "preference/calibration_error": derived(_calibration, pair_calibration(chosen, rejected).numpy()),
    }


def label_metrics(scores: Tensor, labels: Tensor) -> Metrics:
    """Metrics of all N scores of an update, logits of labels from 0 to 1. Above 1/2 a label is a yes, below a no, 1/2 neither.

    accuracy: share of the scores on the label's side, where scores of 0 and labels of 1/2 count half; positives: share of the
    yeses, a 1/2 counting half; auc: area under the ROC curve, 1/2 for who knows nothing, whatever that share is, and left out
    where all are of one kind; calibration_error: how far the mean label is from the mean probability, mean over ten bins of it.
    """
    scores, labels = scores.detach(), labels.detach()
    sides = (labels - 0.5).sign()
    found = {
        "preference/accuracy": mean(((scores.sign() * sides + 1) / 2).sum(), len(scores)),
        "preference/positives": mean(((sides + 1) / 2).sum(), len(scores)),
        "preference/calibration_error": derived(_calibration, label_calibration(scores, labels).numpy()),
    }
    area = area_under_curve(scores[sides > 0], scores[sides < 0])
    return found if area.isnan() else found | {"preference/auc": mean(float(area), 1)}


def _calibration(sums: Any) -> float:
    return float(calibration_error(torch.as_tensor(sums)))
