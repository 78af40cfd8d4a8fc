"""The recipes for one machine fit it, by the arithmetic of `megatron-rl plan`, and say so with the figures of today."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from models.test_sizes import MODELS

from megatron_rl.config import load_config
from megatron_rl.launch.memory import GB, estimate
from megatron_rl.launch.preflight import check_memory_savers
from megatron_rl.models.precision import Machine

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
RECIPES = {
    "olmoe-1b-7b-1x80gb": ("OLMoE-1B-7B", 1, 80),
    "moonlight-16b-a3b-1xh200": ("Moonlight-16B-A3B", 1, 141),
    "qwen3-30b-a3b-8x80gb": ("Qwen3-30B-A3B", 8, 80),
    "gpt-oss-20b-8x80gb": ("gpt-oss-20b", 8, 80),
}
"""Config -> model, GPUs, GB of one."""


@pytest.mark.parametrize("name", RECIPES)
def test_it_fits(name):
    model, gpus, memory = RECIPES[name]
    config = load_config(CONFIGS / f"{name}.yaml")
    assert config.name == name
    found = estimate(config, MODELS[model], gpus)
    assert found.fits(memory * GB), f"{found.usage.total / GB:.1f} GB"
    check_memory_savers(config, Machine((9, 0), None, None, "13.0"))
    text = (CONFIGS / f"{name}.yaml").read_text()
    said = re.search(r"weights ([\d.]+), gradients ([\d.]+), optimizer ([\d.]+), at most ([\d.]+) in all", text)
    kinds = [found.usage.kinds.get(kind, 0) for kind in ("weights", "gradients", "optimizer")]
    for figure, size in zip(said.groups(), kinds, strict=False):
        assert float(figure) == pytest.approx(size / GB, abs=0.06)
    assert float(said[4]) == pytest.approx(found.usage.total / GB, rel=0.03)  # with what is assumed
    host = float(re.search(r"Host: optimizer (\d+)", text)[1])
    assert host == pytest.approx(gpus * found.host / GB, abs=0.6)


@pytest.mark.parametrize("name", RECIPES)
def test_the_engines_weights_leave_room_for_a_cache(name):
    """Of as many tokens as it says, within 10 %, which is more than 32 of its longest responses."""
    model, gpus, memory = RECIPES[name]
    config, hf_config = load_config(CONFIGS / f"{name}.yaml"), MODELS[model]
    server = config.rollout.server
    assert config.rollout.colocate and config.sync.transport == "tensor"
    assert server.count * server.tensor == gpus
    weights = estimate(config, hf_config, gpus).push["bytes"]
    room = server.tensor * server.memory_fraction * memory * GB - weights
    if latent := getattr(hf_config, "kv_lora_rank", None):
        a_layer = 2 * (latent + hf_config.qk_rope_head_dim)
    else:
        head = getattr(hf_config, "head_dim", None) or hf_config.hidden_size // hf_config.num_attention_heads
        a_layer = 2 * 2 * hf_config.num_key_value_heads * head
    tokens = room / (a_layer * hf_config.num_hidden_layers)
    text = (CONFIGS / f"{name}.yaml").read_text()
    number, unit = re.search(r"a token, ([\d.,]+)( million)? tokens", text).groups()
    said = float(number.replace(",", "")) * (1e6 if unit else 1)
    assert said == pytest.approx(tokens, rel=0.1)
    assert tokens > 32 * config.rollout.context_length
