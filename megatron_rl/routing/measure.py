"""Metrics that compare the routers' own choices with replayed or recorded routes and with the engine's routes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from megatron_rl.metrics.reduce import Metric, Metrics, derived
from megatron_rl.routing.passes import RouteObserver, Router, of_layers, per_token
from megatron_rl.routing.replay import RouteSource, reference_routes
from megatron_rl.routing.table import RouteTable, deviation_counts, kl_divergence, routing_log_probs, total_variation


class Foreseen(dict[int, Tensor]):
    """Layer -> [T, k] expert ids that the engine would choose from the router logits of the current pass.

    These ids can differ from the trainer's choice, because either the engine or the trainer adds a predictor's bias to the
    logits, not both.
    """


class Unpredicted(dict[int, Tensor]):
    """Layer -> [T, k] ids that a recording pass with prediction would have chosen without prediction."""


class EngineDeviations(dict[int, Tensor]):
    """Layer -> [k + 1] numbers of tokens for which engine and trainer disagree on 0, 1, ..., k experts.

    The trainer makes its choice in the first pass of the micro-batch, with the old weights.
    """


def share_of_experts(counts: list[float]) -> float | None:
    """Return the share of experts in which two routes agree. counts: [k + 1] tokens whose routes differ in 0 to k experts."""
    tokens = sum(counts)
    return 1 - sum(slot * count for slot, count in enumerate(counts)) / ((len(counts) - 1) * tokens) if tokens else None


def shares(counts: list[float]) -> list[float] | None:
    """Return each count as a share of their sum; None if the sum is 0."""
    tokens = sum(counts)
    return [float(count / tokens) for count in counts] if tokens else None


class EngineAgreement(RouteObserver):
    """Compares the engine's routes with the trainer's own choice, in the first pass of a micro-batch."""

    def __init__(self, table: RouteTable, update: int) -> None:
        self.table, self.update = table, update

    def see_choice(self, layer: int, own: Tensor, chosen: Tensor) -> None:
        """Count in how many slots the engine's experts differ from the trainer's."""
        engine, found = self.table.engine_route(layer), self.table.left(EngineDeviations)
        if engine is not None and layer not in found:
            trainers = self.table.left(Foreseen).get(layer, own)
            found[layer] = deviation_counts(engine, trainers, self.table.counted_with_route(engine))

    def metrics(self) -> Metrics:
        """Return the agreement with the engine for each layer."""
        found = self.table.left(EngineDeviations).items()
        return of_layers("engine_agreement", {n: derived(share_of_experts, c) for n, c in found}, self.update)


class RouteAgreement(RouteObserver):
    """Compares the replayed routes (in free routing: the recorded routes) with the current choice of the routers."""

    def __init__(self, table: RouteTable, source: RouteSource, update: int) -> None:
        self.table, self.update = table, update
        self.source: RouteSource = source
        self.deviations: dict[int, Tensor] = {}
        """Layer -> [k + 1] counts of tokens whose two routes differ in 0, 1, ..., k experts."""
        self.unpredicted: dict[int, Tensor] = {}
        """Like `deviations`, for the routes that would have been recorded without prediction."""

    def see_choice(self, layer: int, own: Tensor, chosen: Tensor) -> None:
        """Count in how many slots the replayed experts differ from the current choice."""
        reference = reference_routes(self.table, self.source, layer)
        if layer in self.deviations or reference is None:
            return
        counted = self.table.counted_with_route(reference)
        self.deviations[layer] = deviation_counts(reference, own, counted)
        if (unpredicted := self.table.left(Unpredicted).get(layer)) is not None:
            self.unpredicted[layer] = deviation_counts(unpredicted, own, counted)

    def metrics(self) -> Metrics:
        """Return agreement and deviations for each layer."""
        agreement = {layer: derived(share_of_experts, counts) for layer, counts in self.deviations.items()}
        unpredicted = {layer: derived(share_of_experts, counts) for layer, counts in self.unpredicted.items()}
        return (
            of_layers("agreement", agreement, self.update, each=True, later=True)
            | of_layers("agreement_unpredicted", unpredicted, self.update, later=True)
            | of_layers("deviation", {n: derived(shares, c) for n, c in self.deviations.items()}, self.update)
        )


class RouteDistance(RouteObserver):
    """Measures how far the routers' distributions have moved since recording, for the tokens in `RouteTable.cached`."""

    def __init__(self, table: RouteTable, update: int) -> None:
        self.table, self.update = table, update
        self._found: dict[str, dict[int, Metric]] = {"kl": {}, "staleness": {}, "kl_unpredicted": {}}

    def see_logits(self, layer: int, hidden: Tensor, logits: Tensor, router: Router) -> Tensor:
        """Compare the current distributions with the recorded ones."""
        features = self.table.features.get(layer)
        if layer in self._found["kl"] or features is None or not len(features.logits):
            return logits
        log_probs = partial(routing_log_probs, score_function=router.score_function)
        now, then = log_probs(logits.detach()[self.table.cached]), log_probs(features.predicted)
        measured = {"kl": kl_divergence(now, then), "staleness": total_variation(now, then)}
        if features.bias is not None:
            measured["kl_unpredicted"] = kl_divergence(now, log_probs(features.logits))
        for name, values in measured.items():
            self._found[name][layer] = per_token(values.sum(), len(values))
        return logits

    def metrics(self) -> Metrics:
        """Return KL and staleness for each layer."""
        found: Metrics = {}
        for name, layers in self._found.items():
            found |= of_layers(name, layers, self.update, each=name == "kl", later=name != "staleness")
        return found


# -- utilization ---------------------------------------------------------------------------------------------------------
# How evenly routers use their experts: entropy of their distributions, and number of tokens per expert.


class RouterEntropy(RouteObserver):
    """Measures the entropy of the routers' distributions, in nats, over the tokens in `RouteTable.counted`."""

    def __init__(self, table: RouteTable, update: int) -> None:
        self.table, self.update = table, update
        self._sums: dict[int, Tensor] = {}

    def see_logits(self, layer: int, hidden: Tensor, logits: Tensor, router: Router) -> Tensor:
        """Sum the entropies of the counted tokens."""
        if layer not in self._sums:
            log_probs = routing_log_probs(logits.detach(), router.score_function)
            self._sums[layer] = -torch.where(self.table.counted, (log_probs.exp() * log_probs).sum(-1), 0.0).sum()
        return logits

    def metrics(self) -> Metrics:
        """Return the entropy for each layer."""
        tokens = len(self.table.counted_rows)
        return of_layers("entropy", {layer: per_token(s, tokens) for layer, s in self._sums.items()}, self.update)


class Load(dict[int, Tensor]):
    """Layer -> [E] number of tokens of each expert, among the tokens in `RouteTable.counted`."""


def active_experts(load: np.ndarray) -> float | None:
    """Return the share of the experts that had a token; None without tokens."""
    return float((load > 0).mean()) if load.any() else None


def load_max(load: np.ndarray) -> float | None:
    """Return the tokens of the busiest expert, as a multiple of the mean; None without tokens."""
    return float(load.max() / load.mean()) if load.any() else None


class ExpertLoad(RouteObserver):
    """Counts the tokens of each expert in the first pass of a micro-batch."""

    def __init__(self, table: RouteTable, update: int) -> None:
        self.table, self.update = table, update

    def see_choice(self, layer: int, own: Tensor, chosen: Tensor) -> None:
        """Count the tokens of each expert."""
        found = self.table.left(Load)
        if layer not in found:
            tokens = self.table.counted.float()[:, None].expand(chosen.shape)
            load = torch.zeros(self.table.shape.experts, device=chosen.device)
            found[layer] = load.scatter_add_(0, chosen.flatten(), tokens.flatten())

    def metrics(self) -> Metrics:
        """Return the share of active experts and the largest load for each layer."""
        found: Metrics = {}
        for name, figure in {"active_experts": active_experts, "load_max": load_max}.items():
            # Average over layers and updates: their loads must not be added.
            loads = self.table.left(Load).items()
            of = {layer: replace(derived(figure, load), across="mean") for layer, load in loads}
            found |= of_layers(name, of, self.update)
        return found
