"""Data of a packed micro-batch that goes through the model beside its hidden states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_rl.ops.token_places import TokenPlaces
from megatron_rl.routing.passes import RoutePass, RouterLosses


class LayerOutputs(Protocol):
    """Interface of an observer of the decoder layers' outputs in a micro-batch."""

    def see(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """Return the output [rows, 1, hidden] of a layer (numbered from 0) that the next layer gets."""
        ...


@dataclass
class PackedBatch(PackedSeqParams):
    """Data that goes through the model beside a micro-batch's hidden states."""

    places: TokenPlaces | None = None
    """Positions of the tokens; None to compute them during the pass, which has to wait for the GPU."""
    routing: RoutePass | None = None
    """Work of the routers in this pass; None for free routing without recording."""
    features: LayerOutputs | None = None
    """Observer of the layers' outputs in this pass."""
    router_losses: RouterLosses | None = None
    """Router losses and the tokens that they count, in a pass with gradients; None: all tokens count, no measurement."""


def token_places(params: PackedSeqParams, tokens: int, cp_group: torch.distributed.ProcessGroup) -> TokenPlaces:
    """Return a micro-batch's token places: given ones, or computed once and stored on `params`, which all layers share."""
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
        setattr(params, "_places", found)  # noqa: B010 Megatron's class has no such field
    return found[1]
