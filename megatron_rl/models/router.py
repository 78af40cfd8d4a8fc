"""The router of a MoE layer, and the transformer layer that hands its router the routing data of the packed batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, topk_routing_with_score_function
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_rl.algorithms.router_losses import load_balancing_terms, z_terms
from megatron_rl.models.packed import PackedBatch
from megatron_rl.routing.passes import RouteObserver, RoutePass, RouterLosses, RouteSelector
from megatron_rl.routing.predictor import RoutePredictor

PREDICTOR_WEIGHT = ".router.predictor.weight"
"""Ending of the names of the predictors' parameters in a chunk."""


class ReplayRouter(TopKRouter):
    """Megatron's router. A `RoutePass` (the routing data of a micro-batch) can record, predict or replay its choice of experts.

    Megatron still computes scores, weights, groups and expert bias. Without a `RoutePass`, Megatron also chooses the experts.
    The auxiliary losses are sums over this process's tokens without padding. The trainer divides all gradients by a single
    number, so these losses are first multiplied by `RouterLosses.weight` (`Trainer.update`). Megatron's own auxiliary losses
    include padding, and are only correct if every token of a micro-batch is in the loss.
    """

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.router_replay = RouteSelector()
        self.predictor: RoutePredictor | None = None
        self.adapter: RouterAdapter | None = None
        self._losses: RouterLosses | None = None

    @contextmanager
    def during(self, batch: PackedBatch) -> Iterator[None]:
        """Use the routes and losses of the batch inside the block. Errors: RuntimeError, see `RouteSelector.during`."""
        self._losses = batch.router_losses
        try:
            with self.router_replay.during(batch.routing):
                yield
        finally:
            self._losses = None

    def add_predictor(self) -> None:
        """Add an evolution predictor with zero weights. Its weight is not in the policy's optimizer and gradient buffers."""
        self.predictor = RoutePredictor(self.config.hidden_size, self.weight.shape[0]).to(self.weight.device)
        self.predictor.requires_grad_(False)

    def gating(self, input: torch.Tensor) -> torch.Tensor:
        """Compute logits [s, b, E] from hidden states [s, b, d], as changed by the adapter and the `RoutePass`."""
        logits = self.compute_logits(input)
        if self.adapter is not None and self.adapter.enabled:
            logits = logits + self.adapter(input).to(logits.dtype)
        route_pass = self.router_replay.route_pass
        if route_pass is None:
            return logits
        hidden = input.detach().reshape(-1, input.shape[-1])
        flat = logits.view(-1, logits.shape[-1])
        return route_pass.see_logits(self.router_replay.layer, hidden, flat, self).view_as(logits)

    def compute_logits(self, input: torch.Tensor) -> torch.Tensor:
        """Compute the logits [s, b, E] of Megatron's router from hidden states [s, b, d]."""
        if HAVE_TE and input.dtype == torch.float32:  # Megatron would use a TF32 product here
            return F.linear(input, self.weight, self.bias)
        return super().gating(input)

    def routing(
        self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return weights [T, E] (0 for experts not chosen) and the chosen experts [T, E] bool, from logits [s, b, E]."""
        weights, chosen = super().routing(logits, padding_mask=padding_mask)
        return self.router_replay.weigh(weights, self.config.moe_router_topk_scaling_factor or 1.0), chosen

    def _real(self, routing_map: torch.Tensor) -> torch.Tensor:
        return routing_map if self._losses is None else routing_map & self._losses.real[:, None]

    def _attached(self, name: str, coefficient: float, terms: torch.Tensor, activation: torch.Tensor) -> torch.Tensor:
        """Return the activation unchanged; its backward pass adds the gradient of coefficient x the sum of the terms [T]."""
        losses = self._losses
        total = terms.sum() if losses is None else losses.weight * losses.see(name, self.router_replay.layer, terms)
        attached: Any = MoEAuxLossAutoScaler.apply(activation, coefficient * total)
        return attached

    def _apply_aux_loss(
        self, probs: torch.Tensor, scores_for_aux_loss: torch.Tensor, routing_map: torch.Tensor, *_: Any, **__: Any
    ) -> torch.Tensor:
        coefficient = self.get_aux_loss_coeff("aux_loss")
        if not coefficient:
            return probs
        loads = self._real(routing_map).sum(0)
        if self.tp_cp_group.size() > 1:  # these ranks have other parts of the micro-batch
            dist.all_reduce(loads, group=self.tp_cp_group)
        return self._attached("aux_loss", coefficient, load_balancing_terms(scores_for_aux_loss, loads), probs)

    def apply_z_loss(self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None) -> torch.Tensor:
        """Return the logits [T, E] unchanged; their backward pass adds the gradient of the z-loss."""
        coefficient = self.config.moe_z_loss_coeff
        if not coefficient or not self.training or not torch.is_grad_enabled():
            return logits
        return self._attached("z_loss", coefficient, z_terms(logits), logits)

    def _apply_expert_bias(self, routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None) -> None:
        if self.enable_expert_bias and torch.is_grad_enabled():  # only in updates, once each
            with torch.no_grad():
                self.get_buffer("local_tokens_per_expert").add_(self._real(routing_map).sum(0))

    @torch.no_grad()
    def choice(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the experts [T, k] int64 that the router itself would choose for logits [T, E]."""
        _, ids = self._top(logits, dense_output=True)
        return ids

    @torch.no_grad()
    def gates(self, logits: torch.Tensor, routes: torch.Tensor | None = None) -> torch.Tensor:
        """Return the router's weights [T, E] for logits [T, E], without the scaling factor; 0 for experts not chosen.

        routes: experts [T, k] to use instead of the router's choice. A token without a route (`routing.table.has_route`) keeps
        the router's choice.
        """
        selector = None
        if routes is not None:
            selector = RouteSelector()
            selector.layer_number, selector.route_pass = 1, RoutePass([_Given(routes)])
        gates, _ = self._top(logits, dense_output=False, router_replay=selector)
        return gates

    def _top(
        self, logits: torch.Tensor, *, dense_output: bool, router_replay: RouteSelector | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return topk_routing_with_score_function(
            logits,
            self.topk,
            use_pre_softmax=self.config.moe_router_pre_softmax,
            num_groups=self.config.moe_router_num_groups,
            group_topk=self.config.moe_router_group_topk,
            score_function=self.score_function,
            expert_bias=self.expert_bias,
            dense_output=dense_output,
            router_replay=router_replay,  # pyright: ignore[reportArgumentType]: it has the interface
        )


class RouterAdapter(torch.nn.Module):
    """A low-rank adapter of a router. Like the router, it is not split over ranks; Megatron-Bridge would split it.

    With sequence parallelism, each rank routes different tokens. The mark `sequence_parallel` on the adapter's weights makes
    Megatron sum their gradients over the ranks.
    """

    input_is_parallel = False

    def __init__(self, router: ReplayRouter, rank: int, alpha: float) -> None:
        super().__init__()
        experts, hidden = router.weight.shape
        self.dim, self.alpha, self.enabled = rank, alpha, True
        self.linear_in = torch.nn.Linear(hidden, rank, bias=False, dtype=router.weight.dtype)
        self.linear_out = torch.nn.Linear(rank, experts, bias=False, dtype=router.weight.dtype)
        for parameter in self.parameters():
            parameter.sequence_parallel = router.config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute the adapter's part of the logits [..., E], in fp32, from hidden states [..., d]."""
        low = torch.nn.functional.linear(hidden.float(), self.linear_in.weight.float())
        return torch.nn.functional.linear(low, self.linear_out.weight.float()) * (self.alpha / self.dim)

    def enable_adapter_layers(self) -> None:
        """Turn the adapter on."""
        self.enabled = True

    def disable_adapter_layers(self) -> None:
        """Turn the adapter off."""
        self.enabled = False


class _Given(RouteObserver):
    def __init__(self, routes: torch.Tensor) -> None:
        self.routes = routes

    def replay(self, layer: int) -> torch.Tensor:
        return self.routes


class ReplayTransformerLayer(TransformerLayer):
    """Megatron's layer; it hands its router the routing data (`PackedBatch.routing`) that comes with the packed batch."""

    def _forward_mlp(
        self,
        hidden_states: torch.Tensor,
        inference_context: Any = None,
        padding_mask: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ):
        arguments = (hidden_states, inference_context, padding_mask, packed_seq_params)
        router = getattr(self.mlp, "router", None)
        if router is None or not isinstance(packed_seq_params, PackedBatch):
            return super()._forward_mlp(*arguments)
        with router.during(packed_seq_params):
            return super()._forward_mlp(*arguments)


def routers(chunks: Iterable[torch.nn.Module]) -> Iterator[tuple[int, ReplayRouter]]:
    """Yield (index of the model's layer, from 0; router) for this process's MoE layers."""
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, ReplayRouter):
                yield module.router_replay.layer, module
