"""Turns on GPUs that servers and trainer share (rollout.colocate); elsewhere nothing of this happens.

generate          the servers answer                            the trainer sleeps
to_trainer        they give up cache and weights                then the trainer wakes, scores and updates
to_servers(...)   they take back their weights, are sent new    the trainer keeps its weights alone, until they are sent
                  ones and take back the cache                  and sleeps
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from megatron_rl.distributed.parallel import Ranks, used_gb
from megatron_rl.metrics.reduce import Metrics, maximum
from megatron_rl.servers.local import LocalServers
from megatron_rl.trainer.trainer import Trainer


class Colocation:
    """Turns of the trainer and of rank 0's children. All processes have one and call it together."""

    def __init__(
        self,
        servers: LocalServers,
        ranks: Ranks,
        *,
        shared: bool,
        clock: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        """shared: the GPUs are; the servers sleep already. clock: measures a part of the step."""
        self._servers, self._ranks, self._clock = servers, ranks, clock
        self.shared = self.asleep = shared
        """asleep: the servers have left the GPUs to the trainer."""
        self.trainer: Trainer
        """Known from the first push on."""
        self._used: dict[str, float | None] = {}
        """Memory of this process's GPU at the end of the servers' last turn."""

    def attach(self, trainer: Trainer) -> None:
        """Name the trainer that takes turns with the servers."""
        self.trainer = trainer

    def to_trainer(self) -> None:
        """Servers give up their memory, and all of the trainer is there again."""
        if self.shared and not self.asleep:
            with self._clock("sleep"):
                awake = used_gb()
                self._ranks.main_does(self._servers.sleep, patient=True)
                self._used = {"memory/awake_gb": awake, "memory/asleep_gb": used_gb()}
                self.asleep = True
                self.trainer.wake()

    def to_servers(self, *tags: str) -> None:
        """Servers take back the memory with these tags; with `weights` alone, the trainer's weights are there too.

        Else nothing of the trainer is there.
        """
        if not self.shared:
            return
        with self._clock("wake"):
            sending = tags == ("weights",)
            self.trainer.sleep(keep_weights=sending)
            self._ranks.barrier()  # every process has left its GPU
            if sending:  # of a server that never slept, or was started again
                self._ranks.main_does(lambda: self._servers.sleep("kv_cache"), patient=True)
            self._ranks.main_does(lambda: self._servers.wake(*tags), patient=True)
            if sending:
                self.trainer.wake(weights_only=True)
            else:
                self.asleep = False

    def make_room(self) -> None:
        """All of the trainer leaves the GPUs: a server that starts measures how much memory is free."""
        if self.shared:
            self.trainer.sleep()
            self._ranks.barrier()

    def metrics(self) -> Metrics:
        """GB used of a GPU, by all processes, as the servers' last turn ended: before they gave up theirs, and after."""
        return {name: maximum(gb) for name, gb in self._used.items() if gb is not None}
