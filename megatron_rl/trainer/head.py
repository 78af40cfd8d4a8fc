"""The model's head during training: from hidden states to per-token log-probs and entropy."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

from megatron_rl.config import DistillationConfig
from megatron_rl.distributed.parallel import process_group
from megatron_rl.ops import linear_kl, linear_log_probs, linear_topk_kl
from megatron_rl.ops.device import LateChecks
from megatron_rl.ops.linear_log_probs import TokenLoss
from megatron_rl.ops.masked_log_softmax import KeptTokens
from megatron_rl.ops.token_terms import label_over_mean


@dataclass(frozen=True)
class HeadRequest:
    """The loss's request to the head. Travels through GPTModel.forward as `output_processor_context`."""

    labels: torch.Tensor
    """[T] int64, -100 where nothing is asked: such rows never meet the head."""
    rows: torch.Tensor
    """[n] int64: the others."""
    temperature: float
    log_rho: float | None
    """Logarithm of the safe set's rho; None: the vocabulary is not pruned."""
    kept: KeptTokens | None
    """Tokens that a truncating sampler kept."""
    with_entropy: bool
    vocab_size: int
    """The model's own; columns beyond it are Megatron's padding and belong to no softmax."""
    chunk_tokens: int
    token_loss: TokenLoss | None
    """The loss of some tokens alone, where it is a sum over tokens: the head then computes gradients on the way."""
    late: LateChecks
    """Where errors wait until the passes of all micro-batches are done."""
    fp32_logits: bool = False
    identical: bool = False
    """Log-probs are those of an engine with the same operators, bit for bit (precision.identical)."""
    teacher: TeacherHead | RecordedTeacher | None = None
    smooths: bool = False
    """True: label smoothing asks how far the label's logit is above their mean; of whole softmaxes at temperature 1."""


@dataclass(frozen=True)
class TeacherHead:
    """Inputs of the distance to a teacher."""

    hidden: torch.Tensor
    """[n, dt], at the rows that have a label."""
    weight: torch.Tensor
    """[V / tp, dt] of its head."""
    settings: DistillationConfig
    vocab_size: int


@dataclass(frozen=True)
class RecordedTeacher:
    """The same where the teacher's log-probs of its likeliest tokens were recorded."""

    token_ids: torch.Tensor
    """[n, k] int32, at the rows that have a label; -1: none."""
    log_probs: torch.Tensor
    """[n, k] fp32."""
    settings: DistillationConfig
    vocab_size: int


def log_prob_head(
    *,
    hidden_states: torch.Tensor,
    output_layer: torch.nn.Module,
    output_weight: torch.Tensor | None,
    context: HeadRequest,
    **_: object,
) -> torch.Tensor:
    """GPTModel's `output_processor`: hidden states [T / tp, 1, H] -> the `HeadOutputs`, [5, T] fp32, or [6, T] if it smooths.

    Tokens without a label have zeros. A token outside the safe set has a log-prob of -inf. With tensor
    parallelism hidden states come sharded over the sequence and the vocabulary is sharded over the ranks; the gradient is
    reduce-scattered back.
    """
    group = process_group(parallel_state.get_tensor_model_parallel_group())
    if group.size() > 1:
        hidden_states = gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=True)
    hidden_states = hidden_states.squeeze(1)
    weight = output_layer.get_parameter("weight") if output_weight is None else output_weight
    result = linear_log_probs(
        hidden_states,
        weight,
        context.labels,
        log_rho=context.log_rho,
        temperature=context.temperature,
        tp_group=group,
        with_entropy=context.with_entropy,
        vocab_size=context.vocab_size,
        kept=context.kept,
        chunk_tokens=context.chunk_tokens,
        token_loss=context.token_loss,
        fp32_logits=context.fp32_logits,
        identical=context.identical,
        rows=context.rows,
        late=context.late,
    )
    entropy = torch.zeros_like(result.log_probs) if result.entropy is None else result.entropy
    distance = torch.zeros_like(result.log_probs)
    if context.teacher is not None:
        hidden = hidden_states[context.rows]
        if isinstance(context.teacher, RecordedTeacher):
            found = _recorded_distance(context, context.teacher, hidden, weight, group)
        else:
            found = _distance(context, context.teacher, hidden, weight, group)
        distance = distance.index_copy(0, context.rows, found.to(distance.dtype))
    found = [result.log_probs, entropy, result.pruned, result.margin, distance]
    if context.smooths:
        above = label_over_mean(
            hidden_states[context.rows],
            weight,
            context.labels[context.rows],
            tp_group=group,
            vocab_size=context.vocab_size,
        )
        found.append(torch.zeros_like(distance).index_copy(0, context.rows, above.to(distance.dtype)))
    return torch.stack(found)


def _distance(
    context: HeadRequest, teacher: TeacherHead, hidden: torch.Tensor, weight: torch.Tensor, group: dist.ProcessGroup
) -> torch.Tensor:
    """[n]: the divergence from the teacher, over the tokens that both vocabularies have."""
    rows = min(len(weight), len(teacher.weight))  # with the same tokenizer tables differ in unused rows alone
    return linear_kl(
        hidden,
        weight[:rows],
        teacher.hidden,
        teacher.weight[:rows],
        temperature=teacher.settings.temperature,
        direction=teacher.settings.direction,
        mix=teacher.settings.mix,
        tp_group=group,
        vocab_size=teacher.vocab_size,
        chunk_tokens=context.chunk_tokens,
        fp32_logits=context.fp32_logits,
    )


def _recorded_distance(
    context: HeadRequest, teacher: RecordedTeacher, hidden: torch.Tensor, weight: torch.Tensor, group: dist.ProcessGroup
) -> torch.Tensor:
    """[n]: the divergence between the recorded tokens and one class for all others."""
    assert teacher.settings.direction != "jensen_shannon"  # which checks/key_rules.py refuses
    return linear_topk_kl(
        hidden,
        weight,
        teacher.token_ids.long(),
        teacher.log_probs,
        direction=teacher.settings.direction,
        tp_group=group,
        vocab_size=teacher.vocab_size,
        chunk_tokens=context.chunk_tokens,
        fp32_logits=context.fp32_logits,
    )


def hidden_head(
    *,
    hidden_states: torch.Tensor,
    context: torch.Tensor,
    output_layer: object = None,
    output_weight: object = None,
    **_: object,
) -> torch.Tensor:
    """GPTModel's `output_processor` of a teacher: hidden states [T / tp, 1, H] -> [n, H] of the rows `context` [n]."""
    if parallel_state.get_tensor_model_parallel_world_size() > 1:
        hidden_states = gather_from_sequence_parallel_region(hidden_states)
    return hidden_states.squeeze(1)[context]
