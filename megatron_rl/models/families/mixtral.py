"""Mixtral (Jiang et al. 2024, arXiv 2401.04088): Llama's attention, softmax over the top-k router logits.

Megatron-Bridge does not have this family, so this module defines all its settings and weight names.
"""

from __future__ import annotations

from typing import Any

import transformers

from megatron_rl.models.families.family import Family, Moe, TinySizes, expert_linears


def _bridge() -> type:
    from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
    from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
    from megatron.bridge.models.conversion.param_mapping import AutoMapping, GatedMLPMapping, QKVMapping

    layer, hf_layer = "decoder.layers.*", "model.layers.*"
    hf_expert = f"{hf_layer}.block_sparse_moe.experts.*"

    class Mixtral(MegatronModelBridge):
        """Bridge with all settings and weight names of Mixtral."""

        def provider_bridge(self, hf_pretrained: Any) -> Any:
            provider = super().provider_bridge(hf_pretrained)
            config = hf_pretrained.config
            provider.normalization = "RMSNorm"
            provider.gated_linear_unit = True
            provider.add_bias_linear = False
            provider.moe_ffn_hidden_size = config.intermediate_size
            provider.moe_router_pre_softmax = False
            provider.moe_router_load_balancing_type = "aux_loss"
            if config.sliding_window is not None:
                provider.window_size = (config.sliding_window - 1, 0)
            return provider

        def mapping_registry(self) -> MegatronMappingRegistry:
            plain = {
                "embedding.word_embeddings.weight": "model.embed_tokens.weight",
                "output_layer.weight": "lm_head.weight",
                "decoder.final_layernorm.weight": "model.norm.weight",
                f"{layer}.self_attention.linear_qkv.layer_norm_weight": f"{hf_layer}.input_layernorm.weight",
                f"{layer}.self_attention.linear_proj.weight": f"{hf_layer}.self_attn.o_proj.weight",
                f"{layer}.pre_mlp_layernorm.weight": f"{hf_layer}.post_attention_layernorm.weight",
                f"{layer}.mlp.router.weight": f"{hf_layer}.block_sparse_moe.gate.weight",
                f"{layer}.mlp.experts.linear_fc2.weight*": f"{hf_expert}.w2.weight",
                f"{layer}.mlp.experts.local_experts.*.linear_fc2.weight": f"{hf_expert}.w2.weight",
            }
            return MegatronMappingRegistry(
                *(AutoMapping(megatron_param=ours, hf_param=theirs) for ours, theirs in plain.items()),
                QKVMapping(
                    megatron_param=f"{layer}.self_attention.linear_qkv.weight",
                    q=f"{hf_layer}.self_attn.q_proj.weight",
                    k=f"{hf_layer}.self_attn.k_proj.weight",
                    v=f"{hf_layer}.self_attn.v_proj.weight",
                ),
                *(
                    GatedMLPMapping(megatron_param=ours, gate=f"{hf_expert}.w1.weight", up=f"{hf_expert}.w3.weight")
                    for ours in (
                        f"{layer}.mlp.experts.linear_fc1.weight*",
                        f"{layer}.mlp.experts.local_experts.*.linear_fc1.weight",
                    )
                ),
            )

    return Mixtral


def _tiny(s: TinySizes) -> transformers.PreTrainedConfig:
    return transformers.AutoConfig.for_model(
        "mixtral",
        **s.decoder | {"intermediate_size": s.expert_intermediate},
        head_dim=s.head_dim,
        num_local_experts=s.experts,
        num_experts_per_tok=s.topk,
    )


FAMILY = Family(
    "MixtralForCausalLM",
    "mixtral",
    _bridge,
    _tiny,
    moe=Moe(
        experts="num_local_experts",
        intermediate="intermediate_size",
        block="block_sparse_moe",
        linears=expert_linears(gate="w1", up="w3", down="w2"),
    ),
    width_from_hidden=True,
)
