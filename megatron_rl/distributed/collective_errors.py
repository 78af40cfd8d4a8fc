"""Error messages that name the missing ranks if a collective fails because a process, its host or the network is gone."""

from __future__ import annotations

import os
import socket
import threading
import time
import traceback
from contextlib import suppress

import torch.distributed as dist

PATIENCE_S = 5.0
"""Seconds to wait for an answer of the other processes, which notice the failure at about the same time."""
_KEY = "megatron_rl/lost"


def lost_contact(error: BaseException) -> str | None:
    """Return one line that describes a failed collective; None for any other error, or if there is only one process.

    Every process that notices the failure writes to the store of the process group, so each process can name the silent ranks.
    """
    if not _of_a_collective(error) or int(os.environ.get("WORLD_SIZE", 1)) == 1:
        return None
    reason = str(error).splitlines()[0].rsplit("] ", 1)[-1]
    if not dist.is_initialized():
        met = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        return (
            f"rank {os.environ.get('RANK')} on {socket.gethostname()} could not connect to the others at {met} within"
            f" parallel.timeout_s: {reason}; check that they started, their logs, and that this host reaches that address"
        )
    answers: list[list[int]] = []
    # The store may be on a lost host, and then its calls never return.

    def ask() -> None:
        with suppress(dist.DistError):  # the store is gone: no answer
            answers.append(_silent())

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(2 * PATIENCE_S)
    if not answers:
        who = f"contact with {os.environ.get('MASTER_ADDR', 'the host of rank 0')}, where the processes met, is lost"
    elif answers[0]:
        ranks = ", ".join(map(str, answers[0]))
        who = f"contact with rank{'s' if len(answers[0]) > 1 else ''} {ranks} is lost"
    else:
        who = "contact between the processes was lost for too long, but all are there"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f"{os.sep}megatron_rl{os.sep}" in f.filename]
    place = f" in {os.path.basename(frames[-1].filename)}:{frames[-1].lineno} ({frames[-1].name})" if frames else ""
    return (
        f"{who}: rank {dist.get_rank()} on {socket.gethostname()} waited{place} for at most parallel.timeout_s: {reason}; see"
        " their logs and hosts. Run the same command again to go on from the last checkpoint"
    )


def _of_a_collective(error: BaseException) -> bool:
    networks = (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError)
    # gloo's errors are RuntimeErrors that begin with a path in gloo's source.
    return isinstance(error, networks) or (isinstance(error, RuntimeError) and "gloo/transport" in str(error))


def _silent() -> list[int]:
    store = dist.distributed_c10d._get_default_store()
    store.set(f"{_KEY}/{dist.get_rank()}", "")
    deadline = time.monotonic() + PATIENCE_S
    while True:
        silent = [rank for rank in range(dist.get_world_size()) if not store.check([f"{_KEY}/{rank}"])]
        if not silent or time.monotonic() > deadline:
            return silent
        time.sleep(0.1)
