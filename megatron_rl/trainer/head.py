"""From hidden states to per-token log-probs and entropy, in chunks: the logits of more than one chunk never exist."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch.utils.checkpoint import checkpoint

from megatron_rl.ops import masked_log_softmax

CHUNK_ELEMENTS = 1 << 26
"""Logits of one chunk on one tensor-parallel rank: 256 MiB in fp32."""


@dataclass(frozen=True)
class HeadRequest:
    """What the loss wants from the head. Travels through GPTModel.forward as `output_processor_context`."""

    labels: torch.Tensor
    """[T] int64, negative where nothing is asked: such rows never meet the head."""
    temperature: float
    with_entropy: bool
    vocab_size: int
    """The model's own; columns beyond it are Megatron's padding and belong to no softmax."""


def log_prob_head(*, hidden_states, output_layer, output_weight, context: HeadRequest, config, **_) -> torch.Tensor:
    """GPTModel's `output_processor`: hidden states [T / tp, 1, H] -> [2, T] fp32 (log-probs; entropy or zeros).

    Rows without a label are zero. With tensor parallelism hidden states come sharded over the sequence and the
    vocabulary is sharded over the ranks; the gradient is reduce-scattered back.
    """
    group = parallel_state.get_tensor_model_parallel_group()
    parallel = group.size() > 1
    if parallel:
        hidden_states = gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=True)
    weight = output_layer.weight if output_weight is None else output_weight
    rows = (context.labels >= 0).nonzero(as_tuple=True)[0]
    hidden = hidden_states.squeeze(1)[rows]
    labels = context.labels[rows]

    real_columns = context.vocab_size - group.rank() * weight.shape[0]

    def chunk_values(hidden_chunk: torch.Tensor, label_chunk: torch.Tensor) -> torch.Tensor:
        logits = hidden_chunk @ weight.t()
        if real_columns < weight.shape[0]:
            padding = torch.arange(weight.shape[0], device=logits.device) >= real_columns
            logits = logits.masked_fill(padding, float("-inf"))
        result = masked_log_softmax(
            logits,
            label_chunk,
            log_rho=None,
            temperature=context.temperature,
            tp_group=group if parallel else None,
            with_entropy=context.with_entropy,
        )
        entropy = result.entropy if context.with_entropy else torch.zeros_like(result.log_probs)
        return torch.stack([result.log_probs, entropy])

    rows_per_chunk = max(1, CHUNK_ELEMENTS // weight.shape[0])
    pieces = list(zip(hidden.split(rows_per_chunk), labels.split(rows_per_chunk), strict=True))
    if len(pieces) == 1 or not torch.is_grad_enabled():
        values = [chunk_values(*piece) for piece in pieces]
    else:
        values = [checkpoint(chunk_values, *piece, use_reentrant=False) for piece in pieces]
    out = torch.zeros(2, context.labels.shape[0], dtype=torch.float32, device=hidden.device)
    return out.index_copy(1, rows, torch.cat(values, 1))
