"""SGLang's model classes with route predictors added. The classes keep their original names."""

from __future__ import annotations

from sglang.srt.models.deepseek_v2 import DeepseekV3ForCausalLM
from sglang.srt.models.gpt_oss import GptOssForCausalLM
from sglang.srt.models.mixtral import MixtralForCausalLM
from sglang.srt.models.olmoe import OlmoeForCausalLM
from sglang.srt.models.qwen3_moe import Qwen3MoeForCausalLM

from megatron_rl_models.prediction import with_predictors

EntryClass = [
    with_predictors(model)
    for model in (
        DeepseekV3ForCausalLM,  # also Moonlight and all other models with this architecture in config.json
        GptOssForCausalLM,
        MixtralForCausalLM,
        OlmoeForCausalLM,
        Qwen3MoeForCausalLM,
    )
]
"""Model classes that SGLang registers under their class names."""
