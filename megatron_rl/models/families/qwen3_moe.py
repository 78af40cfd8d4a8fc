"""Qwen3-MoE."""

from __future__ import annotations

import transformers

from megatron_rl.models.families.family import Family, TinySizes


def _bridge() -> type:
    from megatron.bridge.models.qwen.qwen3_moe_bridge import Qwen3MoEBridge

    return Qwen3MoEBridge


def _tiny(s: TinySizes) -> transformers.PreTrainedConfig:
    return transformers.AutoConfig.for_model(
        "qwen3_moe", **s.decoder, head_dim=s.head_dim, **s.routed, num_experts=s.experts, norm_topk_prob=True
    )


FAMILY = Family("Qwen3MoeForCausalLM", "qwen3_moe", _bridge, _tiny, qk_norm="head")
