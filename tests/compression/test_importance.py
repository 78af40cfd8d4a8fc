"""Importance of layers, experts, channels and heads, against loops over tokens written from the papers' definitions."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_rl.compression.importance import block_influence, channel_sums, gated_norms, group_norms, largest


@pytest.fixture
def rng() -> torch.Generator:
    seed = torch.seed() % 2**31
    print(f"seed {seed}")
    return torch.Generator().manual_seed(seed)


def test_block_influence(rng):
    x, y = torch.randn(2, 9, 5, generator=rng)
    expected = sum(1 - float(a @ b) / (math.sqrt(a @ a) * math.sqrt(b @ b)) for a, b in zip(x, y, strict=True))
    assert float(block_influence(x, y)) == pytest.approx(expected, rel=1e-5)
    assert float(block_influence(x, 3 * x)) == pytest.approx(0, abs=1e-6)
    assert float(block_influence(x, -x)) == pytest.approx(18)


def test_gated_norms_are_sums_by_expert(rng):
    norms, experts = torch.rand(20, 2, generator=rng), torch.randint(0, 4, (20, 2), generator=rng)
    sums, sent = gated_norms(norms, experts, 5)
    for expert in range(5):
        found = [float(n) for n, e in zip(norms.flatten(), experts.flatten(), strict=True) if e == expert]
        assert float(sums[expert]) == pytest.approx(sum(found), rel=1e-6) and int(sent[expert]) == len(found)
    assert sums[4] == sent[4] == 0


def test_channels_by_activation_and_by_what_they_add(rng):
    x, down = torch.randn(11, 6, generator=rng), torch.randn(4, 6, generator=rng)
    assert torch.allclose(channel_sums(x), sum(row.abs() for row in x).double())
    for channel in range(6):
        added = torch.outer(x[:, channel], down[:, channel])  # [T, d]
        assert float(channel_sums(x, down)[channel].sqrt()) == pytest.approx(float(added.norm()), rel=1e-5)


def test_groups_by_the_norm_of_what_they_add(rng):
    heads, projection = torch.randn(7, 3, 4, generator=rng), torch.randn(5, 3, 4, generator=rng)
    for group, found in enumerate(group_norms(heads, projection)):
        expected = sum(float((projection[:, group] @ token[group]).norm()) for token in heads)
        assert float(found) == pytest.approx(expected, rel=1e-5)


def test_the_largest_stay_in_order_and_of_equal_ones_the_first():
    assert largest(torch.tensor([3.0, 1.0, 4.0, 4.0, 0.0]), 3) == [0, 2, 3]
    assert largest(torch.tensor([1.0, 1.0, 1.0]), 2) == [0, 1]
