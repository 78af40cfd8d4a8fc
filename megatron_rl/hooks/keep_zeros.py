"""Keeps zero weights at zero, so that a pruned model stays pruned during training (model.keep_zeros)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_rl.data.packing import Batch
from megatron_rl.errors import UserError
from megatron_rl.models.shape import Shape, linear_weights
from megatron_rl.trainer.hooks import Stage, UpdateContext, UpdateHook

if TYPE_CHECKING:
    from megatron_rl.trainer.trainer import Trainer


class KeepZeros(UpdateHook):
    """Removes the gradient of weights that are zero in the folder model.path.

    Without a gradient, these weights stay at zero. Adam's moments of such a weight are always zero, so its step is
    0 / (0 + eps), and weight decay multiplies 0. So the fp32 weight, its bf16 copy, checkpoints and exports all have an
    exact zero. The gradient is removed before the gradient norm is computed, so it does not affect the clipping of other
    gradients.
    """

    def __init__(self, keep: bool | list[str]) -> None:
        """Create it. keep: patterns of weight names (`models.freeze`); True: linear layers of attention, MLPs and experts."""
        self.patterns = [] if isinstance(keep, bool) else keep
        self._trainer: Trainer | None = None
        self._zeros: list[tuple[str, torch.nn.Parameter, Tensor]] = []
        self._looked = False

    def attach(self, trainer: Trainer) -> None:
        """Find the zero weights. Errors: UserError if there are none."""
        self._trainer = trainer
        wanted = linear_weights(Shape.from_config(trainer.model.hf_config), self.patterns)
        for named in trainer.model.parameter_names(trainer.chunks):
            for name, parameter in named.items():
                if name in wanted and parameter.requires_grad and (zero := parameter.detach() == 0).any():
                    self._zeros.append((name, parameter, zero))
        if not trainer.ranks.maximum(len(self._zeros)):
            raise UserError(
                f"config: model.keep_zeros: {trainer.model.path} has no zero weights to keep; set model.keep_zeros to false"
            )

    def before_forward(self, batches: Sequence[Batch], stage: Stage, place: UpdateContext) -> None:
        """Check before the first update that weights that are zero in model.path still are. Collective. Errors: UserError."""
        if self._looked or stage != "update" or self._trainer is None:
            return
        self._looked = True
        lost = [name for name, parameter, zero in self._zeros if (parameter.detach()[zero] != 0).any()]
        if names := [name for found in self._trainer.ranks.gather(lost[:1]) for name in found]:
            raise UserError(
                f"config: model.keep_zeros: {names[0]} has zeros in model.path, but not in the checkpoint, which was trained"
                " without model.keep_zeros; start a run with another name"
            )

    def after_reduction(self) -> None:
        """Remove the gradients of zero weights."""
        for _, parameter, zero in self._zeros:
            parameter.main_grad.masked_fill_(zero, 0)  # pyright: ignore[reportAttributeAccessIssue]: DDP adds it

    def tensors(self) -> list[Tensor]:
        """Return the masks of zero weights, which take one byte per weight."""
        return [zero for _, _, zero in self._zeros]
