"""The name of a set of weights: the same for the same weights alone."""

from __future__ import annotations

import torch

from megatron_rl.sync.checksums import WeightsDigest

PREDICTOR = "model.layers.0.mlp.gate.predictor.weight"


def digest(weights: dict[str, torch.Tensor], dtype: torch.dtype = torch.bfloat16) -> str:
    watched = WeightsDigest(dtype)
    passed = dict(watched.watch(weights.items()))
    assert list(passed) == list(weights) and all(passed[name] is weights[name] for name in weights)
    return str(watched)


def test_a_digest_is_that_of_the_weights_in_the_dtype_that_is_served():
    weights = {name: torch.randn(16, 8) for name in ("a", "b")}
    same = {name: weights[name].bfloat16().float() for name in reversed(weights)}
    assert digest(weights) == digest(same) != digest(same, torch.float32)
    for index in ((0, 0), (15, 7), (7, 3)):
        moved = {name: t.clone() for name, t in weights.items()}
        moved["b"][index] += 1.0
        assert digest(moved) != digest(weights)
    assert digest({"a": weights["b"], "b": weights["a"]}) != digest(weights)
    assert digest({}) == ""


def test_a_predictor_that_is_zero_is_as_good_as_none():
    weights = {"a": torch.randn(16, 8)}
    assert digest(weights | {PREDICTOR: torch.zeros(4, 8)}) == digest(weights)
    small = weights | {PREDICTOR: torch.full((4, 8), 1e-6)}
    assert digest(small) != digest(weights)
    smaller = weights | {PREDICTOR: torch.full((4, 8), 1e-6 + 1e-10)}  # the same in bf16
    assert digest(smaller) != digest(small)
