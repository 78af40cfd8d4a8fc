"""Token-level mismatch between the engine that samples and the trainer that learns.

For a sampled token, d = trainer's log-prob - engine's log-prob, ratio = exp(d), and p = the trainer's probability. The
statistics are sums, extremes and histograms, so results of several ranks can be merged. The bins of the histograms are even in
asinh(d / 1e-6), 1.7 % wide and fine near zero. So quantiles need no gathering of all tokens.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch

from megatron_rl.algorithms.correction import effective_sample_size
from megatron_rl.metrics.classes import BELOW

LIMIT = 20.0
"""Limit to which d is clamped: e^20 = 5e8."""
HALF = 1024
"""Number of bins on each side of zero."""
FINEST = 1e-6
SPAN = math.asinh(LIMIT / FINEST)
VALUES = np.sinh(np.arange(-HALF, HALF + 1) * (SPAN / HALF)) * FINEST
"""Values of d that the bins represent."""
TAIL = 0.01
"""Largest p of a token that counts as tail."""
CERTAIN = 1e-3
"""Smallest 1 - p of a token in the fit of the (1 - p) law. Below this limit, the rounding of log-probs hides the law."""


@dataclass(frozen=True)
class Mismatch:
    """Mergeable statistics of a set of tokens. Merging with the statistics of an empty set changes nothing."""

    tokens: int = 0
    not_finite: int = 0
    """Number of tokens that are left out because d is not finite."""
    zero: int = 0
    """Number of tokens in `not_finite` that have ratio 0, because the trainer pruned them: their log-prob is -inf."""
    k1: float = 0.0
    """Sum of -d."""
    k3: float = 0.0
    """Sum of ratio - 1 - d."""
    absolute: float = 0.0
    """Sum of |d|."""
    ratio: float = 0.0
    ratio_squared: float = 0.0
    surprise: float = 0.0
    """Sum of the engine's negative log-probs."""
    lowest: float = math.inf
    """Smallest d; `highest` is the largest d."""
    highest: float = -math.inf
    safe: int = 0
    """Number of tokens that are known to lie in the trainer's safe set; `safe_k3` is their sum of ratio - 1 - d."""
    safe_k3: float = 0.0
    histogram: np.ndarray = field(default_factory=lambda: np.zeros(2 * HALF + 1, np.int64))
    """Number of tokens in each bin of d, [2 * HALF + 1]."""
    bound: np.ndarray = field(default_factory=lambda: np.zeros(HALF + 1, np.int64))
    """Number of tokens in each bin of |d| / (2 (1 - p)), [HALF + 1]. By proposition 4.2 of "Taming the Tail" (Li et al.), this
    ratio is the smallest logit error that explains d. Tokens that are certain for both engine and trainer are left out."""
    classes: np.ndarray = field(default_factory=lambda: np.zeros((len(BELOW), 4)))
    """For each class of p, [len(BELOW), 4]: number of tokens, sum of |d|, sum of -d, sum of d^2."""
    largest: np.ndarray = field(default_factory=lambda: np.zeros(len(BELOW)))
    """For each class of p, [len(BELOW)]: largest |d|."""
    sequences: tuple[float, ...] = ()
    """Sum of d over each sequence."""
    largest_mean: float = math.nan
    """Largest |mean of d| of any sequence, over its tokens with finite d; NaN without such tokens."""

    def __add__(self, other: Mismatch) -> Mismatch:
        """Merge the statistics of two sets of tokens."""
        extremes = {"lowest": min, "highest": max, "largest": np.maximum, "largest_mean": _larger}
        operations = {name: extremes.get(name, operator.add) for name in vars(self)}
        return Mismatch(**{name: add(getattr(self, name), getattr(other, name)) for name, add in operations.items()})


def _larger(one: float, other: float) -> float:
    return float(np.fmax(one, other))  # ignores NaN if the other value is a number


def _bins(values: torch.Tensor) -> torch.Tensor:
    return (torch.asinh(values.clamp(-LIMIT, LIMIT) / FINEST) * (HALF / SPAN)).round().long() + HALF


def measure(
    train_log_probs: torch.Tensor,
    rollout_log_probs: torch.Tensor,
    mask: torch.Tensor,
    sequences: Iterable[float] = (),
    safe: torch.Tensor | None = None,
    means: Iterable[float] = (),
) -> Mismatch:
    """Compute the statistics of the masked-in tokens in fp64. All tensors have the same shape and device.

    sequences: sum of d over each sequence, -inf if it has a token that the trainer pruned. safe: True for tokens in the
    trainer's safe set; None if not known. means: mean of d over the tokens of each sequence with finite d.
    """
    largest_mean = max((abs(value) for value in means), default=math.nan)
    mask = mask.bool()
    engine = rollout_log_probs[mask].double()
    d = train_log_probs.detach()[mask].double() - engine
    finite = d.isfinite()
    not_finite, zero, sequences = int((~finite).sum()), int((d == -torch.inf).sum()), tuple(sequences)
    d, engine = d[finite].clamp(-LIMIT, LIMIT), engine[finite].clamp(max=0.0)
    if not len(d):
        return Mismatch(not_finite=not_finite, zero=zero, sequences=sequences, largest_mean=largest_mean)
    ratio, absolute, k3 = d.exp(), d.abs(), d.expm1() - d
    inside = k3.new_zeros(len(k3), dtype=torch.bool) if safe is None else safe[mask][finite]
    parts = [-d, k3, absolute, ratio, ratio.square(), -engine]
    sums = torch.stack([part.sum() for part in parts] + [d.min(), d.max()]).tolist()

    train = (engine + d).clamp(max=0.0)
    rest = -torch.minimum(engine, train).expm1()  # 1 - p for the smaller p of both sides
    sure = rest < CERTAIN
    needed = _bins(absolute[~sure] / (2 * rest[~sure])) - HALF
    members = torch.bucketize(train.exp(), torch.tensor(BELOW[:-1], dtype=torch.float64, device=d.device), right=True)
    columns = torch.stack([torch.ones_like(d), absolute, -d, d.square()], 1)
    return Mismatch(
        len(d),
        not_finite,
        zero,
        *sums,
        safe=int(inside.sum()),
        safe_k3=float(k3[inside].sum()),
        histogram=torch.bincount(_bins(d), minlength=2 * HALF + 1).cpu().numpy(),
        bound=torch.bincount(needed, minlength=HALF + 1).cpu().numpy(),
        classes=d.new_zeros(len(BELOW), 4).index_add_(0, members, columns).cpu().numpy(),
        largest=d.new_zeros(len(BELOW)).scatter_reduce_(0, members, absolute, "amax").cpu().numpy(),
        sequences=sequences,
        largest_mean=largest_mean,
    )


def quantile(counts: np.ndarray, values: np.ndarray, share: float) -> float:
    """Return the smallest value that at least a `share` of the counted items does not exceed; NaN without items."""
    cumulative = np.cumsum(counts)
    if not cumulative[-1]:
        return math.nan
    return float(values[np.searchsorted(cumulative, max(share * cumulative[-1], 1.0))])


NAMES = (
    *("kl", "k1", "chi2", "ppl_gap", "ess", "sequence_ess", "ratio_max", "ratio_min", "ratio_p01", "ratio_p99"),
    *("abs_mean", "abs_median", "abs_p99", "not_finite"),
)


def figures(measured: Mismatch) -> dict[str, float]:
    """Return {name: number for the log}; numbers are NaN if there is no token.

    kl: k3 estimate of KL(engine || trainer), in nats per token (the engine sampled the tokens). k1: the k1 estimate of the same
    KL, the mean of -d. chi2: mean of (ratio - 1)^2, the chi-square divergence of the trainer from the engine. ppl_gap:
    perplexity of the tokens under the trainer minus perplexity under the engine. ess, sequence_ess: effective sample size of
    the ratios of tokens and of whole sequences, as a share of their number (1 without mismatch). ratio_*: extremes and
    quantiles of the ratio. abs_*: statistics of |d|. Tokens of ratio 0 count only in chi2 and ess, because they would make the
    other numbers infinite.
    """
    n = measured.tokens
    with_zero = n + measured.zero
    found = dict.fromkeys(NAMES, math.nan) | {"not_finite": float(measured.not_finite)}
    if measured.sequences:
        ratios = torch.tensor(measured.sequences, dtype=torch.float64)
        found["sequence_ess"] = float(effective_sample_size(ratios)) / len(ratios)
    if n:
        counts = measured.histogram
        folded = counts[HALF:].copy()
        folded[1:] += counts[:HALF][::-1]
        found |= {
            "kl": measured.k3 / n,
            "k1": measured.k1 / n,
            "chi2": max(0.0, (measured.ratio_squared - 2 * measured.ratio) / with_zero + 1),
            "ppl_gap": math.exp((measured.surprise + measured.k1) / n) - math.exp(measured.surprise / n),
            "ess": measured.ratio**2 / (with_zero * measured.ratio_squared),
            "ratio_max": math.exp(measured.highest),
            "ratio_min": math.exp(measured.lowest),
            "ratio_p01": math.exp(quantile(counts, VALUES, 0.01)),
            "ratio_p99": math.exp(quantile(counts, VALUES, 0.99)),
            "abs_mean": measured.absolute / n,
            "abs_median": quantile(folded, VALUES[HALF:], 0.5),
            "abs_p99": quantile(folded, VALUES[HALF:], 0.99),
        }
    return found


def with_law(measured: Mismatch) -> dict[str, float]:
    """Return `figures`, the KL over other sets of tokens, and the distribution of the mismatch over tokens and sequences.

    log_ppl_gap_max: largest difference of a sequence's log-perplexity between engine and trainer. This is the largest |mean of
    d| of a sequence. Tokens of ratio 0 are left out.
    """
    of_sequences = {} if math.isnan(measured.largest_mean) else {"log_ppl_gap_max": measured.largest_mean}
    return figures(measured) | of_sequences | kl_figures(measured) | law_figures(measured)


def kl_figures(measured: Mismatch) -> dict[str, float]:
    """Return the k3 estimate over other sets of tokens, to compare runs with and without vocabulary pruning.

    kl_capped: KL that includes the tokens of ratio 0 with a log-ratio of -20; each adds e^-20 - 1 + 20, about 19. kl_safe: KL
    of the tokens in the trainer's safe set, if the set is known. With pruning, sampled tokens lie in the safe sets of both
    engine and trainer, so kl_safe equals kl. A key is missing if it has no tokens.
    """
    found, n = {}, measured.tokens + measured.zero
    if n:
        found["kl_capped"] = (measured.k3 + measured.zero * (math.expm1(-LIMIT) + LIMIT)) / n
    if measured.safe:
        found["kl_safe"] = measured.safe_k3 / measured.safe
    return found


def law_figures(measured: Mismatch) -> dict[str, float]:
    """Return the distribution of the mismatch over p ("Taming the Tail", section 4.3); empty if there is no token.

    epsilon_p99, epsilon_p100: logit error e with which |d| <= 2 e (1 - p) holds for 99 % of the tokens, and for all tokens
    (proposition 4.2); p is the smaller probability of engine and trainer, and e is at most 20. tail_bias: mean of the engine's
    minus the trainer's log-prob over sampled tokens with p < 0.01. It is positive by proposition 4.3, because the trainer's p
    selects the tokens; tokens that are selected by the engine's p have no such bias. tail_bias_z: tail_bias in standard errors.
    p<X/NAME: tokens, abs, bias and abs_max of the tokens whose p lies below X and not below the previous class's X.
    """
    if not measured.tokens:
        return {}
    found = {}
    if measured.bound.any():
        for share in (0.99, 1.0):
            found[f"epsilon_p{round(100 * share)}"] = quantile(measured.bound, VALUES[HALF:], share)
    tail = measured.classes[: BELOW.index(TAIL) + 1].sum(0)
    if tail[0]:
        found["tail_bias"] = tail[2] / tail[0]
        variance = tail[3] / tail[0] - found["tail_bias"] ** 2
        if tail[0] > 1 and variance > 0:
            found["tail_bias_z"] = found["tail_bias"] / math.sqrt(variance / (tail[0] - 1))
    for below, (tokens, absolute, bias, _), largest in zip(BELOW, measured.classes, measured.largest, strict=True):
        if tokens:
            values = {"tokens": tokens, "abs": absolute / tokens, "bias": bias / tokens, "abs_max": largest}
            found |= {f"p<{below:g}/{name}": value for name, value in values.items()}
    return {name: float(value) for name, value in found.items()}
