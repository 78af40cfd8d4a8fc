"""The checksum that both sides compute: against Python integers, and against every way in which a push can go wrong."""

from __future__ import annotations

import random

import pytest
import torch
from megatron_rl_plugin import fingerprint as fp


def by_hand(tensor: torch.Tensor) -> int:
    """The definition, word by word, with Python's own integers."""
    matrix = fp.as_matrix(tensor)
    rows = matrix.shape[0]
    size = matrix.element_size()
    data = matrix.contiguous().view(torch.uint8).reshape(rows, -1).numpy().tobytes()
    width = len(data) // rows
    word = size if size < 4 and width % 4 else 4
    keys = fp._keys(fp._ceil_power_of_two(width // word), torch.device("cpu")).tolist()
    total = 0
    for i in range(rows):
        row = data[i * width : (i + 1) * width]
        words = [int.from_bytes(row[j : j + word], "little", signed=True) for j in range(0, width, word)]
        total += pow(fp.ROW_BASE, i, 1 << 64) * sum(w * k for w, k in zip(words, keys, strict=False))
    return total % (1 << 64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8])
@pytest.mark.parametrize("shape", [(7,), (5, 6), (5, 7), (3, 4, 10), ()])
def test_equals_its_definition(shape, dtype):
    tensor = (torch.randn(shape) * 50).to(dtype)
    assert fp.fingerprint(tensor) == by_hand(tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_single_bit_counts(dtype):
    """A flipped bit always changes the fingerprint: words are multiplied by odd numbers."""
    tensor = torch.randn(9, 12).to(dtype)
    before = fp.fingerprint(tensor)
    raw = tensor.view(torch.uint8).view(-1)
    for position in range(len(raw)):
        for bit in range(8):
            raw[position] ^= 1 << bit
            assert fp.fingerprint(tensor) != before, (position, bit)
            raw[position] ^= 1 << bit
    assert fp.fingerprint(tensor) == before


def test_order_counts():
    square = torch.randn(64, 64)
    before = fp.fingerprint(square)
    assert fp.fingerprint(square.T) != before
    assert fp.fingerprint(square.roll(1, 0)) != before
    assert fp.fingerprint(square.roll(1, 1)) != before
    assert fp.fingerprint(square[torch.randperm(64)]) != before
    two_rows = square.clone()
    two_rows[[3, 35]] = square[[35, 3]]
    assert fp.fingerprint(two_rows) != before


def test_sign_flips_do_not_cancel():
    """Sign bits are the top bits of the words, where a sum modulo a power of two is weakest."""
    tensor = torch.randn(128, 64)
    before = fp.fingerprint(tensor)
    seen = {before}
    generator = random.Random(0)
    for _ in range(300):
        changed = tensor.clone()
        for row, column in {(generator.randrange(128), generator.randrange(64)) for _ in range(2)}:
            changed[row, column] *= -1
        seen.add(fp.fingerprint(changed))
    assert len(seen) == 301
    assert fp.fingerprint(-tensor) != before


def test_adds_up_over_row_blocks():
    q, k, v = torch.randn(32, 24), torch.randn(8, 24), torch.randn(8, 24)
    total = fp.fingerprint(q) + fp.below(fp.fingerprint(k), 32) + fp.below(fp.fingerprint(v), 40)
    assert fp.fingerprint(torch.cat([q, k, v])) == total % fp.MODULUS
    padded = torch.cat([q, torch.zeros(8, 24)])
    assert fp.fingerprint(padded) == fp.fingerprint(q)


def test_views_hash_like_their_copies():
    tensor = torch.randn(40, 50)
    assert fp.fingerprint(tensor[:, 10:31]) == fp.fingerprint(tensor[:, 10:31].clone())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cpu_and_gpu_agree(monkeypatch):
    monkeypatch.setattr(fp, "_GPU_CHUNK", 10_000)
    for dtype in (torch.float32, torch.bfloat16):
        tensor = torch.randn(513, 200).to(dtype)
        assert fp.fingerprint(tensor) == fp.fingerprint(tensor.cuda())
