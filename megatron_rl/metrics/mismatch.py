"""How far the engine that sampled and the trainer that learns are apart, token by token.

d = trainer's log-prob - engine's log-prob of a sampled token, ratio = exp(d). What each rank measures can be added up:
sums, extremes, and a histogram of d that is fine near zero (its bins are even in asinh(d / 1e-6), 1.7 % wide), so that
quantiles need no gathering of all tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

LIMIT = 20.0
"""|d| is cut here: e^20 = 5e8."""
HALF = 1024
"""Bins on each side of zero."""
FINEST = 1e-6
SPAN = math.asinh(LIMIT / FINEST)


@dataclass(frozen=True)
class Mismatch:
    """Mergeable statistics of one set of tokens; the empty set is the neutral element."""

    tokens: int = 0
    not_finite: int = 0
    """Tokens left out because d is no finite number (a trainer that has pruned the token says -inf)."""
    k1: float = 0.0
    """Sum of -d."""
    k3: float = 0.0
    """Sum of ratio - 1 - d."""
    absolute: float = 0.0
    """Sum of |d|."""
    ratio: float = 0.0
    ratio_squared: float = 0.0
    lowest: float = math.inf
    """Smallest and largest d."""
    highest: float = -math.inf
    histogram: np.ndarray | None = None
    """[2 * HALF + 1] int64 counts of d."""


def measure(train_log_probs: torch.Tensor, rollout_log_probs: torch.Tensor, mask: torch.Tensor) -> Mismatch:
    """Statistics of the masked-in tokens. All of one shape, on one device; computed in fp64."""
    mask = mask.bool()
    d = train_log_probs.detach()[mask].double() - rollout_log_probs[mask].double()
    finite = d.isfinite()
    not_finite = int((~finite).sum())
    d = d[finite].clamp(-LIMIT, LIMIT)
    if not len(d):
        return Mismatch(not_finite=not_finite)
    ratio = d.exp()
    bins = (torch.asinh(d / FINEST) * (HALF / SPAN)).round().long() + HALF
    sums = torch.stack(
        [-d.sum(), (d.expm1() - d).sum(), d.abs().sum(), ratio.sum(), ratio.square().sum(), d.min(), d.max()]
    ).tolist()
    histogram = torch.bincount(bins, minlength=2 * HALF + 1).cpu().numpy()
    return Mismatch(len(d), not_finite, *sums, histogram)


def merge(parts: Iterable[Mismatch]) -> Mismatch:
    """Statistics of all the parts' tokens together."""
    parts = [p for p in parts if p.tokens or p.not_finite]
    filled = [p for p in parts if p.tokens]
    added = {
        name: sum(getattr(p, name) for p in parts)
        for name in ("tokens", "not_finite", "k1", "k3", "absolute", "ratio", "ratio_squared")
    }
    return Mismatch(
        **added,
        lowest=min((p.lowest for p in filled), default=math.inf),
        highest=max((p.highest for p in filled), default=-math.inf),
        histogram=np.sum([p.histogram for p in filled], axis=0) if filled else None,
    )


def quantile(counts: np.ndarray, values: np.ndarray, share: float) -> float:
    """The value below or at which `share` of the counts lie."""
    cumulative = np.cumsum(counts)
    return float(values[np.searchsorted(cumulative, max(share * cumulative[-1], 1.0))])


def metrics(measured: Mismatch) -> dict[str, float]:
    """Names and numbers for the log.

    mismatch/kl: k3 estimate of KL(engine || trainer), in nats per token (the tokens are the engine's); mismatch/k1: its
    plain estimate; mismatch/ess: effective sample size of the token ratios as a share of the tokens (1: no mismatch);
    mismatch/ratio_*: extremes and quantiles of the ratio; mismatch/abs_*: of |d|. NaN where there is no token.
    """
    n = measured.tokens
    left_out = {"mismatch/not_finite": float(measured.not_finite)}
    if not n:
        names = "kl k1 ess ratio_max ratio_min ratio_p01 ratio_p99 abs_mean abs_median abs_p99"
        return {f"mismatch/{name}": math.nan for name in names.split()} | left_out
    values = np.sinh(np.arange(-HALF, HALF + 1) * (SPAN / HALF)) * FINEST
    counts = measured.histogram
    folded = counts[HALF:].copy()
    folded[1:] += counts[:HALF][::-1]
    return {
        "mismatch/kl": measured.k3 / n,
        "mismatch/k1": measured.k1 / n,
        "mismatch/ess": measured.ratio**2 / (n * measured.ratio_squared),
        "mismatch/ratio_max": math.exp(measured.highest),
        "mismatch/ratio_min": math.exp(measured.lowest),
        "mismatch/ratio_p01": math.exp(quantile(counts, values, 0.01)),
        "mismatch/ratio_p99": math.exp(quantile(counts, values, 0.99)),
        "mismatch/abs_mean": measured.absolute / n,
        "mismatch/abs_median": quantile(folded, values[HALF:], 0.5),
        "mismatch/abs_p99": quantile(folded, values[HALF:], 0.99),
    } | left_out
