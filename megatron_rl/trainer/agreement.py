"""Whether what the engine says of its samples can be of this model at all: checked before anything is learnt from it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from megatron_rl.errors import UserError
from megatron_rl.routing.metrics import engine_agreement

CLOSE = "mismatch/close"
"""Name of a metric: share of the sampled tokens whose log-probs engine and trainer have within a factor of two."""
FEWEST = 32
"""Tokens of an update below which nothing is said."""


def check_agreement(
    metrics: Mapping[str, float], routes: Mapping[str, float | np.ndarray], tokens: int, floor: float | None
) -> None:
    """Errors: UserError where less than a share `floor` agrees in an update, of its tokens or of a layer's experts.

    metrics, routes: figures of an update over all processes, and what its routers measured; those of demonstrations have
    nothing to compare. tokens: that count in the loss.

    The shares of log-probs within a factor of two and of equal experts are both near 1 in a healthy run, FP8 included
    (rounding turns few experts over, and moves few log-probs by 0.7). Routes of other tokens agree by chance alone, which
    is topk / experts times the unevenness of the load: from 0.06 (Qwen3-30B-A3B) to 0.25 (Mixtral) for an even one.
    """
    if floor is None or tokens < FEWEST or CLOSE not in metrics:
        return
    start = f"rollout.agreement_floor = {floor:g}: before an update"
    end = "nothing was learnt from it"
    for layer, (share, compared) in engine_agreement(routes).items():
        if compared >= FEWEST and share < floor:
            raise UserError(
                f"{start} only {share:.0%} of the experts that SGLang reports in layer {layer} are the trainer's own choice for"
                f" the same tokens and weights; {end}: look at its --moe-runner-backend (triton captures routes) and at the"
                " model that it serves"
            )
    if (share := metrics[CLOSE]) < floor:
        raise UserError(
            f"{start} only {share:.0%} of the tokens have log-probs within a factor of two in SGLang and in the trainer; {end}:"
            " look at the model, dtype, temperature and --attention-backend of the server"
        )
