"""Hooks by which a feature, one class, takes part in the passes and updates of a trainer that does not know it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from megatron_rl.data.packing import Batch
from megatron_rl.metrics.reduce import Metrics
from megatron_rl.routing.passes import RouteObserver
from megatron_rl.routing.table import RouteTable
from megatron_rl.trainer.preview import StepPreview

if TYPE_CHECKING:
    from megatron_rl.trainer.trainer import Trainer

Stage = Literal["log_probs", "update"]
"""A pass of the old policy, before the first update of a rollout batch; or the forward and backward of an update."""


@dataclass(frozen=True)
class UpdateContext:
    """Where a pass stands in the work on a rollout batch."""

    update: int = 0
    """Number of the update that the micro-batches belong to, over all epochs."""
    rollout: Sequence[Sequence[Batch]] = ()
    """The micro-batches of all its updates, as far as they are packed; empty: there is but this one."""
    again: bool = False
    """True: a later epoch learns from these micro-batches once more."""


def updates_of(rollout: Sequence[Sequence[Batch]], epochs: int) -> Iterator[tuple[int, UpdateContext]]:
    """Parts of a rollout batch in the order in which updates learn from them, all of them in each epoch, and the places."""
    parts, updates = len(rollout), len(rollout) * epochs
    for update in range(updates):
        yield update % parts, UpdateContext(update, rollout, update + parts < updates)


ALONE = UpdateContext()
"""Place of a pass that belongs to no rollout batch, and of an update that is all that is done with one."""


@dataclass(frozen=True)
class Step:
    """Result of one optimizer step."""

    done: bool
    """False: the gradients were not finite, or a hook refused it; nothing has changed."""
    norm: float
    """Norm of all gradients, before clipping."""
    lr: float
    """Learning rate of the step: 0 where a hook refused it."""
    scale: float = 1.0
    """Factor of the learning rate that hooks asked for."""


class UpdateHook:
    """A feature of training; by itself it does nothing. The methods are called in this order, on all processes."""

    name: str = ""
    """Name of its state in checkpoints; without one none is saved."""
    reads_outputs: bool = False
    """True if its observers are shown what experts put out."""
    changes_gradients: bool = False
    """True if it does so before they are reduced, which then may not begin in the backward."""
    parameters: str = ""
    """How the names of the parameters end that it gives the model."""
    served: bool = False
    """True if the rollout engine has these too."""
    ends_batch: bool = False
    """Set in an update, alike on all processes: no other one of its rollout batch is to follow."""

    def attach(self, trainer: Trainer) -> None:
        """The model is built, and unless the trainer only scores its optimizer (else None) too."""

    # -- a pass -------------------------------------------------------------------------------------------------------

    def before_forward(self, batches: Sequence[Batch], stage: Stage, place: UpdateContext) -> None:
        """A pass of the policy begins, over these micro-batches."""

    def observers(self, table: RouteTable, stage: Stage, place: UpdateContext) -> list[RouteObserver]:
        """Its observers at the routers in the pass of the micro-batch of these routes."""
        return []

    def after_backward(self) -> None:
        """Called in an update: gradients are this process's own sums, not reduced yet."""

    def after_reduction(self) -> None:
        """Called in an update: gradients are means over the tokens of all processes, reduced where the optimizer wants them."""

    def after_pass(self, stage: Stage) -> None:
        """The forward, and in an update the backward, of all micro-batches is done; weights are as they were."""

    # -- a step -------------------------------------------------------------------------------------------------------

    def before_step(self, preview: StepPreview) -> float:
        """Factor of the step's learning rate, the same on all processes; 0: the step is left out.

        Not called where gradients are not finite.
        """
        return 1.0

    def after_step(self, step: Step) -> None:
        """The step is done, or left out."""

    def metrics(self) -> Metrics:
        """Metrics that this process measured in the update, without those of its observers."""
        return {}

    def check(self, metrics: Metrics) -> None:
        """Metrics of the update's passes, of all processes, before the step. Errors: UserError; nothing was learned then."""

    # -- between updates ----------------------------------------------------------------------------------------------

    def weights_pushed(self) -> None:
        """The rollout engine has just got the weights as they are."""

    def tensors(self) -> Iterable[Tensor]:
        """Tensors that it keeps on the device beside the model: it leaves with the trainer's memory."""
        return ()

    def state_dict(self, model_state: dict[str, Any]) -> dict[str, Any]:
        """Its tensors as Megatron's dist_checkpointing stores them; model_state: that of the model's chunks."""
        return {}

    def progress(self) -> dict[str, int]:
        """Numbers of its state; in a checkpoint the largest of all processes."""
        return {}

    def load_state_dict(self, state: dict[str, Any], progress: dict[str, int]) -> None:
        """Restore what the two above had saved."""
