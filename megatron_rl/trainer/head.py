"""The model's head during training: computes log-probs and entropy of tokens from hidden states."""

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
    """Inputs and options for the model's head. GPTModel.forward passes them on as `output_processor_context`."""

    labels: torch.Tensor
    """Labels, [T] int64; -100 for rows without a label, which the head leaves out."""
    rows: torch.Tensor
    """Indices of the rows with a label, [n] int64."""
    temperature: float
    log_rho: float | None
    """Logarithm of the safe set's threshold rho; None without vocabulary pruning."""
    kept: KeptTokens | None
    """Tokens that the rollout's truncating sampler (such as top-p) kept; None without truncation."""
    with_entropy: bool
    vocab_size: int
    """Vocabulary size of the model. Logits beyond it are Megatron's padding and are left out of every softmax."""
    chunk_tokens: int
    token_loss: TokenLoss | None
    """Function for a chunk's loss, if the loss is a sum over tokens. The head then computes gradients in the forward pass."""
    late: LateChecks
    """Collector of errors, which are raised after the forward passes of all micro-batches."""
    fp32_logits: bool = False
    identical: bool = False
    """True: log-probs equal, bit for bit, the log-probs of an engine with the same operators (precision.identical)."""
    teacher: TeacherHead | RecordedTeacher | None = None
    smooths: bool = False
    """True: also compute the label's logit minus the mean logit, for label smoothing. It needs the full vocabulary and
    temperature 1."""


@dataclass(frozen=True)
class TeacherHead:
    """Inputs for the divergence from a teacher model."""

    hidden: torch.Tensor
    """Hidden states of the teacher at the rows with a label, [n, dt] (dt: hidden size of the teacher)."""
    weight: torch.Tensor
    """Weight of the teacher's head, [V / tp, dt]."""
    settings: DistillationConfig
    vocab_size: int


@dataclass(frozen=True)
class RecordedTeacher:
    """Inputs for the divergence from a teacher whose top log-probs were recorded."""

    token_ids: torch.Tensor
    """Recorded tokens at the rows with a label, [n, k] int32; -1 for none."""
    log_probs: torch.Tensor
    """The teacher's log-probs of these tokens, [n, k] fp32."""
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
    """Compute `HeadOutputs`, [5, T] fp32 ([6, T] with label smoothing), from hidden states [T / tp, 1, H].

    GPTModel calls this function as its `output_processor`. Rows without a label get zeros. A token outside the safe set has a
    log-prob of -inf. With tensor parallelism, each rank has a shard of the sequence's hidden states and of the
    vocabulary's weights. The gradient of the hidden states is reduce-scattered.
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
    """Return the divergence from the teacher, [n], over the tokens that both vocabularies contain."""
    rows = min(len(weight), len(teacher.weight))  # with the same tokenizer, the tables differ in unused rows only
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
    """Return the divergence from the teacher, [n], over the recorded tokens and one class for all other tokens."""
    assert teacher.settings.direction != "jensen_shannon"  # checks/key_rules.py refuses it
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
    """Return the hidden states [n, H] of the rows in `context`, from [T / tp, 1, H]. Used as a teacher's `output_processor`."""
    if parallel_state.get_tensor_model_parallel_world_size() > 1:
        hidden_states = gather_from_sequence_parallel_region(hidden_states)
    return hidden_states.squeeze(1)[context]
