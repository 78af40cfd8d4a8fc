"""Quantiles of the lengths of responses."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from megatron_rl.metrics.reduce import Metric, derived


def quantiles(lengths: Iterable[int]) -> Metric:
    """Return a metric of response lengths in tokens: NAME/p10, NAME/p50, NAME/p90 and NAME/max."""
    return derived(_quantiles, tuple(lengths))


def _quantiles(values: tuple[int, ...]) -> dict[str, float]:
    if not values:
        return {}
    found = np.quantile(values, (0.1, 0.5, 0.9, 1.0), method="inverted_cdf")
    return dict(zip(("p10", "p50", "p90", "max"), found.tolist(), strict=True))
