"""Operators with their own gradients. Each file holds one operator and its reference in plain torch."""

from megatron_rl.ops.distillation_kl import linear_kl, linear_topk_kl
from megatron_rl.ops.linear_log_probs import linear_log_probs
from megatron_rl.ops.masked_log_softmax import masked_log_softmax
from megatron_rl.ops.sink_attention import sink_attention

__all__ = ["linear_kl", "linear_log_probs", "linear_topk_kl", "masked_log_softmax", "sink_attention"]
