"""Llama 2 and 3, and all other models with this architecture in config.json."""

from __future__ import annotations

import transformers

from megatron_rl.models.families.family import Family, TinySizes


def _bridge() -> type:
    from megatron.bridge.models.llama.llama_bridge import LlamaBridge

    return LlamaBridge


def _tiny(s: TinySizes) -> transformers.PreTrainedConfig:
    """Return a config with tied embeddings, as in the small Llama models."""
    return transformers.AutoConfig.for_model("llama", **s.decoder | {"tie_word_embeddings": True}, head_dim=s.head_dim)


def _unsupported(config: transformers.PreTrainedConfig) -> tuple[str, str] | None:
    # Megatron-Core hard-codes these three values (rope_utils, Llama 3.1).
    fixed = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "llama3" and any(rope.get(key, value) != value for key, value in fixed.items()):
        return "rope_parameters", f"llama3 scaling is only supported with {fixed}"
    return None


FAMILY = Family(
    "LlamaForCausalLM",
    "llama",
    _bridge,
    _tiny,
    rope_types=("default", "llama3", "linear"),
    unsupported=_unsupported,
    tied_in_sglang=True,
    fp8_scales_lost=True,  # SGLang renames them weight_scale
)
