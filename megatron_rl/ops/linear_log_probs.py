"""Log-probs from hidden states and head weight, chunk by chunk: only the logits of one chunk exist at a time.

The gradients of hidden states and weight are accumulated in a loop over chunks. If all tokens fit into one chunk, its logits
are kept for the backward pass. Otherwise the backward pass computes the logits of each chunk again (four matrix multiplications
of the head's size in total). If `token_loss` gives the loss of each token, the forward pass computes the gradients at once, and
three matrix multiplications are enough (as in Liger Kernel's fused linear losses, arXiv 2410.10989).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from megatron_rl.ops import batch_invariant
from megatron_rl.ops.device import LateChecks, check
from megatron_rl.ops.masked_log_softmax import (
    IGNORE,
    KeptTokens,
    MaskedLogSoftmax,
    Rows,
    check_options,
    check_targets,
    evaluate,
    write_gradient,
)
from megatron_rl.ops.matmuls import HeadGradients, fp32_product, scaled, token_chunks

TokenLoss = Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor], torch.Tensor]
"""Function (log_probs [n], entropy [n] or None, rows [n]: indices among the T tokens) -> loss of these tokens, a scalar."""

_OP = "linear_log_probs"


def linear_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    log_rho: float | None,
    temperature: float = 1.0,
    tp_group: dist.ProcessGroup | None = None,
    with_entropy: bool = False,
    vocab_size: int | None = None,
    kept: KeptTokens | None = None,
    chunk_tokens: int = 2048,
    token_loss: TokenLoss | None = None,
    fp32_logits: bool = False,
    identical: bool = False,
    rows: torch.Tensor | None = None,
    late: LateChecks | None = None,
) -> MaskedLogSoftmax:
    """Return `masked_log_softmax` of hidden @ weight^T, with logits of at most `chunk_tokens` tokens at a time.

    hidden [T, H] and weight [V / tp, H] have one dtype. targets: [T] int64; -100 ignores a row, which is then not multiplied
    by the head. vocab_size: vocabulary of the model; columns beyond it (Megatron's padding) are left out of the softmax. With
    tp_group each rank holds an equal share of the rows of `weight`. The gradient of `hidden` is then only this rank's part;
    the caller sums the parts, as with Megatron's column-parallel layers. kept: restricts the softmax of each token to its
    kept tokens.

    fp32_logits: bf16 hidden and weight give fp32 logits, as in SGLang with --enable-fp32-lm-head. Products of bf16 numbers are
    exact in fp32, so nothing is rounded to bf16 before the softmax. A chunk's logits take twice the memory. The gradient of the
    logits is rounded to bf16 for its products with hidden and weight; these products sum in fp32 as always.

    identical: the bits of a log-prob depend only on the hidden state of its token and equal those of an engine that uses the
    same operators (ops/batch_invariant.py). Logits are in fp32. Gradients are computed from the same logits.

    token_loss: for a loss that is a sum of terms of single tokens with a normalizer known in advance (PPO/GRPO clipping,
    REINFORCE, cross entropy). It does not work for a loss whose terms use the log-probs of other tokens (GSPO's sequence
    ratio). The caller computes the same loss from the returned values. The gradient that reaches this function in the backward
    pass must be the gradient of token_loss times one number.

    rows: [n] int64, the rows whose target is not -100, in order, if the caller knows them; the caller must then check the
    targets too. late: collects errors until the caller calls `late.look()`. With both arguments nothing here waits for a GPU.

    Errors: ValueError as in masked_log_softmax. RuntimeError in the backward if the gradient does not fit token_loss.
    """
    _check(hidden, weight, targets, vocab_size, chunk_tokens)
    check_options(log_rho, temperature)
    if rows is None:
        check_targets(targets, vocab_size or weight.shape[0] * (tp_group.size() if tp_group is not None else 1))
        rows = (targets != IGNORE).nonzero(as_tuple=True)[0]
    if not torch.is_grad_enabled():
        token_loss = None  # there will be no backward
    settings = _Settings(
        log_rho,
        temperature,
        tp_group,
        with_entropy,
        vocab_size,
        kept,
        chunk_tokens,
        token_loss,
        fp32_logits,
        identical,
        late,
    )
    found: Any = _LinearLogProbs.apply(hidden[rows], weight, targets[rows], rows, settings)
    log_probs, entropy, *rest = found
    in_support, coverage, margin, pruned = rest

    def all_rows(values: torch.Tensor, ignored: float) -> torch.Tensor:
        return values.new_full((len(targets),), ignored).index_copy(0, rows, values)

    return MaskedLogSoftmax(
        all_rows(log_probs, 0.0),
        all_rows(in_support, False),
        all_rows(coverage, 1.0),
        None if entropy is None else all_rows(entropy, 0.0),
        all_rows(margin, 0.0),
        all_rows(pruned, 0.0),
    )


def _check(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, vocab_size: int | None, chunk_tokens: int
) -> None:
    def require(condition: bool, message: str) -> None:
        if not condition:
            raise ValueError(f"{_OP}: {message}")

    shapes = f"hidden {list(hidden.shape)}, weight {list(weight.shape)}, targets {list(targets.shape)}"
    require(
        hidden.ndim == weight.ndim == 2 and hidden.shape[1] == weight.shape[1], f"{shapes} must be [T, H], [V, H], [T]"
    )
    require(targets.shape == hidden.shape[:1], f"{shapes} must be [T, H], [V, H], [T]")
    floating = (torch.float32, torch.bfloat16, torch.float64)
    require(hidden.dtype in floating, f"hidden is {hidden.dtype}, must be fp32, bf16 or fp64")
    require(hidden.dtype == weight.dtype, f"hidden is {hidden.dtype}, weight {weight.dtype}: must be alike")
    require(targets.dtype == torch.int64, f"targets are {targets.dtype}, must be int64")
    require(
        hidden.device == weight.device == targets.device,
        f"hidden is on {hidden.device}, weight on {weight.device}, targets on {targets.device}",
    )
    require(vocab_size is None or vocab_size >= 1, f"vocab_size {vocab_size} must be at least 1")
    require(chunk_tokens >= 1, f"chunk_tokens {chunk_tokens} must be at least 1")


@dataclass(frozen=True)
class _Settings:
    log_rho: float | None
    temperature: float
    tp_group: dist.ProcessGroup | None
    with_entropy: bool
    vocab_size: int | None
    kept: KeptTokens | None
    chunk_tokens: int
    token_loss: TokenLoss | None
    fp32_logits: bool
    identical: bool
    late: LateChecks | None

    def logits(self, hidden: torch.Tensor, weight: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        if self.identical:
            logits = batch_invariant.linear(hidden, weight, dtype=torch.float32)
        else:
            logits = fp32_product(hidden, weight) if self.fp32_logits else hidden @ weight.t()
        first = self.tp_group.rank() * weight.shape[0] if self.tp_group is not None else 0
        if self.vocab_size is not None:
            logits[:, max(0, self.vocab_size - first) :] = -torch.inf
        if self.kept is not None:
            self.kept.remove_others(logits, rows, first)
        return logits

    def evaluate(
        self, logits: torch.Tensor, targets: torch.Tensor, rows: torch.Tensor
    ) -> tuple[MaskedLogSoftmax, Rows]:
        options = (self.log_rho, self.temperature, self.tp_group, self.with_entropy)
        value, state = evaluate(logits, targets, *options, names=rows, late=self.late)
        if self.identical:
            first = self.tp_group.rank() * logits.shape[1] if self.tp_group is not None else 0
            log_probs = batch_invariant.log_probs(
                logits, targets - first, self.log_rho, self.temperature, partial(_reduce, self.tp_group)
            )
            value = replace(value, log_probs=log_probs)
        return value, state


def _reduce(group: dist.ProcessGroup | None, x: torch.Tensor, operation: str) -> None:
    if group is not None and group.size() > 1:
        dist.all_reduce(x, op=dist.ReduceOp.MAX if operation == "max" else dist.ReduceOp.SUM, group=group)


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        rows: torch.Tensor,
        settings: _Settings,
    ) -> tuple[torch.Tensor | None, ...]:
        chunks = token_chunks(len(hidden), settings.chunk_tokens)
        token_loss = settings.token_loss if len(chunks) > 1 and any(ctx.needs_input_grad[:2]) else None
        wanted = {"of_weight": ctx.needs_input_grad[1]}
        gradients = HeadGradients(hidden, weight, len(chunks), **wanted) if token_loss is not None else None
        values, states, sent = [], [], []
        logits = weight.new_empty(0)
        for chunk in chunks:
            logits = settings.logits(hidden[chunk], weight, rows[chunk])
            value, state = settings.evaluate(logits, targets[chunk], rows[chunk])
            values.append(value)
            states.append(state)
            if token_loss is not None and gradients is not None:
                grads = _token_gradients(token_loss, value, rows[chunk])
                write_gradient(state, logits, *grads, logits)
                gradients.add(chunk, hidden[chunk], weight, logits)
                sent.append(torch.stack([g if g is not None else torch.zeros_like(value.log_probs) for g in grads]))

        ctx.settings, ctx.fused = settings, gradients is not None
        ctx.set_materialize_grads(False)
        if gradients is not None:
            ctx.save_for_backward(gradients.hidden, gradients.weight, torch.cat(sent, 1))
            ctx.weight_dtype = weight.dtype
        else:
            ctx.numbers = [(s.first_column, s.log_rho, s.temperature) for s in states]
            # Nothing else holds these logits, so the backward may overwrite them.
            ctx.only_logits = logits if len(chunks) == 1 else None
            ctx.save_for_backward(hidden, weight, rows, *(t for state in states for t in state.tensors()))
        if not values:
            nothing = hidden.new_zeros(0, dtype=torch.promote_types(hidden.dtype, torch.float32))
            entropy = nothing if settings.with_entropy else None
            values = [MaskedLogSoftmax(nothing, nothing > 0, nothing, entropy, nothing, nothing)]
        names = ("log_probs", "in_support", "coverage", "margin", "pruned")
        joined = [torch.cat([getattr(v, name) for v in values]) for name in names]
        entropy = torch.cat([v.entropy for v in values if v.entropy is not None]) if settings.with_entropy else None
        ctx.mark_non_differentiable(*joined[1:])
        return joined[0], entropy, *joined[1:]

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_log_probs: torch.Tensor | None, grad_entropy: torch.Tensor | None, *_: None
    ) -> tuple[torch.Tensor | None, ...]:
        if ctx.fused:
            hidden, weight, sent = ctx.saved_tensors
            factor = _factor(sent, grad_log_probs, grad_entropy, ctx.settings.late)
            of_weight = None if weight is None else scaled(weight, factor, ctx.weight_dtype)
            return scaled(hidden, factor, hidden.dtype), of_weight, None, None, None
        hidden, weight, rows, *tensors = ctx.saved_tensors
        made, ctx.only_logits = ctx.only_logits, None  # a second backward computes the logits again
        states = [Rows(*tensors[5 * i : 5 * i + 5], *numbers) for i, numbers in enumerate(ctx.numbers)]
        chunks = token_chunks(len(hidden), ctx.settings.chunk_tokens)
        gradients = HeadGradients(hidden, weight, len(chunks), of_weight=ctx.needs_input_grad[1])
        for chunk, state in zip(chunks, states, strict=True):
            logits = ctx.settings.logits(hidden[chunk], weight, rows[chunk]) if made is None else made
            of_log_probs, of_entropy = (None if g is None else g[chunk] for g in (grad_log_probs, grad_entropy))
            write_gradient(state, logits, of_log_probs, of_entropy, logits)
            gradients.add(chunk, hidden[chunk], weight, logits)
        of_weight = None if gradients.weight is None else gradients.weight.to(weight.dtype)
        return gradients.hidden, of_weight, None, None, None


def _token_gradients(
    token_loss: TokenLoss, value: MaskedLogSoftmax, rows: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    log_probs, entropy = value.log_probs.detach().requires_grad_(), value.entropy
    if entropy is not None:
        entropy = entropy.detach().requires_grad_()
    with torch.enable_grad():
        loss = token_loss(log_probs, entropy, rows)
    given = [log_probs] if entropy is None else [log_probs, entropy]
    grads = torch.autograd.grad(loss, given, allow_unused=True) if loss.requires_grad else [None] * len(given)
    return grads[0] if grads[0] is not None else torch.zeros_like(value.log_probs), grads[1] if len(grads) > 1 else None


def _factor(
    sent: torch.Tensor,
    grad_log_probs: torch.Tensor | None,
    grad_entropy: torch.Tensor | None,
    late: LateChecks | None,
) -> torch.Tensor:
    """Return the factor between the incoming gradients [T] and token_loss's gradients [2, T]. Errors: RuntimeError."""
    came = torch.stack([torch.zeros_like(sent[0]) if g is None else g for g in (grad_log_probs, grad_entropy)])
    sent, came = sent.flatten(), came.flatten()
    largest = sent.nan_to_num(0.0, 0.0, 0.0).abs().argmax().view(1)  # the host does not read an index of one dimension
    factor = torch.where(sent[largest] == 0, 1.0, came[largest] / sent[largest])
    expected = factor * sent
    close = (came - expected).abs() <= 1e-4 * expected.abs() + 1e-6 * expected[largest].abs()
    wrong = ~(close | (came.isnan() & sent.isnan()))  # a NaN of the loss itself is passed on
    check(wrong, lambda _: RuntimeError(_WRONG_LOSS), late)
    return factor


_WRONG_LOSS = (
    f"{_OP}: the incoming gradient is not the gradient of token_loss times one number: either token_loss differs from the"
    " loss, or the loss is not a sum over tokens with a normalizer known in advance (like GSPO); leave token_loss out,"
    " and the backward computes the logits again"
)
