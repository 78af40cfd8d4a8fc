"""Functions from a token's logits to one number, computed chunk by chunk: only the logits of one chunk exist at a time.

The forward keeps a few numbers per token. The backward computes the logits of each chunk again from hidden states and
weights. If all tokens are in one chunk, the products of the forward are kept instead.
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
    """Function of the logits, and its gradient. `logits` starts with the student's, [n, V / tp], and may be overwritten."""

    def values(self, logits: list[torch.Tensor], chunk: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the values [n] of the tokens `chunk`, the same on all ranks, and [n, c] to keep for `gradient`."""
        ...

    def gradient(self, logits: list[torch.Tensor], chunk: slice, kept: torch.Tensor) -> torch.Tensor:
        """Return the gradient [n, V / tp] of the values with respect to the student's logits, without communication."""
        ...


@dataclass(frozen=True)
class Heads:
    """Options of the step from hidden states to logits."""

    temperature: float
    tp_group: dist.ProcessGroup | None
    vocab_size: int | None
    chunk_tokens: int
    fp32_logits: bool
    dtype: torch.dtype
    """Dtype of the logits after the product."""
    padding: float
    """Logit of columns beyond vocab_size."""

    def product(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Multiply hidden [n, H] by weight [V / tp, H] transposed: [n, V / tp]."""
        return fp32_product(hidden, weight) if self.fp32_logits else hidden @ weight.t()

    def logits(self, products: Iterable[torch.Tensor], keep: bool) -> list[torch.Tensor]:
        """Convert products to `dtype` and divide them by the temperature.

        keep: True leaves the products unchanged; False lets the logits overwrite them where possible.
        """
        found = []
        for product in products:
            scaled = product.to(self.dtype, copy=keep).div_(self.temperature)
            if self.vocab_size is not None:
                first = first_column(self.tp_group, scaled.shape[1])
                scaled[:, max(0, self.vocab_size - first) :] = self.padding
            found.append(scaled)
            del product  # free it before the next product
        return found


def of_tokens(
    hidden: torch.Tensor, weight: torch.Tensor, heads: Heads, terms: TokenTerms, *teacher: torch.Tensor
) -> torch.Tensor:
    """Apply `terms` to the logits of hidden [T, H] and weight [V / tp, H]: [T] in `heads.dtype`, differentiable in both.

    teacher: nothing, or hidden states and weight of a second head, whose logits are passed to `terms` too; no gradient.
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
    """Yield the product of each pair (hidden states, weight), one after another."""
    return (heads.product(hidden[chunk], weight) for hidden, weight in zip(pairs[::2], pairs[1::2], strict=True))


def first_column(group: dist.ProcessGroup | None, columns: int) -> int:
    """Return the vocabulary id of this rank's first column."""
    return group.rank() * columns if group is not None else 0


def log_sum_of_ranks(logs: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Return the log of the sum over ranks of exp(logs), element by element; -inf if `logs` is -inf on all ranks."""
    if group is None or group.size() == 1:
        return logs
    most = logs.clone()
    dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
    most = torch.where(most == -torch.inf, 0.0, most)
    total = (logs - most).exp()
    dist.all_reduce(total, group=group)
    return most + total.log()


def require(op: str, condition: bool, message: str) -> None:
    """Raise ValueError that names the operator, unless the condition holds."""
    if not condition:
        raise ValueError(f"{op}: {message}")


def check_head(op: str, hidden: torch.Tensor, weight: torch.Tensor, names: tuple[str, str]) -> None:
    """Check shapes, dtypes and devices of hidden states and weight. Errors: ValueError."""
    shapes = f"{names[0]} {list(hidden.shape)}, {names[1]} {list(weight.shape)}"
    fit = hidden.ndim == weight.ndim == 2 and hidden.shape[1] == weight.shape[1]
    require(op, fit, f"{shapes} must be [T, H], [V, H]")
    require(op, hidden.dtype in _FLOATING, f"{names[0]} is {hidden.dtype}, must be fp32, bf16 or fp64")
    types = f"{names[0]} is {hidden.dtype}, {names[1]} {weight.dtype}"
    require(op, hidden.dtype == weight.dtype, f"{types}: must be alike")
    places = f"{names[0]} is on {hidden.device}, {names[1]} on {weight.device}"
    require(op, hidden.device == weight.device, places)


def check_numbers(op: str, vocab_size: int | None, chunk_tokens: int) -> None:
    """Check vocab_size and chunk_tokens. Errors: ValueError."""
    require(op, vocab_size is None or vocab_size >= 1, f"vocab_size {vocab_size} must be at least 1")
    require(op, chunk_tokens >= 1, f"chunk_tokens {chunk_tokens} must be at least 1")


# -- label over mean -----------------------------------------------------------------------------------------------------
# The logit of each label minus the mean logit of the vocabulary. Label smoothing adds this term to a cross entropy.
# With the logits z, the label y and the share e that is spread over the V tokens of the vocabulary,
#     (1 - e) (-log p_y) + e mean over v of (-log p_v) = -log p_y + e (z_y - mean of z),
# because log p_v = z_v - log sum exp z, and the second part is the same for all v. The mean of the logits is the hidden state
# times the mean row of the head's weight, so that no logits are needed.


def label_over_mean(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    tp_group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
) -> torch.Tensor:
    """Return each token's target logit minus its mean logit, [n] fp32 (fp64 if hidden is fp64).

    The result is differentiable in hidden and weight.

    hidden [n, H] and weight [V / tp, H] have one dtype. targets: [n] int64 ids of the whole vocabulary, below vocab_size;
    no target is ignored. vocab_size: vocabulary of the model; rows beyond it (Megatron's padding) are left out of the mean.
    With tp_group each rank holds an equal share of the rows of `weight`. The gradient of `hidden` is then only this rank's
    part; the caller sums the parts.

    Errors: ValueError if shapes or dtypes do not fit.
    """
    shapes = f"hidden {list(hidden.shape)}, weight {list(weight.shape)}, targets {list(targets.shape)}"
    fits = hidden.ndim == weight.ndim == 2 and hidden.shape[1] == weight.shape[1] and targets.shape == hidden.shape[:1]
    if not fits:
        raise ValueError(f"label_over_mean: {shapes} must be [n, H], [V, H], [n]")
    if hidden.dtype != weight.dtype or targets.dtype != torch.int64:
        types = f"hidden is {hidden.dtype}, weight {weight.dtype}, targets {targets.dtype}"
        raise ValueError(f"label_over_mean: {types}: hidden and weight must be alike, targets int64")
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
    """Return [n, H]: the weight's row of the label minus the mean row; only this rank's part of the difference."""
    mean = weight[: ctx.rows].sum(0, dtype=_exact(weight)) / ctx.vocabulary
    return weight[local].to(_exact(weight)) * own[:, None] - mean
