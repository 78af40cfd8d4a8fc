"""Whether what the engine says of its samples can be of this model at all: checked before anything is learned from it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from megatron_rl.data.packing import Batch
from megatron_rl.errors import UserError
from megatron_rl.metrics.reduce import Metrics
from megatron_rl.routing.metrics import layer_name
from megatron_rl.trainer.hooks import Place, Stage, UpdateHook
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

    def before_forward(self, batches: Sequence[Batch], stage: Stage, place: Place) -> None:
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
