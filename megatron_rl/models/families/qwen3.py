"""Qwen3: the family's dense models."""

from __future__ import annotations

import transformers

from megatron_rl.models.families.family import Family, TinySizes


def _bridge() -> type:
    from megatron.bridge.models.qwen.qwen3_bridge import Qwen3Bridge

    return Qwen3Bridge


def _tiny(s: TinySizes) -> transformers.PreTrainedConfig:
    return transformers.AutoConfig.for_model("qwen3", **s.decoder, head_dim=s.head_dim)


FAMILY = Family("Qwen3ForCausalLM", "qwen3", _bridge, _tiny, qk_norm="head", tied_in_sglang=True)
