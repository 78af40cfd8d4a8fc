"""The evolution predictor of Pr2: a linear map beside each router that learns where the router will go."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from megatron_rl.routing.table import route_kl

PredictorLoss = Literal["kl", "delta"]


class RoutePredictor(nn.Module):
    """Bias for router logits from the router's input, `[..., d]` -> `[..., E]` fp32; zero at the start (Pr2, Section 4.1).

    Its weight `[E, d]` is fp32 whatever the model's dtype: it changes by less than bf16 resolves.
    """

    def __init__(self, hidden_size: int, num_experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_experts, hidden_size, dtype=torch.float32))

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the bias of router inputs `[..., d]`, `[..., E]`."""
        return predicted_bias(hidden, self.weight)


def predicted_bias(hidden: Tensor, weight: Tensor) -> Tensor:
    """W_p h in fp32: hidden `[..., d]`, weight `[E, d]` -> `[..., E]`."""
    return nn.functional.linear(hidden.to(weight.dtype), weight)


def relative_horizon(update: int, updates: int) -> float:
    """How far the mini-batch of an update looks ahead, as a multiple of the mean over the updates of its rollout batch.

    update: from 0, so that many updates move the router before it; updates: of the rollout batch, at least 2, of mean
    (updates - 1) / 2. Ours; the paper's bias is one for all. Relative, so that a predictor stands for the same drift with and
    without, and its learning rate for the same number of rollout batches, whatever their number of updates.
    """
    return 2 * update / (updates - 1)


def predictive_loss(
    current_logits: Tensor, recorded_logits: Tensor, predicted_bias: Tensor, *, score_function: str = "softmax"
) -> Tensor:
    """Mean over tokens of KL(stopgrad(rho) || rho_hat), rho_hat of stopgrad(z_old) + bias (Pr2, Eq. 8, one layer).

    current_logits, recorded_logits, predicted_bias: `[T, E]`. Gradients reach predicted_bias alone.
    """
    _check(current_logits, recorded_logits, predicted_bias)
    return route_kl(current_logits.detach(), recorded_logits.detach() + predicted_bias, score_function).mean()


def delta_loss(
    current_logits: Tensor, recorded_logits: Tensor, predicted_bias: Tensor, *, score_function: str = "softmax"
) -> Tensor:
    """Mean over tokens of |bias - stopgrad(z - z_old)|^2 (Pr2, Appendix G).

    For softmax both are centered over the experts, since it does not see a common shift; sigmoid scores do.
    """
    _check(current_logits, recorded_logits, predicted_bias)
    error = predicted_bias - (current_logits - recorded_logits).detach()
    if score_function == "softmax":
        error = error - error.mean(-1, keepdim=True)
    return error.square().sum(-1).mean()


def _check(*tensors: Tensor) -> None:
    shapes = [tuple(t.shape) for t in tensors]
    if len(set(shapes)) > 1 or len(shapes[0]) != 2:
        raise ValueError(f"router logits of shapes {shapes}: current, recorded and bias are all [T, E]")
