"""masked_log_softmax in plain torch: its definition, and row kernels for cases that the compiled kernels do not support.

These cases are fp64, and CUDA tensors if the CUDA part of csrc is not built. `finish` and `factors` also process
CPU tensors, for which small operators cost little. The kernels have the signatures of the kernels in csrc.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

IGNORE = -100
LOWEST = -1e4
"""Finite value used instead of a log-ratio of -inf. Its exp is 0 in fp32 and fp64, and its product with 0 is 0, not NaN."""


def log_softmax_by_definition(
    logits: torch.Tensor, targets: torch.Tensor, *, log_rho: float | None, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (log_probs, in_support, coverage, entropy, margin, pruned), each [T], of logits [T, V] at targets [T].

    All targets must be in the vocabulary. The result is differentiable. Everything, also the safe set, is computed in
    the precision of `logits`, at least fp32.
    """
    z = logits.to(working_dtype(logits)) / temperature
    most = z.max(-1, keepdim=True).values
    safe = z > -torch.inf
    if log_rho is not None:
        safe &= z >= most + log_rho
    log_p = torch.where(safe, z, -torch.inf).log_softmax(-1)
    finite = torch.where(safe, log_p, 0.0)
    entropy = -torch.where(safe, finite.exp() * finite, 0.0).sum(-1)
    p = z.detach().softmax(-1)
    coverage, pruned = torch.where(safe, p, 0.0).sum(-1), torch.where(safe, 0.0, p).sum(-1)
    at_target = [values.gather(1, targets[:, None])[:, 0] for values in (log_p, safe, (z - most).detach())]
    return at_target[0], at_target[1], coverage, entropy, at_target[2], pruned


def working_dtype(tensor: torch.Tensor) -> torch.dtype:
    """Return the dtype of the softmax: fp32, or fp64 for fp64 logits."""
    return torch.promote_types(tensor.dtype, torch.float32)


def extremes(logits: torch.Tensor, targets: torch.Tensor, first_column: int) -> torch.Tensor:
    """Return [2, T]: the largest logit of each row (+inf if it has NaN), and the target's logit (-inf if on another rank)."""
    rows, columns = logits.shape
    work = working_dtype(logits)
    most = (
        torch.cat([logits[b].amax(-1) for b in _slices(logits)]).to(work) if rows else logits.new_zeros(0, dtype=work)
    )
    most.masked_fill_(most.isnan(), torch.inf)
    local = targets - first_column
    at_target = logits.gather(1, local.clamp(0, columns - 1)[:, None])[:, 0].to(work)
    return torch.stack([most, torch.where((local >= 0) & (local < columns), at_target, -torch.inf)])


def sums(
    logits: torch.Tensor, maximum: torch.Tensor, log_rho: float | None, temperature: float, with_entropy: bool
) -> torch.Tensor:
    """Return sums [3, T]: e^d inside the safe set, e^d outside, d e^d inside, with d = (x - maximum) / temperature."""
    out = maximum.new_zeros(3, len(maximum))
    for b, d, safe in _blocks(logits, maximum, log_rho, temperature):
        e = d.exp()
        inside = e * safe
        out[0, b], out[1, b] = inside.sum(-1), (e - inside).sum(-1)
        if with_entropy:
            out[2, b] = inside.mul_(d).sum(-1)
    if log_rho is None:
        out[1] = 0.0  # a logit of -inf is outside of every set
    return out


def extremes_and_sums(
    logits: torch.Tensor, targets: torch.Tensor, log_rho: float | None, temperature: float, with_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `extremes` and `sums` of logits that hold the whole vocabulary."""
    first = extremes(logits, targets, 0)
    return first, sums(logits, first[0], log_rho, temperature, with_entropy)


def finish(
    targets: torch.Tensor,
    extremes: torch.Tensor,
    sums: torch.Tensor,
    log_rho: float | None,
    temperature: float,
    with_entropy: bool,
    vocabulary: int | None,
) -> tuple[torch.Tensor | None, ...]:
    """Return (log_probs, in_support, coverage, entropy or None, margin, pruned, bad_logits, outside or None), each [T].

    extremes [2, T] and sums [3, T] are over the whole vocabulary. The last two results mark errors. bad_logits: the row has
    NaN, +inf or no logit above -inf. outside: the target is outside of the vocabulary, if its size is given.
    """
    (maximum, at_target), (safe_sum, pruned_sum, weighted) = extremes, sums
    counts = targets != IGNORE
    divisor = maximum.new_full((1,), temperature)  # CUDA multiplies by the inverse of a scalar, which rounds
    most = maximum / divisor
    # All ranks compute the same. An ignored row may hold any values: it is processed like any other row and cleared here.
    bad_logits = counts & ~most.isfinite()
    in_support = counts & (at_target > -torch.inf)
    if log_rho is not None:
        in_support &= at_target / divisor >= most + log_rho
    log_sum = safe_sum.log()
    log_probs = torch.where(in_support, (at_target - maximum) / temperature - log_sum, -torch.inf)
    log_probs = torch.where(counts, log_probs, 0.0)
    full_sum = safe_sum + pruned_sum
    coverage = torch.where(counts, safe_sum / full_sum, 1.0)
    pruned = torch.where(counts, pruned_sum / full_sum, 0.0)
    entropy = torch.where(counts, log_sum - weighted / safe_sum, 0.0) if with_entropy else None
    margin = torch.where(counts, at_target / divisor - most, 0.0)
    outside = None if vocabulary is None else outside_of(targets, vocabulary)
    return log_probs, in_support, coverage, entropy, margin, pruned, bad_logits, outside


def outside_of(targets: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Return [T] bool: True for targets that are not ignored and not in the vocabulary."""
    return (targets != IGNORE) & ((targets < 0) | (targets >= vocabulary))


def factors(
    targets: torch.Tensor,
    in_support: torch.Tensor,
    safe_sum: torch.Tensor,
    entropy: torch.Tensor | None,
    grad_log_probs: torch.Tensor | None,
    grad_entropy: torch.Tensor | None,
    temperature: float,
) -> torch.Tensor:
    """Return [3, T]: factor, slope and at_target of `gradient`, from the incoming gradients [T]."""
    factor = slope = at_target = torch.zeros_like(safe_sum)
    if grad_log_probs is not None:
        at_target = torch.where(in_support, grad_log_probs / temperature, 0.0)
        factor = torch.where(in_support, -at_target / safe_sum, 0.0)
    if grad_entropy is not None and entropy is not None:
        scaled = torch.where(targets != IGNORE, grad_entropy / safe_sum / temperature, 0.0)
        slope = -scaled
        factor = factor + torch.where(scaled != 0, scaled * (safe_sum.log() - entropy), 0.0)
    return torch.stack([factor, slope, at_target])


def gradient(
    logits: torch.Tensor,
    targets: torch.Tensor,
    first_column: int,
    maximum: torch.Tensor,
    factors: torch.Tensor,
    log_rho: float | None,
    temperature: float,
    out: torch.Tensor,
) -> None:
    """Write (factor + slope d) e^d inside of the safe set and 0 outside to `out`, and add at_target at the target.

    factors: [3, T], holds factor, slope and at_target. `out` may be the logits.
    """
    local = targets - first_column
    owned = (local >= 0) & (local < logits.shape[1])
    index = local.clamp(0, logits.shape[1] - 1)[:, None]
    factor, slope, at_target = factors.unsqueeze(-1)
    at_target = torch.where(owned[:, None], at_target, 0.0)
    for b, d, safe in _blocks(logits, maximum, log_rho, temperature):
        grad = d.mul(slope[b]).add_(factor[b]).mul_(d.exp_()).mul_(safe)
        out[b] = grad.scatter_add_(1, index[b], at_target[b])
    out.masked_fill_((factors == 0).all(0)[:, None], 0.0)  # such a row may hold NaN


def _slices(logits: torch.Tensor) -> list[slice]:
    """Return blocks of rows that fit the cache of a CPU core, or are large enough to fill a GPU."""
    rows, columns = logits.shape
    per_block = max(1, ((1 << 24) if logits.is_cuda else (1 << 18)) // max(1, columns))
    return [slice(start, min(start + per_block, rows)) for start in range(0, rows, per_block)]


def _blocks(
    logits: torch.Tensor, maximum: torch.Tensor, log_rho: float | None, temperature: float
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """Yield (rows, d, mask with 1.0 inside of the safe set), in working precision. The caller may overwrite both tensors."""
    divisor = maximum.new_full((1,), temperature)  # CUDA multiplies by the inverse of a scalar, which rounds
    for b in _slices(logits):
        z = logits[b].to(maximum.dtype) / divisor
        most = (maximum[b] / divisor)[:, None]
        safe = z > -torch.inf if log_rho is None else (z >= most + log_rho) & (z > -torch.inf)
        yield b, z.sub_(most).clamp_(min=LOWEST), safe.to(z.dtype)
