"""Checks that what the engine says of its samples can be of this model at all, before anything is learned from it."""

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
"""Tokens of an update below which nothing is said."""


class AgreementFloor(UpdateHook):
    """Stops the run where less than a share `floor` agrees in an update, of its tokens or of a layer's experts.

    With `correction.bypass` the trainer's side is the policy as it is, which later updates of a rollout batch find moved on
    purpose: of them nothing is said.
    """

    def __init__(self, floor: float) -> None:
        self.floor = floor
        self._layers: tuple[int, ...] = ()
        self._bypass = self._moved = False

    def attach(self, trainer: Trainer) -> None:
        """Learn which layers have routes, and whose log-probs the engine's are compared with."""
        self._layers = trainer.layout.routes.moe_layers if trainer.layout.routes else ()
        self._bypass = trainer.config.correction.bypass

    def before_forward(self, batches: Sequence[Batch], stage: Stage, place: UpdateContext) -> None:
        """Note whether the policy has been updated since it sampled."""
        self._moved = self._bypass and place.update > 0

    def check(self, metrics: Metrics) -> None:
        """Raise a UserError where too little agrees."""
        if not self._moved:
            check_agreement(metrics, self._layers, self.floor)


def check_agreement(metrics: Metrics, moe_layers: Iterable[int], floor: float) -> None:
    """metrics: of an update, merged over all processes; those of demonstrations have nothing to compare.

    The shares of log-probs within a factor of two and of equal experts are both near 1 in a healthy run, FP8 included
    (rounding turns few experts over, and moves few log-probs by 0.7). Routes of other tokens agree by chance alone, which
    is topk / experts times the unevenness of the load: from 0.06 (Qwen3-30B-A3B) to 0.25 (Mixtral) for an even one.
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
                f" the same tokens and weights; {end}: look at its --moe-runner-backend (triton captures routes) and at the"
                " model that it serves"
            )
    if (share := close / tokens) < floor:
        raise UserError(
            f"{start} only {share:.0%} of the tokens have log-probs within a factor of two in SGLang and in the trainer; {end}:"
            " look at the model, dtype, temperature and --attention-backend of the server"
        )


# -- on policy -----------------------------------------------------------------------------------------------------------
# The claim that each update is of the very policy that sampled (`algorithm.on_policy`), as far as the trainer can see it.


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


# -- target kl -----------------------------------------------------------------------------------------------------------
# Early stopping: no update further from the policy that a step began with than a limit (`algorithm.target_kl`).


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

    def before_forward(self, batches: Sequence[Batch], stage: Stage, place: UpdateContext) -> None:
        """Note which update of the rollout batch it is."""
        self._update, self.ends_batch = place.update, False

    def check(self, metrics: Metrics) -> None:
        """Compare the KL of all processes' tokens with the limit."""
        total, tokens = metrics[OLD_KL].parts if OLD_KL in metrics else (0.0, 0)
        self.ends_batch = self._update > 0 and total > self.limit * tokens

    def metrics(self) -> Metrics:
        """Return how many updates of the rollout batch are left out, this one included."""
        return {"update/left_out": alike(float(self.ends_batch * (self.updates - self._update)), across="sum")}
