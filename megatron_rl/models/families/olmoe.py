"""OLMoE: norms of queries and keys run over all heads together; every layer has experts."""

from __future__ import annotations

from typing import Any

import transformers

from megatron_rl.models.families.family import Family, Moe, TinySizes


def _bridge() -> type:
    from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
    from megatron.bridge.models.conversion.param_mapping import AutoMapping, GatedMLPMapping
    from megatron.bridge.models.olmoe.olmoe_bridge import OlMoEBridge

    expert, hf_expert = "decoder.layers.*.mlp.experts.local_experts.*", "model.layers.*.mlp.experts.*"

    class Olmoe(OlMoEBridge):
        """The original bridge, plus weight names for separate (ungrouped) experts. norm_topk_prob follows config.json."""

        def provider_bridge(self, hf_pretrained: Any) -> Any:
            provider = super().provider_bridge(hf_pretrained)
            provider.moe_router_pre_softmax = not hf_pretrained.config.norm_topk_prob
            return provider

        def mapping_registry(self) -> MegatronMappingRegistry:
            return MegatronMappingRegistry(
                *super().mapping_registry().get_all_mappings(),
                AutoMapping(f"{expert}.linear_fc2.weight", f"{hf_expert}.down_proj.weight"),
                GatedMLPMapping(
                    megatron_param=f"{expert}.linear_fc1.weight",
                    gate=f"{hf_expert}.gate_proj.weight",
                    up=f"{hf_expert}.up_proj.weight",
                ),
            )

    return Olmoe


def _provider() -> type:
    from megatron.bridge.models.olmoe.olmoe_provider import OlMoEModelProvider

    return OlMoEModelProvider


def _tiny(s: TinySizes) -> transformers.PreTrainedConfig:
    """Return a config with experts in every layer. Queries are not grouped, because SGLang does not support groups here."""
    return transformers.AutoConfig.for_model(
        "olmoe",
        **s.decoder | {"intermediate_size": s.expert_intermediate, "num_key_value_heads": s.heads},
        num_experts=s.experts,
        num_experts_per_tok=s.topk,
        norm_topk_prob=False,
        eos_token_id=None,  # the default is outside of a small vocabulary
    )


FAMILY = Family(
    "OlmoeForCausalLM",
    "olmoe",
    _bridge,
    _tiny,
    provider=_provider,
    moe=Moe(intermediate="intermediate_size"),
    qk_norm="heads",
    width_from_hidden=True,
)
