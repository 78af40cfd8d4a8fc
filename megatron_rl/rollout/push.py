"""The trainer's weights reach the servers, also where one of them dies meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from megatron_rl.data.trajectory import Trajectory
from megatron_rl.distributed.parallel import Ranks
from megatron_rl.errors import UserError
from megatron_rl.rollout.colocation import Colocation
from megatron_rl.rollout.recover import RESTARTS, Recovery
from megatron_rl.servers.server import DEATH_S
from megatron_rl.sync.adapter_push import AdapterSync
from megatron_rl.sync.checksums import WeightsDigest
from megatron_rl.sync.engines import version_of
from megatron_rl.sync.weight_sync import SyncStats, WeightSync
from megatron_rl.trainer.trainer import Trainer


class Pusher:
    """Weights of one trainer, on servers that keep or lose them when they sleep. All processes call it together."""

    def __init__(
        self,
        sync: WeightSync | AdapterSync,
        turns: Colocation,
        recovery: Recovery,
        ranks: Ranks,
        *,
        dtype: torch.dtype,
        digests: bool,
        keeps_weights: bool,
        run: str,
    ) -> None:
        """dtype: of the engine's weights; digests: take one of each push; keeps_weights: a server that sleeps does.

        run: its id, with which its versions on the servers begin.
        """
        self._sync, self._turns, self._recovery, self._ranks = sync, turns, recovery, ranks
        self._dtype, self._digests, self._keeps_weights = dtype, digests, keeps_weights
        self._run = run
        self._trainer: Trainer | None = None
        self._now = 0
        """Step of the trainer's weights: the next push is of them."""
        self.version = 0
        """Step of the weights that the servers have."""
        self.digests: dict[str, str] = {}
        """Digests of all versions that this process pushed; empty where none are taken, and for one on its way."""
        self.latest: str | None = None
        """The last of them: the servers have it, or are being sent it."""
        self.sent = SyncStats(bytes=0, seconds=0.0, buckets=0, tensors=0)
        """The last push."""

    def note_step(self, step: int) -> None:
        """The trainer's weights are those of this step: where a server dies, they are what it is sent."""
        self._now = step

    def push(self, trainer: Trainer, version: int) -> None:
        """Send weights to all servers and compare checksums; a server that has died is restarted first."""
        self._trainer, self._now = trainer, version
        self._recovery.revive()
        self.again()

    def again(self) -> None:
        """Send the trainer's weights as they are now; once more where a server died meanwhile.

        Where nothing is trained, a server that was started again has the weights of the folder, which are those asked for.
        """
        if self._trainer is None:
            return
        for attempt in range(RESTARTS + 1):
            try:
                self._turns.to_servers("weights")
                unmerged = isinstance(self._sync, AdapterSync)
                weights = self._trainer.export_adapters() if unmerged else self._trainer.export_weights()
                digest, self.latest = WeightsDigest(self._dtype), str(self._now)
                if self._digests:
                    weights = digest.watch(weights)
                self.digests.setdefault(str(self._now), "")  # answers may come before the push returns
                self.sent = self._sync.push(weights, version_of(self._run, self._now))
                self.version = self._now
                self.digests[str(self._now)] = self._ranks.from_main(str(digest))  # which alone may have seen adapters
                self._trainer.weights_pushed()
                self._turns.to_servers("kv_cache")
                return
            except UserError:  # the same on every process
                if attempt == RESTARTS or not self._recovery.revive(DEATH_S, trouble=True):
                    raise

    def wake(self) -> None:
        """The servers' turn, with the weights that they had; with the trainer's, where these are lost."""
        if not self._turns.asleep:
            return
        if self._recovery.revive() or not self._keeps_weights:
            self.again()
            return
        self.verify(lambda: self._turns.to_servers("kv_cache", "weights"))

    def verify(self, wake: Callable[[], None] = lambda: None) -> None:
        """Check that all servers, once awake, have what was pushed last; where a child has died, it is pushed again.

        Errors: UserError naming servers.
        """
        try:
            wake()
            self._sync.verify()
        except UserError:
            # What external servers answered came from weights that can no longer be looked at.
            if self._recovery.external or not self._recovery.revive(DEATH_S, trouble=True):
                raise
            self.again()


# -- versions ------------------------------------------------------------------------------------------------------------
# Which weights responses were sampled from, against those that were pushed last.


def others(trajectories: Sequence[Trajectory], version: str) -> list[str]:
    """A line for each trajectory with tokens that are not known to come from weights `version`: its prompt, and theirs."""
    lines = []
    for t in trajectories:
        spans = [span for span in t.weight_spans if span.version != version]
        if spans:
            named = ", ".join(f"tokens {span.start} to {span.end} from '{span.version}'" for span in spans)
            lines.append(f"that to prompt '{t.prompt_id}' has {named}")
        elif not t.weight_spans and bool(t["loss_mask"].any()):
            lines.append(f"that to prompt '{t.prompt_id}' does not say")
    return lines


def staleness(trajectories: Sequence[Trajectory], step: int) -> list[int]:
    """Steps between the oldest weights that each trajectory has tokens of and those that train on it, of `step`."""
    versions = [[int(span.version) for span in t.weight_spans if span.version.isdecimal()] for t in trajectories]
    return [step - min(found, default=step) for found in versions]
