"""SGLang's model classes, each once more under its own name with route predictors."""

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
        DeepseekV3ForCausalLM,  # also Moonlight and whatever else has this architecture in its config.json
        GptOssForCausalLM,
        MixtralForCausalLM,
        OlmoeForCausalLM,
        Qwen3MoeForCausalLM,
    )
]
"""Classes that SGLang registers, by class name."""
