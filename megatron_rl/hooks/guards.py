"""Hooks that stop or skip an update if the trainer and the engine, or the old and current policy, do not agree."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from megatron_rl.data.packing import Batch
from megatron_rl.errors import UserError
from megatron_rl.metrics.reduce import Metrics, alike
from megatron_rl.routing.passes import layer_name
from megatron_rl.trainer.hooks import Stage, UpdateContext, UpdateHook
from megatron_rl.trainer.objective import CLOSE
from megatron_rl.trainer.trainer import Trainer

FEWEST = 32
"""Smallest number of tokens in an update for which the check is meaningful. Smaller updates are not checked."""


class AgreementFloor(UpdateHook):
    """Stops the run if too few of an update's tokens, or of a layer's expert choices, agree with the engine.

    The smallest allowed share is `floor`. With `correction.bypass`, the engine is compared with the current policy, which
    the first update of a rollout batch changes on purpose. So the later updates of the batch are not checked.
    """

    def __init__(self, floor: float) -> None:
        self.floor = floor
        self._layers: tuple[int, ...] = ()
        self._bypass = self._moved = False

    def attach(self, trainer: Trainer) -> None:
        """Store the layers that have routes, and whether the correction is bypassed."""
        self._layers = trainer.layout.routes.moe_layers if trainer.layout.routes else ()
        self._bypass = trainer.config.correction.bypass

    def before_forward(self, batches: Sequence[Batch], stage: Stage, place: UpdateContext) -> None:
        """Store whether the current policy must not be compared: with the bypass, from the second update on."""
        self._moved = self._bypass and place.update > 0

    def check(self, metrics: Metrics) -> None:
        """Raise UserError if the shares of agreement are below the floor."""
        if not self._moved:
            check_agreement(metrics, self._layers, self.floor)


def check_agreement(metrics: Metrics, moe_layers: Iterable[int], floor: float) -> None:
    """Raise UserError if shares of agreement are below `floor`. Demonstrations have nothing to compare.

    metrics: of an update, merged over all processes.

    The share of log-probs within a factor of two and the share of equal experts are both near 1 in a healthy run, also in FP8:
    rounding changes few experts, and changes few log-probs by 0.7 (a factor of two). Routes of unrelated tokens agree only by
    chance. With an even load, the chance is topk / experts: 0.06 (Qwen3-30B-A3B) to 0.25 (Mixtral). With an uneven load, it is
    larger.
    """
    if CLOSE not in metrics:
        return
    close, tokens = metrics[CLOSE].parts
    if tokens < FEWEST:
        return
    start = f"rollout.agreement_floor = {floor:g}: before an update"
    end = "nothing was learned from it"
    for layer in moe_layers:
        experts = metrics.get(layer_name(layer, "engine_agreement"))
        if experts is None or sum(experts.parts[0]) < FEWEST:
            continue
        share: Any = experts.finish(*experts.parts)
        if share < floor:
            raise UserError(
                f"{start} only {share:.0%} of the experts that SGLang reports in layer {layer} are the trainer's own choice for"
                f" the same tokens and weights; {end}: check its --moe-runner-backend (triton captures routes) and the model"
                " that it serves"
            )
    if (share := close / tokens) < floor:
        raise UserError(
            f"{start} only {share:.0%} of the tokens have log-probs within a factor of two in SGLang and in the trainer; {end}:"
            " check the model, dtype, temperature and --attention-backend of the server"
        )


# -- on policy -----------------------------------------------------------------------------------------------------------
# The promise that each update uses the exact policy that sampled (`algorithm.on_policy`), as far as the trainer can check.


EXACTLY = {"loss/ratio": 1.0, "loss/clip_fraction": 0.0}
"""{metric: its exact value in an on-policy update}."""


class OnPolicy(UpdateHook):
    """Stops the run before an update if the weights changed after the last weight sync, or if the ratio is not exactly 1."""

    def __init__(self) -> None:
        self._pushed: dict[str, int] = {}

    def attach(self, trainer: Trainer) -> None:
        """Store the trainer, to compare its weights later."""
        self._trainer = trainer

    def weights_pushed(self) -> None:
        """Store the fingerprints of the weights that were sent to the engine."""
        self._pushed = self._trainer.fingerprints()

    def check(self, metrics: Metrics) -> None:
        """Raise UserError, on all processes, if a weight has changed since the weight sync or the ratio is not 1."""
        self._trainer.ranks.all_do(self._check_weights)
        check_exact(metrics)

    def _check_weights(self) -> None:
        if not self._pushed:
            return
        now = self._trainer.fingerprints()
        moved = [name for name in self._pushed if now[name] != self._pushed[name]]
        if moved:
            raise UserError(
                f"algorithm.on_policy: {len(moved)} of the trainer's {len(now)} weights have changed since they were pushed,"
                f" such as {moved[0]} on rank {self._trainer.ranks.rank}; nothing was learned from this update: find out what"
                " changes them between the push and the update"
            )


def check_exact(metrics: Metrics) -> None:
    """Raise UserError if the update is not on-policy. metrics: of an update, merged over all processes."""
    for name, expected in EXACTLY.items():
        total, tokens = metrics[name].parts if name in metrics else (0.0, 0)
        if tokens and total != expected * tokens:
            raise UserError(
                f"algorithm.on_policy: {name} of the update is {total / tokens!r}, but on-policy it is {expected}; nothing was"
                " learned from this update: its ratio starts from other log-probs than its own"
            )


# -- target kl -----------------------------------------------------------------------------------------------------------
# Early stopping: skip updates once the policy is too far from the policy at the start of the step (`algorithm.target_kl`).


OLD_KL = "loss/old_kl"
"""Name of the metric of the KL(old policy || current policy), a k3 estimate from an update's pass in nats per token."""


class TargetKL(UpdateHook):
    """Skips an update if its pass measures a KL above the limit, and skips all later updates of the rollout batch.

    The KL is measured on the update's own tokens, before its step. OpenAI's Spinning Up and Stable-Baselines3 do the same, but
    stop at 1.5 times their target_kl; this hook stops at the limit itself. The first update of a rollout batch is always done.
    """

    def __init__(self, limit: float, updates: int) -> None:
        """Create it. limit: largest KL in nats per token. updates: number of updates per rollout batch."""
        self.limit, self.updates = limit, updates
        self._update = 0

    def before_forward(self, batches: Sequence[Batch], stage: Stage, place: UpdateContext) -> None:
        """Store the index of the update in the rollout batch."""
        self._update, self.ends_batch = place.update, False

    def check(self, metrics: Metrics) -> None:
        """Set `ends_batch` if the KL over all processes' tokens exceeds the limit."""
        total, tokens = metrics[OLD_KL].parts if OLD_KL in metrics else (0.0, 0)
        self.ends_batch = self._update > 0 and total > self.limit * tokens

    def metrics(self) -> Metrics:
        """Return the number of the rollout batch's skipped updates, this one included."""
        return {"update/left_out": alike(float(self.ends_batch * (self.updates - self._update)), across="sum")}
