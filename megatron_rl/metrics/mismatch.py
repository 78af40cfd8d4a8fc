"""How far the engine that sampled and the trainer that learns are apart, token by token.

d = trainer's log-prob - engine's log-prob of a sampled token, ratio = exp(d), p = the trainer's probability of it. What each
rank measures can be added up: sums, extremes, and histograms that are fine near zero (their bins are even in asinh(d / 1e-6),
1.7 % wide), so that quantiles need no gathering of all tokens.
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
"""|d| is cut here: e^20 = 5e8."""
HALF = 1024
"""Bins on each side of zero."""
FINEST = 1e-6
SPAN = math.asinh(LIMIT / FINEST)
VALUES = np.sinh(np.arange(-HALF, HALF + 1) * (SPAN / HALF)) * FINEST
"""The value that a bin stands for."""
TAIL = 0.01
"""p below which a token counts as one of the tail."""
CERTAIN = 1e-3
"""1 - p below which rounding of the log-prob itself hides the (1 - p) law: such tokens are left out of its fit."""


@dataclass(frozen=True)
class Mismatch:
    """Mergeable statistics of one set of tokens; the empty set is the neutral element."""

    tokens: int = 0
    not_finite: int = 0
    """Tokens left out because d is no finite number."""
    zero: int = 0
    """Number of these with ratio 0: a trainer that has pruned the token says -inf."""
    k1: float = 0.0
    """Sum of -d."""
    k3: float = 0.0
    """Sum of ratio - 1 - d."""
    absolute: float = 0.0
    """Sum of |d|."""
    ratio: float = 0.0
    ratio_squared: float = 0.0
    surprise: float = 0.0
    """Sum of the engine's -log-probs."""
    lowest: float = math.inf
    """Smallest and largest d."""
    highest: float = -math.inf
    safe: int = 0
    """Tokens that are known to lie in the trainer's safe set, and their sum of ratio - 1 - d."""
    safe_k3: float = 0.0
    histogram: np.ndarray = field(default_factory=lambda: np.zeros(2 * HALF + 1, np.int64))
    """[2 * HALF + 1] counts of d."""
    bound: np.ndarray = field(default_factory=lambda: np.zeros(HALF + 1, np.int64))
    """[HALF + 1] counts of |d| / (2 (1 - p)): the logit error that proposition 4.2 of "Taming the Tail" (Li et al.) needs at
    least; of tokens that one of the two sides is not sure of."""
    classes: np.ndarray = field(default_factory=lambda: np.zeros((len(BELOW), 4)))
    """[len(BELOW), 4] by p: tokens, sum of |d|, sum of -d, sum of d^2."""
    largest: np.ndarray = field(default_factory=lambda: np.zeros(len(BELOW)))
    """[len(BELOW)] by p: largest |d|."""
    sequences: tuple[float, ...] = ()
    """Sum of d of each sequence."""
    largest_mean: float = math.nan
    """Largest |mean of d| of a sequence over its tokens of finite d; NaN: there is none."""

    def __add__(self, other: Mismatch) -> Mismatch:
        """Statistics of both parts' tokens together."""
        extremes = {"lowest": min, "highest": max, "largest": np.maximum, "largest_mean": _larger}
        operations = {name: extremes.get(name, operator.add) for name in vars(self)}
        return Mismatch(**{name: add(getattr(self, name), getattr(other, name)) for name, add in operations.items()})


def _larger(one: float, other: float) -> float:
    return float(np.fmax(one, other))  # of a number and NaN, the number


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
    """Statistics of the masked-in tokens. All of one shape, on one device; computed in fp64.

    sequences: sum of d over each sequence, -inf where it has a token that the trainer has pruned. safe: whether a token lies
    in the trainer's safe set; None: not known. means: mean of d over the tokens of each sequence whose d is finite.
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
    rest = -torch.minimum(engine, train).expm1()  # 1 - p, the larger of both sides': above that of any point between
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
    """The value below or at which `share` of the counts lie; NaN where nothing was counted."""
    cumulative = np.cumsum(counts)
    if not cumulative[-1]:
        return math.nan
    return float(values[np.searchsorted(cumulative, max(share * cumulative[-1], 1.0))])


NAMES = (
    *("kl", "k1", "chi2", "ppl_gap", "ess", "sequence_ess", "ratio_max", "ratio_min", "ratio_p01", "ratio_p99"),
    *("abs_mean", "abs_median", "abs_p99", "not_finite"),
)


def figures(measured: Mismatch) -> dict[str, float]:
    """Names and numbers for the log; NaN where there is no token.

    kl: k3 estimate of KL(engine || trainer), in nats per token (the tokens are the engine's); k1: its plain
    estimate; chi2: mean of (ratio - 1)^2, the chi-square divergence of the trainer from the engine; ppl_gap: trainer's
    perplexity of the tokens minus the engine's; ess, sequence_ess: effective sample size of the ratios of tokens and of
    whole sequences, as a share of their number (1: no mismatch); ratio_*: extremes and quantiles of the ratio; abs_*: of
    |d|. Tokens of ratio 0 count in chi2 and ess, and in no other: to kl they would be infinite.
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
    """`figures`, the KL by other sets of tokens, and where in the distribution, and in which sequences, the mismatch sits.

    log_ppl_gap_max: the largest difference of a sequence's log-perplexity between engine and trainer, |mean of d|, tokens of
    ratio 0 left out.
    """
    of_sequences = {} if math.isnan(measured.largest_mean) else {"log_ppl_gap_max": measured.largest_mean}
    return figures(measured) | of_sequences | kl_figures(measured) | law_figures(measured)


def kl_figures(measured: Mismatch) -> dict[str, float]:
    """The k3 estimate of `figures` over other tokens, so that runs with and without pruning compare; absent where none is.

    kl_capped: with those of ratio 0, whose log-ratio counts as -20: each adds e^-20 - 1 + 20, about 19. kl_safe: of those in
    the trainer's safe set (with pruning the tokens of both sides' sets, and so kl itself), where it is known which they are.
    """
    found, n = {}, measured.tokens + measured.zero
    if n:
        found["kl_capped"] = (measured.k3 + measured.zero * (math.expm1(-LIMIT) + LIMIT)) / n
    if measured.safe:
        found["kl_safe"] = measured.safe_k3 / measured.safe
    return found


def law_figures(measured: Mismatch) -> dict[str, float]:
    """Place of the mismatch in the distribution ("Taming the Tail", section 4.3); absent where there is no token.

    epsilon_p99, epsilon_p100: the logit error e with which |d| <= 2 e (1 - p) holds for 99 % of the tokens, and
    for all (proposition 4.2), p being the smaller of both sides' probabilities; at most 20. tail_bias: mean of
    engine's - trainer's log-prob over sampled tokens with p < 0.01, positive by proposition 4.3 (and selected by the
    trainer's p: among tokens of one engine's p there is no such bias); tail_bias_z: the same in
    standard errors. p<X/NAME, for the tokens with p below X and not below the X before: tokens, abs, bias, abs_max.
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
