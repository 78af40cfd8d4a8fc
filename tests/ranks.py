"""Run a function on several real processes over gloo and collect what it returns, for tests of parallel layouts."""

from __future__ import annotations

import faulthandler
import fcntl
import gc
import importlib
import math
import os
import pickle
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_rl.servers.server import reserve_port
from tests.preloaded import TRAINER
from tests.zygote import Process

if TYPE_CHECKING:
    import torch

TIE = 2e-6
"""Scores of experts in fp32 are right to about 1e-6 of a token's largest: of two that are closer, another layout, or another
precision, may choose the other one, and then all that follows differs by much more than rounding."""
BORDER = 5e-6
"""Log-probs and values in fp32 are right to about 1e-6: a token that is closer to where a loss begins to clip has a gradient
under one layout and none under another."""
NEAR_TIE = 23
"""Exit code of a process that met one."""


class NearTie(Exception):
    """Two experts of a run that is a reference nearly tied, or a token was nearly clipped."""


def fresh_seed() -> int:
    """A seed of nobody's choice, which is shown where the test fails."""
    seed = int(np.random.SeedSequence().entropy % 2**31)
    print(f"seed {seed}")
    return seed


def without_ties[T](attempt: Callable[[int], T]) -> T:
    """What `attempt` makes of the first fresh seed with which its runs with `refuse_ties`, or what it does within
    `refusing_ties`, meet no tie."""
    for _ in range(10):
        seed = fresh_seed()
        try:
            return attempt(seed)
        except NearTie as tie:
            print(tie)
    raise AssertionError(
        "ten seeds with experts that nearly tie, or tokens nearly clipped: is TIE or BORDER too large?"
    )


def fork(target: Callable, *args: Any) -> Process:
    """A process that has imported the trainer, and calls the function."""
    return Process(TRAINER, target, args, path=sys.path)


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
        settings.moe_grad_scale_func = None
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
        "MEGATRON_RL_RUN_KEY": "of this test",
    }


@contextmanager
def shared_core(world_size: int) -> Iterator[list[int]]:
    """Cores for processes that talk to each other: one that no other test's have, where the machine has more to do than it has
    cores, and all otherwise. Processes on one core wake each other with less work: an all_reduce takes a third of the time."""
    cores = sorted(os.sched_getaffinity(0))
    running = int(Path("/proc/loadavg").read_text().split()[3].split("/")[0])
    if world_size == 1 or running <= len(cores):
        yield cores
        return
    for core in cores:
        with open(TRAINER.folder() / f"core-{core}.lock", "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            yield [core]
            return
    yield cores


def run_ranks(
    world_size: int, function: str, args: tuple = (), timeout: float = 240.0, *, refuse_ties: bool = False
) -> list[Any]:
    """Call `function` ("module:name", tests/ being importable) with `args` on each rank; returns the results by rank.

    refuse_ties: NearTie where two experts tie but for rounding, or a token is clipped but for it, for `without_ties`.

    Errors: AssertionError with the tail of the failed rank's output; the others are ended. TimeoutError likewise.
    """
    with tempfile.TemporaryDirectory() as folder, reserve_port() as reserved, shared_core(world_size) as cores:
        environments = [rank_environment(rank, world_size, reserved) for rank in range(world_size)]
        processes: list[Process] = []
        try:
            for rank, environment in enumerate(environments):
                processes.append(
                    fork(_run, rank, environment, cores, Path(folder), function, args, timeout, refuse_ties)
                )
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
                p.kill()
                p.join(30)
        if any(processes[rank].exitcode == NEAR_TIE for rank in failed):
            raise NearTie(f"two experts nearly tie, or a token is nearly clipped, in {function}")
        for ranks, error, happened in (
            (failed, AssertionError, "failed"),
            (late, TimeoutError, f"took over {timeout} s"),
        ):
            if ranks:
                tail = (Path(folder) / f"{ranks[0]}.log").read_text(errors="replace")[-9000:]
                raise error(f"rank {ranks[0]} of {world_size} {happened} in {function}:\n{tail}")
        return [pickle.loads((Path(folder) / f"{rank}.out").read_bytes()) for rank in range(world_size)]


def _refuse() -> None:
    raise NearTie


@contextmanager
def refusing_ties(met: Callable[[], None] = _refuse) -> Iterator[None]:
    """Call `met`, by default raising NearTie, where the last of the k largest values of a row is the next one but for rounding,
    or where a token is on the border of a loss's clip: in this process, of whatever asks torch.topk."""
    import torch

    from megatron_rl.algorithms import losses

    topk, token_terms, value_terms = torch.topk, losses.token_terms, losses.value_terms

    def watched(values: torch.Tensor, k: int, *args: Any, **settings: Any) -> Any:
        if values.dim() == 2 and k < values.shape[1]:
            chosen = topk(values.detach(), k + 1, dim=1).values
            size = values.detach().abs()
            size = torch.where(size.isfinite(), size, 0).amax(1)  # experts of groups that were not chosen have -inf
            if bool((chosen[:, -2] - chosen[:, -1] < TIE * size).any()):
                met()
        return topk(values, k, *args, **settings)

    def look(beyond: torch.Tensor) -> None:
        if bool((beyond.abs() < BORDER).any()):
            met()

    def watched_tokens(
        log_probs: torch.Tensor, old: torch.Tensor, *args: Any, clip_low: float, clip_high: float
    ) -> Any:
        for bound in (1 - clip_low, 1 + clip_high):
            if bound > 0 and bound != 1:  # with bounds of 1 a token that did not move is on both, in every layout
                look((log_probs - old).detach() - math.log(bound))
        return token_terms(log_probs, old, *args, clip_low=clip_low, clip_high=clip_high)

    def watched_values(values: torch.Tensor, old: torch.Tensor, *args: Any, clip: float | None) -> Any:
        if clip is not None:
            look((values - old).detach().abs() - clip)
        return value_terms(values, old, *args, clip=clip)

    torch.topk, losses.token_terms, losses.value_terms = watched, watched_tokens, watched_values
    try:
        yield
    finally:
        torch.topk, losses.token_terms, losses.value_terms = topk, token_terms, value_terms


def nearly_ties(model: torch.nn.Module, tokens: Any) -> bool:
    """Whether two experts of a model of transformers nearly tie for a token of the sequence.

    Sums in another order may then choose the other one, whose output moves what follows from this token by some percents, and
    by less what follows from those that attend to it.
    """
    import torch

    try:
        with torch.no_grad(), refusing_ties():
            model(torch.as_tensor(np.asarray(tokens), dtype=torch.long)[None])
    except NearTie:
        return True
    return False


def _run(
    rank: int,
    environment: dict[str, str],
    cores: list[int],
    folder: Path,
    function: str,
    args: tuple,
    timeout: float,
    refuse_ties: bool,
) -> None:
    """One rank, in its own process."""
    log = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1), os.dup2(log, 2)
    os.environ.update(environment | {"OMP_NUM_THREADS": "1"})
    os.sched_setaffinity(0, cores)
    faulthandler.dump_traceback_later(0.9 * timeout, file=log)  # says where a rank hangs, before it is killed
    try:
        module, _, name = function.partition(":")
        with refusing_ties() if refuse_ties else nullcontext():
            result = getattr(importlib.import_module(module), name)(*args)
        (folder / f"{rank}.out").write_bytes(pickle.dumps(result))
    except NearTie:
        os._exit(NEAR_TIE)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
