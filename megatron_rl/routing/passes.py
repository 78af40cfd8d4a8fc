"""Hooks into the routers for one pass (forward and backward) of a micro-batch: observers that each router calls in turn.

A `RoutePass` holds the observers and travels through the model together with the packed batch. Micro-batches in flight,
pipeline stages and recomputation therefore always use their own `RoutePass`. Each router holds a `RouteSelector`, which has
access to the `RoutePass` only during the forward pass of its layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from megatron_rl.metrics.reduce import Metric, Metrics, Value, derived
from megatron_rl.routing.predictor import RoutePredictor
from megatron_rl.routing.table import has_route


def straight_through(values: Tensor, x: Tensor) -> Tensor:
    """Return exactly `values`, with the gradient of x. Both have one shape and are finite."""
    return values + (x - x.detach())  # the bracket is 0, so that the sum is not rounded


class Router(Protocol):
    """Interface of a layer's router, as far as observers use it."""

    predictor: RoutePredictor | None
    score_function: str

    def choice(self, logits: Tensor) -> Tensor:
        """Return the experts [T, k] int64 that the router itself would choose from logits [T, E], regardless of replay."""
        ...


class RouteObserver:
    """Base class of objects that read or change what the routers do in one pass; its methods change nothing.

    Each layer calls the methods in this order. Recomputation runs a layer again, so observers store their measurements by
    layer and measure each layer once.
    """

    reads_outputs: bool = False
    """True if `see_outputs` must be called with the outputs of the experts."""

    def see_logits(self, layer: int, hidden: Tensor, logits: Tensor, router: Router) -> Tensor:
        """Read the router input [T, d] (detached) and the logits [T, E]; return the logits by which experts are chosen."""
        return logits

    def replay(self, layer: int) -> Tensor | None:
        """Return expert ids [T, k] that replace the router's choice.

        Tokens with sentinels (`NO_ROUTE`) keep the router's choice; None keeps it for all tokens.
        """
        return None

    def gates(self, layer: int) -> Tensor | None:
        """Return fp32 weights [T, k] of the experts that `replay` returned, before the model's scaling factor.

        A token with 0 in all slots keeps the router's own weights; None keeps the own weights of all tokens.
        """
        return None

    def see_choice(self, layer: int, own: Tensor, chosen: Tensor) -> None:
        """Read the router's own choice and the experts that get the tokens (`chosen`), both [T, k] int64 ids."""

    def see_outputs(self, layer: int, outputs: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
        """Read the experts' outputs [T k, D], already multiplied by router weights [T, k]; return the outputs to use.

        rows: [T, k], the rows of each token in `outputs`. The method is called in passes without gradients. In an update, a
        recomputed layer runs twice, and the method is called only in the run that computes gradients.
        """
        return outputs

    def metrics(self) -> Metrics:
        """Return the measured metrics, after the pass."""
        return {}


class RoutePass:
    """Observers of one forward (and backward) pass of one micro-batch through the routers."""

    def __init__(self, observers: Sequence[RouteObserver]) -> None:
        """observers: if several of them replay routes of a layer, the first one decides."""
        self.observers = observers
        self.reads_outputs = any(observer.reads_outputs for observer in observers)

    def see_logits(self, layer: int, hidden: Tensor, logits: Tensor, router: Router) -> Tensor:
        """Show the logits to all observers (`RouteObserver.see_logits`)."""
        for observer in self.observers:
            logits = observer.see_logits(layer, hidden, logits, router)
        return logits

    def choose(self, layer: int, own: Tensor) -> Tensor:
        """Return the expert ids [T, k] int64 of this pass. own: [T, k], the router's own choice."""
        replayed = next((ids for o in self.observers if (ids := o.replay(layer)) is not None), None)
        chosen = own if replayed is None else torch.where(has_route(replayed)[:, None], replayed.long(), own)
        for observer in self.observers:
            observer.see_choice(layer, own, chosen)
        return chosen

    def weigh(self, layer: int, chosen: Tensor, weights: Tensor, scaling_factor: float) -> Tensor:
        """Return the weights [T, E] of the chosen experts [T, k] in this pass. weights: [T, E], the router's own weights.

        A replayed weight has exactly the replayed value times the scaling factor, and the gradient of the router's weight.
        """
        gates = next((found for o in self.observers if (found := o.gates(layer)) is not None), None)
        if gates is None:
            return weights
        values = torch.zeros_like(weights).scatter(1, chosen, gates.to(weights.dtype) * scaling_factor)
        values = torch.where(gates.any(-1, keepdim=True), values, weights.detach())
        return straight_through(values, weights)

    def see_outputs(self, layer: int, outputs: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
        """Show the outputs to all observers (`RouteObserver.see_outputs`)."""
        for observer in self.observers:
            outputs = observer.see_outputs(layer, outputs, rows, weights)
        return outputs


class RouteSelector:
    """Chooses the experts of a router. It has the interface of Megatron-Core's RouterReplay, without its global state."""

    def __init__(self) -> None:
        self.layer_number: int | None = None
        """Number of the layer in the model, from 1; Megatron's router sets it."""
        self.route_pass: RoutePass | None = None
        self.own: Tensor | None = None
        """[T, k] ids of the router's own choice; None: Megatron's top-k computes them."""
        self._asked = False
        self._chosen: Tensor | None = None
        """[T, k] ids chosen in the current pass; None until the router calls `get_replay_topk`."""

    @property
    def layer(self) -> int:
        """Number of the layer in the model, from 0."""
        assert self.layer_number is not None
        return self.layer_number - 1

    @contextmanager
    def during(self, route_pass: RoutePass | None) -> Iterator[None]:
        """Use `route_pass` inside the block. Errors: RuntimeError if the router did not call `get_replay_topk`."""
        self.route_pass, self._asked = route_pass, False
        try:
            yield
        finally:
            self.route_pass = self._chosen = None
        if route_pass is not None and not self._asked:
            raise RuntimeError(
                f"router of layer {self.layer}: chose its experts without looking at the routes to replay, because it did not"
                " call get_replay_topk"
            )

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        own: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """Return scores [T, k] and ids [T, k] of the experts to use. own: computes the router's choice from scores [T, E]."""
        if self.route_pass is None and self.own is None:
            return own(scores, topk, num_groups, group_topk)
        self._asked = True
        ids = own(scores.detach(), topk, num_groups, group_topk)[1] if self.own is None else self.own
        if self.route_pass is None:
            return scores.gather(1, ids), ids
        self._chosen = self.route_pass.choose(self.layer, ids)
        return scores.gather(1, self._chosen), self._chosen

    def weigh(self, weights: Tensor, scaling_factor: float) -> Tensor:
        """Return the weights [T, E] of this pass's experts. weights: [T, E], the router's own, including the scaling factor."""
        if self.route_pass is None or self._chosen is None:
            return weights
        return self.route_pass.weigh(self.layer, self._chosen, weights, scaling_factor)


# -- metrics -------------------------------------------------------------------------------------------------------------
# Names of the routers' metrics: the metric of a layer also enters the metric of all layers, and the metric of its update.


def of_layers(
    name: str, layers: Mapping[int, Metric], update: int, *, each: bool = False, later: bool = False
) -> Metrics:
    """Return metrics routing/layer_LL/NAME; their values are also included in routing/NAME and routing/update_U/NAME.

    layers: metric by model layer, from 0. update: number of the update within the rollout batch, from 1. each: also include in
    routing/layer_LL/update_U/NAME. later: also include in routing/later/NAME from the second update on, because no router has
    changed before it.
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
    """Return the name of a metric of one layer."""
    return f"routing/layer_{layer:02}/{name}"


def per_token(total: Value, tokens: Value) -> Metric:
    """Return a metric that is a mean over tokens; null if there are no tokens."""
    return derived(share, total, tokens)


def share(part: float, whole: float) -> float | None:
    """Return part / whole; None if whole is 0."""
    return part / whole if whole else None


# -- router losses -------------------------------------------------------------------------------------------------------
# The tokens over which the routers of this process are balanced in one pass of a micro-batch, and the router losses.


@dataclass
class RouterLosses:
    """Router losses of one micro-batch. Padding is routed too, but left out of losses and loads."""

    real: Tensor
    """[T] bool: True for tokens that are not padding, of the T tokens that reach this process's routers."""
    weight: float
    """Factor of a router loss (a sum over tokens) in the backward pass, relative to the sum of the objective."""
    _sums: dict[str, dict[int, Tensor]] = field(default_factory=dict)
    """Sum of a loss over the tokens that are not padding, by name of the loss and model layer."""

    def see(self, name: str, layer: int, terms: Tensor) -> Tensor:
        """Return and store the sum of a loss's terms [T], padding excluded. layer: from 0. Recomputation overwrites it."""
        total = (terms * self.real).sum()
        self._sums.setdefault(name, {})[layer] = total.detach()
        return total

    def metrics(self, update: int) -> Metrics:
        """Return the mean over tokens of each loss, for each layer. update: number in the rollout batch, from 1."""
        found: Metrics = {}
        tokens = self.real.sum()
        for name, layers in self._sums.items():
            found |= of_layers(name, {layer: per_token(total, tokens) for layer, total in layers.items()}, update)
        return found
