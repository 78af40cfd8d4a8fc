"""Log-softmax over the min-p safe set, at given targets: Dynamic Vocabulary Pruning (Li et al., eq. 18-20).

The safe set of a row is {j : z_j >= max(z) + log_rho} with z = logits / temperature in fp32. The backward pass treats the safe
set as constant. Probabilities are renormalized over the safe set. log_rho=None keeps the whole vocabulary (plain log-softmax).

The row kernels are in csrc/masked_log_softmax/ (CPU, CUDA). Besides the logits, the backward needs five numbers per row.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.autograd.graph import increment_version

from megatron_rl.ops import masked_log_softmax_torch as plain
from megatron_rl.ops.device import LateChecks, check, upload
from megatron_rl.ops.extensions import masked_log_softmax as compiled

IGNORE = plain.IGNORE
_OP = "masked_log_softmax"


@dataclass(frozen=True)
class MaskedLogSoftmax:
    """Results of `masked_log_softmax`, one number per row [T]; fp32 (fp64 for fp64 logits)."""

    log_probs: torch.Tensor
    """Log-prob of the target over the safe set, differentiable. A target outside of the safe set has -inf with zero
    gradient; an ignored row has 0 with zero gradient."""
    in_support: torch.Tensor
    """bool: True if the target is in the safe set. False for an ignored row."""
    coverage: torch.Tensor
    """Probability mass of the safe set under the full softmax; without gradient. 1 for an ignored row."""
    entropy: torch.Tensor | None
    """Entropy of the distribution over the safe set, differentiable; it does not depend on the target. 0 for an ignored
    row."""
    margin: torch.Tensor
    """Log of (probability of the target / probability of the likeliest token), also for pruned targets. The target is in the
    safe set for every log_rho up to this value. Without gradient. 0 for an ignored row."""
    pruned: torch.Tensor
    """Probability mass outside of the safe set under the full softmax; without gradient. Equals 1 - coverage, but is summed
    separately, so that values far below the rounding error of 1 stay precise. 0 for an ignored row."""


def masked_log_softmax(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    log_rho: float | None,
    temperature: float = 1.0,
    tp_group: dist.ProcessGroup | None = None,
    with_entropy: bool = False,
    inplace_backward: bool = False,
) -> MaskedLogSoftmax:
    """Return the log-probs of `targets` over the safe set of `logits`, and related values.

    logits: [T, V / tp] fp32, bf16 (or fp64), contiguous. With tp_group each rank holds an equal, contiguous share of the
    vocabulary. targets: [T] int64 ids of the whole vocabulary, -100 for rows to ignore. The gradient of the logits has
    their dtype and is exactly zero outside of the safe set. With inplace_backward the gradient overwrites the logits, so that
    no second tensor of this size exists. Use it only if nothing reads the logits after the backward.

    Errors: ValueError that names the argument, before anything is computed. ValueError that names the row, on all ranks, if a
    target is outside of the vocabulary, or if a row that is not ignored has NaN, +inf or no logit above -inf. The host waits
    for the device once.
    """
    _check(logits, targets, inplace_backward)
    check_options(log_rho, temperature)
    found: Any = _MaskedLogSoftmax.apply(
        logits, targets, log_rho, temperature, tp_group, with_entropy, inplace_backward
    )
    log_probs, entropy, *rest = found
    in_support, coverage, margin, pruned = rest
    return MaskedLogSoftmax(log_probs, in_support, coverage, entropy if with_entropy else None, margin, pruned)


def masked_log_softmax_reference(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    log_rho: float | None,
    temperature: float = 1.0,
    with_entropy: bool = False,
) -> MaskedLogSoftmax:
    """Return the results by their definition, in plain differentiable torch over a whole vocabulary."""
    counts = targets != IGNORE
    log_probs, in_support, coverage, entropy, margin, pruned = plain.log_softmax_by_definition(
        logits, targets.clamp(min=0), log_rho=log_rho, temperature=temperature
    )
    return MaskedLogSoftmax(
        torch.where(counts, log_probs, 0.0),
        in_support & counts,
        torch.where(counts, coverage, 1.0),
        torch.where(counts, entropy, 0.0) if with_entropy else None,
        torch.where(counts, margin, 0.0),
        torch.where(counts, pruned, 0.0),
    )


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(f"{_OP}: {message}")


def _check(logits: torch.Tensor, targets: torch.Tensor, inplace_backward: bool) -> None:
    _require(
        logits.ndim == 2 and targets.shape == logits.shape[:1],
        f"logits {list(logits.shape)} must be [T, V], targets {list(targets.shape)} [T]",
    )
    floating = (torch.float32, torch.bfloat16, torch.float64)
    _require(logits.dtype in floating, f"logits are {logits.dtype}, must be fp32, bf16 or fp64")
    _require(targets.dtype == torch.int64, f"targets are {targets.dtype}, must be int64")
    _require(logits.is_contiguous(), "logits are not contiguous: call .contiguous() first")
    _require(targets.device == logits.device, f"targets are on {targets.device}, logits on {logits.device}")
    _require(logits.device.type in ("cpu", "cuda"), f"logits are on {logits.device}, must be on a CPU or a CUDA GPU")
    base = logits if logits._base is None else logits._base
    _require(
        not (inplace_backward and base.requires_grad and base.is_leaf),
        "inplace_backward would overwrite logits that are a leaf or a view of a leaf; pass inplace_backward=False",
    )


def check_options(log_rho: float | None, temperature: float) -> None:
    """Check log_rho and temperature. Errors: ValueError."""
    smallest, largest = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
    _require(smallest <= temperature <= largest, f"temperature {temperature} must be above 0, and a number of fp32")
    share = "(rho is a share of the largest probability)"
    _require(log_rho is None or log_rho <= 0, f"log_rho {log_rho} must be at most 0 {share}")


def check_targets(targets: torch.Tensor, vocabulary: int) -> None:
    """Check that all targets are in the vocabulary. The host waits for the device once. Errors: ValueError."""
    check(plain.outside_of(targets, vocabulary), partial(_bad_target, targets, vocabulary))


def _bad_target(targets: torch.Tensor, vocabulary: int, row: int) -> ValueError:
    return ValueError(
        f"{_OP}: target {int(targets[row])} of row {row} is outside the vocabulary of {vocabulary} ({IGNORE} ignores a row)"
    )


def _bad_logits(targets: torch.Tensor, names: torch.Tensor | None, row: int) -> ValueError:
    name = row if names is None else int(names[row])
    return ValueError(
        f"{_OP}: row {name} of the logits (target {int(targets[row])}) has NaN, +inf or no value above -inf"
    )


def _kernels(logits: torch.Tensor) -> Any:
    served = not logits.is_cuda or (compiled.cuda and torch.cuda.get_device_capability(logits.device) >= (8, 0))
    return compiled if served and logits.dtype != torch.float64 else plain


def _row_kernels(logits: torch.Tensor) -> Any:
    """Return the kernels for work on a few numbers per row: one launch on a GPU, small torch operators on a CPU."""
    return _kernels(logits) if logits.is_cuda else plain


@dataclass(frozen=True)
class Rows:
    """Values that the backward needs besides the logits: a few numbers per row."""

    targets: torch.Tensor
    in_support: torch.Tensor
    maximum: torch.Tensor
    """Largest logit of each row, over the whole vocabulary."""
    safe_sum: torch.Tensor
    """Sum of exp((logit - maximum) / temperature) over the safe set."""
    entropy: torch.Tensor | None
    first_column: int
    log_rho: float | None
    temperature: float

    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """Return the tensors, for ctx.save_for_backward. The other fields are numbers."""
        return self.targets, self.in_support, self.maximum, self.safe_sum, self.entropy


def evaluate(
    logits: torch.Tensor,
    targets: torch.Tensor,
    log_rho: float | None,
    temperature: float,
    tp_group: dist.ProcessGroup | None,
    with_entropy: bool,
    names: torch.Tensor | None = None,
    late: LateChecks | None = None,
    vocabulary: int | None = None,
) -> tuple[MaskedLogSoftmax, Rows]:
    """Compute the values without an autograd graph, and the inputs of `write_gradient`.

    Arguments as in `masked_log_softmax`, already checked. names: [T], row numbers for error messages. vocabulary:
    size of the vocabulary, if the targets must still be checked. Errors: ValueError that names the row, raised in
    `late.look()` if `late` is given; the values of this row are meaningless.
    """
    group = tp_group if tp_group is not None and tp_group.size() > 1 else None
    first_column = group.rank() * logits.shape[1] if group is not None else 0
    targets = targets.contiguous()
    kernels = _kernels(logits)

    if group is not None:
        extremes = kernels.extremes(logits, targets, first_column)
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
        sums = kernels.sums(logits, extremes[0], log_rho, temperature, with_entropy)
        dist.all_reduce(sums, group=group)
    else:
        extremes, sums = kernels.extremes_and_sums(logits, targets, log_rho, temperature, with_entropy)
    *values, bad_logits, outside = _row_kernels(logits).finish(
        targets, extremes, sums, log_rho, temperature, with_entropy, vocabulary
    )
    found = MaskedLogSoftmax(*values)
    checks = LateChecks() if late is None else late
    if vocabulary is not None:
        checks.add(outside, partial(_bad_target, targets, vocabulary))
    checks.add(bad_logits, partial(_bad_logits, targets, names))
    if late is None:
        checks.look()
    return found, Rows(
        targets, found.in_support, extremes[0], sums[0], found.entropy, first_column, log_rho, temperature
    )


def write_gradient(
    rows: Rows,
    logits: torch.Tensor,
    grad_log_probs: torch.Tensor | None,
    grad_entropy: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Write the gradient of the logits to `out`, which may be the logits themselves.

    dz_j = g (1[j = target] - p_j) - g_H p_j (log p_j + H) for j in the safe set. No communication between ranks is needed.
    """
    sent = (None if g is None else g.contiguous() for g in (grad_log_probs, grad_entropy))
    factors = _row_kernels(logits).factors(
        rows.targets, rows.in_support, rows.safe_sum, rows.entropy, *sent, rows.temperature
    )
    options = (rows.log_rho, rows.temperature)
    _kernels(logits).gradient(logits, rows.targets, rows.first_column, rows.maximum, factors, *options, out)


class _MaskedLogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        log_rho: float | None,
        temperature: float,
        tp_group: dist.ProcessGroup | None,
        with_entropy: bool,
        inplace_backward: bool,
    ) -> tuple[torch.Tensor | None, ...]:
        vocabulary = logits.shape[1] * (tp_group.size() if tp_group is not None else 1)
        values, rows = evaluate(logits, targets, log_rho, temperature, tp_group, with_entropy, vocabulary=vocabulary)
        ctx.save_for_backward(logits, *rows.tensors())
        ctx.numbers, ctx.inplace = (rows.first_column, log_rho, temperature), inplace_backward
        others = values.in_support, values.coverage, values.margin, values.pruned
        ctx.mark_non_differentiable(*others)
        ctx.set_materialize_grads(False)
        return values.log_probs, values.entropy, *others

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_log_probs: torch.Tensor | None, grad_entropy: torch.Tensor | None, *_: None
    ) -> tuple[torch.Tensor | None, ...]:
        logits, *tensors = ctx.saved_tensors
        out = logits.detach() if ctx.inplace else torch.empty_like(logits)
        write_gradient(Rows(*tensors, *ctx.numbers), logits, grad_log_probs, grad_entropy, out)
        if ctx.inplace:
            increment_version(logits)  # a second backward through the logits then raises an error
        return out, None, None, None, None, None, None


# -- kept tokens ---------------------------------------------------------------------------------------------------------
# The tokens that a truncating sampler kept, as a mask of logits, so that the trainer's softmax has the same support.


@dataclass(frozen=True)
class KeptTokens:
    """Vocabulary ids that a truncating sampler (top-p, top-k) kept for each of T tokens."""

    ids: torch.Tensor
    """[n] int64: kept ids of the first token, then of the second, ..."""
    borders: torch.Tensor
    """[T + 1] int64: the kept ids of token t are ids[borders[t] : borders[t + 1]]. An empty range means that the whole
    vocabulary was kept."""
    tokens: torch.Tensor
    """[n] int64: number of the token to which each id belongs."""

    @classmethod
    def of(cls, ids: torch.Tensor, borders: torch.Tensor) -> KeptTokens:
        """Build the sets from `ids` and `borders`, on the host: on a GPU this would wait for the device."""
        each = torch.arange(len(borders) - 1, device=borders.device)
        return cls(ids, borders, each.repeat_interleave(borders.diff()))

    def remove_others(self, logits: torch.Tensor, rows: torch.Tensor, first_column: int) -> None:
        """Set logits [m, V / tp] of the tokens `rows` to -inf outside of the kept sets, in place.

        first_column: vocabulary id of the first column. The ids of all tokens are processed, because selecting the ids of
        `rows` would make the host wait for the GPU.
        """
        count, width = logits.shape
        places = self.borders.new_full((len(self.borders) - 1,), count)
        row = places.index_copy(0, rows, torch.arange(count, device=rows.device))[self.tokens]
        column = self.ids - first_column
        here = (row < count) & (column >= 0) & (column < width)
        cells = torch.where(here, row * width + column, count * width)  # last cell: ids that are not here
        kept = torch.zeros(count * width + 1, dtype=torch.bool, device=rows.device).index_fill_(0, cells, True)
        truncated = self.borders[rows + 1] > self.borders[rows]
        logits.masked_fill_(truncated[:, None] & ~kept[:-1].view(count, width), -torch.inf)

    def to(self, device: torch.device) -> KeptTokens:
        """Copy to `device` without waiting for it."""
        return KeptTokens(upload(self.ids, device), upload(self.borders, device), upload(self.tokens, device))
