"""Terms that keep a router's experts in use: losses of its scores and logits, and biases that move with the load."""

from __future__ import annotations

import torch
from torch import Tensor


def load_balancing_terms(scores: Tensor, loads: Tensor) -> Tensor:
    """Each token's term [T] of the load-balancing loss (Fedus et al. 2021, arXiv 2101.03961, eq. 4), in the type of scores.

    With E experts, p the scores of a token, which add up to 1, and f the share of the loads that each expert has: E x the sum
    of f p. The mean over the tokens that the loads are of is the loss: 1 where all experts have the same load or the same
    score, and E where one expert has everything. Only scores have a gradient.

    scores: [T, E]; loads: [E], choices of each expert over all tokens, those of other ranks included; all 0: the terms are 0.

    Hugging Face's load_balancing_loss_func is the same of one layer, times the number of experts of a token.
    """
    shares = loads.detach().to(scores.dtype)
    return scores @ (shares / shares.sum().clamp(min=1)) * scores.shape[-1]


def z_terms(logits: Tensor) -> Tensor:
    """Each token's term [T] of the router's z-loss (Zoph et al. 2022, arXiv 2202.08906, eq. 5): logsumexp(logits)^2.

    logits: [T, E]. The mean over tokens is the loss, which keeps logits small, where their rounding is small too.
    """
    return torch.logsumexp(logits, dim=-1).square()


@torch.no_grad()
def balanced_bias(bias: Tensor, loads: Tensor, rate: float) -> Tensor:
    """Biases [E] after an update: bias + rate x sign(mean load - load) (Wang et al. 2024, arXiv 2408.15664, algorithm 1).

    A bias is added to a router's scores where it chooses, and not where it weighs (DeepSeek-V3, arXiv 2412.19437, eq. 16).
    loads: [..., E], choices of each expert in the update; biases likewise.
    """
    return bias + rate * torch.sign(loads.mean(-1, keepdim=True) - loads).to(bias.dtype)
