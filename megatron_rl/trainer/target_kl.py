"""Early stopping: no update further from the policy that a step began with than a limit (`algorithm.target_kl`)."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_rl.data.packing import Batch
from megatron_rl.metrics.reduce import Metrics, alike
from megatron_rl.trainer.hooks import Place, Stage, UpdateHook

OLD_KL = "loss/old_kl"
"""Name of a metric: k3 estimate of KL(old policy || current one), nats per token, as an update's pass finds it."""


class TargetKL(UpdateHook):
    """Leaves out an update whose pass finds the KL above the limit, and ends the work on its rollout batch.

    The KL is that of the update's own tokens, before its step (as in OpenAI's Spinning Up and Stable-Baselines3, which stop at
    1.5 times their target_kl; here it is the limit itself). The first update of a rollout batch is always done.
    """

    def __init__(self, limit: float, updates: int) -> None:
        """limit: nats per token. updates: of a rollout batch."""
        self.limit, self.updates = limit, updates
        self._update = 0

    def before_forward(self, batches: Sequence[Batch], stage: Stage, place: Place) -> None:
        """Note which update of the rollout batch it is."""
        self._update, self.ends_batch = place.update, False

    def check(self, metrics: Metrics) -> None:
        """Compare the KL of all processes' tokens with the limit."""
        total, tokens = metrics[OLD_KL].parts if OLD_KL in metrics else (0.0, 0)
        self.ends_batch = self._update > 0 and total > self.limit * tokens

    def metrics(self) -> Metrics:
        """Return how many updates of the rollout batch are left out, this one included."""
        return {"update/left_out": alike(float(self.ends_batch * (self.updates - self._update)), across="sum")}
