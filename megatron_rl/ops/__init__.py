"""Operators with their own gradients: one operator per file, with its plain-torch reference beside it."""

from megatron_rl.ops.linear_kl import linear_kl as linear_kl
from megatron_rl.ops.linear_log_probs import linear_log_probs as linear_log_probs
from megatron_rl.ops.linear_topk_kl import linear_topk_kl as linear_topk_kl
from megatron_rl.ops.masked_log_softmax import masked_log_softmax as masked_log_softmax
from megatron_rl.ops.sink_attention import sink_attention as sink_attention
