"""Optimizers that `optimizer.name` can select: their Megatron settings and the state that they keep for each weight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_rl.config.model import OptimizerConfig


@dataclass(frozen=True)
class Optimizer:
    """An optimizer of Megatron-Core, which is built by its name in `OPTIMIZERS`.

    Its update rule is not described here: `StepPreview` lets the optimizer itself step on copies.
    """

    settings: Callable[[OptimizerConfig], dict[str, Any]]
    """Fields of Megatron's OptimizerConfig that only this optimizer has."""
    states: Callable[[OptimizerConfig], tuple[str, ...]]
    """Names of the optimizer-state tensors that have the size of their weight. They are fp32, unless optimizer.moments
    says otherwise."""
    classes: tuple[str, ...]
    """Names of the optimizer classes whose state this package initializes for checkpoints. Megatron initializes the
    state of other classes."""
    counts_steps: bool
    """True if the optimizer classes keep a step count, `step`, for each weight."""
    sharded: bool
    """True if Megatron's distributed optimizer supports this optimizer."""


OPTIMIZERS: dict[str, Optimizer] = {
    "adam": Optimizer(
        settings=lambda opt: {"adam_beta1": opt.betas[0], "adam_beta2": opt.betas[1], "adam_eps": opt.eps},
        states=lambda opt: ("exp_avg", "exp_avg_sq"),
        classes=("Adam", "AdamW"),  # torch's: Megatron reads `step`, which exists only after a step
        counts_steps=True,
        sharded=True,
    ),
    "sgd": Optimizer(
        settings=lambda opt: {"sgd_momentum": opt.momentum},
        states=lambda opt: ("momentum_buffer",) if opt.momentum else (),
        classes=("SGD", "FusedSGD"),
        counts_steps=False,
        sharded=False,
    ),
}
