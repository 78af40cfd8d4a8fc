"""FLOPs of a model's forward pass, computed from its shape, and peak FLOPs per second of GPUs."""

from __future__ import annotations

import math
from collections.abc import Iterable

from transformers import PreTrainedConfig

from megatron_rl.models.shape import Shape, end_weights, layer_weights

TRAINING = 3
"""FLOPs of a forward and a backward pass, divided by the FLOPs of the forward pass. The backward pass has two multiplications
for each one of the forward pass."""
PEAK_TFLOPS = {
    "NVIDIA A100-SXM4-40GB": 312.0,
    "NVIDIA A100-SXM4-80GB": 312.0,
    "NVIDIA A100-PCIE-40GB": 312.0,
    "NVIDIA A100 80GB PCIe": 312.0,
    "NVIDIA L40S": 362.05,
    "NVIDIA H20": 148.0,
    "NVIDIA H100 80GB HBM3": 989.4,
    "NVIDIA H100 PCIe": 756.0,
    "NVIDIA H100 NVL": 835.0,
    "NVIDIA H200": 989.4,
    "NVIDIA H200 NVL": 835.0,
    "NVIDIA GH200 480GB": 989.4,
    "NVIDIA B200": 2250.0,
}
"""torch's name of a GPU -> dense bf16 peak in 1e12 FLOPs per second, from NVIDIA's data sheets (half the sparse values)."""


def attended_pairs(length: int, window: int | None = None) -> int:
    """Return the number of (query, key) pairs in a causal sequence. window: keys per query, including its own position."""
    seen = length if window is None else min(window, length)
    return seen * (seen + 1) // 2 + (length - seen) * seen


def forward_flops(shape: Shape, tokens: int, head_tokens: int, pairs: int) -> float:
    """Return the FLOPs of one forward pass: 2 for each multiply-add of its matrix multiplications.

    The count includes the weights that each token uses (only its own experts) and the head for `head_tokens` tokens. Attention
    multiplies twice for each (query, key) pair. pairs: number of these pairs, summed over the layers.
    """
    layers = [w for layer in range(shape.layers) for w in layer_weights(shape, layer) if len(w.shape) > 1]
    met = sum(math.prod(w.shape) * (shape.topk if w.part == "experts" else 1) for w in layers)
    head = math.prod(end_weights(shape, first=False, last=True)[-1].shape)
    attention = shape.heads * (shape.head_dim + shape.value_dim)
    return 2.0 * (met * tokens + head * head_tokens + attention * pairs)


def sequence_flops(config: PreTrainedConfig, sequences: Iterable[tuple[int, int]]) -> float:
    """Return the FLOPs of a forward pass over causal sequences, given as (tokens, tokens that the head predicts)."""
    shape = Shape.from_config(config)
    total = 0.0
    for tokens, labels in sequences:
        total += forward_flops(shape, tokens, labels, sum(attended_pairs(tokens, window) for window in shape.windows))
    return total
