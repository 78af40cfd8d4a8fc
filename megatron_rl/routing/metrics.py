"""Names of the routers' metrics: a layer's count for those of all layers, and of its update."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from megatron_rl.metrics.reduce import Metric, Metrics, Value, derived


def of_layers(
    name: str, layers: Mapping[int, Metric], update: int, *, each: bool = False, later: bool = False
) -> Metrics:
    """routing/layer_LL/NAME, which counts for routing/NAME and routing/update_U/NAME.

    layers: by model layer, from 0. update: number in the rollout batch, from 1. each: for routing/layer_LL/update_U/NAME
    too. later: for routing/later/NAME too, from the second update on, before which no router has moved.
    """
    found: Metrics = {}
    for layer, metric in layers.items():
        also = (f"routing/{name}", f"routing/update_{update}/{name}")
        if later and update > 1:
            also += (f"routing/later/{name}",)
        if each:
            also += (f"routing/layer_{layer:02}/update_{update}/{name}",)
        found[layer_name(layer, name)] = replace(metric, also=also)
    return found


def layer_name(layer: int, name: str) -> str:
    """Name of a metric of one layer."""
    return f"routing/layer_{layer:02}/{name}"


def per_token(total: Value, tokens: Value) -> Metric:
    """A mean over tokens, of which there may be none."""
    return derived(share, total, tokens)


def share(part: float, whole: float) -> float | None:
    """A sum as a share of another, which may be 0."""
    return part / whole if whole else None
