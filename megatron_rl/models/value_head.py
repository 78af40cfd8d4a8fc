"""A head of one number in the place of the one over the vocabulary: rewards of responses, values of states."""

from __future__ import annotations

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region


class ValueHead(torch.nn.Module):
    """One number for each hidden state, computed in fp32. It has no bias, as Hugging Face's classifiers have none.

    It starts at zero, where a folder has no head yet: a reward model then begins at a loss of log 2 and a critic with values
    of 0, on every parallel layout alike.
    """

    def __init__(self, like: torch.Tensor, *, sequence_parallel: bool) -> None:
        """like: [..., hidden], the weight of the head that it stands in for."""
        super().__init__()
        self.weight = torch.nn.Parameter(like.new_zeros(1, like.shape[-1]))
        # Each rank sees its share of the tokens: Megatron adds up the gradients of weights that say so.
        self.weight.sequence_parallel = sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[T, 1, hidden] -> [T] fp32."""
        return torch.nn.functional.linear(hidden_states.squeeze(1).float(), self.weight.float()).squeeze(1)


def give_value_head(chunk: GPTModel) -> None:
    """Replace the head of a chunk, where it has one."""
    if chunk.post_process:
        weight = chunk.output_layer.get_parameter("weight")
        head = ValueHead(weight, sequence_parallel=chunk.config.sequence_parallel)
        chunk.output_layer = head  # pyright: ignore[reportAttributeAccessIssue]: Megatron has it for logits alone


def value_head(
    *, hidden_states: torch.Tensor, output_layer: torch.nn.Module, output_weight: object = None, **_: object
) -> torch.Tensor:
    """GPTModel's `output_processor`: hidden states [T / tp, 1, H] -> values [1, T] fp32 of every position.

    With tensor parallelism the T are sharded over the ranks. All of them compute the same of the gathered values, so that a
    rank's own part is the gradient of its own.
    """
    values = output_layer(hidden_states)
    if getattr(output_layer.get_parameter("weight"), "sequence_parallel", False):
        values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
    return values[None]
