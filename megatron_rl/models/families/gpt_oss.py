"""gpt-oss: attention sinks, biases in attention, router and experts, sliding windows in every other layer, stacked experts."""

from __future__ import annotations

from typing import Any

import transformers

from megatron_rl.models.families.family import Family, Moe, Stack, TinySizes


def _bridge() -> type:
    from megatron.bridge.models.gpt_oss.gpt_oss_bridge import GPTOSSBridge

    class GptOss(GPTOSSBridge):
        """The original bridge, with yarn and sliding windows from config.json instead of the released models' constants."""

        def provider_bridge(self, hf_pretrained: Any) -> Any:
            provider = super().provider_bridge(hf_pretrained)
            config = hf_pretrained.config
            rope = config.rope_parameters
            provider.yarn_rotary_scaling_factor = rope["factor"]
            provider.yarn_original_max_position_embeddings = rope["original_max_position_embeddings"]
            provider.yarn_beta_fast = rope.get("beta_fast", 32.0)
            provider.yarn_beta_slow = rope.get("beta_slow", 1.0)
            provider.yarn_correction_range_round_to_int = rope.get("truncate", True)
            provider.window_attn_skip_freq = [int(kind == "sliding_attention") for kind in config.layer_types]
            provider.activation_func_clamp_value = getattr(config, "swiglu_limit", 7.0)
            return provider

    return GptOss


def _tiny(s: TinySizes) -> transformers.PreTrainedConfig:
    """Return a config with yarn, learned sinks, biases, and a sliding window in every other layer."""
    if s.hidden == 2 * s.expert_intermediate:
        raise ValueError(
            f"gpt_oss: hidden {s.hidden} is twice the expert's intermediate size, so gate_up_proj is square and "
            "converters cannot tell its orientation; choose another --expert-intermediate"
        )
    return transformers.AutoConfig.for_model(
        "gpt_oss",
        **s.decoder | {"intermediate_size": s.expert_intermediate},
        head_dim=s.head_dim,
        num_local_experts=s.experts,
        num_experts_per_tok=s.topk,
        sliding_window=s.window,
        swiglu_limit=7.0,  # as in the released folders; SGLang reads it, and some releases of transformers lack it
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": max(1, s.max_position // 32),
        },
    )


def _unsupported(config: transformers.PreTrainedConfig) -> tuple[str, str] | None:
    if config.hidden_size == 2 * config.intermediate_size:
        return "hidden_size", "gate_up_proj is square, so its orientation cannot be told from its shape"
    return None


FAMILY = Family(
    "GptOssForCausalLM",
    "gpt_oss",
    _bridge,
    _tiny,
    moe=Moe(
        experts="num_local_experts",
        intermediate="intermediate_size",
        router="router",
        of_router=("weight", "bias"),
        stacks={"gate_up_proj": Stack("w13_weight", "out", by_turns=True), "down_proj": Stack("w2_weight", "in")},
    ),
    bias=True,
    sinks="sinks",
    router_bias=True,
    rope_types=("yarn",),
    unsupported=_unsupported,
    served_in_folder_dtype=True,
    not_quantized="SGLang only reads it in MXFP4",
    few_tokens=128,  # FlashInfer's router, if installed
)
