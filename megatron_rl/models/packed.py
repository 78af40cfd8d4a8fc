"""The packed micro-batch's data that goes through the model beside its hidden states."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_rl.ops.packed_layout import PackedLayout
from megatron_rl.routing.passes import RoutePass


@dataclass
class PackedBatch(PackedSeqParams):
    """The data that goes through the model beside a micro-batch's hidden states."""

    layout: PackedLayout | None = None
    """Places of its tokens; None: found on the way, at the price of waiting for a GPU."""
    routing: RoutePass | None = None
    """Work of the routers in this pass; None: they route freely, and nothing is kept."""


def packed_layout(params: PackedSeqParams, tokens: int, cp_group: torch.distributed.ProcessGroup) -> PackedLayout:
    """The layout of a micro-batch: as given, or computed once and kept on `params`, which all layers of a pass share."""
    given = getattr(params, "layout", None)
    if given is not None:
        return given
    key = (tokens, cp_group.size(), cp_group.rank())
    kept = getattr(params, "_layout", None)
    if kept is None or kept[0] != key:
        cu_seqlens = params.cu_seqlens_q if params.cu_seqlens_q_padded is None else params.cu_seqlens_q_padded
        if cu_seqlens is None:
            raise ValueError("packed sequences without cu_seqlens_q")
        kept = (key, PackedLayout.build(cu_seqlens, *key))
        setattr(params, "_layout", kept)  # noqa: B010 Megatron's own class, which has no such field
    return kept[1]
