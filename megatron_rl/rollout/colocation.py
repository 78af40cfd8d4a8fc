"""Alternate use of shared GPUs by servers and trainer (rollout.colocate). Without shared GPUs, `Colocation` does nothing.

generate          the servers answer                            the trainer sleeps
to_trainer        the servers release cache and weights         then the trainer wakes, scores and updates
to_servers(...)   the servers take back their weights, receive  the trainer keeps only its weights until they are sent,
                  new ones and take back the cache              then sleeps
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from megatron_rl.distributed.parallel import Ranks, used_gb
from megatron_rl.metrics.reduce import Metrics, maximum
from megatron_rl.servers.local import LocalServers
from megatron_rl.trainer.trainer import Trainer


class Colocation:
    """Gives shared GPUs either to the trainer or to rank 0's servers. All processes call the methods together."""

    def __init__(
        self,
        servers: LocalServers,
        ranks: Ranks,
        *,
        shared: bool,
        clock: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        """shared: True if servers and trainer share GPUs; the servers are then already asleep.

        clock: measures the time of a part of a step.
        """
        self._servers, self._ranks, self._clock = servers, ranks, clock
        self.shared = self.asleep = shared
        """shared: True if servers and trainer share GPUs. asleep: True while the servers leave the GPUs to the trainer."""
        self.trainer: Trainer
        """Trainer that shares the GPUs; set by the first push."""
        self._used: dict[str, float | None] = {}
        """GB in use on this process's GPU, before and after the servers last released their memory."""

    def attach(self, trainer: Trainer) -> None:
        """Set the trainer that shares the GPUs with the servers."""
        self.trainer = trainer

    def to_trainer(self) -> None:
        """Put the servers to sleep, so that they release their memory, and wake the trainer."""
        if self.shared and not self.asleep:
            with self._clock("sleep"):
                awake = used_gb()
                self._ranks.main_does(self._servers.sleep, patient=True)
                self._used = {"memory/awake_gb": awake, "memory/asleep_gb": used_gb()}
                self.asleep = True
                self.trainer.wake()

    def to_servers(self, *tags: str) -> None:
        """Let the servers take back the parts of their GPU memory that `tags` names (`weights`, `kv_cache`).

        With `weights` as the only tag, the trainer keeps its weights on the GPU. Otherwise the whole trainer leaves the GPU.
        """
        if not self.shared:
            return
        with self._clock("wake"):
            sending = tags == ("weights",)
            self.trainer.sleep(keep_weights=sending)
            self._ranks.barrier()  # every process has left its GPU
            if sending:  # a server that never slept, or was restarted, still holds its cache
                self._ranks.main_does(lambda: self._servers.sleep("kv_cache"), patient=True)
            self._ranks.main_does(lambda: self._servers.wake(*tags), patient=True)
            if sending:
                self.trainer.wake(weights_only=True)
            else:
                self.asleep = False

    def make_room(self) -> None:
        """Move the whole trainer off the GPUs, because a starting server measures how much memory is free."""
        if self.shared:
            self.trainer.sleep()
            self._ranks.barrier()

    def metrics(self) -> Metrics:
        """Return the GB of a GPU that all processes used, before and after the servers last released their memory."""
        return {name: maximum(gb) for name, gb in self._used.items() if gb is not None}
