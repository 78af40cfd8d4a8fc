"""The packed micro-batch's data that goes through the model beside its hidden states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_rl.ops.token_places import TokenPlaces
from megatron_rl.routing.passes import RoutePass, RouterLosses


class LayerOutputs(Protocol):
    """Whoever looks at the outputs of a micro-batch's decoder layers."""

    def see(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """Return the output [rows, 1, hidden] of a layer, from 0, that goes on to the next one."""
        ...


@dataclass
class PackedBatch(PackedSeqParams):
    """The data that goes through the model beside a micro-batch's hidden states."""

    places: TokenPlaces | None = None
    """Places of its tokens; None: found on the way, at the price of waiting for a GPU."""
    routing: RoutePass | None = None
    """Work of the routers in this pass; None: they route freely, and nothing is recorded."""
    features: LayerOutputs | None = None
    """Who looks at the outputs of the layers in this pass."""
    router_losses: RouterLosses | None = None
    """Which tokens the routers balance, in a pass with gradients; None: all, and nothing is measured."""


def token_places(params: PackedSeqParams, tokens: int, cp_group: torch.distributed.ProcessGroup) -> TokenPlaces:
    """The places of a micro-batch: as given, or computed once and stored on `params`, which all layers of a pass share."""
    given = getattr(params, "places", None)
    if given is not None:
        return given
    key = (tokens, cp_group.size(), cp_group.rank())
    found = getattr(params, "_places", None)
    if found is None or found[0] != key:
        cu_seqlens = params.cu_seqlens_q if params.cu_seqlens_q_padded is None else params.cu_seqlens_q_padded
        if cu_seqlens is None:
            raise ValueError("packed sequences without cu_seqlens_q")
        found = (key, TokenPlaces.build(cu_seqlens, *key))
        setattr(params, "_places", found)  # noqa: B010 Megatron's own class, which has no such field
    return found[1]
