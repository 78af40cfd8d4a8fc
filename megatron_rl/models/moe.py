"""The MoE layers of a model: access to their experts' weights and to the output of each token's experts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor

from megatron_rl.models.router import ReplayRouter

OUTPUT = "linear_fc2.weight"
"""Name of the output projection among an expert's parameters."""
_OF_ONE = re.compile(r"\.(?P<kind>weight|bias)(?P<expert>\d+)$")
"""Ending of parameter names in Transformer Engine's grouped layers: linear_fc1.weight0, linear_fc1.weight1, ..."""


@dataclass(frozen=True)
class ExpertSlice:
    """One parameter of one expert: a whole parameter, or a row of a parameter that all experts share."""

    parameter: torch.nn.Parameter
    row: int | None = None

    @property
    def data(self) -> Tensor:
        """View of the expert's values."""
        return self.of(self.parameter.detach())

    @property
    def place(self) -> slice:
        """Range of the expert's elements in the flattened parameter."""
        size = self.data.numel()
        first = (self.row or 0) * size
        return slice(first, first + size)

    @property
    def main_grad(self) -> Tensor:
        """View of the expert's gradient in DDP's fp32 gradient buffer."""
        return self.of(self.parameter.main_grad)  # pyright: ignore[reportAttributeAccessIssue]: DDP adds it

    def of(self, whole: Tensor) -> Tensor:
        """Return this expert's part of a tensor with the parameter's shape."""
        return whole if self.row is None else whole[self.row]


class ExpertMoELayer(MoELayer):
    """Megatron's MoE layer. It can show each token's expert outputs to the current `RoutePass` before they are summed."""

    router: ReplayRouter

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        experts: Any = self.experts  # Megatron's type for it is not a module
        for parameter in experts.parameters():
            # Megatron marks the biases of the experts' output projections as if each tensor-parallel rank had a part of their
            # gradient. These biases are reduced with the experts, over these ranks too. With the mark they are summed twice.
            parameter.sequence_parallel = False

    def combine(self, output: Tensor) -> Tensor:
        """Collect the experts' outputs like Megatron. The current `RoutePass` may replace them before they are summed."""
        output = super().combine(output)
        route_pass = self.router.router_replay.route_pass
        # In training, a recomputed layer runs twice. The outputs are shown only in the run with gradients, so once.
        shown = torch.is_grad_enabled() or not self.training
        if route_pass is None or not route_pass.reads_outputs or not shown:
            return output
        dispatcher: Any = self.token_dispatcher
        rows = rows_of_tokens(dispatcher, self.config.moe_router_topk)
        # Each token has k experts. masked_select does not know this, and would have to wait for the GPU to count them.
        experts = dispatcher.routing_map.byte().argsort(dim=1, descending=True, stable=True)[:, : rows.shape[1]]
        weights = dispatcher.probs.gather(1, experts)
        return route_pass.see_outputs(self.router.router_replay.layer, output, rows, weights)

    def postprocess(self, output: Tensor, shared_expert_output: Tensor | None) -> Tensor:
        """Finish the layer like Megatron, then detach the tensors that its dispatcher keeps.

        Otherwise the router's weights in the dispatcher would keep the autograd graph until the next forward pass. With full
        recomputation, the graph holds the layer's input and the input's gradient. At the end of a backward pass, the inputs and
        gradients of all layers would then be in memory.
        """
        output = super().postprocess(output, shared_expert_output)
        self.let_go()
        return output

    def let_go(self) -> None:
        """Detach the tensors that the dispatcher keeps from this forward pass."""
        dispatcher: Any = self.token_dispatcher
        for holder in (dispatcher, getattr(dispatcher, "_comm_manager", dispatcher)):
            for name, value in [*vars(holder).items()]:
                if isinstance(value, Tensor) and value.grad_fn is not None:
                    setattr(holder, name, value.detach())


def rows_of_tokens(dispatcher: Any, topk: int) -> Tensor:
    """Return each token's rows in the all-to-all dispatcher's combined outputs, by ascending expert, [T, k] int64."""
    # Rows are sorted by expert, then by token. A stable sort by token keeps each token's experts in order.
    return dispatcher.reversed_local_input_permutation_mapping.argsort(stable=True).view(-1, topk)


def moe_layers(chunks: Iterable[torch.nn.Module]) -> Iterator[tuple[int, MoELayer]]:
    """Yield (index of the model's layer, from 0; MoE layer) for this process's MoE layers."""
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, MoELayer) and isinstance(module.router, ReplayRouter):
                yield module.router.router_replay.layer, module


def expert_slices(experts: torch.nn.Module) -> dict[str, list[ExpertSlice]]:
    """Return the trainable parameters of this rank's experts: for each name within an expert, one slice per expert, in order.

    Megatron stores experts in three forms: a module per expert (SequentialMLP), a parameter per expert (weight0, weight1, ...
    in Transformer Engine's grouped layers), and a row per expert in one parameter `[n, ...]`.
    """
    if hasattr(experts, "local_experts"):
        found: dict[str, list[ExpertSlice]] = {}
        for expert in experts.get_submodule("local_experts").children():
            for name, parameter in expert.named_parameters():
                if parameter.requires_grad:
                    found.setdefault(name, []).append(ExpertSlice(parameter))
        return found
    numbered: dict[str, dict[int, ExpertSlice]] = {}
    for name, parameter in experts.named_parameters():
        if not parameter.requires_grad:
            continue
        if match := _OF_ONE.search(name):
            plain = f"{name[: match.start()]}.{match['kind']}"
            numbered.setdefault(plain, {})[int(match["expert"])] = ExpertSlice(parameter)
        else:
            numbered[name] = {row: ExpertSlice(parameter, row) for row in range(len(parameter))}
    return {name: [slices[i] for i in sorted(slices)] for name, slices in numbered.items()}
