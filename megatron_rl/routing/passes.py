"""One pass of a micro-batch through the routers, as a list of observers that each router asks in turn.

A pass goes through the model beside the packing, so that micro-batches in flight, pipeline stages and recomputation each meet
their own. A router holds a `RouteSelector`, which is told of the pass for the duration of its layer's forward and no longer.
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
    """Exactly the values, with the gradient of x; of one shape, finite."""
    return values + (x - x.detach())  # the bracket is 0: adding it rounds nothing


class Router(Protocol):
    """The interface of a layer's router that observers use."""

    predictor: RoutePredictor | None
    score_function: str

    def choice(self, logits: Tensor) -> Tensor:
        """[T, E] logits -> [T, k] int64: the experts that it would choose, whatever is replayed."""
        ...


class RouteObserver:
    """A feature's part at the routers in one pass; the base class does nothing.

    The methods are called in this order in each layer.

    Recomputation runs a layer again: what is measured is stored by layer, and measured once.
    """

    reads_outputs: bool = False
    """True if it is shown what experts put out."""

    def see_logits(self, layer: int, hidden: Tensor, logits: Tensor, router: Router) -> Tensor:
        """Router input [T, d] (detached) and logits [T, E] before the choice; returns the logits to choose with."""
        return logits

    def replay(self, layer: int) -> Tensor | None:
        """[T, k] ids that stand in for the router's own, sentinels where it chooses; None: it does for all tokens."""
        return None

    def gates(self, layer: int) -> Tensor | None:
        """[T, k] fp32 weights of the experts that `replay` names, before the model's scaling factor.

        0 in all slots of a token: its weights are the router's own. None: they are for all tokens.
        """
        return None

    def see_choice(self, layer: int, own: Tensor, chosen: Tensor) -> None:
        """Expert ids [T, k] int64 that the router chose by itself, and those that the tokens go to."""

    def see_outputs(self, layer: int, outputs: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
        """Outputs of the experts [T k, D] times their router weights [T, k], and the rows [T, k] of each token's.

        Called in a pass without gradients, and in an update where they are computed; returns the outputs to go on with.
        """
        return outputs

    def metrics(self) -> Metrics:
        """Metrics that it measured, after the pass."""
        return {}


class RoutePass:
    """One forward (and backward) of one micro-batch."""

    def __init__(self, observers: Sequence[RouteObserver]) -> None:
        """Where several observers replay, the first that has routes of a layer decides."""
        self.observers = observers
        self.reads_outputs = any(observer.reads_outputs for observer in observers)

    def see_logits(self, layer: int, hidden: Tensor, logits: Tensor, router: Router) -> Tensor:
        """Show the logits to all observers (`RouteObserver.see_logits`)."""
        for observer in self.observers:
            logits = observer.see_logits(layer, hidden, logits, router)
        return logits

    def choose(self, layer: int, own: Tensor) -> Tensor:
        """Expert ids [T, k] int64 of this pass. own: [T, k], the choice of the model's router by itself."""
        replayed = next((ids for o in self.observers if (ids := o.replay(layer)) is not None), None)
        chosen = own if replayed is None else torch.where(has_route(replayed)[:, None], replayed.long(), own)
        for observer in self.observers:
            observer.see_choice(layer, own, chosen)
        return chosen

    def weigh(self, layer: int, chosen: Tensor, weights: Tensor, scaling_factor: float) -> Tensor:
        """Weights [T, E] of the chosen experts [T, k] in this pass. weights: [T, E], the router's own for them.

        A replayed weight has exactly the value that is replayed, times the scaling factor, and the gradient of the router's.
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
    """Chooses the experts of a router.

    It has the interface of Megatron-Core's RouterReplay, and none of its globals.
    """

    def __init__(self) -> None:
        self.layer_number: int | None = None
        """Number of the layer in the model, from 1; Megatron's router sets it."""
        self.route_pass: RoutePass | None = None
        self.own: Tensor | None = None
        """[T, k] ids that are the router's own choice, where Megatron's top-k is not to find it."""
        self._asked = False
        self._chosen: Tensor | None = None
        """[T, k] of the pass that it is told of, once the router has asked."""

    @property
    def layer(self) -> int:
        """Number of the layer in the model, from 0."""
        assert self.layer_number is not None
        return self.layer_number - 1

    @contextmanager
    def during(self, route_pass: RoutePass | None) -> Iterator[None]:
        """Obey `route_pass` inside the block. Errors: RuntimeError where the router chose without asking."""
        self.route_pass, self._asked = route_pass, False
        try:
            yield
        finally:
            self.route_pass = self._chosen = None
        if route_pass is not None and not self._asked:
            raise RuntimeError(
                f"router of layer {self.layer}: chose its experts without looking at the routes to replay"
            )

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        own: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """(scores [T, k], ids [T, k]) of this pass's experts. scores: [T, E] in which `own` finds the router's choice."""
        if self.route_pass is None and self.own is None:
            return own(scores, topk, num_groups, group_topk)
        self._asked = True
        ids = own(scores.detach(), topk, num_groups, group_topk)[1] if self.own is None else self.own
        if self.route_pass is None:
            return scores.gather(1, ids), ids
        self._chosen = self.route_pass.choose(self.layer, ids)
        return scores.gather(1, self._chosen), self._chosen

    def weigh(self, weights: Tensor, scaling_factor: float) -> Tensor:
        """Weights [T, E] of this pass's experts. weights: [T, E], which the router gives them, scaling factor included."""
        if self.route_pass is None or self._chosen is None:
            return weights
        return self.route_pass.weigh(self.layer, self._chosen, weights, scaling_factor)


# -- metrics -------------------------------------------------------------------------------------------------------------
# Names of the routers' metrics: a layer's count for those of all layers, and of its update.


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


# -- router losses -------------------------------------------------------------------------------------------------------
# The tokens that this process's routers balance in one pass of a micro-batch, and what the losses of the routers were.


@dataclass
class RouterLosses:
    """One micro-batch's. Padding is routed too, as its neighbors are, and is left out of losses and loads."""

    real: Tensor
    """[T] bool: the tokens of this process's routers that are no padding."""
    weight: float
    """Factor of a sum over tokens in the backward, beside the objective's sum."""
    _sums: dict[str, dict[int, Tensor]] = field(default_factory=dict)
    """Sum of the terms of these tokens, by name and model layer."""

    def see(self, name: str, layer: int, terms: Tensor) -> Tensor:
        """Sum of the terms [T] of tokens that are no padding, of a layer from 0. Recomputation sees them again."""
        total = (terms * self.real).sum()
        self._sums.setdefault(name, {})[layer] = total.detach()
        return total

    def metrics(self, update: int) -> Metrics:
        """Mean over tokens of each loss by layer; update: number in the rollout batch, from 1."""
        found: Metrics = {}
        tokens = self.real.sum()
        for name, layers in self._sums.items():
            found |= of_layers(name, {layer: per_token(total, tokens) for layer, total in layers.items()}, update)
        return found
