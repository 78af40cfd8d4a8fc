"""Hooks for router balance: a measurement of the experts' loads, and biases that make the loads more even."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_rl.algorithms.router_losses import balanced_bias
from megatron_rl.distributed.parallel import process_group
from megatron_rl.models.router import routers
from megatron_rl.routing.measure import ExpertLoad, RouterEntropy
from megatron_rl.routing.passes import RouteObserver
from megatron_rl.routing.table import RouteTable
from megatron_rl.trainer.hooks import Stage, Step, UpdateContext, UpdateHook

if TYPE_CHECKING:
    from megatron_rl.trainer.trainer import Trainer


class Utilization(UpdateHook):
    """Measures how evenly the experts of each layer are used; does nothing for a dense model."""

    def observers(self, table: RouteTable, stage: Stage, place: UpdateContext) -> list[RouteObserver]:
        """Return the observers that measure the loads in an update."""
        update = place.update + 1
        return [ExpertLoad(table, update), RouterEntropy(table, update)] if stage == "update" else []


class ExpertBias(UpdateHook):
    """Moves the biases of the experts' scores toward even loads after each update (`algorithms.router_losses.balanced_bias`).

    The loads count the expert choices of all tokens of the update, prompts included and padding excluded. A skipped update
    moves no bias.
    """

    def __init__(self, rate: float) -> None:
        """Create it. rate: model.moe_bias_update_rate, which is above 0."""
        self._rate = rate
        self._biases: list[torch.Tensor] = []
        self._counts: list[torch.Tensor] = []
        self._loads = torch.zeros(0)

    def attach(self, trainer: Trainer) -> None:
        """Find the biases of the routers on this pipeline stage."""
        found = [router for _, router in routers(trainer.chunks) if router.enable_expert_bias]
        self._biases = [router.get_buffer("expert_bias") for router in found]
        self._counts = [router.get_buffer("local_tokens_per_expert") for router in found]

    def after_backward(self) -> None:
        """Store this process's loads, because Megatron's gradient reduction resets them."""
        if self._counts:
            self._loads = torch.stack(self._counts)

    def after_step(self, step: Step) -> None:
        """Move the biases if the optimizer step was taken."""
        if not step.done or not self._biases:
            return
        group = process_group(parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True))
        dist.all_reduce(self._loads, group=group)
        for bias, loads in zip(self._biases, self._loads, strict=True):
            bias.copy_(balanced_bias(bias, loads, self._rate))
