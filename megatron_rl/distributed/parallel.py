"""torch.distributed and Megatron's parallel state, with the collective operations that the package needs."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megatron_rl.platform import activate

activate()  # before this module imports Megatron

from megatron.core import parallel_state, tensor_parallel  # noqa: E402

from megatron_rl.config import ParallelConfig  # noqa: E402
from megatron_rl.config.plan import expert_tensor_size  # noqa: E402
from megatron_rl.distributed import nccl  # noqa: E402
from megatron_rl.distributed.processes import dumps, join, loads  # noqa: E402
from megatron_rl.errors import StopRequested, together  # noqa: E402

T = TypeVar("T")

BEAT_S = 1.0
"""Longest time in seconds between two heartbeats of a process that waits for something outside of the run."""


@dataclass(frozen=True)
class Ranks:
    """Position of this process in the run. The processes of one data-parallel rank hold one copy of the model."""

    rank: int
    world_size: int
    data_rank: int
    data_size: int
    is_leader: bool
    """True for the first process of a copy of the model; it requests rollouts for its data-parallel rank."""
    copy_group: dist.ProcessGroup
    """The processes that hold one copy of the model (tensor x pipeline x context), over gloo."""
    leaders: tuple[int, ...]
    """Global ranks of the leaders, by data-parallel rank."""
    world_group: dist.ProcessGroup
    """Process group of all processes, over gloo, for objects and flags."""
    device: torch.device

    def from_leader(self, value: T | None) -> T:
        """Return the leader's value on every process of its copy of the model."""
        return self._broadcast(value, self.leaders[self.data_rank], self.copy_group)

    def from_main(self, value: T | None) -> T:
        """Return global rank 0's value on every process."""
        return self._broadcast(value, 0, self.world_group)

    def gather(self, value: T) -> list[T]:
        """Return every process's value, in the order of ranks, on every process."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.world_group)
        return values

    def gather_from_leaders(self, value: T) -> list[T]:
        """Return every leader's value, by data-parallel rank, on every process."""
        values: list[Any] = self.gather(value if self.is_leader else None)
        return [values[leader] for leader in self.leaders]

    def main_does(self, work: Callable[[], T], *, patient: bool = False) -> T:
        """Run `work` on global rank 0. Every process gets the result or the error.

        patient: the work may take any time (`patiently`).
        """
        if patient:
            work = self.patiently(work if self.rank == 0 else lambda: None)  # type: ignore[assignment]
        return self.from_main(together(work if self.rank == 0 else None, self.world_group))

    def leaders_do(self, work: Callable[[], T], *, patient: bool = False) -> T | None:
        """Run `work` on the leaders and return its result there, None elsewhere. A leader's error is raised on every process.

        patient: the work may take any time (`patiently`).
        """
        if patient:
            work = self.patiently(work if self.is_leader else lambda: None)  # type: ignore[assignment]
        return together(work if self.is_leader else None, self.world_group)

    def all_do(self, work: Callable[[], T]) -> T:
        """Run `work` on every process and return its result. If it fails on one process, every process raises the error."""
        done: Any = together(work, self.world_group)
        return done

    def patiently(self, work: Callable[[], T]) -> Callable[[], T]:
        """Run `work` on every process. Return a function that returns its result.

        The work waits for something outside of the run, such as servers. It runs in a thread, while the processes exchange
        heartbeats. So a long wait does not look like a lost process (parallel.timeout_s), and a lost process is noticed within
        this timeout. The method returns when all processes have finished the work.
        """
        if self.world_size == 1:
            return work
        done = in_background(work)
        self.wait_for(done)
        return done.result

    def wait_for(
        self, done: Future, stop: Callable[[], bool] = lambda: False, enough: Callable[[], bool] = lambda: False
    ) -> bool:
        """Wait like `patiently` for work that every process has begun, or until `stop` or `enough` returns True.

        enough: collective, with the same result on all processes. The method returns True on all processes if `stop` returned
        True on one of them, else False. If `stop` or `enough` returned True, the work may still be running.
        """
        start = time.monotonic()
        while True:
            # Poll often at first, so that short work is not delayed until the next sign of life.
            wait([done], min(BEAT_S, 0.01 + (time.monotonic() - start) / 50))
            working, stopped = self._maxima(int(not done.done()), int(stop()))
            if stopped or not working or enough():
                return bool(stopped)

    def exchange(self, outgoing: list[T]) -> list[T]:
        """Send outgoing[d] to the leader of data-parallel rank d. Return the objects from all leaders, in the order of ranks.

        Every process calls this method. On processes that are not leaders, outgoing is ignored and the result is empty.
        """
        if self.data_size == 1:
            return outgoing if self.is_leader else []
        parcels = [b""] * self.world_size
        if self.is_leader:
            for leader, value in zip(self.leaders, outgoing, strict=True):
                parcels[leader] = dumps(value) if leader != self.rank else b""
        sizes = torch.tensor([len(parcel) for parcel in parcels])
        found = torch.empty_like(sizes)
        dist.all_to_all_single(found, sizes, group=self.world_group)
        # One more byte, because torch cannot make a tensor of an empty buffer.
        sent = torch.frombuffer(bytearray(b"".join([*parcels, b"\0"])), dtype=torch.uint8)[:-1]
        arrived = torch.empty(int(found.sum()), dtype=torch.uint8)
        dist.all_to_all_single(arrived, sent, found.tolist(), sizes.tolist(), group=self.world_group)
        if not self.is_leader:
            return []
        parts = arrived.split(found.tolist())
        return [outgoing[self.data_rank] if r == self.rank else loads(parts[r].numpy().tobytes()) for r in self.leaders]

    def maximum(self, value: int) -> int:
        """Return the largest value over all processes."""
        return self._maxima(value)[0]

    def _maxima(self, *values: int) -> list[int]:
        tensor = torch.tensor(values)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.world_group)
        return tensor.tolist()

    def total(self, value: int, *, of_leaders: bool = False) -> int:
        """Return the sum over all processes. of_leaders: sum over the leaders only (one process of each copy of the model)."""
        tensor = torch.tensor(value if self.is_leader or not of_leaders else 0)
        dist.all_reduce(tensor, group=self.world_group)
        return int(tensor)

    def barrier(self) -> None:
        """Wait for all processes."""
        dist.barrier(group=self.world_group)

    def _broadcast(self, value: Any, source: int, group: dist.ProcessGroup) -> Any:
        if dist.get_world_size(group) == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=source, group=group)
        return box[0]


def in_background[R](work: Callable[[], R]) -> Future[R]:
    """Run work in a daemon thread, because the interpreter waits at its end for all other threads."""
    done: Future[R] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="patiently", daemon=True).start()
    return done


def initialize(config: ParallelConfig, seed: int) -> Ranks:
    """Start torch.distributed (from torchrun's environment; one process without it) and Megatron's parallel state.

    All data-parallel ranks get the same random seeds. Tensor-parallel and pipeline ranks get different seeds, as in Megatron.
    """
    timeout = timedelta(seconds=config.timeout_s)
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    for name, value in nccl.ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if not dist.is_initialized():
        join("cpu:gloo,cuda:nccl" if gpu else "gloo", timeout)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor,
        pipeline_model_parallel_size=config.pipeline,
        virtual_pipeline_model_parallel_size=config.virtual_pipeline if config.virtual_pipeline > 1 else None,
        context_parallel_size=config.context,
        expert_model_parallel_size=config.expert,
        expert_tensor_parallel_size=expert_tensor_size(config),
        distributed_timeout_minutes=max(1, round(config.timeout_s / 60)),
        create_gloo_process_groups=True,
    )
    random.seed(seed)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)

    rank, world_size = dist.get_rank(), dist.get_world_size()
    world_group = process_group(dist.new_group(backend="gloo", timeout=timeout))
    data_rank = parallel_state.get_data_parallel_rank()
    data_ranks: list[int] = [0] * world_size
    dist.all_gather_object(data_ranks, data_rank, group=world_group)
    copies = [[r for r in range(world_size) if data_ranks[r] == d] for d in range(max(data_ranks) + 1)]
    groups = [dist.new_group(copy, backend="gloo", timeout=timeout) for copy in copies]
    return Ranks(
        rank=rank,
        world_size=world_size,
        data_rank=data_rank,
        data_size=len(copies),
        is_leader=copies[data_rank][0] == rank,
        copy_group=process_group(groups[data_rank]),
        leaders=tuple(copy[0] for copy in copies),
        world_group=world_group,
        device=device,
    )


def process_group(found: object) -> dist.ProcessGroup:
    """Return a group of Megatron's parallel state as a `ProcessGroup`, because Megatron's functions have no types."""
    assert isinstance(found, dist.ProcessGroup)
    return found


def used_gb() -> float | None:
    """Return the memory that all processes together use on this process's GPU, in GB of 10^9 bytes; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    free, whole = torch.cuda.mem_get_info()
    return (whole - free) / 1e9


def shutdown() -> None:
    """Shut down Megatron's parallel state and torch.distributed, for programs that continue afterwards (tests, tools)."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


# -- interrupt -----------------------------------------------------------------------------------------------------------
# Aborts a step in the middle if the run was asked to end and the step has not changed anything yet.


class Interrupt:
    """Request to stop. Trainers check it between passes and, without a pipeline, between micro-batches.

    All processes check equally often. Each check returns the result of the previous check, so that no process waits.
    """

    def __init__(self, ranks: Ranks, asked: Callable[[], bool], *, deep: bool) -> None:
        """Create it. asked: returns True if this process was asked to end. deep: True to check between micro-batches too."""
        self.deep = deep
        self._ranks, self._asked = ranks, asked
        self.armed = False
        """True while the current step has not changed anything yet."""
        self._flag = torch.zeros(())
        self._sum: dist.Work | None = None

    def arm(self) -> None:
        """Mark the start of a step, which may be aborted. All processes call this method."""
        self.disarm()
        self.armed = True

    def disarm(self) -> None:
        """Mark that the step has changed something and must be completed. All processes call this method."""
        self.armed = False
        if self._sum is not None:
            self._sum.wait()
            self._sum = None

    def look(self) -> None:
        """Check the request. Errors: StopRequested, on all processes at the same check."""
        if not self.armed:
            return
        if self._sum is not None:
            self._sum.wait()
            self._sum = None
            if self._flag > 0:
                raise StopRequested
        self._flag = torch.tensor(int(self._asked()))
        self._sum = dist.all_reduce(self._flag, dist.ReduceOp.MAX, self._ranks.world_group, async_op=True)
