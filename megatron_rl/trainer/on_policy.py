"""The claim that each update is of the very policy that sampled (`algorithm.on_policy`), as far as the trainer can see it."""

from __future__ import annotations

from megatron_rl.errors import UserError
from megatron_rl.metrics.reduce import Metrics
from megatron_rl.trainer.hooks import UpdateHook
from megatron_rl.trainer.trainer import Trainer

EXACTLY = {"loss/ratio": 1.0, "loss/clip_fraction": 0.0}
"""Metrics of an update that is on-policy."""


class OnPolicy(UpdateHook):
    """Stops the run before an update whose weights are not those that were pushed, or whose ratio is not exactly 1."""

    def __init__(self) -> None:
        self._pushed: dict[str, int] = {}

    def attach(self, trainer: Trainer) -> None:
        """Remember whose weights they are."""
        self._trainer = trainer

    def weights_pushed(self) -> None:
        """Remember the weights, by their fingerprints."""
        self._pushed = self._trainer.fingerprints()

    def check(self, metrics: Metrics) -> None:
        """Raise a UserError, on all processes, where one of its weights has moved or the ratio is another."""
        self._trainer.ranks.all_do(self._check_weights)
        check_exact(metrics)

    def _check_weights(self) -> None:
        if not self._pushed:
            return
        now = self._trainer.fingerprints()
        moved = [name for name in self._pushed if now[name] != self._pushed[name]]
        if moved:
            raise UserError(
                f"algorithm.on_policy: {len(moved)} of the trainer's {len(now)} weights have moved since they were pushed, such"
                f" as {moved[0]} on rank {self._trainer.ranks.rank}; nothing was learned from this update: find out what"
                " changes them between the push and the update"
            )


def check_exact(metrics: Metrics) -> None:
    """metrics: of an update, merged over all processes. Errors: UserError."""
    for name, expected in EXACTLY.items():
        total, tokens = metrics[name].parts if name in metrics else (0.0, 0)
        if tokens and total != expected * tokens:
            raise UserError(
                f"algorithm.on_policy: {name} of the update is {total / tokens!r}, and {expected} on-policy; nothing was"
                " learned from it: its ratio starts from other log-probs than its own"
            )
