"""FLOPs of a model's forward from its shape, and the peaks of devices: arithmetic alone."""

from __future__ import annotations

import math
from collections.abc import Iterable

from transformers import PreTrainedConfig

from megatron_rl.models.shape import Shape, end_weights, layer_weights

TRAINING = 3
"""Forwards that a forward and its backward cost: the backward has two products for each of the forward's."""
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
"""torch's name of a GPU -> dense bf16 peak in 1e12 FLOPs per second, of NVIDIA's data sheets (half of their sparse figures)."""


def attended_pairs(length: int, window: int | None = None) -> int:
    """(query, key) pairs of a causal sequence; window: of which a query sees the last so many keys, itself among them."""
    seen = length if window is None else min(window, length)
    return seen * (seen + 1) // 2 + (length - seen) * seen


def forward_flops(shape: Shape, tokens: int, head_tokens: int, pairs: int) -> float:
    """FLOPs of one forward: 2 for each multiply-add of the matrix products.

    They are those of the weights that a token meets (its own experts among them), of the head for the tokens that meet it, and
    attention's two for each of `pairs`: (query, key) pairs, summed over layers.
    """
    layers = [w for layer in range(shape.layers) for w in layer_weights(shape, layer) if len(w.shape) > 1]
    met = sum(math.prod(w.shape) * (shape.topk if w.part == "experts" else 1) for w in layers)
    head = math.prod(end_weights(shape, first=False, last=True)[-1].shape)
    attention = shape.heads * (shape.head_dim + shape.value_dim)
    return 2.0 * (met * tokens + head * head_tokens + attention * pairs)


def sequence_flops(config: PreTrainedConfig, sequences: Iterable[tuple[int, int]]) -> float:
    """FLOPs of one forward over causal sequences of (tokens, of which so many are predicted, and meet the head)."""
    shape = Shape.from_config(config)
    total = 0.0
    for tokens, labels in sequences:
        total += forward_flops(shape, tokens, labels, sum(attended_pairs(tokens, window) for window in shape.windows))
    return total
