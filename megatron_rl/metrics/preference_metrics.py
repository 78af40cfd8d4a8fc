"""Metrics of preference pairs and of labeled scores: accuracy, margin and calibration."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_rl.algorithms.preference import area_under_curve, calibration_error, label_calibration, pair_calibration
from megatron_rl.metrics.reduce import Metrics, derived, mean


def pair_metrics(chosen: Tensor, rejected: Tensor) -> Metrics:
    """Return metrics of the scores of P pairs, [P] each. If TRL has the same metric, the name is TRL's.

    accuracy: share of the pairs whose chosen response has the higher score; equal scores count half. margin: mean difference.
    chosen, rejected: mean scores. calibration_error: difference between the share of right pairs and the model's probability
    sigmoid(difference), as a mean over ten bins of that probability.
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
    """Return metrics of all N scores of an update, which are logits of labels from 0 to 1.

    A label above 1/2 is positive, below 1/2 negative, and 1/2 is neither. accuracy: share of scores whose sign agrees with the
    label; scores of 0 and labels of 1/2 count half. positives: share of positive labels; a label of 1/2 counts half. auc: area
    under the ROC curve; 1/2 for scores without information, whatever the share of positives. The key auc is missing if there
    are no positive or no negative labels. calibration_error: difference between mean label and mean probability, as
    a mean over ten bins of the probability.
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
