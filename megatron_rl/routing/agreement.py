"""How far two routes of the same tokens are apart: sets of experts, and distributions over them."""

from __future__ import annotations

import torch
from torch import Tensor


def deviations(a: Tensor, b: Tensor) -> Tensor:
    """Slots of each token in which two sets of k experts differ: `[T, k]`, `[T, k]` -> `[T]` int64 in 0..k.

    The order within a set does not matter; a set names no expert twice. Errors: ValueError for different shapes.
    """
    if a.shape != b.shape or a.dim() != 2:
        raise ValueError(f"routes of shapes {tuple(a.shape)} and {tuple(b.shape)}: two [T, k] are compared")
    found = (a.long()[:, :, None] == b.long()[:, None, :]).any(-1)
    return (~found).sum(-1)


def topk_agreement(a: Tensor, b: Tensor) -> Tensor:
    """Mean over tokens of |A and B| / k, a scalar in 0..1 (Pr2, Section 5.4). a, b: `[T, k]` expert ids, any order."""
    return 1 - deviations(a, b).double().mean() / a.shape[1]


def deviation_counts(a: Tensor, b: Tensor, counted: Tensor) -> Tensor:
    """`[k + 1]` int64: tokens whose sets differ in 0, 1, ..., k slots, of those that `counted` `[T]` bool names.

    Without a step that would wait for a GPU, as choosing rows or torch.bincount would.
    """
    counts = counted.new_zeros(a.shape[1] + 1, dtype=torch.int64)
    return counts.index_add_(0, deviations(a, b), counted.long())


def routing_log_probs(logits: Tensor, score_function: str = "softmax") -> Tensor:
    """The distribution over experts behind router logits, `[..., E]` -> `[..., E]` fp32 (fp64 stays), as logarithms.

    softmax: log-softmax, whether the model takes its top-k before or after it. sigmoid (DeepSeek-V3): the scores over
    their sum, which is how the model weights its experts; its bias for selection belongs to no distribution.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if score_function == "sigmoid":
        logits = torch.nn.functional.logsigmoid(logits)
    elif score_function != "softmax":
        raise ValueError(f"score_function = {score_function!r}: softmax or sigmoid")
    return logits.log_softmax(-1)


def route_kl(current: Tensor, recorded: Tensor, score_function: str = "softmax") -> Tensor:
    """KL(current || recorded) of each token, `[T]` in nats; both `[T, E]` router logits."""
    return kl_divergence(*(routing_log_probs(z, score_function) for z in (current, recorded)))


def kl_divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p || q) over the last dimension, in nats."""
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def total_variation(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Half the sum of |p - q| over the last dimension: the soft router staleness of Pr2, Appendix B.2."""
    return (log_p.exp() - log_q.exp()).abs().sum(-1) / 2
