"""Interface of update hooks: a hook is a class that adds a feature to the trainer's passes and updates."""

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
"""Type of a pass. "log_probs": forward pass for the old policy's log-probs, before the updates of a rollout batch. "update":
forward-backward pass of an update."""


@dataclass(frozen=True)
class UpdateContext:
    """Context of a forward pass: its update, and the micro-batches of the whole rollout batch."""

    update: int = 0
    """Number of the update that the micro-batches belong to, counted over all epochs."""
    rollout: Sequence[Sequence[Batch]] = ()
    """Micro-batches of all updates that are packed so far; empty if there is only the current update."""
    again: bool = False
    """True if a later epoch trains on these micro-batches again."""


def updates_of(rollout: Sequence[Sequence[Batch]], epochs: int) -> Iterator[tuple[int, UpdateContext]]:
    """Yield (index of the update's micro-batches, context) in the order of the updates. Each epoch repeats all of them."""
    parts, updates = len(rollout), len(rollout) * epochs
    for update in range(updates):
        yield update % parts, UpdateContext(update, rollout, update + parts < updates)


ALONE = UpdateContext()
"""Context of a pass outside of a rollout batch, or of the only update of a rollout batch."""


@dataclass(frozen=True)
class Step:
    """Result of one optimizer step."""

    done: bool
    """False if the gradients were not finite or a hook refused the step. A step that is not done changes nothing."""
    norm: float
    """Norm of all gradients, before clipping."""
    lr: float
    """Learning rate of the step; 0 if a hook refused it."""
    scale: float = 1.0
    """Factor by which the hooks scaled the learning rate."""


class UpdateHook:
    """Base class of training features, whose methods do nothing. All processes call the methods, in the order below."""

    name: str = ""
    """Name of the hook's state in checkpoints; without a name, no state is saved."""
    reads_outputs: bool = False
    """True if the hook's observers read the outputs of experts."""
    changes_gradients: bool = False
    """True if the hook changes gradients before the data-parallel reduction, which then cannot overlap the backward pass."""
    parameters: str = ""
    """Suffix of the names of the parameters that the hook adds to the model; empty if it adds none."""
    served: bool = False
    """True if the rollout engine also has these parameters."""
    ends_batch: bool = False
    """True: skip the remaining updates of the rollout batch. Set during an update, to the same value on all processes."""

    def attach(self, trainer: Trainer) -> None:
        """Initialize the hook. The trainer's model is built and, unless the trainer only scores, its optimizer too."""

    # -- a pass -------------------------------------------------------------------------------------------------------

    def before_forward(self, batches: Sequence[Batch], stage: Stage, place: UpdateContext) -> None:
        """Prepare for a forward pass of the policy over these micro-batches."""

    def observers(self, table: RouteTable, stage: Stage, place: UpdateContext) -> list[RouteObserver]:
        """Return the hook's observers of the routers in a micro-batch's pass. table: routes of the micro-batch."""
        return []

    def after_backward(self) -> None:
        """Use or change an update's gradients before the data-parallel reduction, as sums over this process's tokens only."""

    def after_reduction(self) -> None:
        """Use or change an update's reduced gradients (means over all tokens) in the buffers that the optimizer reads."""

    def after_pass(self, stage: Stage) -> None:
        """Handle the end of a pass over all micro-batches. In an update, this includes the backward pass.

        The weights have not changed yet.
        """

    # -- a step -------------------------------------------------------------------------------------------------------

    def before_step(self, preview: StepPreview) -> float:
        """Return a factor for the step's learning rate, the same on all processes; 0 skips the step.

        The trainer does not call this method if the gradients are not finite.
        """
        return 1.0

    def after_step(self, step: Step) -> None:
        """Handle the end of a step, whether it was taken or skipped."""

    def metrics(self) -> Metrics:
        """Return the metrics that this process measured in the update. The metrics of the hook's observers are not included."""
        return {}

    def check(self, metrics: Metrics) -> None:
        """Check the metrics of an update's passes, merged over all processes. Errors: UserError, before the step is taken."""

    # -- between updates ----------------------------------------------------------------------------------------------

    def weights_pushed(self) -> None:
        """Handle a weight sync: the rollout engine has just received the current weights."""

    def tensors(self) -> Iterable[Tensor]:
        """Return the hook's own tensors on the device. They are offloaded to host memory together with the trainer's memory."""
        return ()

    def state_dict(self, model_state: dict[str, Any]) -> dict[str, Any]:
        """Return the hook's tensors for Megatron's dist_checkpointing. model_state: state of the model's chunks."""
        return {}

    def progress(self) -> dict[str, int]:
        """Return the integers in the hook's state, by name. A checkpoint stores the largest value over all processes."""
        return {}

    def load_state_dict(self, state: dict[str, Any], progress: dict[str, int]) -> None:
        """Restore the hook's state from the saved results of `state_dict` and `progress`."""
