"""Routing in the log: what routers measured, as sums that can be added over micro-batches and processes, and as figures.

Names of the sums of one update: `routing/LAYER/deviation/J` (tokens whose replayed experts differ from the current
router's in J slots), `routing/LAYER/unpredicted/J` (so, had nothing been predicted), `routing/LAYER/engine/J` (the
engine's experts against what the trainer would choose in its place before the first update),
`routing/LAYER/cached`, `/kl`, `/staleness`, `/kl_unpredicted`, `/predictor_loss` (the last four summed over the cached tokens),
`routing/LAYER/load` (an array: tokens of each expert), `routing/LAYER/counted`, `/entropy`, `/orthogonality` (the last two
summed over the counted tokens).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

import numpy as np
import torch

from megatron_rl.routing.replay import RoutePass

PREFIX = "routing/"
OF_CACHED = ("kl", "staleness", "kl_unpredicted", "predictor_loss")
OF_COUNTED = ("entropy", "orthogonality")


def route_sums(passes: Iterable[RoutePass | None]) -> dict[str, float | np.ndarray]:
    """What this process's routers measured in one update."""
    sums: dict[str, float | np.ndarray] = {}
    names: list[str] = []
    values: list[torch.Tensor] = []

    def add(name: str, value: torch.Tensor) -> None:
        names.append(name)
        values.append(value.double().reshape(-1))

    for route_pass in passes:
        if route_pass is None:
            continue
        for layer, counts in route_pass.table.engine_deviations.items():
            add(f"{PREFIX}{layer}/engine", counts)
        for layer, stats in route_pass.stats.items():
            if (load := route_pass.table.load.get(layer)) is not None:
                add(f"{PREFIX}{layer}/load", load)
            if stats.entropy is not None:
                add(f"{PREFIX}{layer}/counted", route_pass.table.counted.sum())
                add(f"{PREFIX}{layer}/entropy", stats.entropy)
            if stats.orthogonality is not None:
                add(f"{PREFIX}{layer}/orthogonality", stats.orthogonality)
            if stats.deviations is not None:
                add(f"{PREFIX}{layer}/deviation", stats.deviations)
            if stats.unpredicted is not None:
                add(f"{PREFIX}{layer}/unpredicted", stats.unpredicted)
            if stats.cached:
                cached = f"{PREFIX}{layer}/cached"
                sums[cached] = sums.get(cached, 0.0) + stats.cached
                add(f"{PREFIX}{layer}/kl", stats.kl)
                add(f"{PREFIX}{layer}/staleness", stats.staleness)
                if stats.kl_unpredicted is not None:
                    add(f"{PREFIX}{layer}/kl_unpredicted", stats.kl_unpredicted)
                if stats.predictor_loss is not None:
                    add(f"{PREFIX}{layer}/predictor_loss", stats.predictor_loss)
    numbers = iter(torch.cat(values).tolist() if values else ())  # one transfer from the device
    for name, value in zip(names, values, strict=True):
        if name.endswith("/load"):  # too many for a key each
            load = np.array(list(itertools.islice(numbers, len(value))))
            sums[name] = sums[name] + load if name in sums else load
            continue
        several = name.endswith(("/deviation", "/unpredicted", "/engine"))
        for slot in range(len(value)):
            key = f"{name}/{slot}" if several else name
            sums[key] = sums.get(key, 0.0) + next(numbers)
    return sums


def route_metrics(updates: list[dict[str, float]]) -> dict[str, float]:
    """Figures of one step from the sums of its inner updates, over all processes.

    routing/agreement (mean over tokens, layers and updates of |replayed and current| / k), routing/deviation_J (shares),
    routing/kl and routing/staleness (total variation), both a token and layer, from the distribution that the replayed
    routes stand for to the current router's; routing/agreement_unpredicted and routing/kl_unpredicted, agreement and KL had
    nothing been predicted; routing/predictor_loss; routing/engine_agreement. The same below routing/update_U/ (from 1) and
    routing/layer_LL/, agreement and kl also below routing/layer_LL/update_U/.
    """
    cells: dict[tuple[int, int], dict[str, float]] = {}  # (layer, update) -> sums
    for number, sums in enumerate(updates, 1):
        for key, value in sums.items():
            if key.startswith(PREFIX):
                layer, name = key.removeprefix(PREFIX).split("/", 1)
                cells.setdefault((int(layer), number), {})[name] = value
    layers, numbers = sorted({cell[0] for cell in cells}), sorted({cell[1] for cell in cells})
    metrics = _named("", cells.values())
    for number in numbers:
        metrics |= _named(f"update_{number}/", [sums for cell, sums in cells.items() if cell[1] == number])
    for layer in layers:
        metrics |= _named(f"layer_{layer:02}/", [sums for cell, sums in cells.items() if cell[0] == layer])
    for (layer, number), sums in sorted(cells.items()):
        one = _figures([sums])
        for name in ("agreement", "kl"):
            if name in one:
                metrics[f"{PREFIX}layer_{layer:02}/update_{number}/{name}"] = one[name]
    return metrics


def engine_agreement(sums: Mapping[str, float | np.ndarray]) -> dict[int, tuple[float, float]]:
    """By layer, from the sums of one update: share of the engine's experts that the trainer would choose, and its tokens."""
    found: dict[int, dict[str, float]] = {}
    for key, value in sums.items():
        if key.startswith(PREFIX) and "/engine/" in key:
            layer, name = key.removeprefix(PREFIX).split("/", 1)
            found.setdefault(int(layer), {})[name] = value
    counts = {layer: _counts(of_layer, "engine") for layer, of_layer in sorted(found.items())}
    return {layer: (_agreement(c), sum(c)) for layer, c in counts.items() if sum(c)}


def _named(prefix: str, cells: Iterable[dict[str, float]]) -> dict[str, float]:
    return {f"{PREFIX}{prefix}{name}": value for name, value in _figures(list(cells)).items()}


def _figures(cells: list[dict[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for sums in cells:
        for name, value in sums.items():
            total[name] = total.get(name, 0.0) + value
    figures: dict[str, float] = {}
    counts = _counts(total, "deviation")
    if sum(counts):
        figures["agreement"] = _agreement(counts)
        figures |= {f"deviation_{slot}": count / sum(counts) for slot, count in enumerate(counts)}
    for kind, name in {"unpredicted": "agreement_unpredicted", "engine": "engine_agreement"}.items():
        if sum(counts := _counts(total, kind)):
            figures[name] = _agreement(counts)
    for name in OF_CACHED:
        tokens = sum(sums["cached"] for sums in cells if name in sums)
        if tokens:
            figures[name] = total[name] / tokens
    for name in OF_COUNTED:
        tokens = sum(sums["counted"] for sums in cells if name in sums)
        if tokens:
            figures[name] = total[name] / tokens
    return figures | _utilization(cells)


def _utilization(cells: list[dict[str, float]]) -> dict[str, float]:
    """active_experts: share of the experts that had a token; load_max: of the busiest expert, as a multiple of the mean."""
    loads = [sums["load"] for sums in cells if "load" in sums and sums["load"].any()]
    if not loads:
        return {}
    active, busiest = [(load > 0).mean() for load in loads], [load.max() / load.mean() for load in loads]
    return {"active_experts": float(np.mean(active)), "load_max": float(np.mean(busiest))}


def _counts(total: dict[str, float], kind: str) -> list[float]:
    found = {int(name.split("/")[1]): value for name, value in total.items() if name.startswith(f"{kind}/")}
    return [found.get(slot, 0.0) for slot in range(max(found, default=-1) + 1)]


def _agreement(counts: list[float]) -> float:
    topk = len(counts) - 1
    return 1 - sum(slot * count for slot, count in enumerate(counts)) / (topk * sum(counts))
