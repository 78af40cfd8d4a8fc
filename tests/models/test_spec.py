"""A tiny GPT of each family on our layer spec: packed equals one by one, every parameter learns, the right modules."""

from __future__ import annotations

import pytest
import torch
from layer_world import FAMILIES, VOCAB, gpt_model, layer_config, packed_params, parallel_world
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_layer import MoELayer

from megatron_rl.models.attention import CoreAttention, MLASelfAttention, SelfAttention
from megatron_rl.models.experts import GroupedExperts
from megatron_rl.models.norm import RMSNorm
from megatron_rl.models.spec import layer_spec

LENGTHS = [5, 1, 9, 3]


@pytest.fixture(scope="module", autouse=True)
def world():
    with parallel_world():
        yield


def run(model, tokens, lengths=None):
    """Logits `[T, vocab]` of a pack, or of one sequence."""
    packed = None if lengths is None else packed_params(lengths)
    positions = torch.cat([torch.arange(n) for n in lengths or [len(tokens)]])
    return model(tokens[None], positions[None], None, packed_seq_params=packed)[0]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("recompute", [None, "selective", "full"])
def test_packed_equals_one_by_one_with_gradients(family, recompute):
    options = {"recompute_granularity": recompute}
    if recompute == "full":
        options |= {"recompute_method": "uniform", "recompute_num_layers": 1}
    model = gpt_model(layer_config(family, **options))
    tokens = torch.randint(0, VOCAB, (sum(LENGTHS),))
    direction = torch.randn(len(tokens), VOCAB)
    packed = run(model, tokens, LENGTHS)
    packed.backward(direction)
    gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
    assert all(torch.isfinite(g).all() for g in gradients.values())
    assert all(g.any() for n, g in gradients.items() if "local_experts" not in n)  # an expert may have had no token
    model.zero_grad()
    for part, expected, d in zip(tokens.split(LENGTHS), packed.split(LENGTHS), direction.split(LENGTHS), strict=True):
        out = run(model, part)
        torch.testing.assert_close(out, expected, atol=2e-5, rtol=1e-4)
        out.backward(d)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            parameter.grad, gradients[name], atol=1e-3, rtol=1e-3, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_the_modules_of_each_family():
    for family in FAMILIES:
        config = layer_config(family)
        layers = gpt_model(config).decoder.layers
        for layer in layers:
            attention = layer.self_attention
            assert type(attention.core_attention) is CoreAttention
            assert type(attention) is (MLASelfAttention if family == "deepseek" else SelfAttention)
            assert type(layer.input_layernorm) is type(layer.pre_mlp_layernorm) is RMSNorm
        dense = {"dense": [True, True], "deepseek": [True, False]}.get(family, [False, False])
        assert [not isinstance(layer.mlp, MoELayer) for layer in layers] == dense
        if family == "gpt_oss":
            assert [layer.self_attention.core_attention.window for layer in layers] == [4, None]
            assert layers[0].self_attention.core_attention.softmax_offset.shape == (4,)
        if family == "deepseek":
            assert layers[1].mlp.shared_experts is not None
            assert layers[1].mlp.router.expert_bias.shape == (4,)
            assert type(layers[0].self_attention.kv_layernorm) is RMSNorm
        if family != "dense":
            assert type(layers[1].mlp.experts) is GroupedExperts


@pytest.mark.parametrize("q_lora_rank", [None, 8])
def test_multi_latent_queries_have_a_norm_only_behind_their_down_projection(q_lora_rank):
    layers = gpt_model(layer_config("deepseek", q_lora_rank=q_lora_rank)).decoder.layers
    attention = layers[0].self_attention
    assert hasattr(attention, "linear_q_proj") == (q_lora_rank is None)
    assert isinstance(getattr(attention, "q_layernorm", None), RMSNorm) == (q_lora_rank is not None)


def test_a_spec_does_not_share_state_with_the_next():
    first, second = layer_spec(layer_config("dense")), layer_spec(layer_config("dense", qk_layernorm=False))
    assert first.layer_specs[0].submodules.self_attention.submodules.q_layernorm is RMSNorm
    assert second.layer_specs[0].submodules.self_attention.submodules.q_layernorm is IdentityOp
