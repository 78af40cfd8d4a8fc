"""How far the logit of each label is above the mean logit of the vocabulary: what label smoothing adds to a cross entropy.

With z the logits, y the label and e the share that is spread over the V tokens of the vocabulary,

    (1 - e) (-log p_y) + e mean over v of (-log p_v) = -log p_y + e (z_y - mean of z),

as log p_v = z_v - log sum exp z, of which the second part is the same for all. And the mean of the logits is the hidden state
times the mean row of the head's weight, so that no logits are needed.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable


def label_over_mean(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    tp_group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
) -> torch.Tensor:
    """z_y - mean of z of each token, [n] in fp32 (fp64 where hidden is), differentiable in hidden and weight.

    hidden [n, H] and weight [V / tp, H] of one type; targets [n] int64 of the whole vocabulary, below vocab_size, none ignored.
    vocab_size: the model's own; rows beyond it (Megatron's padding) belong to no mean. With tp_group each rank holds an equal
    share of the rows of weight, and the gradient of hidden is this rank's part: their sum is the caller's.

    Errors: ValueError for shapes and types that do not fit.
    """
    shapes = f"hidden {list(hidden.shape)}, weight {list(weight.shape)}, targets {list(targets.shape)}"
    fits = hidden.ndim == weight.ndim == 2 and hidden.shape[1] == weight.shape[1] and targets.shape == hidden.shape[:1]
    if not fits:
        raise ValueError(f"label_over_mean: {shapes} must be [n, H], [V, H], [n]")
    if hidden.dtype != weight.dtype or targets.dtype != torch.int64:
        types = f"hidden is {hidden.dtype}, weight {weight.dtype}, targets {targets.dtype}"
        raise ValueError(f"label_over_mean: {types}: must be alike, and int64")
    found: Any = _LabelOverMean.apply(hidden, weight, targets, tp_group, vocab_size)
    return found


class _LabelOverMean(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        group: dist.ProcessGroup | None,
        vocab_size: int | None,
    ) -> torch.Tensor:
        rank, size = (group.rank(), group.size()) if group is not None else (0, 1)
        first = rank * len(weight)
        ctx.vocabulary = size * len(weight) if vocab_size is None else vocab_size
        ctx.rows = min(max(0, ctx.vocabulary - first), len(weight))
        own = (targets >= first) & (targets < first + ctx.rows)
        local = torch.where(own, targets - first, 0)
        ctx.save_for_backward(hidden, weight, local, own)
        found = (hidden.to(_exact(hidden)) * _direction(weight, local, own, ctx)).sum(1)
        if size > 1:
            dist.all_reduce(found, group=group)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, local, own = ctx.saved_tensors
        of_hidden = of_weight = None
        if ctx.needs_input_grad[0]:
            of_hidden = (grad[:, None] * _direction(weight, local, own, ctx)).to(hidden.dtype)
        if ctx.needs_input_grad[1]:
            pulls = grad[:, None] * hidden.to(_exact(hidden))
            sums = torch.zeros(weight.shape, dtype=pulls.dtype, device=weight.device)
            sums[: ctx.rows] = -pulls.sum(0) / ctx.vocabulary
            of_weight = sums.index_add_(0, local, pulls * own[:, None]).to(weight.dtype)
        return of_hidden, of_weight, None, None, None


def _exact(tensor: torch.Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _direction(weight: torch.Tensor, local: torch.Tensor, own: torch.Tensor, ctx: Any) -> torch.Tensor:
    """[n, H]: this rank's part of the label's row of the weight, less that of the mean row."""
    mean = weight[: ctx.rows].sum(0, dtype=_exact(weight)) / ctx.vocabulary
    return weight[local].to(_exact(weight)) * own[:, None] - mean
