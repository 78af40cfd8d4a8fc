"""Writing with Megatron's dist_checkpointing: synchronous, in this process alone, one reason when it fails."""

from __future__ import annotations

import errno
import logging
import os
import queue
import shutil
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies import filesystem_async
from torch.distributed.checkpoint.api import CheckpointException

from megatron_rl.models.parallel_check import one_line

logging.getLogger(filesystem_async.__name__).setLevel(logging.CRITICAL)  # it logs what it raises


def write(state: dict[str, Any], folder: Path) -> None:
    """Write a sharded state dict into an existing folder (all ranks call). Errors: OSError with the reason as strerror."""
    # Megatron would start a second process to hold the queue of results, which an asynchronous write needs: 0.6 GB each
    # rank, and left behind when the trainer is killed.
    filesystem_async._results_queue = queue.Queue()
    try:
        dist_checkpointing.save(state, str(folder), async_strategy="mcore", verify_integrity=True)
    except (OSError, CheckpointingException, CheckpointException, RuntimeError) as error:
        raise OSError(errno.EIO, f"could not be written ({_why(error, folder)})") from None


def _why(error: BaseException, folder: Path) -> str:
    """The writers below report a full disk as an error of any kind."""
    if shutil.disk_usage(folder).free < 1 << 20:
        return os.strerror(errno.ENOSPC)
    if isinstance(error, CheckpointException):  # by rank, each with its traceback
        error = next(iter(error.failures.values()))[0]
    return one_line(error)
