"""Replay as an object that travels with its micro-batch: what routers remember of it, and what they do in one pass.

A `RouteTable` belongs to one packed micro-batch on one process and holds what its routers recorded. A `RoutePass` is
one forward (and backward) of that micro-batch; it goes through the model beside the packing, so that micro-batches in
flight, pipeline stages and recomputation each meet their own. A router holds a `RouteSelector`, which is told of
the pass for the duration of its layer's forward and no longer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, Protocol

import torch
from torch import Tensor

from megatron_rl.algorithms.stein import coactivation_counts, orthogonality_of_products
from megatron_rl.ops.placement import upload
from megatron_rl.routing.agreement import deviation_counts, kl_divergence, routing_log_probs, total_variation
from megatron_rl.routing.predictor import PredictorLoss, RoutePredictor, delta_loss, predicted_bias, predictive_loss
from megatron_rl.routing.table import evenly_spaced, has_route, route_dtype

RouteSource = Literal["none", "r2", "r3", "pr2", "pr3"]
PREDICTING = ("pr2", "pr3")
FROM_ENGINE = ("r3", "pr3")


class Router(Protocol):
    """What a pass asks of a layer's router."""

    predictor: RoutePredictor | None
    score_function: str

    def choice(self, logits: Tensor) -> Tensor:
        """[T, E] logits -> [T, k] int64: the experts that it would choose, whatever is replayed."""


@dataclass
class Features:
    """What one router saw of C cached tokens when routes were recorded."""

    hidden: Tensor | None
    """[C, d] router input, where a predictor learns from it."""
    logits: Tensor
    """[C, E] fp32, without the predictor's bias."""
    bias: Tensor | None
    """[C, E] fp32: the predictor's at that time."""

    def to(self, device: torch.device) -> Features:
        return Features(*(None if t is None else upload(t, device) for t in (self.hidden, self.logits, self.bias)))

    @property
    def predicted(self) -> Tensor:
        """[C, E]: logits of the distribution that the recorded routes stand for."""
        return self.logits if self.bias is None else self.logits + self.bias


@dataclass
class RouteTable:
    """Routes and features of one micro-batch: the T tokens that reach this process's routers, in their order."""

    moe_layers: tuple[int, ...]
    counted: Tensor
    """[T] bool: tokens that metrics count, those whose prediction is in the loss."""
    cached: Tensor
    """[C] int64: rows whose features are kept."""
    engine: Tensor | None = None
    """[T, moe_layers, k] expert ids of the rollout engine, sentinels where it has none."""
    recorded: dict[int, Tensor] = field(default_factory=dict)
    """[T, k] ids by model layer, from the trainer's own recording pass."""
    unpredicted: dict[int, Tensor] = field(default_factory=dict)
    """[T, k] ids by model layer, where that pass predicts: what it would have chosen of the same inputs without."""
    features: dict[int, Features] = field(default_factory=dict)
    engine_deviations: dict[int, Tensor] = field(default_factory=dict)
    """[k + 1] counts by layer: engine's routes against the trainer's own under the old weights."""
    load: dict[int, Tensor] = field(default_factory=dict)
    """[E] counted tokens by layer of each expert, in the first pass."""
    coactivation: dict[int, Tensor] = field(default_factory=dict)
    """[E, E] counted tokens by layer on which two experts are both active, in the first pass that counts pairs."""
    counted_rows: Tensor = field(default_factory=lambda: torch.arange(0))
    """[M] int64: those that are counted; as rows, because a GPU would be waited for to find them."""
    _evenly_spaced: dict[int, Tensor] = field(default_factory=dict)
    """What `evenly_spaced` answered, by budget: every layer asks."""

    def to(self, device: torch.device) -> RouteTable:
        """On a device, as it was packed: before its first pass."""
        moved = {k: upload(v, device) for k, v in vars(self).items() if isinstance(v, Tensor)}
        features = {layer: kept.to(device) for layer, kept in self.features.items()}
        return replace(self, **moved, features=features)

    def evenly_spaced(self, budget: int) -> Tensor:
        """[C] int64: at most `budget` of the counted rows, evenly spread."""
        if budget not in self._evenly_spaced:
            places = torch.from_numpy(evenly_spaced(len(self.counted_rows), budget))
            self._evenly_spaced[budget] = self.counted_rows[upload(places, self.counted_rows.device)]
        return self._evenly_spaced[budget]

    def engine_route(self, layer: int) -> Tensor | None:
        """[T, k] ids of the engine for a model layer."""
        return None if self.engine is None else self.engine[:, self.moe_layers.index(layer)]


@dataclass
class LayerStats:
    """What one layer's router measured of one micro-batch in one update; sums over tokens."""

    deviations: Tensor | None = None
    """[k + 1] counts of tokens: replayed (or recorded) against the current router's own experts."""
    unpredicted: Tensor | None = None
    """Counts as above, had nothing been predicted."""
    cached: int = 0
    """Tokens behind the sums below."""
    kl: Tensor | float = 0.0
    staleness: Tensor | float = 0.0
    kl_unpredicted: Tensor | None = None
    """KL as above, had nothing been predicted."""
    predictor_loss: Tensor | None = None
    entropy: Tensor | None = None
    """Of the router, nats; sum over the counted tokens."""
    orthogonality: Tensor | None = None
    """Of the experts' outputs, sum over the counted tokens."""


@dataclass
class RoutePass:
    """One pass of a micro-batch: `log_probs` before the first update of a rollout batch, `update` in each of them."""

    table: RouteTable
    source: RouteSource
    experts: int
    stage: Literal["log_probs", "update"]
    learn: PredictorLoss | None = None
    """Loss of the predictors in this pass (of `score`: in an update to come); None: they rest."""
    gradients: dict[int, Tensor] = field(default_factory=dict)
    """[E, d] by layer, of the predictor loss summed over tokens; one dictionary for all micro-batches of an update."""
    stats: dict[int, LayerStats] = field(default_factory=dict)
    orthogonality: float = 0.0
    """Weight of the loss that keeps the outputs of a token's experts apart, in an update."""
    orthogonality_tokens: int = 0
    count_pairs: bool = False
    """Of experts that are active together."""
    probe: dict[int, Tensor] | None = None
    """Router inputs [C, d] of some counted tokens by layer, kept where a dictionary is given."""
    probe_tokens: int = 0
    """At most so many of one micro-batch."""
    _engine_like: dict[int, Tensor] = field(default_factory=dict)
    """[T, k] ids by layer that the engine would choose by this pass's logits, where those are not the pass's own."""

    # -- called by the router of each layer, in this order ------------------------------------------------------------

    def see_logits(self, layer: int, hidden: Tensor, logits: Tensor, router: Router) -> Tensor:
        """Router input [T, d] and logits [T, E] before the choice of experts; returns the logits to choose with."""
        if self.probe is not None and layer not in self.probe:
            self.probe[layer] = hidden.detach()[self.table.evenly_spaced(self.probe_tokens)]
        if self.stage == "log_probs":
            return self._record_features(layer, hidden.detach(), logits, router)
        if layer not in self.stats:  # recomputation runs a layer again
            self.stats[layer] = self._measure(layer, logits.detach(), router)
        return logits

    def choose(self, layer: int, own: Tensor) -> Tensor:
        """Expert ids [T, k] int64 of this pass. own: [T, k], the choice of the model's router by itself."""
        replayed = self._replayed(layer)
        engine_like = self._engine_like.pop(layer, own)
        if self.stage == "log_probs" and self.source == "pr2":
            self.table.unpredicted[layer] = engine_like.to(route_dtype(self.experts))
        self._compare(layer, replayed, own, engine_like)
        chosen = own if replayed is None else torch.where(has_route(replayed)[:, None], replayed.long(), own)
        if layer not in self.table.load:
            tokens = self.table.counted.float()[:, None].expand(chosen.shape)
            load = torch.zeros(self.experts, device=chosen.device)
            self.table.load[layer] = load.scatter_add_(0, chosen.flatten(), tokens.flatten())
        if self.count_pairs and layer not in self.table.coactivation:
            self.table.coactivation[layer] = coactivation_counts(chosen, self.experts, self.table.counted)
        if replayed is None and self.stage == "log_probs":
            self.table.recorded[layer] = own.to(route_dtype(self.experts))
        return chosen

    def see_outputs(self, layer: int, outputs: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
        """Add the orthogonality loss of the counted tokens to the model's, as a sum over tokens.

        outputs: [T k, D] of all tokens' experts, times their router weights [T, k]; rows: [T, k], where those of a token are.
        Returns `outputs`, whose backward is that of the loss too. Its gradient is taken here, of at most orthogonality_tokens
        evenly spread tokens that stand for all: no more than that is kept until the backward.
        """
        tokens = self.table.evenly_spaced(self.orthogonality_tokens)
        share = self.table.counted.sum() / max(len(tokens), 1)
        some = rows[tokens]
        seen = outputs.detach()[some].float()  # [C, k, D]
        products = (seen @ seen.transpose(1, 2)).requires_grad_()
        weight = weights.detach()[tokens].float().requires_grad_()
        with torch.enable_grad():
            pairs = weight.unsqueeze(1) * weight.unsqueeze(2)
            loss = orthogonality_of_products(torch.where(pairs > 0, products / torch.where(pairs > 0, pairs, 1.0), 0.0))
        of_products, of_weight = torch.autograd.grad(loss, (products, weight))
        self.stats[layer].orthogonality = loss.detach() * share
        scale = self.orthogonality * share
        of_outputs = ((of_products + of_products.transpose(1, 2)) @ seen * scale).to(outputs.dtype)
        return _WithGradients.apply(outputs, weights, some, tokens, of_outputs, (of_weight * scale).to(weights.dtype))

    # -- inside -------------------------------------------------------------------------------------------------------

    def _replayed(self, layer: int) -> Tensor | None:
        """[T, k] ids that stand in for the router's own; None: it chooses."""
        if self.source in FROM_ENGINE:
            return self.table.engine_route(layer)
        if self.source == "none" or self.stage == "log_probs":
            return None
        return self.table.recorded.get(layer)  # one update per rollout batch has no recording pass, and needs none

    def _record_features(self, layer: int, hidden: Tensor, logits: Tensor, router: Router) -> Tensor:
        table = self.table
        if self.source not in PREDICTING:
            table.features[layer] = Features(None, logits[table.cached], None)
            return logits
        bias = router.predictor(hidden)
        given = table.features.get(layer)  # by the engine
        if given is None:
            given = table.features[layer] = Features(None, logits[table.cached], None)
        given.bias = bias[table.cached] if given.hidden is None else router.predictor(given.hidden)
        if given.hidden is None and self.learn is not None:
            given.hidden = hidden[table.cached]
        if self.source in FROM_ENGINE:  # which has chosen with its predictor; here weights are the router's alone
            self._engine_like[layer] = router.choice(logits + bias)
            return logits
        self._engine_like[layer] = router.choice(logits)
        return logits + bias

    def _measure(self, layer: int, logits: Tensor, router: Router) -> LayerStats:
        log_probs = partial(routing_log_probs, score_function=router.score_function)
        every = log_probs(logits)
        entropy = -torch.where(self.table.counted, (every.exp() * every).sum(-1), 0.0).sum()
        features = self.table.features.get(layer)
        if features is None or not len(features.logits):
            return LayerStats(entropy=entropy)
        current = logits[self.table.cached]
        now, then = log_probs(current), log_probs(features.predicted)
        stats = LayerStats(
            cached=len(current),
            kl=kl_divergence(now, then).sum(),
            staleness=total_variation(now, then).sum(),
            entropy=entropy,
        )
        if features.bias is not None:
            stats.kl_unpredicted = kl_divergence(now, log_probs(features.logits)).sum()
        if self.learn is not None:
            with torch.enable_grad():
                # Not the parameter itself, which must never have a gradient: it would be the policy's.
                weight = router.predictor.weight.detach().requires_grad_()
                bias = predicted_bias(features.hidden, weight)
                loss_of = delta_loss if self.learn == "delta" else predictive_loss
                loss = loss_of(current, features.logits, bias, score_function=router.score_function) * len(current)
            (gradient,) = torch.autograd.grad(loss, weight)
            self.gradients[layer] = self.gradients[layer] + gradient if layer in self.gradients else gradient
            stats.predictor_loss = loss.detach()
        return stats

    def _compare(self, layer: int, replayed: Tensor | None, own: Tensor, engine_like: Tensor) -> None:
        table = self.table
        engine = table.engine_route(layer)
        if engine is not None and layer not in table.engine_deviations:
            table.engine_deviations[layer] = self._deviations(engine, engine_like, engine)
        if self.stage == "log_probs" or self.stats[layer].deviations is not None:
            return
        reference = replayed
        if replayed is None and self.source not in FROM_ENGINE:  # where the engine has sent none, none are replayed
            reference = table.recorded.get(layer)
        if reference is not None:
            self.stats[layer].deviations = self._deviations(reference, own, reference)
            if (unpredicted := table.unpredicted.get(layer)) is not None:
                self.stats[layer].unpredicted = self._deviations(unpredicted, own, reference)

    def _deviations(self, routes: Tensor, own: Tensor, reference: Tensor) -> Tensor:
        """[k + 1] counts over the tokens in the loss for which `reference` has a route."""
        return deviation_counts(routes, own, self.table.counted & has_route(reference))


class _WithGradients(torch.autograd.Function):
    """outputs as they are; to their gradient and that of the weights another loss's is added (a sum over tokens, as the
    schedule's own losses are)."""

    @staticmethod
    def forward(
        ctx, outputs: Tensor, weights: Tensor, rows: Tensor, tokens: Tensor, of_outputs: Tensor, of_weights: Tensor
    ) -> Tensor:
        """rows [C, k] of the outputs have gradients [C, k, D], tokens [C] of the weights [C, k]."""
        ctx.save_for_backward(rows, tokens, of_outputs, of_weights)
        ctx.shape = weights.shape
        return outputs.view_as(outputs)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, tokens, of_outputs, of_weights = ctx.saved_tensors
        grad = grad.index_add(0, rows.flatten(), of_outputs.flatten(0, 1))
        return grad, of_weights.new_zeros(ctx.shape).index_copy(0, tokens, of_weights), None, None, None, None


class RouteSelector:
    """What a router asks for its experts; it has the interface of Megatron-Core's RouterReplay, and none of its globals."""

    def __init__(self) -> None:
        self.layer_number: int | None = None
        """Of the model, from 1; Megatron's router sets it."""
        self.route_pass: RoutePass | None = None
        self._asked = False

    @property
    def layer(self) -> int:
        return self.layer_number - 1

    @contextmanager
    def during(self, route_pass: RoutePass | None) -> Iterator[None]:
        """Obey `route_pass` inside the block. Errors: RuntimeError where the router chose without asking."""
        self.route_pass, self._asked = route_pass, False
        try:
            yield
        finally:
            self.route_pass = None
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
        if self.route_pass is None:
            return own(scores, topk, num_groups, group_topk)
        self._asked = True
        _, ids = own(scores.detach(), topk, num_groups, group_topk)
        chosen = self.route_pass.choose(self.layer, ids)
        return scores.gather(1, chosen), chosen
