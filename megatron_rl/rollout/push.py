"""Push of the trainer's weights to the servers, which also succeeds if a server dies during the push."""

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
    """Pushes one trainer's weights to the servers. All processes call the methods together."""

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
        """dtype: data type of the engine's weights. digests: compute a digest of the weights of each push.

        keeps_weights: True if a sleeping server keeps its weights. run: id of the run, a prefix of versions on the servers.
        """
        self._sync, self._turns, self._recovery, self._ranks = sync, turns, recovery, ranks
        self._dtype, self._digests, self._keeps_weights = dtype, digests, keeps_weights
        self._run = run
        self._trainer: Trainer | None = None
        self._now = 0
        """Step of the trainer's weights, which the next push sends."""
        self.version = 0
        """Step of the weights that the servers have."""
        self.digests: dict[str, str] = {}
        """Weight digest of each version that this process pushed; '' if none is computed, or until the push ends."""
        self.latest: str | None = None
        """Version of the last push, which the servers have or are receiving."""
        self.sent = SyncStats(bytes=0, seconds=0.0, buckets=0, tensors=0)
        """Statistics of the last push."""

    def note_step(self, step: int) -> None:
        """Set the step of the trainer's weights, which a server receives if it dies and is restarted."""
        self._now = step

    def push(self, trainer: Trainer, version: int) -> None:
        """Send weights to all servers and compare checksums; a server that has died is restarted first."""
        self._trainer, self._now = trainer, version
        self._recovery.revive()
        self.again()

    def again(self) -> None:
        """Send the trainer's current weights, and repeat the push if a server died during it.

        Without a trainer, nothing is sent: a restarted server has loaded the requested weights from the model folder.
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
                self.digests[str(self._now)] = self._ranks.from_main(str(digest))  # other ranks may see no adapters
                self._trainer.weights_pushed()
                self._turns.to_servers("kv_cache")
                return
            except UserError:  # the same error on every process
                if attempt == RESTARTS or not self._recovery.revive(DEATH_S, trouble=True):
                    raise

    def wake(self) -> None:
        """Give shared GPUs to the servers. If the servers did not keep their weights, push the trainer's weights."""
        if not self._turns.asleep:
            return
        if self._recovery.revive() or not self._keeps_weights:
            self.again()
            return
        self.verify(lambda: self._turns.to_servers("kv_cache", "weights"))

    def verify(self, wake: Callable[[], None] = lambda: None) -> None:
        """Call `wake`, and check that all servers have the weights of the last push. If a child server has died, push again.

        Errors: UserError that names the servers.
        """
        try:
            wake()
            self._sync.verify()
        except UserError:
            # The weights that external servers answered with can no longer be checked.
            if self._recovery.external or not self._recovery.revive(DEATH_S, trouble=True):
                raise
            self.again()


# -- versions ------------------------------------------------------------------------------------------------------------
# Comparison of the weights that responses were sampled from with the weights of the last push.


def others(trajectories: Sequence[Trajectory], version: str) -> list[str]:
    """Return a line (prompt, versions) for each trajectory that has tokens from unknown weights or another version."""
    lines = []
    for t in trajectories:
        spans = [span for span in t.weight_spans if span.version != version]
        if spans:
            named = ", ".join(f"tokens {span.start} to {span.end} from '{span.version}'" for span in spans)
            lines.append(f"the response to prompt '{t.prompt_id}' has {named}")
        elif not t.weight_spans and bool(t["loss_mask"].any()):
            lines.append(f"the response to prompt '{t.prompt_id}' does not name its weights")
    return lines


def staleness(trajectories: Sequence[Trajectory], step: int) -> list[int]:
    """Return the staleness of each trajectory: `step` (which trains on it) minus the step of its oldest weights."""
    versions = [[int(span.version) for span in t.weight_spans if span.version.isdecimal()] for t in trajectories]
    return [step - min(found, default=step) for found in versions]
