"""Training of the route predictors. They have their own Adam, so the policy's gradients and clipping are not affected."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.optimizer import get_param_id_to_sharded_param_map, make_sharded_optimizer_tensor
from torch import Tensor

from megatron_rl.config import FROM_ENGINE, OptimizerConfig, RoutingConfig
from megatron_rl.data.packing import Batch
from megatron_rl.distributed.parallel import process_group
from megatron_rl.metrics.reduce import Metrics, alike
from megatron_rl.models.router import PREDICTOR_WEIGHT, routers
from megatron_rl.routing.passes import RouteObserver
from megatron_rl.routing.predict import PredictorGradients, PredictRoutes
from megatron_rl.routing.predictor import relative_horizon
from megatron_rl.routing.table import RouteTable
from megatron_rl.trainer.hooks import Stage, Step, UpdateContext, UpdateHook
from megatron_rl.trainer.trainer import Trainer

MOMENTS = ("exp_avg", "exp_avg_sq")


def make_adam(weights: Iterable[Tensor], routing: RoutingConfig, optimizer: OptimizerConfig) -> torch.optim.AdamW:
    """Return the predictors' optimizer. `set_lr` sets the optimizer's learning rate before each step."""
    # Momentum would remember gradients for longer than predictor_decay lets a predictor remember them.
    betas = (0.0, optimizer.betas[1]) if routing.predictor_decay else optimizer.betas
    return torch.optim.AdamW(weights, betas=betas, eps=optimizer.eps)


def set_lr(adam: torch.optim.AdamW, lr: float, routing: RoutingConfig) -> None:
    """Set learning rate and weight decay for the next step. lr: learning rate of the policy's last step."""
    for group in adam.param_groups:
        group["lr"] = lr * routing.predictor_lr_multiplier
        # AdamW decays by learning rate x weight decay.
        group["weight_decay"] = routing.predictor_decay / group["lr"] if group["lr"] else 0.0


class Predictors(UpdateHook):
    """Trains the predictors of this process's MoE layers. All processes with the same layers have the same predictors.

    Predictors learn in every update of a rollout batch except the first, before which the routers have not changed. A pipeline
    stage without an MoE layer has no predictors.
    """

    name = "predictors"
    parameters = PREDICTOR_WEIGHT

    def __init__(self, routing: RoutingConfig, optimizer: OptimizerConfig, updates: int) -> None:
        """Create it. updates: number of updates per rollout batch."""
        self.config, self.optimizer, self.updates = routing, optimizer, updates
        self.served = routing.source in FROM_ENGINE
        self.weights: dict[int, torch.nn.Parameter] = {}
        self.adam: torch.optim.AdamW | None = None
        self._gradients: dict[int, Tensor] = {}
        """{layer: gradient [E, d] of the predictor's loss}, summed over this process's tokens in the update."""
        self._learning: list[PredictorGradients] = []
        """Observers that collect the predictors' gradients, one per micro-batch."""
        self._failed = False

    def attach(self, trainer: Trainer) -> None:
        """Add a predictor to each router, and create the predictors' optimizer."""
        found = dict(routers(trainer.chunks))
        for layer, router in found.items():
            router.add_predictor()
            assert router.predictor is not None
            self.weights[layer] = router.predictor.weight
        if not found:
            return
        self.adam = make_adam(self.weights.values(), self.config, self.optimizer)
        for weight in self.weights.values():
            moments = {name: torch.zeros_like(weight) for name in MOMENTS}
            self.adam.state[weight] = {"step": torch.zeros(()), **moments}
        self.group = process_group(parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True))
        """Ranks over which the tokens are split: data-parallel, context-parallel and (with sequence parallelism)
        tensor-parallel ranks. Expert-parallel ranks are data-parallel ranks too."""

    def before_forward(self, batches: Sequence[Batch], stage: Stage, place: UpdateContext) -> None:
        """Clear the gradients of the last pass."""
        self._gradients, self._learning, self._failed = {}, [], False

    def observers(self, table: RouteTable, stage: Stage, place: UpdateContext) -> list[RouteObserver]:
        """Return the observers that predict routes in this pass, or that collect gradients for the predictors."""
        learns, scaled = place.update > 0, self.config.predictor_horizon == "scaled"
        horizon = relative_horizon(place.update, self.updates) if scaled else 1.0
        if stage == "log_probs":
            from_engine = self.config.source in FROM_ENGINE
            # The engine does not know the updates, so it uses the mean horizon.
            options = {"learns": learns, "horizon": 1.0 if from_engine else horizon}
            return [PredictRoutes(table, chosen_by_engine=from_engine, **options)]
        if not (learns and self.weights):
            return []
        options = (self.config.predictor_loss, place.update + 1, self._gradients, horizon)
        learning = PredictorGradients(table, *options)
        self._learning.append(learning)
        return [learning]

    def after_step(self, step: Step) -> None:
        """Update the predictors if the policy's step was taken.

        If the policy's step was skipped, the router logits may be the cause. So the predictors do not learn from them.
        """
        if self._learning and step.done:
            tokens = sum(one.tokens(next(iter(self.weights))) for one in self._learning)
            self._failed = not self.learn(self._gradients, tokens, step.lr)
        self._gradients, self._learning = {}, []  # else the micro-batches would stay in memory

    def metrics(self) -> Metrics:
        """Return a metric that is 1 if the predictors skipped the update, else 0."""
        return {"update/predictors_skipped": alike(float(self._failed), across="sum")}

    def learn(self, gradients: dict[int, Tensor], tokens: int, lr: float) -> bool:
        """Update each layer's predictor with the mean gradient over the cached tokens of all processes. Collective.

        The cached tokens are `RouteTable.cached`. gradients: {layer: [E, d]}, summed over this process's `tokens`. lr: the
        policy's current learning rate. Returns False if the update was skipped, because there is no cached token or a gradient
        is not finite.
        """
        assert self.adam is not None
        sums = [gradients.get(layer, torch.zeros_like(weight)) for layer, weight in self.weights.items()]
        flat = torch.cat([*(total.flatten() for total in sums), sums[0].new_tensor([tokens])])
        dist.all_reduce(flat, group=self.group)
        *means, everywhere = flat.split([*(total.numel() for total in sums), 1])
        if not float(everywhere) or not bool(flat.isfinite().all()):
            return False
        for weight, gradient in zip(self.weights.values(), means, strict=True):
            weight.grad = gradient.view_as(weight) / everywhere
        set_lr(self.adam, lr, self.config)
        self.adam.step()
        self.adam.zero_grad()
        return True

    def tensors(self) -> Iterable[Tensor]:
        """Yield the optimizer's moments."""
        if self.adam is not None:
            yield from (value for state in self.adam.state.values() for value in state.values())

    # -- checkpoints: the weights are part of the model's state, the moments are saved beside it -------------------

    def progress(self) -> dict[str, int]:
        """Return the number of updates that the predictors have made."""
        return {"updates": int(next(iter(self.adam.state.values()))["step"])} if self.adam else {}

    def state_dict(self, model_state: dict[str, Any]) -> dict[str, Any]:
        """Return the moments of the predictors' Adam."""
        if self.adam is None:
            return {}
        sharded = get_param_id_to_sharded_param_map(model_state, iter(self.weights.values()))
        return {
            name: {
                layer: make_sharded_optimizer_tensor(
                    sharded[index], self.adam.state[weight][name], f"predictors.{name}"
                )
                for index, (layer, weight) in enumerate(self.weights.items())
            }
            for name in MOMENTS
        }

    def load_state_dict(self, state: dict[str, Any], progress: dict[str, int]) -> None:
        """Restore the moments and step count of the predictors' Adam."""
        if self.adam is None:
            return
        for layer, weight in self.weights.items():
            moments = self.adam.state[weight]
            moments["step"] = torch.tensor(float(progress["updates"]))
            for name in MOMENTS:
                moments[name].copy_(state[name][layer])
