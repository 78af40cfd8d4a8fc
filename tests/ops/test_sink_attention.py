"""sink_attention against its definition in fp64, and its gradients by finite differences."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.ops import sink_attention as face
from megatron_rl.ops.sink_attention import sink_attention, sink_attention_reference


def problem(lengths, heads=4, kv_heads=2, width=8, value_width=8, sinks=True, dtype=torch.float64, grad=True):
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    total = int(cu_seqlens[-1])
    q = torch.randn(total, heads, width, dtype=dtype)
    k = torch.randn(total, kv_heads, width, dtype=dtype)
    v = torch.randn(total, kv_heads, value_width, dtype=dtype)
    tensors = [q, k, v] + ([torch.randn(heads, dtype=dtype)] if sinks else [])
    tensors = [t.requires_grad_(grad) for t in tensors]
    return (*tensors, *([] if sinks else [None])), cu_seqlens


def compare(tensors, cu_seqlens, tolerance=1e-12, **options):
    """Outputs and all gradients of both sides."""
    out = sink_attention(*tensors, cu_seqlens=cu_seqlens, **options)
    wide = [t if t is None else t.detach().double().requires_grad_() for t in tensors]
    expected = sink_attention_reference(*wide, cu_seqlens=cu_seqlens, **options)
    assert out.shape == expected.shape
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)
    if not out.numel():
        return
    direction = torch.randn_like(expected)
    given_ = [t for t in tensors if t is not None]
    found = torch.autograd.grad(out, given_, direction.to(out.dtype))
    right = torch.autograd.grad(expected, [t for t in wide if t is not None], direction)
    for a, b in zip(found, right, strict=True):
        torch.testing.assert_close(a.double(), b, atol=20 * tolerance, rtol=20 * tolerance)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=8),
    window=st.none() | st.integers(1, 30),
    groups=st.sampled_from([1, 2, 4]),
    sinks=st.booleans(),
    value_width=st.sampled_from([4, 8]),
    scale=st.none() | st.just(0.3),
    seed=st.integers(0, 2**31),
)
def test_short_sequences(lengths, window, groups, sinks, value_width, scale, seed):
    torch.manual_seed(seed)
    tensors, cu = problem(lengths, heads=4, kv_heads=4 // groups, value_width=value_width, sinks=sinks)
    compare(tensors, cu, window=window, scale=scale)


@pytest.mark.parametrize("window", [None, 1, 17, 128, 1000])
@pytest.mark.parametrize("sinks", [True, False])
def test_long_and_short_together(window, sinks):
    tensors, cu = problem([700, 3, 0, 257, 256, 1], heads=2, kv_heads=1, sinks=sinks)
    compare(tensors, cu, window=window)


def test_small_tiles_change_nothing(monkeypatch):
    import sys

    module = sys.modules["megatron_rl.ops.sink_attention"]
    monkeypatch.setattr(module, "_TILE_SCORES", 600)
    tensors, cu = problem([300, 9, 9, 9, 20, 11], heads=2, kv_heads=1)
    compare(tensors, cu, window=50)
    assert len(module._tiles(cu, 50, 2, torch.device("cpu"))) > 10


def test_gradients_by_finite_differences():
    tensors, cu = problem([5, 1, 0, 7], heads=4, kv_heads=2, width=3, value_width=2)
    for window in (None, 3):
        call = lambda *t, w=window: sink_attention(*t, cu_seqlens=cu, window=w)  # noqa: E731
        assert torch.autograd.gradcheck(call, tensors)


def test_a_sink_takes_its_share():
    """One token sees itself and the sink: out = v / (1 + exp(sink - score))."""
    q, k, v = torch.ones(1, 1, 4), torch.ones(1, 1, 4), torch.ones(1, 1, 4)
    out = sink_attention(q, k, v, torch.tensor([2.0]), cu_seqlens=torch.tensor([0, 1]))
    torch.testing.assert_close(out, torch.full_like(out, 0.5))  # score = 4 / sqrt(4) = 2
    huge = sink_attention(q, k, v, torch.tensor([500.0]), cu_seqlens=torch.tensor([0, 1]))
    assert float(huge.abs().max()) == 0.0


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 2e-2)])
def test_narrow_types(dtype, tolerance):
    torch.manual_seed(0)
    tensors, cu = problem([13, 30, 300], heads=4, kv_heads=2, dtype=dtype)
    compare(tensors, cu, tolerance=tolerance, window=64)


def test_bad_shapes_are_refused():
    tensors, cu = problem([4, 4])
    with pytest.raises(ValueError, match="cu_seqlens must run from 0 to 8"):
        face(*tensors, cu_seqlens=cu[:-1])
    with pytest.raises(ValueError, match="window 0"):
        face(*tensors, cu_seqlens=cu, window=0)
    with pytest.raises(ValueError, match=r"sinks \(2,\) for 4 heads"):
        face(*tensors[:3], tensors[3][:2], cu_seqlens=cu)
    with pytest.raises(ValueError, match="do not fit"):
        face(tensors[0][:, :3], *tensors[1:], cu_seqlens=cu)
