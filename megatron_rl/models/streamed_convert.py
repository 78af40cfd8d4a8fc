"""Conversion of a model that is larger than memory, by one process: weights go from file to file, some at a time.

The model is built and its memory never touched, so that it takes none: Megatron's plan of a checkpoint and Megatron-Bridge's
tasks look at shapes and addresses. What fills it is made when it is written, and freed then.
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
"""Weights that are read from a checkpoint at a time, or one parameter; each such read looks at the whole metadata."""
STREAMED_SHARD_BYTES = 256 * 1024**2
"""Least that an output file is allowed to hold, which memory has to hold too."""


class FolderSource:
    """The source of a write (`dist_write.Write`): a model folder's weights for the parameters of an untouched model."""

    def __init__(
        self,
        tasks: Iterable[WeightConversionTask],
        weight_of: Callable[[WeightConversionTask], Tensor | None],
        checksums: Checksums,
        done: Callable[[], object],
    ) -> None:
        """tasks, weight_of: of `Model.reader`. checksums: take those of the parameters. done: called after each of them."""
        self.tasks = sorted(tasks, key=_address)
        self._checksums = checksums
        self._weight_of = weight_of
        self._done = done
        self._recent: tuple[WeightConversionTask | None, Tensor | None] = None, None

    def __call__(self, tensor: Tensor) -> Tensor:
        """Content of a tensor that lies in a parameter's memory; if it belongs to no parameter: the tensor itself."""
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
            assert made is not None, task.param_name  # one process has all of every parameter
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
    """The tasks with weights of a checkpoint, which are read some at a time and freed when the caller lets go of them.

    sharded: the model's sharded state dict. read: loads a part of it.
    """
    for group in _groups(tasks):
        parts = {task.param_name: _Part(sharded[task.param_name]) for task in group}
        found = read({name: part.state for name, part in parts.items()})
        weights = {name: part.merged(found.pop(name)) for name, part in parts.items()}
        parts.clear()
        for task in group:
            yield replace(task, param_weight=weights.pop(task.param_name))


class _Part:
    """Part of a checkpoint that is read for one parameter, into memory of its own: the model's is never touched."""

    def __init__(self, sharded: ShardedTensor | ShardedTensorFactory) -> None:
        data = torch.empty_like(cast("Tensor", sharded.data))
        own: Any = replace(sharded, data=data)
        self._merge = own.merge_fn if isinstance(sharded, ShardedTensorFactory) else None
        self._axes = 0
        self.state: Any = dict_list_map_outplace(self._alone, own.build() if self._merge else own)

    def _alone(self, part: ShardedTensor) -> ShardedTensor:
        """The same with axes that Megatron puts in front (layer, expert) as its own; it wants all along those at once."""
        self._axes = part.prepend_axis_num
        shape = (1,) * self._axes + part.local_shape
        data = cast("Tensor", part.data).view(shape)
        return replace(part, data=data, local_shape=shape, prepend_axis_num=0)

    def merged(self, found: Any) -> Tensor:
        """The parameter, of what was read into the state."""
        parts: Any = dict_list_map_outplace(lambda tensor: tensor.view(tensor.shape[self._axes :]), found)
        return self._merge(parts) if self._merge else parts


def shard_bytes(tasks: Iterable[WeightConversionTask], limit: int) -> int:
    """Most bytes of an output file: a 32nd of the model within SHARD_BYTES and limit, as memory holds one."""
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
