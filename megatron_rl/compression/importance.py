"""How much each part of a model does on calibration data: what structured pruning keeps the largest of.

Sums over tokens, in fp64, so that those of several micro-batches and processes add up; tokens of padding are left out by the
caller.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def block_influence(inputs: Tensor, outputs: Tensor) -> Tensor:
    """Sum over tokens of 1 - cosine between what enters a layer and what leaves it, both [T, d] -> scalar.

    Block influence of ShortGPT (arXiv 2403.03853, eq. 1): a layer that hardly turns its input is the first to go.
    """
    return (1 - F.cosine_similarity(inputs.double(), outputs.double(), dim=-1)).sum()


def gated_norms(norms: Tensor, experts: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Sums by expert of norms [T, k] of its output times its gate, and the tokens that it got: both [count].

    experts: [T, k] int64, whose output each norm is of. The quotient is REAP's saliency (arXiv 2510.13999): the mean of
    gate x norm over the tokens that are sent to the expert.
    """
    flat = experts.flatten()
    sums = torch.zeros(count, dtype=torch.float64, device=norms.device)
    return sums.index_add(0, flat, norms.double().flatten()), flat.bincount(minlength=count).double()


def channel_sums(activations: Tensor, down: Tensor | None = None) -> Tensor:
    """Sum over tokens for each inner channel of an MLP, whose activations are [T, F] -> [F].

    Without down: of |activation| (Minitron, arXiv 2407.14679). With the weight down [d, F] behind them: of the squared norm of
    what the channel adds to the output, activation^2 x norm of its column^2, which is Wanda's |W| x norm of X (arXiv
    2306.11695) of all its weights, squared and summed.
    """
    if down is None:
        return activations.double().abs().sum(0)
    return activations.double().square().sum(0) * down.double().square().sum(0)


def group_norms(heads: Tensor, projection: Tensor) -> Tensor:
    """Sum over tokens of the norm of what each group of heads adds to the residual stream -> [G].

    heads: outputs of attention [T, G, w], w numbers of a group's query heads; projection: [d, G, w], the weight behind them.
    """
    norms = [(heads[:, g].float() @ projection[:, g].float().t()).norm(dim=-1) for g in range(heads.shape[1])]
    return torch.stack([norm.double().sum() for norm in norms])


def largest(importance: Tensor, count: int) -> list[int]:
    """Places of the `count` largest of [n], in ascending order; of equal ones the first."""
    return sorted(importance.argsort(descending=True, stable=True)[:count].tolist())
