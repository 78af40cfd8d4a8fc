"""Data of a packed micro-batch that the model's layers get in addition to the hidden states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_rl.ops.token_places import TokenPlaces
from megatron_rl.routing.passes import RoutePass, RouterLosses


class LayerOutputs(Protocol):
    """Interface of an observer that reads, and may replace, the output of each decoder layer in a micro-batch."""

    def see(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """Read a layer's output [rows, 1, hidden], and return the output that the next layer gets. layer: index from 0."""
        ...


@dataclass
class PackedBatch(PackedSeqParams):
    """Megatron's description of a packed micro-batch, extended by data for our layers."""

    places: TokenPlaces | None = None
    """Positions of the tokens; None to compute them in the forward pass, which then waits for the GPU."""
    routing: RoutePass | None = None
    """Observers that record or replay the routes of this micro-batch; None if routers choose freely and nothing is recorded."""
    features: LayerOutputs | None = None
    """Observer of the decoder layers' outputs; None if nothing observes them."""
    router_losses: RouterLosses | None = None
    """Weight of the router losses, and the tokens that they include, for a forward pass with gradients. None: the losses
    include all tokens and are not measured."""


def token_places(params: PackedSeqParams, tokens: int, cp_group: torch.distributed.ProcessGroup) -> TokenPlaces:
    """Return the positions of a micro-batch's tokens. If `params` has none, compute and store them there for all layers."""
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
