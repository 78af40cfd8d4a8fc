"""The SGLang servers that the trainer starts on its own machine: which GPUs they get, and what is done to all of them."""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from megatron_rl.config import Config, RolloutConfig
from megatron_rl.errors import UserError
from megatron_rl.servers.server import RolloutServer
from megatron_rl.sync.weight_sync import SERVER_PYTHONPATH

log = logging.getLogger(__name__)


def place(rollout: RolloutConfig, *, trainers: int, gpus: int) -> list[range]:
    """GPUs of each child server, counted among those of this machine that the trainer sees; without a GPU empty ranges.

    trainers: the trainer's processes on this machine, which have GPUs 0 to trainers - 1; 0 where nothing is trained.
    Colocated servers share these; others get those behind them. Errors: UserError with the figures where there are too few.
    """
    server, shared = rollout.server, rollout.colocate and trainers > 0
    if not gpus:
        return [range(0)] * (server.count or 1)
    if trainers > gpus:
        raise UserError(
            f"the trainer's {trainers} processes need a GPU each, and this machine has {gpus}; start {gpus}"
        )
    first, end = (0, trainers) if shared else (trainers, gpus)
    count = server.count or max(1, (end - first) // server.tensor)
    needed, room = count * server.tensor, end - first
    figures = f"{count} x rollout.server.tensor = {server.tensor} is {needed}"
    if needed > room and shared:
        raise UserError(
            f"config: rollout.colocate: the servers share the GPUs of the trainer's {trainers} process(es), and {figures}; set"
            f" rollout.server.tensor to a divisor of {trainers}, or rollout.server.count"
        )
    if needed > room:
        raise UserError(
            f"config: rollout: {figures} GPU(s) for servers, and of this machine's {gpus} the trainer's {trainers} process(es)"
            f" leave {room}; start fewer (--nproc), share them (rollout.colocate: true), or list servers in rollout.addresses"
        )
    if shared and server.count is None and room % server.tensor:
        raise UserError(
            f"config: rollout.colocate: rollout.server.tensor = {server.tensor} does not divide the GPUs of the trainer's"
            f" {trainers} processes; set it to a divisor, or say rollout.server.count"
        )
    return [range(first + i * server.tensor, first + (i + 1) * server.tensor) for i in range(count)]


def place_here(rollout: RolloutConfig, *, trains: bool) -> list[range]:
    """Call `place` with the figures of this process's environment (torchrun's) and machine."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    if world > local:
        raise UserError(
            f"config: rollout.addresses is empty, and servers that the trainer starts serve one machine: of its {world}"
            f" processes {local} run here; list servers (tools/serve.py starts them), as examples/slurm does"
        )
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return place(rollout, trainers=local if trains else 0, gpus=gpus)


def visible_names(indices: Sequence[int]) -> list[str]:
    """CUDA's names of these GPUs of this process, for the CUDA_VISIBLE_DEVICES of another."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [names.split(",")[i].strip() if names else str(i) for i in indices]


class LocalServers:
    """All servers that are children of this process, each with a port and a log of its own; there may be none.

    `servers` are in the order of their GPUs. What is done to several is done at once.
    """

    def __init__(self, config: Config, places: Sequence[range], *, sleeps: bool) -> None:
        """sleeps: they share their GPUs with the trainer, and give them up when told to."""
        self.sleeps = sleeps
        self.key = secrets.token_hex(32)
        """Key of all of them, and of nobody else's."""
        alone = len(places) == 1
        self.servers = [
            RolloutServer.from_config(
                config,
                pythonpath=[SERVER_PYTHONPATH],
                log_path=config.run_dir / ("sglang.log" if alone else f"sglang-{index}.log"),
                devices=visible_names(gpus),
                sleeps=sleeps,
                key=self.key,
            )
            for index, gpus in enumerate(places)
        ]

    def close(self) -> None:
        """End all."""
        self._each(lambda server: server.__exit__())

    @property
    def addresses(self) -> list[str]:
        """http://host:port of each."""
        return [server.address for server in self.servers]

    def start(self) -> None:
        """Start all; returns at once, but where they sleep: then they have taken and left the GPUs before the trainer comes."""
        for server in self.servers:
            server.start()
        if self.sleeps:
            self.wait_ready()
            self.sleep()

    def wait_ready(self) -> None:
        """Wait until all answer."""
        self._each(RolloutServer.wait_ready)

    def lost(self) -> bool:
        """True if there were some, and none is alive."""
        return bool(self.servers) and not any(server.alive() for server in self.servers)

    def dead(self, patience_s: float = 0.0) -> list[RolloutServer]:
        """Servers that have ended; while there is none, those that end within the time."""
        deadline = time.monotonic() + patience_s
        while True:
            found = [server for server in self.servers if not server.alive()]
            if found or not self.servers or time.monotonic() >= deadline:
                return found
            time.sleep(0.05)

    def changed(self, patience_s: float = 0.0, *, trouble: bool = False) -> int:
        """How many have ended; while there is none, those that end within the time.

        trouble: where none has, those that hang are ended.
        """
        if not (found := self.dead(patience_s)) and trouble:
            self._each(_end_if_it_hangs)
            found = self.dead()
        return len(found)

    def renew(self) -> list[str]:
        """Start those that are dead again, each at its address; where they sleep, without their cache. -> all addresses."""
        dead = self.dead()
        for server in dead:
            server.stop()
            server.start()
        self._each(RolloutServer.wait_ready, dead)
        if self.sleeps:
            self._each(lambda server: server.sleep("kv_cache"), dead)
        return self.addresses

    def sleep(self, *tags: str) -> None:
        """`RolloutServer.sleep` of all."""
        self._each(lambda server: server.sleep(*tags))

    def wake(self, *tags: str) -> None:
        """`RolloutServer.wake` of all."""
        self._each(lambda server: server.wake(*tags))

    def _each(self, work: Callable[[RolloutServer], None], servers: list[RolloutServer] | None = None) -> None:
        """Errors: that of the first server which has one, when all are through."""
        servers = self.servers if servers is None else servers
        with ThreadPoolExecutor(max(1, len(servers))) as threads:
            done = [threads.submit(work, server) for server in servers]
        for one in done:
            one.result()


def _end_if_it_hangs(server: RolloutServer) -> None:
    if server.hangs():
        log.warning(f"rollout: {server.address} gives no sign of life, and is started again [log: {server.log_path}]")
        server.stop()
