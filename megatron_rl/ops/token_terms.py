"""A number of each token from its logits, chunk by chunk: the logits of more than one chunk never exist.

What the forward keeps are a few numbers a token. The backward computes each chunk's logits again from hidden states and
weights, unless all tokens are one chunk: then the products of the forward are kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from megatron_rl.ops.matmuls import HeadGradients, fp32_product, token_chunks

_FLOATING = (torch.float32, torch.bfloat16, torch.float64)


class TokenTerms(Protocol):
    """Terms to compute. Logits come as a list, the student's [n, V / tp] first, and may be overwritten."""

    def values(self, logits: list[torch.Tensor], chunk: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Numbers [n] of tokens `chunk`, the same on all ranks, and what `gradient` needs of each of them, [n, c]."""
        ...

    def gradient(self, logits: list[torch.Tensor], chunk: slice, kept: torch.Tensor) -> torch.Tensor:
        """The numbers' gradient [n, V / tp] with respect to the student's logits; no rank waits for another."""
        ...


@dataclass(frozen=True)
class Heads:
    """How hidden states become logits."""

    temperature: float
    tp_group: dist.ProcessGroup | None
    vocab_size: int | None
    chunk_tokens: int
    fp32_logits: bool
    dtype: torch.dtype
    """Dtype of the logits once they are multiplied."""
    padding: float
    """The logit of columns beyond vocab_size."""

    def product(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """[n, H], [V / tp, H] -> [n, V / tp]."""
        return fp32_product(hidden, weight) if self.fp32_logits else hidden @ weight.t()

    def logits(self, products: Iterable[torch.Tensor], keep: bool) -> list[torch.Tensor]:
        """Products in `dtype` and divided by the temperature; they are overwritten where that saves memory, or kept."""
        found = []
        for product in products:
            scaled = product.to(self.dtype, copy=keep).div_(self.temperature)
            if self.vocab_size is not None:
                first = first_column(self.tp_group, scaled.shape[1])
                scaled[:, max(0, self.vocab_size - first) :] = self.padding
            found.append(scaled)
            del product  # not beside the next one
        return found


def of_tokens(
    hidden: torch.Tensor, weight: torch.Tensor, heads: Heads, terms: TokenTerms, *teacher: torch.Tensor
) -> torch.Tensor:
    """Apply `terms` to hidden [T, H] and weight [V / tp, H], of which it is differentiable: [T] in the heads' dtype.

    teacher: nothing, or another head's hidden states and weight, whose logits `terms` gets too; without gradient.
    """
    found: Any = _OfTokens.apply(hidden, weight, heads, terms, *teacher)
    return found


class _OfTokens(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        heads: Heads,
        terms: TokenTerms,
        *teacher: torch.Tensor,
    ) -> torch.Tensor:
        chunks = token_chunks(len(hidden), heads.chunk_tokens)
        only = len(chunks) == 1
        values, kept = hidden.new_empty(len(hidden), dtype=heads.dtype), []
        products: list[torch.Tensor] = []
        for chunk in chunks:
            made = _products(heads, chunk, hidden, weight, *teacher)
            if only:
                made = products = list(made)
            values[chunk], numbers = terms.values(heads.logits(made, keep=only), chunk)
            kept.append(numbers)
        ctx.heads, ctx.terms, ctx.teachers, ctx.chunks = heads, terms, len(teacher), len(chunks)
        ctx.save_for_backward(hidden, weight, *teacher, *kept, *products)
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, *others = ctx.saved_tensors
        teacher, others = others[: ctx.teachers], others[ctx.teachers :]
        kept, products = others[: ctx.chunks], others[ctx.chunks :]
        gradients = HeadGradients(hidden, weight, ctx.chunks, of_weight=ctx.needs_input_grad[1])
        for chunk, numbers in zip(token_chunks(len(hidden), ctx.heads.chunk_tokens), kept, strict=True):
            made = products or _products(ctx.heads, chunk, hidden, weight, *teacher)
            logits = ctx.heads.logits(made, keep=bool(products))
            slope = ctx.terms.gradient(logits, chunk, numbers)
            del logits
            slope.mul_((grad[chunk] / ctx.heads.temperature)[:, None])
            gradients.add(chunk, hidden[chunk], weight, slope)
        of_weight = None if gradients.weight is None else gradients.weight.to(weight.dtype)
        return gradients.hidden, of_weight, None, None, *[None] * ctx.teachers


def _products(heads: Heads, chunk: slice, *pairs: torch.Tensor) -> Iterable[torch.Tensor]:
    """One after the other, of hidden states and weight in turn."""
    return (heads.product(hidden[chunk], weight) for hidden, weight in zip(pairs[::2], pairs[1::2], strict=True))


def first_column(group: dist.ProcessGroup | None, columns: int) -> int:
    """The id of this rank's first column."""
    return group.rank() * columns if group is not None else 0


def log_sum_of_ranks(logs: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Logarithm of the sum over ranks of exp(logs), element by element; -inf where all of them are."""
    if group is None or group.size() == 1:
        return logs
    most = logs.clone()
    dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
    most = torch.where(most == -torch.inf, 0.0, most)
    total = (logs - most).exp()
    dist.all_reduce(total, group=group)
    return most + total.log()


def require(op: str, condition: bool, message: str) -> None:
    """Raise ValueError naming the operator."""
    if not condition:
        raise ValueError(f"{op}: {message}")


def check_head(op: str, hidden: torch.Tensor, weight: torch.Tensor, names: tuple[str, str]) -> None:
    """Shapes, types and devices of a pair. Errors: ValueError."""
    shapes = f"{names[0]} {list(hidden.shape)}, {names[1]} {list(weight.shape)}"
    fit = hidden.ndim == weight.ndim == 2 and hidden.shape[1] == weight.shape[1]
    require(op, fit, f"{shapes} must be [T, H], [V, H]")
    require(op, hidden.dtype in _FLOATING, f"{names[0]} is {hidden.dtype}, must be fp32, bf16 or fp64")
    types = f"{names[0]} is {hidden.dtype}, {names[1]} {weight.dtype}"
    require(op, hidden.dtype == weight.dtype, f"{types}: must be alike")
    places = f"{names[0]} is on {hidden.device}, {names[1]} on {weight.device}"
    require(op, hidden.device == weight.device, places)


def check_numbers(op: str, vocab_size: int | None, chunk_tokens: int) -> None:
    """Check the numbers that every operator takes. Errors: ValueError."""
    require(op, vocab_size is None or vocab_size >= 1, f"vocab_size {vocab_size} must be at least 1")
    require(op, chunk_tokens >= 1, f"chunk_tokens {chunk_tokens} must be at least 1")


# -- label over mean -----------------------------------------------------------------------------------------------------
# How far the logit of each label is above the mean logit of the vocabulary: what label smoothing adds to a cross entropy.
# With z the logits, y the label and e the share that is spread over the V tokens of the vocabulary,
#     (1 - e) (-log p_y) + e mean over v of (-log p_v) = -log p_y + e (z_y - mean of z),
# as log p_v = z_v - log sum exp z, of which the second part is the same for all. And the mean of the logits is the hidden state
# times the mean row of the head's weight, so that no logits are needed.


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
