"""Run a function on several real processes over gloo and collect what it returns, for tests of parallel layouts."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import multiprocessing
import os
import pickle
import socket
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from megatron_rl.rollout.server import reserve_port

# Megatron takes ten seconds to import, and modelopt, which the Bridge asks of every module, seven: once in the server from
# which all processes are forked.
FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(["tests.unhindered", "megatron_rl.train", "modelopt.torch", "tests.frozen"])


def end_layout() -> None:
    """Leave Megatron's parallel state, and its groups, for the next layout on the same processes. Collective.

    A group of gloo has three threads, which cost time for as long as it lives; a layout has some thirty groups.
    """
    import torch.distributed as dist
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    free_trainers()
    dist.barrier()  # nobody is within a collective of a group that another one ends
    world = dist.group.WORLD
    for group in [group for group in dist.distributed_c10d._world.pg_map if group is not world]:
        dist.destroy_process_group(group)
    gc.collect()


def free_trainers() -> None:
    """Free the trainers of a parallel state that has ended, with their groups; Python's collector does not see that they hold
    themselves, by torch's hooks of gradients."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel

    if parallel_state.model_parallel_is_initialized():
        return
    # By its type: isinstance would ask proxies of objects that are gone.
    for found in [found for found in gc.get_objects() if issubclass(type(found), DistributedDataParallel)]:
        found.grad_accs.clear()
        settings = found.config
        settings.finalize_model_grads_func = settings.grad_scale_func = settings.no_sync_func = None
    gc.collect()


def rank_environment(rank: int, world_size: int, reserved: socket.socket) -> dict[str, str]:
    """What torchrun would tell a rank; they meet at the reserved port."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(reserved.getsockname()[1]),
    }


def run_ranks(world_size: int, function: str, args: tuple = (), timeout: float = 240.0) -> list[Any]:
    """Call `function` ("module:name", tests/ being importable) with `args` on each rank; returns the results by rank.

    Errors: AssertionError with the tail of the failed rank's output; the others are ended. TimeoutError likewise.
    """
    os.environ["OMP_NUM_THREADS"] = "1"  # of the server too: a pool of threads would not survive the fork
    with tempfile.TemporaryDirectory() as folder, reserve_port() as reserved:
        environments = [rank_environment(rank, world_size, reserved) for rank in range(world_size)]
        processes = [
            FORKED.Process(target=_run, args=(rank, environment, Path(folder), function, args, timeout), daemon=True)
            for rank, environment in enumerate(environments)
        ]
        try:
            for process in processes:
                process.start()
            deadline = time.monotonic() + timeout
            while any(p.is_alive() for p in processes):
                failed = [r for r, p in enumerate(processes) if p.exitcode not in (None, 0)]
                if failed or time.monotonic() > deadline:
                    break
                time.sleep(0.05)
            failed = [r for r, p in enumerate(processes) if p.exitcode not in (None, 0)]
            late = [r for r, p in enumerate(processes) if p.exitcode is None]
        finally:
            for p in processes:
                if p.pid is not None:
                    p.kill()
                    p.join(30)
        for ranks, error, happened in (
            (failed, AssertionError, "failed"),
            (late, TimeoutError, f"took over {timeout} s"),
        ):
            if ranks:
                tail = (Path(folder) / f"{ranks[0]}.log").read_text(errors="replace")[-9000:]
                raise error(f"rank {ranks[0]} of {world_size} {happened} in {function}:\n{tail}")
        return [pickle.loads((Path(folder) / f"{rank}.out").read_bytes()) for rank in range(world_size)]


def _run(rank: int, environment: dict[str, str], folder: Path, function: str, args: tuple, timeout: float) -> None:
    """One rank, in its own process."""
    log = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1), os.dup2(log, 2)
    os.environ.update(environment)
    faulthandler.dump_traceback_later(0.9 * timeout, file=log)  # says where a rank hangs, before it is killed
    try:
        module, _, name = function.partition(":")
        result = getattr(importlib.import_module(module), name)(*args)
        (folder / f"{rank}.out").write_bytes(pickle.dumps(result))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
