"""A head that gives one number per token instead of logits, for reward models and critics."""

from __future__ import annotations

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region


class ValueHead(torch.nn.Module):
    """Head that computes one number for each hidden state, in fp32. Like Hugging Face's classifiers, it has no bias.

    If the folder has no such head, the weight starts at zero, on every parallel layout. Then a reward model starts with a loss
    of log 2, and a critic with values of 0.
    """

    def __init__(self, like: torch.Tensor, *, sequence_parallel: bool) -> None:
        """Create the head. like: weight [..., hidden] of the head that it replaces."""
        super().__init__()
        self.weight = torch.nn.Parameter(like.new_zeros(1, like.shape[-1]))
        # Each rank sees its share of the tokens, and Megatron sums the gradients of weights with this mark.
        self.weight.sequence_parallel = sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Compute values [T] in fp32 from hidden states [T, 1, hidden]."""
        return torch.nn.functional.linear(hidden_states.squeeze(1).float(), self.weight.float()).squeeze(1)


def give_value_head(chunk: GPTModel) -> None:
    """Replace the head of a chunk by a value head, if the chunk has a head."""
    if chunk.post_process:
        weight = chunk.output_layer.get_parameter("weight")
        head = ValueHead(weight, sequence_parallel=chunk.config.sequence_parallel)
        chunk.output_layer = head  # pyright: ignore[reportAttributeAccessIssue]: Megatron has it for logits alone


def value_head(
    *, hidden_states: torch.Tensor, output_layer: torch.nn.Module, output_weight: object = None, **_: object
) -> torch.Tensor:
    """Compute values [1, T] fp32 of every position from hidden states [T / tp, 1, H] (GPTModel's `output_processor`).

    With tensor parallelism, the T positions are sharded over the ranks. All ranks compute the same loss from the gathered
    values. So a rank's own part of the gradient is the full gradient of its values.
    """
    values = output_layer(hidden_states)
    if getattr(output_layer.get_parameter("weight"), "sequence_parallel", False):
        values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
    return values[None]
