"""Feature distillation: trains outputs of the model's decoder layers to match outputs of a teacher's layers.

A forward pass of the teacher records the outputs of the teacher's layers. The model's forward pass compares them with its own
layers' outputs, and adds the gradient of the loss to the backward pass. The losses are the same as in nvidia-modelopt's
Megatron plugin (`modelopt.torch.distill.plugins.megatron`). The plugin's wrapper is not used, because it runs the teacher
within the model's forward pass, with logits over the whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor
from torch.nn.functional import cosine_similarity, mse_loss

from megatron_rl.config import DistillationConfig
from megatron_rl.metrics.reduce import Metrics, ratio
from megatron_rl.models.packed import LayerOutputs

FEATURES = "distillation/features"
"""Name of the metric of the feature loss, summed over the pairs of layers and averaged over the counted tokens."""


@dataclass
class RecordedLayers:
    """Stores the outputs of some teacher layers at some rows of a micro-batch."""

    rows: Tensor
    """Indices of the rows to keep on this process, [n]."""
    layers: frozenset[int]
    outputs: dict[int, Tensor] = field(default_factory=dict)
    """Output of each stored layer, [n, hidden]."""

    def see(self, layer: int, hidden: Tensor) -> Tensor:
        """Store the output if the layer is one of `layers`; return `hidden` unchanged."""
        if layer in self.layers:
            self.outputs[layer] = hidden.detach()[self.rows, 0]
        return hidden


@dataclass
class DrawnLayers:
    """Adds the feature loss to the model's loss. The feature loss is a sum over the counted rows and the pairs of layers."""

    rows: Tensor
    targets: Mapping[int, Tensor]
    """Output of each teacher layer, [n, hidden]."""
    settings: DistillationConfig
    _sums: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def see(self, layer: int, hidden: Tensor) -> Tensor:
        """Add the loss of this layer's pairs (model layer, teacher layer) to the backward pass; return `hidden`."""
        for pair in self.settings.feature_layers:
            if pair[0] == layer:
                own, target = hidden[self.rows, 0].float(), self.targets[pair[1]].float()
                terms = FEATURE_LOSSES[self.settings.feature_loss](own, target).sum()
                self._sums[pair] = terms.detach()
                # Megatron's mechanism for losses of layers; they get the same scale as the loss of the head.
                loss = self.settings.feature_coefficient * terms
                hidden = MoEAuxLossAutoScaler.apply(hidden, loss)  # pyright: ignore[reportAssignmentType]
        return hidden

    def metrics(self) -> Metrics:
        """Return the feature loss, averaged over the counted tokens."""
        return {FEATURES: ratio(torch.stack([*self._sums.values()]).sum(), len(self.rows))}


def squared_error(own: Tensor, target: Tensor) -> Tensor:
    """Return the mean squared difference of features [n, hidden], one value per token [n]."""
    return mse_loss(own, target, reduction="none").mean(-1)


def cosine_distance(own: Tensor, target: Tensor) -> Tensor:
    """Return 1 - the cosine of the angle between features [n, hidden], one value per token [n]."""
    return 1 - cosine_similarity(own, target, dim=-1)


FEATURE_LOSSES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {"mse": squared_error, "cosine": cosine_distance}
"""Loss functions by the value of distillation.feature_loss. Each returns the losses of n tokens."""


def own_rows(mask: Tensor, *, sequence_parallel: bool) -> Tensor:
    """Return the row indices of counted tokens in this process's layer outputs. mask: [T], of this context-parallel rank."""
    return own_part(mask, sequence_parallel=sequence_parallel).nonzero()[:, 0]


def own_part(values: Tensor, *, sequence_parallel: bool) -> Tensor:
    """Return the entries for the rows that this process's layers hold. values: [T] of a context-parallel rank's micro-batch."""
    if not sequence_parallel:
        return values
    size = parallel_state.get_tensor_model_parallel_world_size()
    return values.chunk(size)[parallel_state.get_tensor_model_parallel_rank()]


@contextmanager
def watched_layers(chunks: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Within the block, let each decoder layer pass its output to the observer `features` of the current micro-batch."""

    def show(layer: torch.nn.Module, args: tuple, named: dict[str, Any], output: tuple[Tensor, ...]) -> tuple:
        watcher: LayerOutputs | None = named["packed_seq_params"].features
        number: int = layer.layer_number - 1  # pyright: ignore[reportAssignmentType, reportOperatorIssue]
        return output if watcher is None else (watcher.see(number, output[0]), *output[1:])

    with ExitStack() as stack:
        for chunk in chunks:
            for module in chunk.modules():
                if isinstance(module, TransformerLayer):
                    stack.callback(module.register_forward_hook(show, with_kwargs=True).remove)
        yield
