"""SGLang servers that the trainer starts on its own machine: which GPUs they get, and operations on all of them."""

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

log = logging.getLogger(__name__)


def place(rollout: RolloutConfig, *, trainers: int, gpus: int) -> list[range]:
    """Return the GPUs of each server, as indices of this machine's visible GPUs; empty ranges on a machine without GPU.

    trainers: number of trainer processes on this machine, which have GPUs 0 to trainers - 1; 0 if nothing is trained. Colocated
    servers share these GPUs; other servers get the GPUs after them. Errors: UserError with numbers if there are too few GPUs.
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
            f" {trainers} processes; set it to a divisor, or set rollout.server.count"
        )
    return [range(first + i * server.tensor, first + (i + 1) * server.tensor) for i in range(count)]


def place_here(rollout: RolloutConfig, *, trains: bool) -> list[range]:
    """Call `place` with the number of trainer processes from torchrun's environment variables, and this machine's GPUs."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    if world > local:
        raise UserError(
            f"config: rollout.addresses is empty, but the trainer can start servers for one machine only: of its {world}"
            f" processes {local} run here; list servers (tools/serve.py starts them), as examples/slurm does"
        )
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return place(rollout, trainers=local if trains else 0, gpus=gpus)


def visible_names(indices: Sequence[int]) -> list[str]:
    """Return the names by which another process's CUDA_VISIBLE_DEVICES selects these GPUs of this process."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [names.split(",")[i].strip() if names else str(i) for i in indices]


class LocalServers:
    """The servers that this process starts, each with its own port and log; there may be none.

    `servers` is in the order of their GPUs. An operation on several servers runs on all of them at the same time.
    """

    def __init__(self, config: Config, places: Sequence[range], *, sleeps: bool) -> None:
        """sleeps: the servers share their GPUs with the trainer, and release them on request."""
        self.sleeps = sleeps
        self.key = secrets.token_hex(32)
        """API key of these servers, and of no others."""
        alone = len(places) == 1
        self.servers = [
            RolloutServer.from_config(
                config,
                log_path=config.run_dir / ("sglang.log" if alone else f"sglang-{index}.log"),
                devices=visible_names(gpus),
                sleeps=sleeps,
                key=self.key,
            )
            for index, gpus in enumerate(places)
        ]

    def close(self) -> None:
        """End all servers."""
        self._each(lambda server: server.__exit__())

    @property
    def addresses(self) -> list[str]:
        """http://host:port of each server."""
        return [server.address for server in self.servers]

    def start(self) -> None:
        """Start all servers without waiting.

        If the servers share GPUs with the trainer, wait until they are ready and put them to sleep before the trainer starts.
        """
        for server in self.servers:
            server.start()
        if self.sleeps:
            self.wait_ready()
            self.sleep()

    def wait_ready(self) -> None:
        """Wait until all servers answer."""
        self._each(RolloutServer.wait_ready)

    def lost(self) -> bool:
        """Return True if there are servers and all of them have ended."""
        return bool(self.servers) and not any(server.alive() for server in self.servers)

    def dead(self, patience_s: float = 0.0) -> list[RolloutServer]:
        """Return servers that have ended. If there are none, wait up to `patience_s` seconds for some to end."""
        deadline = time.monotonic() + patience_s
        while True:
            found = [server for server in self.servers if not server.alive()]
            if found or not self.servers or time.monotonic() >= deadline:
                return found
            time.sleep(0.05)

    def changed(self, patience_s: float = 0.0, *, trouble: bool = False) -> int:
        """Return the number of ended servers. If there are none, wait up to `patience_s` seconds for some to end.

        trouble: if no server has ended, stop the servers that hang.
        """
        if not (found := self.dead(patience_s)) and trouble:
            self._each(_end_if_it_hangs)
            found = self.dead()
        return len(found)

    def renew(self) -> list[str]:
        """Restart ended servers at their old addresses, and return all addresses.

        If servers share GPUs with the trainer, a restarted server releases its KV cache.
        """
        dead = self.dead()
        for server in dead:
            server.stop()
            server.start()
        self._each(RolloutServer.wait_ready, dead)
        if self.sleeps:
            self._each(lambda server: server.sleep("kv_cache"), dead)
        return self.addresses

    def sleep(self, *tags: str) -> None:
        """Call `RolloutServer.sleep` on all servers."""
        self._each(lambda server: server.sleep(*tags))

    def wake(self, *tags: str) -> None:
        """Call `RolloutServer.wake` on all servers."""
        self._each(lambda server: server.wake(*tags))

    def _each(self, work: Callable[[RolloutServer], None], servers: list[RolloutServer] | None = None) -> None:
        """Run `work` on all servers at the same time (default: all of `servers`), and wait for all.

        Errors: the error of the first server, in order, whose `work` raised one.
        """
        servers = self.servers if servers is None else servers
        with ThreadPoolExecutor(max(1, len(servers))) as threads:
            done = [threads.submit(work, server) for server in servers]
        for one in done:
            one.result()


def _end_if_it_hangs(server: RolloutServer) -> None:
    if server.hangs():
        log.warning(f"rollout: {server.address} gives no sign of life and is restarted [log: {server.log_path}]")
        server.stop()
