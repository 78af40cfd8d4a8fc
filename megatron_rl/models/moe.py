"""The MoE layers of a model: where their experts' weights are, and what each expert of a token puts out."""

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
"""Transformer Engine's grouped layers: linear_fc1.weight0, linear_fc1.weight1, ..."""


@dataclass(frozen=True)
class ExpertSlice:
    """One parameter of one expert: a parameter, or one row of a parameter that all experts share."""

    parameter: torch.nn.Parameter
    row: int | None = None

    @property
    def data(self) -> Tensor:
        """Its values, a view."""
        return self.of(self.parameter.detach())

    @property
    def place(self) -> slice:
        """Where it is in the flat parameter."""
        size = self.data.numel()
        first = (self.row or 0) * size
        return slice(first, first + size)

    @property
    def main_grad(self) -> Tensor:
        """A view of DDP's fp32 gradient buffer."""
        return self.of(self.parameter.main_grad)  # pyright: ignore[reportAttributeAccessIssue]: DDP adds it

    def of(self, whole: Tensor) -> Tensor:
        """This expert's part of a tensor like the parameter."""
        return whole if self.row is None else whole[self.row]


class ExpertMoELayer(MoELayer):
    """Megatron's layer; shows a pass that asks for them what the experts of each token put out, before they are summed."""

    router: ReplayRouter

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        experts: Any = self.experts  # by Megatron's type no module
        for parameter in experts.parameters():
            # Megatron marks the biases of experts' output projections as if each tensor-parallel rank had a part of their
            # gradient. They are reduced with the experts, over these ranks too: marked, they would be summed once more.
            parameter.sequence_parallel = False

    def combine(self, output: Tensor) -> Tensor:
        """Megatron's sum of the experts' outputs; the pass sees the outputs first."""
        output = super().combine(output)
        route_pass = self.router.router_replay.route_pass
        # In training what is computed again is shown when its gradients are computed too, and so once.
        shown = torch.is_grad_enabled() or not self.training
        if route_pass is None or not route_pass.reads_outputs or not shown:
            return output
        dispatcher: Any = self.token_dispatcher
        rows = rows_of_tokens(dispatcher, self.config.moe_router_topk)
        # So many experts has each token: to find that out, as masked_select does, a GPU would be waited for.
        experts = dispatcher.routing_map.byte().argsort(dim=1, descending=True, stable=True)[:, : rows.shape[1]]
        weights = dispatcher.probs.gather(1, experts)
        return route_pass.see_outputs(self.router.router_replay.layer, output, rows, weights)

    def postprocess(self, output: Tensor, shared_expert_output: Tensor | None) -> Tensor:
        """Megatron's; then its dispatcher lets go of the graph, which the router's weights would keep until the next pass.

        With full recomputation that graph has the layer's input and its gradient, of all layers at the end of a backward.
        """
        output = super().postprocess(output, shared_expert_output)
        self.let_go()
        return output

    def let_go(self) -> None:
        """Detach what the dispatcher keeps of this pass."""
        dispatcher: Any = self.token_dispatcher
        for holder in (dispatcher, getattr(dispatcher, "_comm_manager", dispatcher)):
            for name, value in [*vars(holder).items()]:
                if isinstance(value, Tensor) and value.grad_fn is not None:
                    setattr(holder, name, value.detach())


def rows_of_tokens(dispatcher: Any, topk: int) -> Tensor:
    """[T, k] int64: rows of the all-to-all dispatcher's combined outputs that are a token's, by rising expert."""
    # Rows are sorted by expert, then by token; a stable sort by token leaves each one's experts in their order.
    return dispatcher.reversed_local_input_permutation_mapping.argsort(stable=True).view(-1, topk)


def moe_layers(chunks: Iterable[torch.nn.Module]) -> Iterator[tuple[int, MoELayer]]:
    """(model layer from 0, layer) of this process's MoE layers."""
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, MoELayer) and isinstance(module.router, ReplayRouter):
                yield module.router.router_replay.layer, module


def expert_slices(experts: torch.nn.Module) -> dict[str, list[ExpertSlice]]:
    """Trainable parameters of this rank's experts by the name that they have in one expert, each in the order of experts.

    For each way in which Megatron stores them: an expert a module (SequentialMLP), a parameter (weight0, weight1, ... of
    Transformer Engine's grouped layers), or a row of one parameter `[n, ...]`.
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
