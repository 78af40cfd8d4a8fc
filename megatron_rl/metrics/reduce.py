"""Typed metrics: a value is declared where it is computed, with its reduction over micro-batches, updates and ranks.

    metrics = {"entropy": mean(entropy_sum, tokens), "corrected/weight_max": maximum(weights.max()), "tokens": total(tokens)}
    merged = merge([metrics, others])         # over micro-batches, and then over ranks
    line = figures(merged)                    # name -> number

This is the one place that reduces: no name, and no prefix of a name, decides how.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import numpy as np
import torch

Value = float | int | np.ndarray | torch.Tensor


@dataclass(frozen=True)
class Metric:
    """Parts that can be merged, and the figure that they make once all of them are there.

    A metric is pickled when ranks gather it, so `finish` is a function of a module.
    """

    parts: tuple[Any, ...]
    """Numbers or arrays, those of one name of the same shapes everywhere; of sums also what has a `+` of its own."""
    operation: Literal["sum", "max", "min"]
    finish: Callable[..., float | Mapping[str, float]]
    """Merged parts -> the figure, NaN where it has no value; or several figures by name, which follow the metric's own."""


Metrics = dict[str, Metric]


class Gathers(Protocol):
    """Ranks, as far as they are asked here."""

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes."""
        ...


def total(value: Value) -> Metric:
    """The sum of all values."""
    return Metric((value,), "sum", float)


def maximum(value: Value) -> Metric:
    """The largest value."""
    return Metric((value,), "max", float)


def minimum(value: Value) -> Metric:
    """The smallest value."""
    return Metric((value,), "min", float)


def ratio(numerator: Value, denominator: Value) -> Metric:
    """The sum of the numerators / the sum of the denominators; NaN where that is 0."""
    return Metric((numerator, denominator), "sum", _ratio)


def mean(total_of_values: Value, count: Value) -> Metric:
    """The mean of `count` values, as tokens or updates, whose sum is `total_of_values`; 0 where there are none."""
    return Metric((total_of_values, count), "sum", _mean)


def derived(finish: Callable[..., float | Mapping[str, float]], *parts: Any) -> Metric:
    """Figures of sums that are no ratios: `finish` (a function of a module) is called with the merged parts."""
    return Metric(parts, "sum", finish)


def _ratio(numerator: float, denominator: float) -> float:
    return float(numerator) / float(denominator) if denominator else math.nan


def _mean(value: float, count: float) -> float:
    return float(value) / float(count) if count else 0.0


def merge(several: Iterable[Mapping[str, Metric]]) -> Metrics:
    """Metrics of several micro-batches, updates or ranks as one. A name may be missing in some of them.

    Errors: ValueError for a name that is reduced in two ways.
    """
    merged: Metrics = {}
    for metrics in several:
        for name, metric in metrics.items():
            known = merged.get(name)
            if known is None:
                merged[name] = metric
                continue
            if (known.operation, known.finish) != (metric.operation, metric.finish):
                raise ValueError(f"metric {name}: {known.operation} and {metric.operation}: one name, one reduction")
            pairs = zip(known.parts, metric.parts, strict=True)
            merged[name] = replace(known, parts=tuple(_OPERATIONS[known.operation](a, b) for a, b in pairs))
    return merged


def _larger(a: Value, b: Value) -> Value:
    return torch.maximum(a, b) if torch.is_tensor(a) and torch.is_tensor(b) else np.maximum(a, b)


def _smaller(a: Value, b: Value) -> Value:
    return torch.minimum(a, b) if torch.is_tensor(a) and torch.is_tensor(b) else np.minimum(a, b)


_OPERATIONS = {"sum": lambda a, b: a + b, "max": _larger, "min": _smaller}


def on_host(several: Sequence[Mapping[str, Metric]]) -> list[Metrics]:
    """The same with numbers and numpy arrays (fp64) in place of tensors, in one transfer from the device."""
    parts = [part for metrics in several for metric in metrics.values() for part in metric.parts]
    tensors = [part for part in parts if torch.is_tensor(part)]
    if not tensors:
        return [dict(metrics) for metrics in several]
    flat = torch.cat([tensor.detach().double().reshape(-1) for tensor in tensors]).cpu().numpy()
    ends = np.cumsum([tensor.numel() for tensor in tensors])[:-1]
    arrays = iter(np.split(flat, ends))

    def moved(part: Value) -> Value:
        if not torch.is_tensor(part):
            return part
        array = next(arrays)
        return array if part.ndim else float(array[0])

    return [
        {name: replace(metric, parts=tuple(map(moved, metric.parts))) for name, metric in metrics.items()}
        for metrics in several
    ]


def over_ranks(ranks: Gathers, several: Sequence[Mapping[str, Metric]]) -> Metrics:
    """This process's metrics, those of its micro-batches apart -> of all processes. Collective."""
    return merge(ranks.gather(merge(on_host(several))))


def figures(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Name -> figure, of merged metrics on the host."""
    found: dict[str, float] = {}
    for name, metric in metrics.items():
        figure = metric.finish(*metric.parts)
        if isinstance(figure, Mapping):
            found |= {f"{name}/{part}": value for part, value in figure.items()}
        else:
            found[name] = figure
    return found
