"""FLOPs against what torch counts in transformers' models, and by hand; utilization."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from megatron_rl.metrics.reduce import figures, merge
from megatron_rl.models.flops import PEAK_TFLOPS, attended_pairs, forward_flops, sequence_flops
from megatron_rl.models.parallel_check import read_hf_config
from megatron_rl.models.shape import Shape
from megatron_rl.report.hardware import per_second
from tools.make_tiny_model import FAMILIES

TOKENS = 40


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_as_torch_counts(family, tiny_model):
    """Eager attention multiplies all pairs, whatever the mask, and all tokens meet the head."""
    folder = tiny_model(family)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        model(torch.randint(4, 64, (1, TOKENS)), use_cache=False)
    config = read_hf_config(folder)
    ours = forward_flops(Shape.from_config(config), TOKENS, TOKENS, config.num_hidden_layers * TOKENS**2)
    assert ours == pytest.approx(counter.get_total_flops(), rel=0.01)


def qwen3_30b() -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        architectures=["Qwen3MoeForCausalLM"],
        vocab_size=151_936,
        hidden_size=2048,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        tie_word_embeddings=False,
    )


def test_by_hand():
    qkv, out, router, experts = 2048 * (32 + 8) * 128, 4096 * 2048, 2048 * 128, 8 * 3 * 2048 * 768
    layers, head = 48 * (qkv + out + router + experts), 2048 * 151_936
    attention = 48 * 32 * 2 * 128 * (100 * 101 // 2)
    assert sequence_flops(qwen3_30b(), [(100, 30)]) == 2 * (100 * layers + 30 * head + attention)
    twice = sequence_flops(qwen3_30b(), [(100, 30), (100, 30)])
    assert twice == 2 * sequence_flops(qwen3_30b(), [(100, 30)])  # packed sequences do not see each other


@pytest.mark.parametrize("window", [None, 1, 3, 7, 50])
def test_pairs(window):
    counted = sum(1 for query in range(7) for key in range(query + 1) if window is None or query - window < key)
    assert attended_pairs(7, window) == counted


def test_windows_of_gpt_oss(tiny_model):
    config = read_hf_config(tiny_model("gpt_oss"))
    shape = Shape.from_config(config)
    windows = shape.windows
    assert set(windows) == {None, config.sliding_window}
    long = 10 * config.sliding_window
    pairs = sum(attended_pairs(long, window) for window in windows)
    assert pairs < len(windows) * attended_pairs(long)
    assert sequence_flops(config, [(long, 5)]) == forward_flops(shape, long, 5, pairs)


def test_utilization_is_that_of_all_ranks_over_the_seconds_of_the_first():
    peak = PEAK_TFLOPS["NVIDIA H200"] * 1e12
    runs = [SimpleNamespace(ranks=SimpleNamespace(rank=rank)) for rank in range(2)]
    shares = zip(runs, (0.3, 0.5), (10.0, 11.0), strict=True)  # of one GPU's peak for 10 s; the ranks' own seconds
    found = [{"mfu": per_second(run, share * peak * 10, 2 * peak * seconds)} for run, share, seconds in shares]
    assert figures(merge(found)) == {"mfu": pytest.approx(0.4)}
