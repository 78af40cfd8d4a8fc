"""Mixtral for Megatron-Bridge, which does not have it: configuration and names of the weights."""

from __future__ import annotations

from typing import Any

from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
from megatron.bridge.models.conversion.param_mapping import AutoMapping, GatedMLPMapping, QKVMapping
from megatron.bridge.models.gpt_provider import GPTModelProvider

LAYER = "decoder.layers.*"
HF_LAYER = "model.layers.*"
HF_EXPERT = f"{HF_LAYER}.block_sparse_moe.experts.*"


class MixtralBridge(MegatronModelBridge):
    """Mixtral (Jiang et al. 2024, arXiv 2401.04088): Llama's attention, softmax over the top-k router logits."""

    def provider_bridge(self, hf_pretrained: Any) -> GPTModelProvider:
        """Megatron's settings for a config.json."""
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
        """Megatron's names of the weights and Hugging Face's."""
        plain = {
            "embedding.word_embeddings.weight": "model.embed_tokens.weight",
            "output_layer.weight": "lm_head.weight",
            "decoder.final_layernorm.weight": "model.norm.weight",
            f"{LAYER}.self_attention.linear_qkv.layer_norm_weight": f"{HF_LAYER}.input_layernorm.weight",
            f"{LAYER}.self_attention.linear_proj.weight": f"{HF_LAYER}.self_attn.o_proj.weight",
            f"{LAYER}.pre_mlp_layernorm.weight": f"{HF_LAYER}.post_attention_layernorm.weight",
            f"{LAYER}.mlp.router.weight": f"{HF_LAYER}.block_sparse_moe.gate.weight",
            f"{LAYER}.mlp.experts.linear_fc2.weight*": f"{HF_EXPERT}.w2.weight",
            f"{LAYER}.mlp.experts.local_experts.*.linear_fc2.weight": f"{HF_EXPERT}.w2.weight",
        }
        return MegatronMappingRegistry(
            *(AutoMapping(megatron_param=ours, hf_param=theirs) for ours, theirs in plain.items()),
            QKVMapping(
                megatron_param=f"{LAYER}.self_attention.linear_qkv.weight",
                q=f"{HF_LAYER}.self_attn.q_proj.weight",
                k=f"{HF_LAYER}.self_attn.k_proj.weight",
                v=f"{HF_LAYER}.self_attn.v_proj.weight",
            ),
            *(
                GatedMLPMapping(megatron_param=ours, gate=f"{HF_EXPERT}.w1.weight", up=f"{HF_EXPERT}.w3.weight")
                for ours in (
                    f"{LAYER}.mlp.experts.linear_fc1.weight*",
                    f"{LAYER}.mlp.experts.local_experts.*.linear_fc1.weight",
                )
            ),
        )
