"""State of the distributed optimizer for Megatron's dist_checkpointing, read and written in place, without gathers or copies.

Each data-parallel rank holds a contiguous range of elements of a parameter's fp32 weights and moments. Megatron's own
layout-independent format (`fully_reshardable`) first gathers all elements on every rank. This module instead cuts each range
into rectangular boxes of the parameter. Each box is a view, which is written or read in place. Names and shapes in the
checkpoint are the same as Megatron's, so each format can load the other's checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

Box = tuple[int, tuple[int, ...], tuple[int, ...]]
"""Rectangular part of an array: (index of its first element in row-major order, offsets, sizes)."""


def boxes(shape: Sequence[int], start: int, end: int) -> Iterator[Box]:
    """Cut the elements [start, end) of a row-major array into boxes. The boxes and their elements are in row-major order."""
    if not shape:
        yield 0, (), ()
        return
    row = math.prod(shape[1:])
    while start < end:
        index, inside = divmod(start, row)
        if inside or end - start < row:  # a part of one row
            stop = min(end, (index + 1) * row)
            for first, offsets, sizes in boxes(shape[1:], inside, stop - index * row):
                yield index * row + first, (index, *offsets), (1, *sizes)
        else:
            rows = (end - start) // row
            stop = start + rows * row
            yield start, (index, *[0] * (len(shape) - 1)), (rows, *shape[1:])
        start = stop


class ShardedState:
    """State of one DistributedOptimizer. `sharded` is the state dict that dist_checkpointing saves or fills when loading.

    Errors: ValueError if the model's sharded state dict lacks a parameter, or has it in another layout.
    """

    def __init__(self, optimizer: DistributedOptimizer, model_state: ShardedStateDict, *, apart: bool = False) -> None:
        """Build the sharded state. model_state: `sharded_state_dict` of the optimizer's model chunks.

        apart: True to store the parameters of each layer and expert in separate tensors. Megatron stores the parameters of all
        layers, and of all experts, in one tensor, which must be complete. Frozen layers or experts have no optimizer state, so
        this tensor would be incomplete.
        """
        self._optimizer = optimizer
        described = {
            part.data: part
            for part in nested_values(model_state)
            if isinstance(part, ShardedTensor | ShardedTensorFactory)
        }
        self._tensors: dict[Tensor, dict[str, Tensor]] = {}
        self.sharded: dict[int, dict[str, list[ShardedTensor]]] = {}
        for parameter, ranges in _ranges(optimizer):
            if parameter not in described:
                raise ValueError(f"a parameter of shape {tuple(parameter.shape)} is not in the model's state")
            # Moments in bf16 are stored as fp32, as Megatron does.
            found = optimizer._get_main_param_and_optimizer_states(parameter)
            tensors = {name: tensor.float() for name, tensor in found.items()}
            self._tensors[parameter] = tensors
            pieces = _pieces(described[parameter], parameter)
            self.sharded[len(self.sharded)] = {
                # The step count is left out: it is a single number, which the scheduler has.
                name: [part for piece in pieces for part in _cut(name, flat, ranges, *piece, apart=apart)]
                for name, flat in tensors.items()
                if name != "step"
            }

    @torch.no_grad()
    def loaded(self) -> None:
        """Hand the loaded state to the optimizer, which may store it in another form. Call it after loading into `sharded`."""
        for parameter, tensors in self._tensors.items():
            self._optimizer._set_main_param_and_optimizer_states(parameter, tensors)
        inner = self._optimizer.optimizer
        if hasattr(inner, "_sync_hdo_state_to_sub_optimizers"):  # Megatron's optimizer with a part on the host
            inner._sync_hdo_state_to_sub_optimizers()


def _ranges(optimizer: DistributedOptimizer) -> Iterator[tuple[Tensor, Any]]:
    """Yield (parameter, range of its elements that this rank holds)."""
    for by_dtype in [] if optimizer.is_stub_optimizer else optimizer.gbuf_ranges:
        for buckets in by_dtype.values():
            for bucket in buckets:
                for parameter, ranges in bucket["param_map"].items():
                    yield parameter, ranges["param"]


def _pieces(described: ShardedTensor | ShardedTensorFactory, parameter: Tensor) -> list[tuple[ShardedTensor, int]]:
    """Return (checkpoint tensor, index of its first element in the parameter); fused gate and up projections have two."""
    built = described.build() if isinstance(described, ShardedTensorFactory) else described
    found = []
    for piece in [built] if isinstance(built, ShardedTensor) else nested_values(built):
        data = piece.data
        assert data is not None, f"{piece.key} describes no tensor"
        first, rest = divmod(data.data_ptr() - parameter.data_ptr(), parameter.element_size())
        if rest or not data.is_contiguous() or not 0 <= first <= parameter.numel() - data.numel():
            raise ValueError(f"{piece.key}: not a contiguous range of the parameter's elements")
        found.append((piece, first))
    return found


def _cut(
    name: str, flat: Tensor, held: Any, piece: ShardedTensor, first: int, *, apart: bool
) -> Iterator[ShardedTensor]:
    """Yield the boxes of `piece`, which begins at element `first` of its parameter.

    flat: elements held.start to held.end of the parameter, which this rank holds.
    """
    start, end = max(held.start - first, 0), min(held.end - first, math.prod(piece.local_shape))
    stacked = piece.prepend_axis_num
    place = "".join(f".{index}" for index in piece.global_offset[:stacked]) if apart else ""
    left_out, ones = (stacked, ()) if apart else (0, (1,) * stacked)
    for element, offsets, sizes in boxes(piece.local_shape, start, end):
        at = first + element - held.start
        inside = (*[0] * stacked, *offsets)
        global_offset = tuple(a + b for a, b in zip(piece.global_offset, inside, strict=True))
        yield ShardedTensor(
            key=f"optimizer.state.{name}.{piece.key}{place}",
            data=flat.detach()[at : at + math.prod(sizes)].view(ones + sizes),
            dtype=flat.dtype,
            local_shape=ones + sizes,
            global_shape=piece.global_shape[left_out:],
            global_offset=global_offset[left_out:],
            axis_fragmentations=None,  # data-parallel ranks cut the tensor at any element
            # Data-parallel ranks hold no copies.
            replica_id=(*piece.replica_id[:2], 0),  # pyright: ignore[reportIndexIssue]: a parameter's is a triple
            allow_shape_mismatch=piece.allow_shape_mismatch,
        )
