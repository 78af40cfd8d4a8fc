"""How far routers are from the routes that are replayed, from what they were recorded with, and from the engine's."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from megatron_rl.metrics.reduce import Metric, Metrics, derived
from megatron_rl.routing.agreement import deviation_counts, kl_divergence, routing_log_probs, total_variation
from megatron_rl.routing.memory import RouteTable
from megatron_rl.routing.metrics import of_layers, per_token
from megatron_rl.routing.passes import RouteObserver, Router
from megatron_rl.routing.replay import RouteSource, reference_routes


class Foreseen(dict[int, Tensor]):
    """[T, k] ids by layer that the engine would choose by a pass's logits, where those are not the pass's own."""


class Unpredicted(dict[int, Tensor]):
    """[T, k] ids by layer that a recording pass with prediction would have chosen of the same inputs without."""


class EngineDeviations(dict[int, Tensor]):
    """[k + 1] counts by layer: the engine's routes against what the trainer would choose under the old weights."""


def share_of_experts(counts: list[float]) -> float | None:
    """Counts [k + 1] of tokens of whose k experts 0, 1, ..., k differ -> the share that does not."""
    tokens = sum(counts)
    return 1 - sum(slot * count for slot, count in enumerate(counts)) / ((len(counts) - 1) * tokens) if tokens else None


def shares(counts: list[float]) -> list[float] | None:
    """Each count as a share of their sum."""
    tokens = sum(counts)
    return [float(count / tokens) for count in counts] if tokens else None


class EngineAgreement(RouteObserver):
    """Compares the engine's routes with those that the trainer would choose in its place, in the first pass."""

    def __init__(self, table: RouteTable, update: int) -> None:
        self.table, self.update = table, update

    def see_choice(self, layer: int, own: Tensor, chosen: Tensor) -> None:
        """Count how the engine's experts differ from the trainer's."""
        engine, found = self.table.engine_route(layer), self.table.left(EngineDeviations)
        if engine is not None and layer not in found:
            trainers = self.table.left(Foreseen).get(layer, own)
            found[layer] = deviation_counts(engine, trainers, self.table.counted_with_route(engine))

    def metrics(self) -> Metrics:
        """Return the engine's agreement by layer."""
        found = self.table.left(EngineDeviations).items()
        return of_layers("engine_agreement", {n: derived(share_of_experts, c) for n, c in found}, self.update)


class RouteAgreement(RouteObserver):
    """Compares the routes that are replayed, or in free routing recorded, with those that routers would choose now."""

    def __init__(self, table: RouteTable, source: RouteSource, update: int) -> None:
        self.table, self.update = table, update
        self.source: RouteSource = source
        self.deviations: dict[int, Tensor] = {}
        """[k + 1] counts by layer."""
        self.unpredicted: dict[int, Tensor] = {}
        """The same, had nothing been predicted."""

    def see_choice(self, layer: int, own: Tensor, chosen: Tensor) -> None:
        """Count how the replayed experts differ from those chosen now."""
        reference = reference_routes(self.table, self.source, layer)
        if layer in self.deviations or reference is None:
            return
        counted = self.table.counted_with_route(reference)
        self.deviations[layer] = deviation_counts(reference, own, counted)
        if (unpredicted := self.table.left(Unpredicted).get(layer)) is not None:
            self.unpredicted[layer] = deviation_counts(unpredicted, own, counted)

    def metrics(self) -> Metrics:
        """Return agreement and deviations by layer."""
        agreement = {layer: derived(share_of_experts, counts) for layer, counts in self.deviations.items()}
        unpredicted = {layer: derived(share_of_experts, counts) for layer, counts in self.unpredicted.items()}
        return (
            of_layers("agreement", agreement, self.update, each=True, later=True)
            | of_layers("agreement_unpredicted", unpredicted, self.update, later=True)
            | of_layers("deviation", {n: derived(shares, c) for n, c in self.deviations.items()}, self.update)
        )


class RouteDistance(RouteObserver):
    """Measures how far the routers' distributions are from those that routes were recorded by, over the cached tokens."""

    def __init__(self, table: RouteTable, update: int) -> None:
        self.table, self.update = table, update
        self._found: dict[str, dict[int, Metric]] = {"kl": {}, "staleness": {}, "kl_unpredicted": {}}

    def see_logits(self, layer: int, hidden: Tensor, logits: Tensor, router: Router) -> Tensor:
        """Compare the distributions now with those of the record."""
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
        """Return KL and staleness by layer."""
        found: Metrics = {}
        for name, layers in self._found.items():
            found |= of_layers(name, layers, self.update, each=name == "kl", later=name != "staleness")
        return found
