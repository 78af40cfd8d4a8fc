"""Evolution predictor of Pr2: a linear map for each router that learns how the router will change."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from megatron_rl.routing.table import route_kl

PredictorLoss = Literal["kl", "delta"]
"""Loss of the predictors: `predictive_loss` (kl) or `delta_loss` (delta)."""


class RoutePredictor(nn.Module):
    """Bias of router logits computed from the router input, `[..., d]` -> `[..., E]` fp32; initially zero (Pr2, Section 4.1).

    The weight `[E, d]` is fp32 for every dtype of the model, because its changes are smaller than the resolution of bf16.
    """

    def __init__(self, hidden_size: int, num_experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_experts, hidden_size, dtype=torch.float32))

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the bias `[..., E]` for router inputs `[..., d]`."""
        return predicted_bias(hidden, self.weight)


def predicted_bias(hidden: Tensor, weight: Tensor) -> Tensor:
    """Return W_p h in fp32: hidden `[..., d]`, weight `[E, d]` -> `[..., E]`."""
    return nn.functional.linear(hidden.to(weight.dtype), weight)


def relative_horizon(update: int, updates: int) -> float:
    """Return the factor of the bias for one update: the number of updates before it, relative to the mean number.

    update: index from 0, equal to the number of updates that change the router before this update. updates: number of updates
    per rollout batch, at least 2. The mean of `update` is therefore (updates - 1) / 2. The paper uses the same bias for all
    updates. The factor is relative to the mean for two reasons: a predictor learns the same drift with and without the factor,
    and the learning rate has the same effect per rollout batch for any number of updates.
    """
    return 2 * update / (updates - 1)


def predictive_loss(
    current_logits: Tensor, recorded_logits: Tensor, predicted_bias: Tensor, *, score_function: str = "softmax"
) -> Tensor:
    """Return the mean over tokens of KL(stopgrad(rho) || rho_hat): Pr2, Eq. 8, for one layer.

    rho: distribution of current_logits. rho_hat: distribution of stopgrad(recorded_logits) + predicted_bias. All arguments are
    `[T, E]`; only predicted_bias gets a gradient.
    """
    _check(current_logits, recorded_logits, predicted_bias)
    return route_kl(current_logits.detach(), recorded_logits.detach() + predicted_bias, score_function).mean()


def delta_loss(
    current_logits: Tensor, recorded_logits: Tensor, predicted_bias: Tensor, *, score_function: str = "softmax"
) -> Tensor:
    """Return the mean over tokens of |predicted_bias - stopgrad(current_logits - recorded_logits)|^2 (Pr2, Appendix G).

    For softmax, the error is centered over the experts, because a common shift of all logits does not change the softmax. For
    sigmoid, the error is not centered, because such a shift changes the scores.
    """
    _check(current_logits, recorded_logits, predicted_bias)
    error = predicted_bias - (current_logits - recorded_logits).detach()
    if score_function == "softmax":
        error = error - error.mean(-1, keepdim=True)
    return error.square().sum(-1).mean()


def _check(*tensors: Tensor) -> None:
    shapes = [tuple(t.shape) for t in tensors]
    if len(set(shapes)) > 1 or len(shapes[0]) != 2:
        raise ValueError(f"router logits of shapes {shapes}: current, recorded and bias must all be [T, E]")
