"""The distributed optimizer's state as Megatron's dist_checkpointing stores it: where it lies, without a gather or a copy.

A data-parallel rank holds a run of elements of each parameter's fp32 weights and moments. Megatron's own format that can be
loaded on any layout (`fully_reshardable`) first gathers all of them on every rank. Here a run is cut into boxes of the
parameter, of which each is a view that is written, or read into, in place. Names and shapes in the checkpoint are the same,
so either side loads what the other has saved.
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
"""(first element in row-major order, offsets, sizes)"""


def boxes(shape: Sequence[int], start: int, end: int) -> Iterator[Box]:
    """Cut the elements [start, end) of a row-major array into boxes whose elements follow each other, in order."""
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
    """The state of one DistributedOptimizer: `sharded` is what dist_checkpointing saves, or loads into.

    Errors: ValueError for a parameter that is not in the model's sharded state dict, or is laid out otherwise there.
    """

    def __init__(self, optimizer: DistributedOptimizer, model_state: ShardedStateDict, *, apart: bool = False) -> None:
        """model_state: `sharded_state_dict` of the optimizer's model chunks.

        apart: the parameters of each layer and expert have tensors of their own. Megatron stores those of all layers, and of
        all experts, as one tensor, which must have no holes: where single ones are frozen and have no state, there would be.
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
            # Moments that are kept in bf16 are stored in fp32, as Megatron does.
            found = optimizer._get_main_param_and_optimizer_states(parameter)
            tensors = {name: tensor.float() for name, tensor in found.items()}
            self._tensors[parameter] = tensors
            pieces = _pieces(described[parameter], parameter)
            self.sharded[len(self.sharded)] = {
                # The count of steps is one number, which the scheduler knows.
                name: [part for piece in pieces for part in _cut(name, flat, ranges, *piece, apart=apart)]
                for name, flat in tensors.items()
                if name != "step"
            }

    @torch.no_grad()
    def loaded(self) -> None:
        """After loading into `sharded`: give it to the optimizer, where it holds it in another form."""
        for parameter, tensors in self._tensors.items():
            self._optimizer._set_main_param_and_optimizer_states(parameter, tensors)
        inner = self._optimizer.optimizer
        if hasattr(inner, "_sync_hdo_state_to_sub_optimizers"):  # Megatron's optimizer that keeps a part on the host
            inner._sync_hdo_state_to_sub_optimizers()


def _ranges(optimizer: DistributedOptimizer) -> Iterator[tuple[Tensor, Any]]:
    """(parameter, the run of its elements that this rank holds)."""
    for by_dtype in [] if optimizer.is_stub_optimizer else optimizer.gbuf_ranges:
        for buckets in by_dtype.values():
            for bucket in buckets:
                for parameter, ranges in bucket["param_map"].items():
                    yield parameter, ranges["param"]


def _pieces(described: ShardedTensor | ShardedTensorFactory, parameter: Tensor) -> list[tuple[ShardedTensor, int]]:
    """(what the checkpoint holds of the parameter, its first element in it): two for fused gate and up projections."""
    built = described.build() if isinstance(described, ShardedTensorFactory) else described
    found = []
    for piece in [built] if isinstance(built, ShardedTensor) else nested_values(built):
        data = piece.data
        assert data is not None, f"{piece.key} describes no tensor"
        first, rest = divmod(data.data_ptr() - parameter.data_ptr(), parameter.element_size())
        if rest or not data.is_contiguous() or not 0 <= first <= parameter.numel() - data.numel():
            raise ValueError(f"{piece.key}: not a run of the parameter's elements")
        found.append((piece, first))
    return found


def _cut(
    name: str, flat: Tensor, held: Any, piece: ShardedTensor, first: int, *, apart: bool
) -> Iterator[ShardedTensor]:
    """The boxes of `piece`, which begins at element `first` of its parameter, in flat (elements held.start to held.end)."""
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
            axis_fragmentations=None,  # data-parallel ranks cut it anywhere
            # Data-parallel ranks hold no copies.
            replica_id=(*piece.replica_id[:2], 0),  # pyright: ignore[reportIndexIssue]: those of parameters are triples
            allow_shape_mismatch=piece.allow_shape_mismatch,
        )
