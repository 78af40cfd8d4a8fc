"""Typed metrics: the code that computes a value declares its reduction over micro-batches, updates and ranks.

    metrics = {"entropy": mean(entropy_sum, tokens), "corrected/weight_max": maximum(weights.max()), "tokens": total(tokens)}
    merged = merge([metrics, others])         # over micro-batches, and then over ranks
    line = figures(merged)                    # name -> number

Only this module reduces metrics. A metric's name never decides how it is reduced.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, cast

import numpy as np
import torch

Value = float | int | np.ndarray | torch.Tensor
Figure = float | Mapping[str, float] | Sequence[float] | None
"""Final value of metric NAME: a number, a mapping for NAME/KEY, a sequence for NAME_0, NAME_1, ..., or None without a value."""


@dataclass(frozen=True)
class Metric:
    """Parts that can be merged, and a function that computes the final value from the merged parts.

    Metrics are pickled, so `finish` must be a module-level function.
    """

    parts: tuple[Any, ...]
    """Numbers or arrays to merge, with the same shapes in all metrics of one name. If the operation is "sum", objects with
    their own `+` are possible too."""
    operation: Literal["sum", "max", "min"]
    finish: Callable[..., Figure]
    """Function from the merged parts to the final value (see `Figure`); NaN or None without a value."""
    across: Literal["parts", "mean", "sum"] = "parts"
    """Rule for combining several updates and layers: merge their parts, or average or sum their final values."""
    also: tuple[str, ...] = ()
    """Further names under which the value counts. For example, a layer's value also counts for the metric of all layers."""


Metrics = dict[str, Metric]


class Gathers(Protocol):
    """Interface of a process group that can gather values."""

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all processes."""
        ...


def total(value: Value) -> Metric:
    """Return a metric that is the sum of all values."""
    return Metric((value,), "sum", float)


def maximum(value: Value) -> Metric:
    """Return a metric that is the largest value."""
    return Metric((value,), "max", float)


def minimum(value: Value) -> Metric:
    """Return a metric that is the smallest value."""
    return Metric((value,), "min", float)


def ratio(numerator: Value, denominator: Value) -> Metric:
    """Return a metric that is the sum of the numerators / the sum of the denominators; NaN if the denominators sum to 0."""
    return Metric((numerator, denominator), "sum", _ratio)


def mean(total_of_values: Value, count: Value) -> Metric:
    """Return a metric that is the mean of `count` values (for example tokens) with sum `total_of_values`; 0 without values."""
    return Metric((total_of_values, count), "sum", _mean)


def alike(value: float, *, across: Literal["mean", "sum"]) -> Metric:
    """Return a metric for a value that is the same on all ranks. across: rule for combining several updates."""
    return Metric((value,), "max", float, across)


def derived(finish: Callable[..., Figure], *parts: Any) -> Metric:
    """Return a metric that is any function of sums. finish: module-level function of the summed parts."""
    return Metric(parts, "sum", finish)


def _ratio(numerator: float, denominator: float) -> float:
    return float(numerator) / float(denominator) if denominator else math.nan


def _mean(value: float, count: float) -> float:
    return float(value) / float(count) if count else 0.0


def merge(several: Iterable[Mapping[str, Metric]]) -> Metrics:
    """Merge metrics of several micro-batches, updates or ranks. A name may be missing in some of them.

    Errors: ValueError if a name has two different reductions.
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


def _extreme(of_tensors: Callable[..., Any], of_arrays: Callable[..., Any]) -> Callable[..., Any]:
    return lambda a, b: (of_tensors if torch.is_tensor(a) and torch.is_tensor(b) else of_arrays)(a, b)


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "sum": operator.add,
    "max": _extreme(torch.maximum, np.maximum),
    "min": _extreme(torch.minimum, np.minimum),
}


def on_host(several: Sequence[Mapping[str, Metric]]) -> list[Metrics]:
    """Replace tensors by numbers and numpy arrays (fp64), with a single transfer from the device."""
    parts = (part for metrics in several for metric in metrics.values() for part in metric.parts)
    tensors = {id(part): part for part in parts if torch.is_tensor(part)}
    if not tensors:
        return [dict(metrics) for metrics in several]
    flat = np.array(torch.cat([tensor.detach().double().reshape(-1) for tensor in tensors.values()]).tolist())
    ends = np.cumsum([tensor.numel() for tensor in tensors.values()])[:-1]
    arrays = dict(zip(tensors, np.split(flat, ends), strict=True))

    def moved(part: Value) -> Value:
        if not torch.is_tensor(part):
            return part
        return arrays[id(part)] if part.ndim else float(arrays[id(part)][0])

    return [
        {name: replace(metric, parts=tuple(map(moved, metric.parts))) for name, metric in metrics.items()}
        for metrics in several
    ]


def over_ranks(ranks: Gathers, several: Sequence[Mapping[str, Metric]]) -> Metrics:
    """Merge the metrics of this process's micro-batches, and then of all processes. Collective."""
    return merge(ranks.gather(merge(on_host(several))))


def of_update(metrics: Mapping[str, Metric]) -> Metrics:
    """Convert the metrics of one update, merged over micro-batches and ranks, to metrics that can be merged over updates."""
    found: list[Metrics] = []
    for name, metric in metrics.items():
        if metric.across != "parts":
            figure = cast("float | None", metric.finish(*metric.parts))  # metrics with `across` are single numbers
            if figure is None:
                continue
            metric = replace(mean(figure, 1) if metric.across == "mean" else total(figure), also=metric.also)
        found.append({each: replace(metric, also=()) for each in (name, *metric.also)})
    return merge(found)


def figures(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Return {name: final value} of merged metrics in host memory, without metrics that have no value (None)."""
    found: dict[str, float] = {}
    for name, metric in metrics.items():
        figure = metric.finish(*metric.parts)
        if isinstance(figure, Mapping):
            found |= {f"{name}/{part}": value for part, value in figure.items()}
        elif isinstance(figure, Sequence):
            found |= {f"{name}_{place}": value for place, value in enumerate(figure)}
        elif figure is not None:
            found[name] = figure
    return found
