"""Conversion of a model that does not fit into memory, in a single process: weights go from file to file, a few at a time.

The model is built, but its parameters are never read or written, so they take no physical memory. Megatron's plan of a
checkpoint and Megatron-Bridge's tasks only use shapes and addresses. Each weight is created when it is written, and then freed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from megatron.bridge.models.conversion.model_bridge import WeightConversionTask
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor

from megatron_rl.models.hf_folder import Checksums

READ_BYTES = 128 * 1024**2
"""Bytes of weights to read from a checkpoint at a time (at least one parameter). Each read goes through all metadata."""
STREAMED_SHARD_BYTES = 256 * 1024**2
"""Smallest limit on the size of an output file in bytes. Memory has to hold one file."""


class FolderSource:
    """`source` argument of a `distributed_checkpoint.Write`: it returns a model folder's weights for a model without values."""

    def __init__(
        self,
        tasks: Iterable[WeightConversionTask],
        weight_of: Callable[[WeightConversionTask], Tensor | None],
        checksums: Checksums,
        done: Callable[[], object],
    ) -> None:
        """Create the source. tasks, weight_of: from `Model.reader`. checksums: gets an entry for each parameter.

        done: called after each parameter.
        """
        self.tasks = sorted(tasks, key=_address)
        self._checksums = checksums
        self._weight_of = weight_of
        self._done = done
        self._recent: tuple[WeightConversionTask | None, Tensor | None] = None, None

    def __call__(self, tensor: Tensor) -> Tensor:
        """Return the folder's weights for a tensor that is a part of a parameter. Any other tensor is returned unchanged."""
        index = bisect_right(self.tasks, tensor.data_ptr(), key=_address) - 1
        task = self.tasks[max(index, 0)]
        start = tensor.data_ptr() - _address(task)
        if not 0 <= start < _parameter(task).nbytes:
            return tensor
        flat = self._weight(task).view(-1)[start // tensor.itemsize :]
        return flat[: tensor.numel()].view(tensor.shape).clone()

    def _weight(self, task: WeightConversionTask) -> Tensor:
        last, weight = self._recent
        if last is not task or weight is None:
            self._recent = None, None
            made = self._weight_of(task)
            assert made is not None, task.param_name  # a single process has every parameter in full
            weight = made.detach().to(_parameter(task).dtype).contiguous()
            self._recent = task, weight
            self._checksums.take([(task.param_name, weight)])
            self._done()
        return weight


def checkpoint_tasks(
    tasks: Iterable[WeightConversionTask],
    sharded: Mapping[str, Any],
    read: Callable[[dict[str, Any]], dict[str, Any]],
) -> Iterator[WeightConversionTask]:
    """Yield the tasks with weights from a checkpoint. A few weights are read at a time, and freed when the caller drops them.

    sharded: the model's sharded state dict. read: function that loads a part of it.
    """
    for group in _groups(tasks):
        parts = {task.param_name: _Part(sharded[task.param_name]) for task in group}
        found = read({name: part.state for name, part in parts.items()})
        weights = {name: part.merged(found.pop(name)) for name, part in parts.items()}
        parts.clear()
        for task in group:
            yield replace(task, param_weight=weights.pop(task.param_name))


class _Part:
    """Sharded state that loads one parameter from a checkpoint, into its own memory: the model's memory stays untouched."""

    def __init__(self, sharded: ShardedTensor | ShardedTensorFactory) -> None:
        data = torch.empty_like(cast("Tensor", sharded.data))
        own: Any = replace(sharded, data=data)
        self._merge = own.merge_fn if isinstance(sharded, ShardedTensorFactory) else None
        self._axes = 0
        self.state: Any = dict_list_map_outplace(self._alone, own.build() if self._merge else own)

    def _alone(self, part: ShardedTensor) -> ShardedTensor:
        """Return the part with Megatron's prepended axes (layer, expert) as real axes, so that one index can be loaded."""
        self._axes = part.prepend_axis_num
        shape = (1,) * self._axes + part.local_shape
        data = cast("Tensor", part.data).view(shape)
        return replace(part, data=data, local_shape=shape, prepend_axis_num=0)

    def merged(self, found: Any) -> Tensor:
        """Return the parameter, assembled from what was read into the state."""
        parts: Any = dict_list_map_outplace(lambda tensor: tensor.view(tensor.shape[self._axes :]), found)
        return self._merge(parts) if self._merge else parts


def shard_bytes(tasks: Iterable[WeightConversionTask], limit: int) -> int:
    """Return the largest size of an output file in bytes: 1/32 of the model, between STREAMED_SHARD_BYTES and limit."""
    return min(limit, max(STREAMED_SHARD_BYTES, sum(_parameter(task).nbytes for task in tasks) // 32))


def _groups(tasks: Iterable[WeightConversionTask]) -> Iterator[list[WeightConversionTask]]:
    group, size = [], 0
    for task in tasks:
        if group and size + _parameter(task).nbytes > READ_BYTES:
            yield group
            group, size = [], 0
        group.append(task)
        size += _parameter(task).nbytes
    if group:
        yield group


def _address(task: WeightConversionTask) -> int:
    return _parameter(task).data_ptr()


def _parameter(task: WeightConversionTask) -> Tensor:
    assert task.param_weight is not None
    return task.param_weight
