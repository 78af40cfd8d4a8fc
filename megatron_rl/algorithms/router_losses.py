"""Losses and biases that balance the load of a router's experts. Losses act on scores and logits; biases follow the load."""

from __future__ import annotations

import torch
from torch import Tensor


def load_balancing_terms(scores: Tensor, loads: Tensor) -> Tensor:
    """Return each token's term [T] of the load-balancing loss, in the dtype of `scores`.

    Source: Fedus et al. 2021, arXiv 2101.03961, eq. 4. With E experts, a token's scores p (their sum is 1) and each expert's
    share f of the load, the term is E x the sum over experts of f p. The loss is the mean over the tokens from which the loads
    were counted. This loss is 1 if all experts have the same load or the same score, and E if one expert has the whole load and
    score. Only `scores` get a gradient.

    scores: [T, E]; loads: [E], how often each expert was chosen over all tokens, on all ranks. If all loads are 0, the terms
    are 0.

    For one layer, Hugging Face's load_balancing_loss_func gives this loss times the number of experts per token.
    """
    shares = loads.detach().to(scores.dtype)
    return scores @ (shares / shares.sum().clamp(min=1)) * scores.shape[-1]


def z_terms(logits: Tensor) -> Tensor:
    """Return each token's term [T] of the router's z-loss (Zoph et al. 2022, arXiv 2202.08906, eq. 5): logsumexp(logits)^2.

    logits: [T, E]. The loss is the mean over tokens. It keeps the logits small, so that their rounding errors are small too.
    """
    return torch.logsumexp(logits, dim=-1).square()


@torch.no_grad()
def balanced_bias(bias: Tensor, loads: Tensor, rate: float) -> Tensor:
    """Return the biases after an update: bias + rate x sign(mean load - load).

    Source: Wang et al. 2024, arXiv 2408.15664, algorithm 1. The bias is added to the router's scores to choose experts, but not
    to compute the experts' weights (DeepSeek-V3, arXiv 2412.19437, eq. 16).
    bias, loads: [..., E]; loads: how often each expert was chosen in the update.
    """
    return bias + rate * torch.sign(loads.mean(-1, keepdim=True) - loads).to(bias.dtype)
