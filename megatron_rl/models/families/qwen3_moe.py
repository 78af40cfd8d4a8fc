"""Qwen3-MoE."""

from __future__ import annotations

from typing import Any

import transformers

from megatron_rl.models.families.family import Family, Moe, TinySizes


def _bridge() -> type:
    from megatron.bridge.models.qwen.qwen3_moe_bridge import Qwen3MoEBridge

    return Qwen3MoEBridge


def _tiny(s: TinySizes) -> transformers.PreTrainedConfig:
    return transformers.AutoConfig.for_model(
        "qwen3_moe", **s.decoder, head_dim=s.head_dim, **s.routed, num_experts=s.experts, norm_topk_prob=True
    )


def _moe_layers(config: transformers.PreTrainedConfig) -> list[int]:
    dense, every = config.mlp_only_layers or (), config.decoder_sparse_step
    return [layer for layer in range(config.num_hidden_layers) if layer not in dense and (layer + 1) % every == 0]


def _keep_layers(config: transformers.PreTrainedConfig, kept: list[int]) -> dict[str, Any]:
    moe = _moe_layers(config)
    return {"decoder_sparse_step": 1, "mlp_only_layers": [new for new, old in enumerate(kept) if old not in moe]}


FAMILY = Family(
    "Qwen3MoeForCausalLM",
    "qwen3_moe",
    _bridge,
    _tiny,
    moe=Moe(layers=_moe_layers, keep_layers=_keep_layers),
    qk_norm="head",
)
