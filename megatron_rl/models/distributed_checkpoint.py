"""Fully parallel dist_checkpointing: data-parallel ranks hold the same tensors, and each rank writes and reads a share.

Only a background write copies tensors that are in host memory. No second process is started. After a failure, the error states
a single reason.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import queue
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy, TorchDistSaveShardedStrategy
from megatron.core.dist_checkpointing.validation import (
    _HASH_ALGORITHM,
    INTEGRITY_FNAME,
    _compute_file_hash,
    verify_integrity_manifest,
)
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from megatron_rl.errors import UserError
from megatron_rl.models.checkpoint_reader import untrusted
from megatron_rl.models.parallel_check import one_line

logging.getLogger(filesystem_async.__name__).setLevel(logging.CRITICAL)  # it logs the errors that it raises
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def write(state: dict[str, Any], folder: Path, source: Callable[[Tensor], Tensor] | None = None) -> None:
    """Write a sharded state dict into an existing folder, like `Write`. All ranks call this function.

    Errors: OSError with the reason as strerror; UserError from `source`.
    """
    Write(state, folder, source=source).finish()


def read(state: dict[str, Any], folder: Path, *, part: bool = False) -> dict[str, Any]:
    """Load into a sharded state dict and return it. All ranks call this function. No code from the files is run.

    The files are first compared with the manifest. part: the state is only a part of the folder's state, and the caller has
    verified the files already. Errors: the errors of dist_checkpointing.load.
    """
    strategy: Any = FullyParallelLoadStrategyWrapper(TorchDistLoadShardedStrategy(), _replicas())
    with untrusted():
        loaded = dist_checkpointing.load(
            state, str(folder), sharded_strategy=strategy, verify_integrity=not part, validate_access_integrity=not part
        )
    return cast("dict[str, Any]", loaded)  # load returns the state alone, as no missing keys are requested


def verify_files(folder: Path) -> None:
    """Compare all files with the manifest. All ranks call this function. Errors: CheckpointingException."""
    with untrusted():
        verify_integrity_manifest(str(folder))


class Write:
    """A write in progress. Every rank creates one, which plans and starts the write; `finish` completes the folder.

    background: write the files in a thread from a copy in host memory, so that the state may change meanwhile.
    source: function that gets each host tensor of the state when the tensor is about to be written. It returns a tensor of the
    same shape and dtype, which is written instead and then freed. The state's own values are never read, so its memory can stay
    untouched. Only for a single process.
    Errors: OSError with the reason as strerror, raised here if the plan fails; UserError from `source`.
    """

    def __init__(
        self,
        state: dict[str, Any],
        folder: Path,
        *,
        background: bool = False,
        source: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._folder = folder
        self._hashes: dict[str, str] = {}
        self._problem: str | None = None
        self._refused: UserError | None = None
        # Megatron would start a second process for the queue of results. It takes 0.6 GB per rank, and stays when the trainer
        # is killed.
        filesystem_async._results_queue = queue.Queue()
        apply_factories(state)
        for part in nested_values(state):
            if isinstance(part, ShardedTensor) and part.data is not None:
                part.data = _for_writer(part.data, copy=background)
        strategy: Any = FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy(), _replicas())
        try:
            request: Any = dist_checkpointing.save(
                state, str(folder), sharded_strategy=strategy, async_sharded_save=True, async_strategy="mcore"
            )
            self._arguments = list(request.async_fn_args)
            if request.preload_fn is not None:
                self._arguments[1] = request.preload_fn()  # copies from the GPUs
            if source is not None:
                self._arguments[1] = [
                    (path, key, (objects, self._sourced(tensors, source)))
                    for path, key, (objects, tensors) in self._arguments[1]
                ]
        except (OSError, CheckpointingException, CheckpointException, RuntimeError) as error:
            raise OSError(errno.EIO, f"could not be written ({_why(error, folder)})") from None
        self._work, self._finalize = request.async_fn, request.finalize_fns
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True) if background else None
        if self._thread is not None:
            self._thread.start()
        else:
            self._run()

    def written(self) -> bool:
        """Return True if this rank has written its files, or if the write has failed on it."""
        return self._thread is None or not self._thread.is_alive()

    def finish(self) -> None:
        """Complete the folder once `written` is True on all ranks. All ranks call this. Errors: OSError, on every rank."""
        reports: list[tuple[dict[str, str], str | None]] = [({}, None)] * dist.get_world_size()
        dist.all_gather_object(reports, (self._hashes, self._problem))
        if self._refused:
            raise self._refused
        try:
            if problem := next((problem for _, problem in reports if problem), None):
                raise RuntimeError(problem)
            for step in self._finalize:
                step()
            outcome: list[str | None] = [None]
            if dist.get_rank() == 0:
                outcome[0] = self._write_manifest({name: h for hashes, _ in reports for name, h in hashes.items()})
            dist.broadcast_object_list(outcome)
            if outcome[0]:
                raise RuntimeError(outcome[0])
        except (OSError, CheckpointingException, CheckpointException, RuntimeError) as error:
            raise OSError(errno.EIO, f"could not be written ({_why(error, self._folder)})") from None

    def _sourced(self, items: Iterable[tuple[Any, Tensor]], source: Callable[[Tensor], Tensor]) -> Iterator[Any]:
        """Yield the items for Megatron's writer, which reads each item once. `source` returns the tensor of each item."""
        try:
            for item, tensor in items:
                yield item, source(tensor)
        except UserError as error:  # the writer would keep only the error's text
            self._refused = error
            raise

    def _run(self) -> None:
        if self._work is None:  # this rank has nothing to write
            return
        paths = [Path(path) for path, *_ in self._arguments[1]]
        try:
            self._work(*self._arguments)
            self._arguments = []  # frees the copy
            # A full disk leaves files out; Megatron's finalization reports this.
            self._hashes = {path.name: _compute_file_hash(str(path)) for path in paths if path.exists()}
        except Exception as error:
            self._problem = one_line(error)

    def _write_manifest(self, hashes: dict[str, str]) -> str | None:
        """Write Megatron's manifest from the hashes that each rank computed for its files. Return the error's text, or None."""
        try:
            others = [path for path in sorted(self._folder.iterdir()) if path.is_file() and path.name not in hashes]
            hashes |= {path.name: _compute_file_hash(str(path)) for path in others}
            payload = {"algorithm": _HASH_ALGORITHM, "files": hashes}
            (self._folder / INTEGRITY_FNAME).write_text(json.dumps(payload, indent=2))
        except OSError as error:
            return one_line(error)
        return None


def _replicas() -> dist.ProcessGroup:
    """Return the group of ranks that hold the same tensors and divide their writing and reading."""
    return cast("dist.ProcessGroup", parallel_state.get_data_parallel_group(with_context_parallel=True))


def _for_writer(tensor: Tensor, *, copy: bool) -> Tensor:
    """Return the tensor in a form that Megatron's writer does not copy: a host tensor must fill its storage.

    copy: copy a host tensor. The writer itself copies GPU tensors to host memory.
    """
    tensor = tensor.detach()
    if tensor.device.type != "cpu":
        return tensor
    if copy:
        return tensor.clone(memory_format=torch.contiguous_format)
    if not tensor.is_contiguous() or not tensor.numel():
        return tensor
    words = tensor.view(_INTEGERS[tensor.element_size()])  # numpy has no bfloat16
    return torch.from_numpy(words.numpy()).view(tensor.dtype)


def _why(error: BaseException, folder: Path) -> str:
    """Return the reason of a failed write in one line. Megatron's writers report a full disk as errors of many types."""
    if shutil.disk_usage(folder).free < 1 << 20:
        return os.strerror(errno.ENOSPC)
    if isinstance(error, CheckpointException):  # by rank, with tracebacks; the first suffices
        return one_line(next(iter(error.failures.values()), ["another process failed"])[0])
    return one_line(error)


# -- extra state ---------------------------------------------------------------------------------------------------------
# Extra state of layers is not read from checkpoints, so a checkpoint fits both Transformer Engine's and local layers. Local
# layers have no extra state. Transformer Engine's layers save objects under names that local layers lack. With delayed scaling
# the objects are pickles, which these layers refuse to load; `fp8.remembered` saves their contents instead.


_NAME = "._extra_state"


def without_extra_state(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return a state dict, or a dict of state dicts, without the extra state of layers."""
    return {
        name: without_extra_state(part) if isinstance(part, dict) else part
        for name, part in state.items()
        if not (isinstance(name, str) and _NAME in name)
    }


def load_weights(module: torch.nn.Module, weights: Mapping[str, Any], *, strict: bool = True) -> Any:
    """Call module.load_state_dict for weights and buffers only. If strict, RuntimeError names missing or unexpected keys."""
    # torch's strict mode does not fit: wrapped layers save extra state under one name and load it under another.
    found = module.load_state_dict(without_extra_state(weights), strict=False)
    missing, unexpected = ([key for key in keys if _NAME not in key] for keys in found)
    if strict and (missing or unexpected):
        raise RuntimeError(f"{type(module).__name__}: missing keys {missing[:5]}, unexpected keys {unexpected[:5]}")
    return type(found)(missing, unexpected)
