"""Fully parallel dist_checkpointing: each data-parallel rank writes and reads its share of the tensors that all hold.

Nothing is copied on the host but what a background write needs, no second process is started, and there is one reason when
it fails.
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

logging.getLogger(filesystem_async.__name__).setLevel(logging.CRITICAL)  # it logs what it raises
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def write(state: dict[str, Any], folder: Path, source: Callable[[Tensor], Tensor] | None = None) -> None:
    """Write a sharded state dict into an existing folder (all ranks call), as `Write` does.

    Errors: OSError with the reason as strerror; UserError of the source.
    """
    Write(state, folder, source=source).finish()


def read(state: dict[str, Any], folder: Path, *, part: bool = False) -> dict[str, Any]:
    """Load into a sharded state dict, after its files were compared with the manifest (all ranks call). Runs nothing of them.

    part: the state is a part of what the folder has, of which all are read from files that are compared already.
    Errors: those of dist_checkpointing.load.
    """
    strategy: Any = FullyParallelLoadStrategyWrapper(TorchDistLoadShardedStrategy(), _replicas())
    with untrusted():
        loaded = dist_checkpointing.load(
            state, str(folder), sharded_strategy=strategy, verify_integrity=not part, validate_access_integrity=not part
        )
    return cast("dict[str, Any]", loaded)  # alone, as missing keys are not asked for


def verify_files(folder: Path) -> None:
    """Compare all files with the manifest (all ranks call). Errors: CheckpointingException."""
    with untrusted():
        verify_integrity_manifest(str(folder))


class Write:
    """A write under way. Every rank makes one, which plans and begins it; `finish` completes the folder.

    background: the files are written in a thread, from a copy on the host: the state may change meanwhile.
    source: called for each tensor of the state on the host when its turn comes; what it returns, of the same shape and dtype,
    is written in its place, and freed. So the state may be memory that nothing has touched. For one process.
    Errors: OSError with the reason as strerror, here for a plan that failed; UserError of the source.
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
        # Megatron would start a second process to hold the queue of results: 0.6 GB each rank, and left behind when the
        # trainer is killed.
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
                self._arguments[1] = request.preload_fn()  # from the GPUs
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
        """True if this rank's files are written, or failed to be."""
        return self._thread is None or not self._thread.is_alive()

    def finish(self) -> None:
        """Complete the folder when `written` is true on all ranks (all call). Errors: OSError, on every rank."""
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
        """The items that Megatron's writer goes through once, with the source's tensors."""
        try:
            for item, tensor in items:
                yield item, source(tensor)
        except UserError as error:  # of which the writer would keep the text alone
            self._refused = error
            raise

    def _run(self) -> None:
        if self._work is None:  # this rank has nothing to write
            return
        paths = [Path(path) for path, *_ in self._arguments[1]]
        try:
            self._work(*self._arguments)
            self._arguments = []  # gives the copy back
            # As far as the disk is not full; Megatron's finalization says if it was.
            self._hashes = {path.name: _compute_file_hash(str(path)) for path in paths if path.exists()}
        except Exception as error:
            self._problem = one_line(error)

    def _write_manifest(self, hashes: dict[str, str]) -> str | None:
        """Megatron's manifest, from hashes that each rank took of its own files. Returns why it could not be written."""
        try:
            others = [path for path in sorted(self._folder.iterdir()) if path.is_file() and path.name not in hashes]
            hashes |= {path.name: _compute_file_hash(str(path)) for path in others}
            payload = {"algorithm": _HASH_ALGORITHM, "files": hashes}
            (self._folder / INTEGRITY_FNAME).write_text(json.dumps(payload, indent=2))
        except OSError as error:
            return one_line(error)
        return None


def _replicas() -> dist.ProcessGroup:
    """The ranks that hold the same tensors, and share their writing and reading."""
    return cast("dist.ProcessGroup", parallel_state.get_data_parallel_group(with_context_parallel=True))


def _for_writer(tensor: Tensor, *, copy: bool) -> Tensor:
    """A tensor that Megatron's writer takes without a copy: on the host it must fill its storage.

    copy: make a copy of a tensor on the host. The writer itself copies one on a GPU to the host.
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
    """The reason of a failed write on one line. Megatron's writers report a full disk as an error of any kind."""
    if shutil.disk_usage(folder).free < 1 << 20:
        return os.strerror(errno.ENOSPC)
    if isinstance(error, CheckpointException):  # by rank, each with its traceback; told to the first alone
        return one_line(next(iter(error.failures.values()), ["another process failed"])[0])
    return one_line(error)


# -- extra state ---------------------------------------------------------------------------------------------------------
# Checkpoints are read without what layers store beside their weights, and so fit Transformer Engine's layers and local ones.
# Local layers have nothing. Transformer Engine's have objects by names that local layers lack, and with delayed scaling these
# are
# pickles, which they refuse to load; `delayed_scaling` keeps their contents.


_NAME = "._extra_state"


def without_extra_state(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """A state dict, or one of several, to be read into: what is left are weights, buffers and whatever is no layer's."""
    return {
        name: without_extra_state(part) if isinstance(part, dict) else part
        for name, part in state.items()
        if not (isinstance(name, str) and _NAME in name)
    }


def load_weights(module: torch.nn.Module, weights: Mapping[str, Any], *, strict: bool = True) -> Any:
    """As module.load_state_dict, of weights and buffers alone. Errors: RuntimeError naming keys that are lost, if strict."""
    # Not torch's own strictness: wrapped layers name what they store in one way and ask for it in another.
    found = module.load_state_dict(without_extra_state(weights), strict=False)
    missing, unexpected = ([key for key in keys if _NAME not in key] for keys in found)
    if strict and (missing or unexpected):
        raise RuntimeError(f"{type(module).__name__}: missing keys {missing[:5]}, unexpected keys {unexpected[:5]}")
    return type(found)(missing, unexpected)
