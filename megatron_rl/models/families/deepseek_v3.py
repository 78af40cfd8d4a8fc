"""DeepSeek-V3 and Moonlight: multi-latent attention, shared experts, sigmoid routers with balancing biases."""

from __future__ import annotations

from typing import Any

import transformers

from megatron_rl.models.families.family import ATTENTION, MLP, Family, Linear, Moe, TinySizes


def _bridge() -> type:
    from megatron.bridge.models.deepseek.deepseek_v3_bridge import DeepSeekV3Bridge

    class DeepSeekV3(DeepSeekV3Bridge):
        """The original bridge, with settings for RL."""

        def provider_bridge(self, hf_pretrained: Any) -> Any:
            provider = super().provider_bridge(hf_pretrained)
            provider.mtp_num_layers = None  # the policy has no draft layers
            provider.moe_router_bias_update_rate = 0.0  # RL keeps the balance from pre-training
            return provider

    return DeepSeekV3


def _provider() -> type:
    from megatron.bridge.models.mla_provider import MLAModelProvider

    return MLAModelProvider


def _tiny(s: TinySizes) -> transformers.PreTrainedConfig:
    """Return a config like Moonlight's (MLA, two shared experts, first layer dense), with two expert groups."""
    return transformers.AutoConfig.for_model(
        "deepseek_v3",
        **s.decoder | {"num_key_value_heads": s.heads},
        **s.routed,
        n_routed_experts=s.experts,
        n_shared_experts=2,
        n_group=2,
        topk_group=1,
        norm_topk_prob=True,
        scoring_func="sigmoid",
        topk_method="noaux_tc",
        moe_layer_freq=1,
        routed_scaling_factor=2.446,
        first_k_dense_replace=1,
        q_lora_rank=s.q_lora_rank or None,
        kv_lora_rank=2 * s.head_dim,
        qk_nope_head_dim=s.head_dim,
        qk_rope_head_dim=s.head_dim // 2,
        v_head_dim=s.head_dim,
        rope_parameters={"rope_type": "default", "rope_theta": 50000.0},
    )


def _moe_layers(config: transformers.PreTrainedConfig) -> list[int]:
    every = getattr(config, "moe_layer_freq", None) or 1
    return [layer for layer in range(config.first_k_dense_replace, config.num_hidden_layers) if layer % every == 0]


def _keep_layers(config: transformers.PreTrainedConfig, kept: list[int]) -> dict[str, Any]:
    return {"first_k_dense_replace": sum(layer < config.first_k_dense_replace for layer in kept)}


_DOWN = "fused_qkv_a_proj_with_mqa"
_LATENTS = {
    "q_a_proj": Linear("none", "latents", _DOWN, 0, whole_blocks=True, in_one_call=True),
    "kv_a_proj_with_mqa": Linear("none", "latents", _DOWN, 1, in_one_call=True),
    "q_b_proj": Linear("rows", "latents"),
    "kv_b_proj": Linear("rows", "latents"),
}

FAMILY = Family(
    "DeepseekV3ForCausalLM",
    "deepseek_v3",
    _bridge,
    _tiny,
    provider=_provider,
    moe=Moe(
        experts="n_routed_experts",
        groups="n_group",
        shared_size=lambda config: config.moe_intermediate_size * (config.n_shared_experts or 0),
        layers=_moe_layers,
        keep_layers=_keep_layers,
        of_router=("weight", "e_score_correction_bias"),
    ),
    linears=MLP | {name: ATTENTION[name] for name in ("q_proj", "o_proj")} | _LATENTS,
    latent_attention=True,
    tied_in_sglang=True,
    few_tokens=16,
)
