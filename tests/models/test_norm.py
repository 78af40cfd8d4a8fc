"""RMSNorm against its definition, and what Megatron's specs ask of it."""

from __future__ import annotations

import pytest
import torch
from layer_world import layer_config

from megatron_rl.errors import UserError
from megatron_rl.models.norm import RMSNorm


def test_equals_the_definition_with_gradients():
    norm = RMSNorm(layer_config(params_dtype=torch.float64), hidden_size=12, eps=1e-3)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(5, 2, 12, dtype=torch.float64, requires_grad=True)
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * norm.weight
    torch.testing.assert_close(norm(x), expected, atol=1e-12, rtol=1e-12)
    assert torch.autograd.gradcheck(lambda x, w: torch.func.functional_call(norm, {"weight": w}, x), (x, norm.weight))


def test_half_precision_is_computed_in_fp32():
    norm = RMSNorm(layer_config(params_dtype=torch.bfloat16), hidden_size=256, eps=1e-6)
    x = torch.randn(64, 256).to(torch.bfloat16) * 300
    wide = x.double()
    expected = (wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt()).to(torch.bfloat16)
    out = norm(x)
    assert out.dtype == torch.bfloat16
    assert float((out == expected).float().mean()) > 0.99  # but for ties of the last rounding


@pytest.mark.parametrize("tensor", [1, 2])
def test_the_weight_is_marked_for_sequence_parallelism(tensor):
    config = layer_config(tensor_model_parallel_size=tensor, sequence_parallel=tensor > 1)
    assert RMSNorm(config=config, hidden_size=8, eps=1e-6).weight.sequence_parallel is (tensor > 1)


def test_other_norms_are_refused():
    with pytest.raises(UserError, match="'LayerNorm' is not supported"):
        RMSNorm(layer_config(normalization="LayerNorm"), 8)
    with pytest.raises(UserError, match="zero-centered"):
        RMSNorm(layer_config(layernorm_zero_centered_gamma=True), 8)
