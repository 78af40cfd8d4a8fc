"""Log-softmax over the min-p safe set, at given targets: Dynamic Vocabulary Pruning (papers/000, eq. 18-20).

The safe set of a row is {j : z_j >= max(z) + log_rho} with z = logits / temperature in fp32; it is fixed in the
backward. Probabilities are renormalised over it. log_rho=None keeps the whole vocabulary: plain log-softmax.

Memory: rows are worked through in blocks, so that beyond the caller's logits and their gradient only one block exists
in fp32; what the backward needs besides the logits is three fp32 numbers a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

IGNORE = -100
LOWEST = -1e4
"""Log-ratio to the row's maximum whose exp is 0 in fp32 and fp64: in its place, -inf would make 0 * -inf = NaN."""


@dataclass(frozen=True)
class MaskedLogSoftmax:
    """One number per row [T]; fp32 (fp64 for fp64 logits)."""

    log_probs: torch.Tensor
    """Log-prob of the target under the safe set, differentiable. -inf with zero gradient for a target outside of it, 0
    with zero gradient for an ignored row."""
    in_support: torch.Tensor
    """bool: the target lies in the safe set. False for an ignored row."""
    coverage: torch.Tensor
    """Share of the full softmax that the safe set holds; without gradient. 1 for an ignored row."""
    entropy: torch.Tensor | None
    """Of the safe set's distribution, differentiable (it does not depend on the target). 0 for an ignored row."""


def masked_log_softmax(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    log_rho: float | None,
    temperature: float = 1.0,
    tp_group: dist.ProcessGroup | None = None,
    with_entropy: bool = False,
) -> MaskedLogSoftmax:
    """Log-probs of `targets` under the safe set of `logits`.

    logits: [T, V / tp] fp32, bf16 (or fp64); with tp_group this rank's equal, contiguous share of the vocabulary.
    targets: [T] int64 ids of the whole vocabulary, -100 for rows to ignore. The gradient of the logits has their dtype
    and is exactly zero outside the safe set.

    Errors: ValueError naming the row, on every rank alike, where a row that counts has NaN or +inf or nothing above
    -inf, or a target outside the vocabulary.
    """
    if logits.ndim != 2 or targets.shape != logits.shape[:1]:
        raise ValueError(
            f"masked_log_softmax: logits {list(logits.shape)} must be [T, V], targets {list(targets.shape)} [T]"
        )
    if temperature <= 0:
        raise ValueError(f"masked_log_softmax: temperature {temperature} must be above 0")
    if log_rho is not None and log_rho > 0:
        raise ValueError(
            f"masked_log_softmax: log_rho {log_rho} must be at most 0 (rho is a share of the largest probability)"
        )
    log_probs, entropy, in_support, coverage = _MaskedLogSoftmax.apply(
        logits, targets, log_rho, temperature, tp_group, with_entropy
    )
    return MaskedLogSoftmax(log_probs, in_support, coverage, entropy if with_entropy else None)


def masked_log_softmax_reference(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    log_rho: float | None,
    temperature: float = 1.0,
    with_entropy: bool = False,
) -> MaskedLogSoftmax:
    """The same in plain differentiable torch over a whole vocabulary, in the precision of `logits` (at least fp32)."""
    z = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    counts = targets != IGNORE
    index = targets.clamp(min=0)[:, None]
    safe = torch.ones_like(z, dtype=torch.bool) if log_rho is None else z >= z.max(-1, keepdim=True).values + log_rho
    safe &= z > -torch.inf
    in_support = safe.gather(1, index)[:, 0] & counts
    masked = torch.where(safe, z, -torch.inf).log_softmax(-1)
    chosen = masked.gather(1, index)[:, 0]
    log_probs = torch.where(in_support, chosen, torch.where(counts, -torch.inf, 0.0))
    coverage = torch.where(counts, torch.where(safe, z.softmax(-1), 0.0).sum(-1).detach(), 1.0)
    entropy = None
    if with_entropy:
        finite = torch.where(safe, masked, 0.0)
        entropy = torch.where(counts, -torch.where(safe, finite.exp() * finite, 0.0).sum(-1), 0.0)
    return MaskedLogSoftmax(log_probs, in_support, coverage, entropy)


class _Blocks:
    """Row blocks of the logits in working precision, in buffers that all blocks share: fresh memory is slow.

    A block fits a CPU core's cache, or is large enough to fill a GPU.
    """

    def __init__(self, logits: torch.Tensor, temperature: float, buffers: int) -> None:
        rows, columns = logits.shape
        per_block = max(1, ((1 << 24) if logits.is_cuda else (1 << 18)) // max(1, columns))
        self.slices = [slice(start, min(start + per_block, rows)) for start in range(0, rows, per_block)]
        self._logits, self._temperature = logits, temperature
        self._buffers = logits.new_empty(buffers, min(per_block, rows), columns, dtype=_working_dtype(logits))

    def __iter__(self):
        """(rows, buffers [buffers, n, V]); the first holds the rows' logits / temperature, the others anything."""
        for rows in self.slices:
            buffers = self._buffers[:, : rows.stop - rows.start]
            buffers[0].copy_(self._logits[rows])
            if self._temperature != 1.0:
                buffers[0].div_(self._temperature)
            yield rows, buffers


def _working_dtype(tensor: torch.Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _check_rows(bad: torch.Tensor, targets: torch.Tensor, vocabulary: int) -> bool:
    """Raise for rows that cannot be worked on (bad: [T] bool, the same on all ranks); True where some row is ignored.

    One synchronisation with the device.
    """
    if not targets.numel():
        return False
    counts = targets != IGNORE
    outside = counts & ((targets < 0) | (targets >= vocabulary))
    first_bad, first_outside, any_bad, any_outside, all_count = torch.stack(
        [bad.byte().argmax(), outside.byte().argmax(), bad.any().long(), outside.any().long(), counts.all().long()]
    ).tolist()
    if any_outside:
        raise ValueError(
            f"masked_log_softmax: target {int(targets[first_outside])} of row {first_outside} is outside the vocabulary"
            f" of {vocabulary} ({IGNORE} ignores a row)"
        )
    if any_bad:
        raise ValueError(
            f"masked_log_softmax: row {first_bad} of the logits (target {int(targets[first_bad])}) has NaN or +inf,"
            " or nothing above -inf"
        )
    return not all_count


class _MaskedLogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, log_rho, temperature, tp_group, with_entropy):
        rows, columns = logits.shape
        parallel = tp_group is not None and tp_group.size() > 1
        first_column = tp_group.rank() * columns if parallel else 0
        local = targets - first_column
        owned = (local >= 0) & (local < columns)
        counts = targets != IGNORE
        work = _working_dtype(logits)
        blocks = _Blocks(logits, temperature, buffers=3)

        # Division by a positive temperature keeps the order: the maximum may be taken before it.
        maximum = torch.cat([logits[b].amax(-1) for b in blocks.slices]) if rows else logits.new_zeros(0)
        target_z = logits.gather(1, local.clamp(0, columns - 1)[:, None])[:, 0]
        target_z = torch.where(owned, target_z, -torch.inf)
        # Reductions of NaN differ between backends: a row with NaN travels as +inf, which is as wrong.
        extremes = torch.stack([maximum, target_z]).to(work) / temperature
        extremes.masked_fill_(extremes.isnan(), torch.inf)
        if parallel:
            dist.all_reduce(extremes, dist.ReduceOp.MAX, group=tp_group)
        maximum, target_z = extremes
        vocabulary = columns * (tp_group.size() if parallel else 1)
        ctx.some_ignored = _check_rows(counts & ~maximum.isfinite(), targets, vocabulary)
        # An ignored row may hold anything: it is worked on as a row of whatever it holds and cleared at the end.
        threshold = maximum + log_rho if log_rho is not None else torch.full_like(maximum, -torch.inf)

        # sums: exp over the safe set; over all; z * exp over the safe set, z measured from the row's maximum.
        sums = torch.zeros(3, rows, dtype=work, device=logits.device)
        for b, (z, exps, safe) in blocks:
            if log_rho is not None:
                torch.ge(z, threshold[b, None], out=safe)  # 1.0 or 0.0: on a CPU ten times as fast as a bool mask
            torch.exp(z.sub_(maximum[b, None]), out=exps)
            if log_rho is not None:
                sums[1, b] = exps.sum(-1)
                exps.mul_(safe)
            sums[0, b] = exps.sum(-1)
            if with_entropy:
                sums[2, b] = exps.mul_(z.clamp_(min=LOWEST)).sum(-1)
        if parallel:
            dist.all_reduce(sums, group=tp_group)
        safe_sum, full_sum, weighted = sums
        in_support = counts & (target_z >= threshold) & (target_z > -torch.inf)
        log_probs = torch.where(in_support, target_z - maximum - safe_sum.log(), -torch.inf)
        log_probs = torch.where(counts, log_probs, 0.0)
        coverage = torch.where(counts, safe_sum / full_sum, 1.0) if log_rho is not None else torch.ones_like(safe_sum)
        entropy = torch.where(counts, safe_sum.log() - weighted / safe_sum, 0.0) if with_entropy else None

        ctx.save_for_backward(logits, local, counts, in_support, owned, maximum, threshold, safe_sum, entropy)
        ctx.temperature, ctx.masked = temperature, log_rho is not None
        ctx.mark_non_differentiable(in_support, coverage)
        ctx.set_materialize_grads(False)
        return log_probs, entropy, in_support, coverage

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_log_probs, grad_entropy, *_):
        """dz_j = g (1[j = target] - p_j) - g_H p_j (log p_j + H), j in the safe set; every rank holds what it needs."""
        logits, local, counts, in_support, owned, maximum, threshold, safe_sum, entropy = ctx.saved_tensors
        zeros = torch.zeros_like(maximum)
        g = zeros if grad_log_probs is None else torch.where(in_support, grad_log_probs, 0.0)
        g_entropy = zeros if grad_entropy is None else torch.where(counts, grad_entropy, 0.0)
        at_target = torch.where(owned, g, 0.0)[:, None]
        local = local.clamp(0, logits.shape[1] - 1)[:, None]
        # p = exps / safe_sum: the division is done on the row's factors.
        scale = g / safe_sum
        scale_entropy = g_entropy / safe_sum
        shift = None if entropy is None else entropy - safe_sum.log()
        grad_logits = torch.empty_like(logits)
        for b, (z, exps, safe) in _Blocks(logits, ctx.temperature, buffers=3):
            if ctx.masked:
                torch.ge(z, threshold[b, None], out=safe)
            torch.exp(z.sub_(maximum[b, None]), out=exps)
            if ctx.masked:
                exps.mul_(safe)
            if grad_entropy is None:
                grad = exps.mul_(-scale[b, None])
            else:
                grad = z.clamp_(min=LOWEST).add_(shift[b, None])  # log p + H
                grad.mul_(-scale_entropy[b, None]).sub_(scale[b, None]).mul_(exps)
            grad.scatter_add_(1, local[b], at_target[b])
            if ctx.temperature != 1.0:
                grad.div_(ctx.temperature)
            grad_logits[b] = grad
        if ctx.some_ignored:  # whatever such a row holds
            grad_logits[~counts] = 0.0
        return grad_logits, None, None, None, None, None
