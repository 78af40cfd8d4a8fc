"""examples/tail_push.py: hidden states that turned and rows that moved are told apart, on numbers made up here."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def made():
    """Hidden states [T, d] of one length and rows [V, d] whose tail shares a direction."""
    generator = torch.Generator().manual_seed(torch.seed() % 2**31)
    hidden = torch.randn(100, 16, generator=generator)
    rows = torch.randn(200, 16, generator=generator)
    rows[64:] *= 0.1
    rows[64:, 0] += 1
    return hidden / hidden.norm(dim=1, keepdim=True), rows


def test_what_turned_is_told_from_what_moved(ablation, made):
    hidden, rows = made
    turned = hidden.clone()
    turned[:, 0] -= 2
    turned /= turned.norm(dim=1, keepdim=True)
    moved = rows.clone()
    moved[64:] *= 3
    same = ablation.compare(made, made)
    start = same["nats below the likeliest, before"]
    assert all(same[name] == pytest.approx(start) for name in WAYS)
    assert same["how far a row moved, of its norm"] == 0
    found = ablation.compare(made, (turned, rows))
    after = found["nats below the likeliest, after"]
    assert found["with the hidden states of after"] == pytest.approx(after)
    assert found["with the rows of after"] == pytest.approx(start)
    name = "cosine of hidden state and shared direction"
    assert found[f"{name}, after"] < -0.6 < found[f"{name}, before"]
    share = "share of hidden states that differs by token"
    assert found[f"{share}, after"] < found[f"{share}, before"]
    assert [found["hidden norm, before"], found["hidden norm, after"]] == pytest.approx([1, 1])
    found = ablation.compare(made, (hidden, moved))
    assert found["with the hidden states of after"] == pytest.approx(start)
    assert found["with the rows of after"] == pytest.approx(found["nats below the likeliest, after"])
    assert found["how far a row moved, of its norm"] == pytest.approx(2)


WAYS = (
    "nats below the likeliest, after",
    "with the hidden states of after",
    "with the rows of after",
)
