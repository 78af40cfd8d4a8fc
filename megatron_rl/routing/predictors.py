"""Training of the route predictors: an Adam of their own, so that they never touch the policy's gradients or clipping."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.optimizer import get_param_id_to_sharded_param_map, make_sharded_optimizer_tensor

from megatron_rl.config import OptimizerConfig, RoutingConfig
from megatron_rl.models.router import ReplayRouter
from megatron_rl.routing.replay import RoutePass

MOMENTS = ("exp_avg", "exp_avg_sq")


class Predictors:
    """The predictors of this process's MoE layers: the same on all processes that hold these layers."""

    def __init__(
        self, routers: Iterable[tuple[int, ReplayRouter]], optimizer: OptimizerConfig, routing: RoutingConfig
    ) -> None:
        self.multiplier, self.decay = routing.predictor_lr_multiplier, routing.predictor_decay
        self.weights = {layer: router.predictor.weight for layer, router in routers}
        # Momentum is a memory of its own, which would outlive what a predictor is to forget.
        betas = (0.0, optimizer.betas[1]) if self.decay else optimizer.betas
        self.adam = torch.optim.AdamW(self.weights.values(), betas=betas, eps=optimizer.eps)
        for weight in self.weights.values():
            moments = {name: torch.zeros_like(weight) for name in MOMENTS}
            self.adam.state[weight] = {"step": torch.zeros(()), **moments}
        self.group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
        """Tokens are spread over data, context and (by sequence parallelism) tensor ranks; expert ranks are data ranks."""

    def step(self, passes: list[RoutePass], lr: float) -> bool:
        """One update by the gradients of the passes: of the mean over the cached tokens of all processes, layer by layer.

        lr: the policy's current learning rate. Collective. Returns whether it was done: not without a cached token, nor
        where a gradient is not finite.
        """
        mine = passes[0].gradients  # which all passes of an update share
        sums = [mine.get(layer, torch.zeros_like(weight)) for layer, weight in self.weights.items()]
        first = next(iter(self.weights))
        tokens = sums[0].new_tensor([sum(p.stats[first].cached for p in passes)])
        flat = torch.cat([*(total.flatten() for total in sums), tokens])
        dist.all_reduce(flat, group=self.group)
        *gradients, tokens = flat.split([*(total.numel() for total in sums), 1])
        if not float(tokens) or not bool(flat.isfinite().all()):
            return False
        for weight, gradient in zip(self.weights.values(), gradients, strict=True):
            weight.grad = gradient.view_as(weight) / tokens
        for group in self.adam.param_groups:
            group["lr"] = lr * self.multiplier
            group["weight_decay"] = self.decay / group["lr"] if group["lr"] else 0.0  # AdamW decays by their product
        self.adam.step()
        self.adam.zero_grad()
        return True

    # -- checkpoints: the weights are part of the model's state, the moments are kept beside it ------------------------

    @property
    def updates(self) -> int:
        """Steps done so far."""
        return int(next(iter(self.adam.state.values()))["step"])

    def sharded_state_dict(self, model_state: dict[str, Any]) -> dict[str, Any]:
        """Adam's moments as Megatron's dist_checkpointing stores them; model_state: that of the chunks."""
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

    def load_state_dict(self, state: dict[str, Any], updates: int) -> None:
        """state: what was loaded in the place of sharded_state_dict's."""
        for layer, weight in self.weights.items():
            kept = self.adam.state[weight]
            kept["step"] = torch.tensor(float(updates))
            for name in MOMENTS:
                kept[name].copy_(state[name][layer])
