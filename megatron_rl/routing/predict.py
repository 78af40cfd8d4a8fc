"""Route prediction: predictors add a bias to router logits when routes are recorded, and learn in the next updates."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.metrics.reduce import Metrics
from megatron_rl.routing.measure import Foreseen, Unpredicted
from megatron_rl.routing.passes import RouteObserver, Router, of_layers, per_token
from megatron_rl.routing.predictor import PredictorLoss, delta_loss, predicted_bias, predictive_loss
from megatron_rl.routing.table import Features, RouteTable, route_dtype


class PredictRoutes(RouteObserver):
    """Adds the predictors' bias to the logits that choose experts, and stores predictor inputs (`RouteTable.features`).

    If the engine has already chosen the experts, with its own predictors, the trainer adds nothing to its logits.
    """

    def __init__(self, table: RouteTable, *, chosen_by_engine: bool, learns: bool, horizon: float) -> None:
        """learns: store router inputs, because an update will train the predictors. horizon: factor of the bias."""
        self.table, self.chosen_by_engine, self.learns, self.horizon = table, chosen_by_engine, learns, horizon

    def see_logits(self, layer: int, hidden: Tensor, logits: Tensor, router: Router) -> Tensor:
        """Store the features, and add the bias if the trainer chooses the experts."""
        table = self.table
        assert router.predictor is not None
        bias = self.horizon * router.predictor(hidden)
        features = table.features.get(layer)  # from the engine
        own = features is None
        if features is None:
            features = table.features[layer] = Features(None, logits[table.cached], None)
        features.bias = bias[table.cached] if features.hidden is None else router.predictor(features.hidden)
        if own and self.learns:  # the engine's logits do not belong to the hidden states of this pass
            features.hidden = hidden[table.cached]
        # The choice that the engine would make here: if its routes are replayed, it predicts too.
        table.left(Foreseen)[layer] = router.choice(logits + bias if self.chosen_by_engine else logits)
        return logits if self.chosen_by_engine else logits + bias

    def see_choice(self, layer: int, own: Tensor, chosen: Tensor) -> None:
        """Store the experts that the router would have chosen without prediction."""
        foreseen = self.table.left(Foreseen).pop(layer)
        if not self.chosen_by_engine:
            self.table.left(Unpredicted)[layer] = foreseen.to(route_dtype(self.table.shape.experts))


class PredictorGradients(RouteObserver):
    """Sums the gradient of the predictors' loss over the cached tokens. The targets come from this update's routers."""

    def __init__(
        self, table: RouteTable, loss: PredictorLoss, update: int, sums: dict[int, Tensor], horizon: float
    ) -> None:
        """sums: layer -> [E, d] sum of gradients, shared by all micro-batches. horizon: factor of the predictors' bias."""
        self.table, self.loss, self.update = table, delta_loss if loss == "delta" else predictive_loss, update
        self.sums, self.horizon = sums, horizon
        self._losses: dict[int, Tensor] = {}

    def see_logits(self, layer: int, hidden: Tensor, logits: Tensor, router: Router) -> Tensor:
        """Add the gradient of this layer's predictor."""
        features = self.table.features.get(layer)
        if layer in self._losses or features is None or features.hidden is None or not len(features.logits):
            return logits
        assert router.predictor is not None
        current = logits.detach()[self.table.cached]
        with torch.enable_grad():
            # A copy, because a gradient of the parameter itself would count as a gradient of the policy.
            weight = router.predictor.weight.detach().requires_grad_()
            bias = self.horizon * predicted_bias(features.hidden, weight)
            loss = self.loss(current, features.logits, bias, score_function=router.score_function) * len(current)
        (gradient,) = torch.autograd.grad(loss, weight)
        self.sums[layer] = self.sums[layer] + gradient if layer in self.sums else gradient
        self._losses[layer] = loss.detach()
        return logits

    def tokens(self, layer: int) -> int:
        """Return the number of tokens whose gradient was added for a layer."""
        return len(self.table.features[layer].logits) if layer in self._losses else 0

    def metrics(self) -> Metrics:
        """Return the predictors' loss for each layer."""
        losses = {layer: per_token(loss, self.tokens(layer)) for layer, loss in self._losses.items()}
        return of_layers("predictor_loss", losses, self.update)
