"""Optimizers that `optimizer.name` may be: what Megatron is told of each, and what each keeps for a weight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_rl.config.model import OptimizerConfig


@dataclass(frozen=True)
class Optimizer:
    """An optimizer of Megatron-Core, which is built by its name in `OPTIMIZERS`.

    How it steps is not said here: `StepPreview` has the optimizer itself step on copies.
    """

    settings: Callable[[OptimizerConfig], dict[str, Any]]
    """Fields of Megatron's OptimizerConfig that belong to this optimizer alone."""
    states: Callable[[OptimizerConfig], tuple[str, ...]]
    """Names, in the optimizer's state, of the tensors of a weight's size that it keeps: fp32 but for optimizer.moments."""
    classes: tuple[str, ...]
    """Names of classes whose state is made here for a checkpoint; that of others Megatron makes."""
    counts_steps: bool
    """True if these keep a count of steps for each weight, `step`."""
    sharded: bool
    """True if Megatron's distributed optimizer takes it."""


OPTIMIZERS: dict[str, Optimizer] = {
    "adam": Optimizer(
        settings=lambda opt: {"adam_beta1": opt.betas[0], "adam_beta2": opt.betas[1], "adam_eps": opt.eps},
        states=lambda opt: ("exp_avg", "exp_avg_sq"),
        classes=("Adam", "AdamW"),  # torch's, of which Megatron asks the step, which only one that was used has
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
