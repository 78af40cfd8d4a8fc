"""Importance of a model's layers, heads, channels and experts. Structured pruning keeps the most important ones.

Importance is summed over tokens of calibration data in fp64, so the sums of several micro-batches and processes can be added.
The caller leaves out padding.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def block_influence(inputs: Tensor, outputs: Tensor) -> Tensor:
    """Return the sum over tokens of 1 - cosine between a layer's inputs and outputs, both [T, d]; a scalar.

    This is ShortGPT's block influence (arXiv 2403.03853, eq. 1). Pruning first removes the layers that change the direction of
    their inputs least.
    """
    return (1 - F.cosine_similarity(inputs.double(), outputs.double(), dim=-1)).sum()


def gated_norms(norms: Tensor, experts: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return (sum of gated output norms of each expert, number of its tokens), both [count].

    norms: [T, k], norm of an expert's output times its gate. experts: [T, k] int64, the expert of each norm. Sum divided by
    number is REAP's saliency (arXiv 2510.13999): the mean of gate x norm over the tokens that are routed to the expert.
    """
    flat = experts.flatten()
    sums = torch.zeros(count, dtype=torch.float64, device=norms.device)
    return sums.index_add(0, flat, norms.double().flatten()), flat.bincount(minlength=count).double()


def channel_sums(activations: Tensor, down: Tensor | None = None) -> Tensor:
    """Return the importance [F] of an MLP's inner channels, summed over the tokens of activations [T, F].

    Without `down`, it is the sum of |activation| (Minitron, arXiv 2407.14679). With the output weight down [d, F], it is the
    sum of the squared norm of the channel's contribution to the output: activation^2 x norm of its column^2. This is Wanda's
    |W| x norm of X (arXiv 2306.11695), squared and summed over the channel's weights.
    """
    if down is None:
        return activations.double().abs().sum(0)
    return activations.double().square().sum(0) * down.double().square().sum(0)


def group_norms(heads: Tensor, projection: Tensor) -> Tensor:
    """Return the sum over tokens of the norm of each head group's contribution to the residual stream, [G].

    heads: outputs of attention [T, G, w], where w is the size of a group's query heads. projection: output weight [d, G, w].
    """
    norms = [(heads[:, g].float() @ projection[:, g].float().t()).norm(dim=-1) for g in range(heads.shape[1])]
    return torch.stack([norm.double().sum() for norm in norms])


def largest(importance: Tensor, count: int) -> list[int]:
    """Return the indices of the `count` largest elements of importance [n], in ascending order.

    Of equal elements, the first are chosen.
    """
    return sorted(importance.argsort(descending=True, stable=True)[:count].tolist())
