"""Bytes that a micro-batch needs on one GPU: activations, and temporaries of a layer and of the head.

The formulas count the tensors that the code keeps (`tests/trainer/test_memory_plan.py` measures them). IMBALANCE is an
assumption.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.config import ParallelConfig, PrecisionConfig
from megatron_rl.config.plan import expert_tensor_size
from megatron_rl.models.precision import TRAIN
from megatron_rl.models.shape import Shape, stage_layers

IMBALANCE = 1.5
"""Number of tokens of a layer's busiest expert-parallel rank, relative to the mean: an assumption."""


@dataclass(frozen=True)
class Kernels:
    """Properties of kernels that determine which tensors are kept for the backward pass."""

    norm: int = 1
    """Number of tensors of its input's size that a norm keeps. torch's norm on a CPU also keeps its normalized input."""
    fused_swiglu: bool = True
    """True if the fused activation of dense MLPs and shared experts keeps only its input."""
    clamped_experts: int = 5
    """Number of tensors of the inner size that experts with gpt-oss's activation keep per token. 5: both halves before and
    after the clamp (Megatron clamps before its fused activation), and the activation. 3: this package's CPU kernel, which
    recomputes the clamp."""
    transformer_engine: bool = True
    head_adds: bool = True
    """True if the head's bf16 matrix multiplications accumulate directly into the fp32 sum of the weight's gradient, and one
    pass scales and rounds the sum."""


GPU = Kernels()
CPU = Kernels(norm=2, fused_swiglu=False, clamped_experts=3, transformer_engine=False, head_adds=False)


def stage_activations(
    recompute: str,
    parallel: ParallelConfig,
    train: str,
    shape: Shape,
    stage: int,
    tokens: int,
    micro_batches: int = 1,
    kernels: Kernels = GPU,
) -> int:
    """Return the bytes that a stage keeps for backward passes, for all micro-batches in flight, without the head.

    recompute: model.recompute; train: precision.train. tokens: tokens of a micro-batch on one rank.
    """
    layers, width = stage_layers(shape, parallel, stage), TRAIN[train].width
    if recompute == "full":
        stored = len(layers) * width * shape.hidden * tokens // parallel.tensor
    else:
        stored = sum(layer_activations(recompute, parallel, width, shape, layer, tokens, kernels) for layer in layers)
    # Number of chunks between their forward and backward passes in Megatron's schedules.
    behind, virtual = parallel.pipeline - stage - 1, parallel.virtual_pipeline
    warm_up = 2 * behind + (virtual - 1) * parallel.pipeline if virtual > 1 else behind
    in_flight = min(micro_batches * virtual, warm_up + 1)
    final = kernels.norm * width * shape.hidden * tokens // parallel.tensor if not behind else 0
    return stored * in_flight // virtual + final


def layer_activations(
    recompute: str,
    parallel: ParallelConfig,
    width: int,
    shape: Shape,
    layer: int,
    tokens: int,
    kernels: Kernels = GPU,
    *,
    imbalance: float = 1.0,
) -> int:
    """Return the bytes that one layer keeps for the backward pass of one micro-batch, without full recomputation.

    width: bytes per element.
    """
    stored = _attention_activations(recompute, parallel, shape, tokens, width, kernels)
    own = tokens // parallel.tensor  # sequence parallelism
    stored += width * own * shape.hidden * (kernels.norm + 1)  # the second norm, its output
    plain = 3 if kernels.fused_swiglu else 5
    if layer not in shape.moe_layers:
        return int(stored + width * plain * tokens * shape.intermediate // parallel.tensor)
    stored += width * plain * tokens * shape.shared_intermediate // parallel.tensor
    stored += own * (12 * shape.experts + 12 * shape.topk)  # logits, sort order of all pairs, routes and gates
    routed = imbalance * own * shape.topk * expert_tensor_size(parallel)
    inner = shape.expert_intermediate / expert_tensor_size(parallel)
    of_token = shape.hidden + (kernels.clamped_experts if shape.bias else 3) * inner
    return int(stored + routed * (width * of_token + 12))


def _attention_activations(
    recompute: str, parallel: ParallelConfig, shape: Shape, tokens: int, width: int, kernels: Kernels
) -> int:
    own = tokens // parallel.tensor
    heads, kv_heads = shape.heads / parallel.tensor, shape.kv_heads / parallel.tensor
    dim = shape.head_dim
    mixed = (heads + 2 * kv_heads) * dim
    numbers = own * shape.hidden * (kernels.norm + 1)  # the first norm, its output
    each = 4 * shape.rotary_dim  # cos and sin, for queries and keys
    if shape.kv_lora:
        numbers += own * ((kernels.norm + 1) * (shape.kv_lora + shape.q_lora) + shape.rotary_dim)
    elif shape.qk_norm == "head":
        each += mixed + heads * dim + (kernels.norm - 1) * (heads + kv_heads) * dim
    elif shape.qk_norm == "heads":
        each += kernels.norm * (heads + kv_heads) * dim
    out = heads * dim if shape.kv_lora else heads * shape.value_dim  # MLA pads values to the width of keys
    if shape.kv_lora and shape.value_dim != dim:
        each += heads * shape.value_dim  # the padding is cut off again
    if recompute == "selective":
        views = heads * (dim - shape.rotary_dim + shape.value_dim) if shape.kv_lora else mixed
        each += heads * dim + kv_heads * dim + (0 if shape.qk_norm == "head" else views)
        each += 0 if shape.kv_lora else out
        return int(width * (numbers + tokens * each))
    context = parallel.context
    seen = context + 0.5 if context > 1 and parallel.cp_comm_type == "all_gather" else 1
    each += heads * dim + kv_heads * dim * seen + (out if shape.kv_lora else kv_heads * shape.value_dim * seen) + out
    return int(width * (numbers + tokens * each) + 4 * heads * tokens)


def layer_work(
    recompute: str,
    parallel: ParallelConfig,
    train: str,
    shape: Shape,
    layers: list[int],
    tokens: int,
    kernels: Kernels,
) -> dict[str, int]:
    """Return the bytes of temporaries in one layer's backward pass.

    Temporaries are recomputed tensors, gradients, and copies of tokens for experts.
    """
    width, full = TRAIN[train].width, recompute == "full"
    own, etp = tokens // parallel.tensor, expert_tensor_size(parallel)
    imbalance = IMBALANCE if parallel.expert > 1 else 1.0
    attention = (2 * shape.heads + 2 * shape.kv_heads) * shape.head_dim // parallel.tensor
    work, dispatch = 0, 0
    for layer in {(i in shape.moe_layers): i for i in layers}.values():
        kept = layer_activations("none", parallel, width, shape, layer, tokens, kernels, imbalance=imbalance)
        recomputed = kept if full else 0
        gradients = 2 * own * shape.hidden
        copies = 0
        if layer in shape.moe_layers:
            routed = imbalance * own * shape.topk * etp
            experts = shape.experts // parallel.expert
            gradients += routed * 3 * shape.expert_intermediate / etp
            gradients += (
                2 * experts * shape.expert_intermediate * shape.hidden / etp
            )  # of fc1, until they are accumulated
            copies = (2 + (parallel.expert > 1)) * routed * shape.hidden
        else:
            gradients += 3 * tokens * shape.intermediate / parallel.tensor
        gradients = max(gradients, tokens * attention)
        if recomputed + width * (gradients + copies) > work + dispatch:
            work, dispatch = int(recomputed + width * gradients), int(width * copies)
    return {"layer": work, "dispatch": dispatch}


def head_work(
    chunk_tokens: int, tensor: int, precision: PrecisionConfig, shape: Shape, tokens: int, kernels: Kernels
) -> dict[str, int]:
    """Return the bytes of the logits of one chunk of tokens, and of the head's gradient sums over all chunks.

    There are two sums, one for the head's weight (fp32) and one for the hidden states. chunk_tokens: model.head_chunk_tokens;
    tensor: parallel.tensor.
    """
    width = TRAIN[precision.train].width
    rows = shape.padded_vocab(tensor) // tensor
    chunk = min(chunk_tokens, tokens)
    fp32_logits = precision.fp32_lm_head or precision.identical
    logits = (4 if fp32_logits else width) * chunk * rows
    table = rows * shape.hidden
    product = width * table if width < 4 else 0  # of one chunk, before accumulation
    summed = (4 if tokens > chunk else width) * table
    # Forward: logits and a product. Backward: the scaled sum, and a copy in the weights' type.
    rounded = width * chunk * rows if fp32_logits and width < 4 else 0  # gradients of fp32 logits
    in_one = kernels.head_adds and width < 4
    peak = summed + (max(logits + rounded, product) if in_one else max(logits + rounded + product, summed + product))
    hidden = 2 * width * tokens * shape.hidden
    return {"logits": logits, "head": peak - logits + hidden}
