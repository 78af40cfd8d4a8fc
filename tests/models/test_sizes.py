"""Parameters of released models, from their config.json: those that transformers builds, and as published."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig

from megatron_rl.config import ParallelConfig
from megatron_rl.models.shape import Counts, Shape, count, model_counts, rank_weights
from tools.make_tiny_model import FAMILIES, Sizes


def released(kind: str, **values: object) -> PreTrainedConfig:
    config = getattr(transformers, f"{kind}Config")(**values)
    config.architectures = [f"{kind}ForCausalLM"]
    return config


MODELS = {
    "Qwen3-30B-A3B": released(
        "Qwen3Moe", hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_hidden_layers=48,
        num_experts=128, num_experts_per_tok=8, num_attention_heads=32, num_key_value_heads=4, head_dim=128,
        vocab_size=151936,
    ),
    "gpt-oss-20b": released("GptOss", num_hidden_layers=24, num_local_experts=32),
    "gpt-oss-120b": released("GptOss", num_hidden_layers=36, num_local_experts=128),
    "OLMoE-1B-7B": released("Olmoe", intermediate_size=1024),
    "Moonlight-16B-A3B": released(
        "DeepseekV3", hidden_size=2048, intermediate_size=11264, moe_intermediate_size=1408, num_hidden_layers=27,
        num_attention_heads=16, num_key_value_heads=16, n_routed_experts=64, n_shared_experts=2, num_experts_per_tok=6,
        n_group=1, topk_group=1, first_k_dense_replace=1, q_lora_rank=None, vocab_size=163840,
    ),
    "DeepSeek-V3": released("DeepseekV3"),
    "Mixtral-8x7B": released("Mixtral"),
    "Qwen3-8B": released(
        "Qwen3", hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, vocab_size=151936,
    ),
    "Llama-3.2-1B": released(
        "Llama", hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=8, head_dim=64, vocab_size=128256, tie_word_embeddings=True,
    ),
}  # fmt: skip
"""What differs from the defaults of transformers, which are those of one released model of each family."""

PUBLISHED = {
    "Qwen3-30B-A3B": (30.5e9, 3.3e9),
    "gpt-oss-20b": (20.9e9, 4.2e9),  # 3.6 without the embedding
    "gpt-oss-120b": (116.8e9, 5.7e9),  # 5.1 without the embedding
    "OLMoE-1B-7B": (6.9e9, 1.3e9),
    "Moonlight-16B-A3B": (16.0e9, 2.9e9),
    "DeepSeek-V3": (671e9, 37.5e9),
    "Mixtral-8x7B": (46.7e9, 12.9e9),
    "Qwen3-8B": (8.2e9, 8.2e9),
    "Llama-3.2-1B": (1.24e9, 1.24e9),
}
"""Total and active."""


@pytest.mark.parametrize("name", MODELS)
def test_counts_are_those_of_transformers(name):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(MODELS[name])
    sizes = {key: parameter.numel() for key, parameter in model.named_parameters()}
    experts = sum(n for key, n in sizes.items() if ".experts." in key)
    counts = model_counts(Shape.from_config(MODELS[name]))
    assert counts.total == sum(sizes.values()) and counts.experts == experts
    assert counts.dense == counts.total - experts
    assert counts.embedding == sum(n for key, n in sizes.items() if "embed_tokens" in key or "lm_head" in key)
    total, active = PUBLISHED[name]
    assert counts.total == pytest.approx(total, rel=0.01) and counts.active == pytest.approx(active, rel=0.03)


def test_the_issues_figures():
    """28.99 B of Qwen3-30B-A3B are in experts and 1.54 B are not; 19.1 and 1.8 B of gpt-oss-20b."""
    counts = [model_counts(Shape.from_config(MODELS[name])) for name in ("Qwen3-30B-A3B", "gpt-oss-20b")]
    assert counts[0] == Counts(
        total=30_532_122_624, experts=28_991_029_248, dense=1_541_093_376, embedding=622_329_856, active=3_353_032_704
    )
    assert round(counts[1].experts / 1e9, 1) == 19.1 and round(counts[1].dense / 1e9, 1) == 1.8


@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_share_the_whole_model(family):
    """Pipeline stages add up; what expert parallelism shares out adds up; nothing else is shared by it."""
    config = FAMILIES[family](Sizes())
    config.architectures = [type(config).__name__.removesuffix("Config") + "ForCausalLM"]
    shape = Shape.from_config(config)
    whole = count(rank_weights(shape, ParallelConfig()))
    assert whole == model_counts(shape).total
    stages = ParallelConfig(pipeline=2, virtual_pipeline=2)
    twice = 512 * 64 if shape.tied else 0
    assert sum(count(rank_weights(shape, stages, stage)) for stage in range(2)) == whole + twice
    if shape.experts:
        halves = rank_weights(shape, ParallelConfig(expert=2))
        assert whole - count(halves) == count(halves, "experts") == model_counts(shape).experts // 2


def test_a_vocabulary_is_padded_for_tensor_parallelism():
    config = FAMILIES["qwen3"](Sizes(vocab=511))
    config.architectures = ["Qwen3ForCausalLM"]
    shape = Shape.from_config(config)
    assert count(rank_weights(shape, ParallelConfig(tensor=2)), "head") == 256 * 64
    assert model_counts(shape).embedding == 2 * 511 * 64
