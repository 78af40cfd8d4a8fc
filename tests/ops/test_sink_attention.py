"""sink_attention against its definition in fp64: compiled kernels, the plain tiles, bad input."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.ops import sink_attention_torch
from megatron_rl.ops.sink_attention import PackedSequences, sink_attention, sink_attention_reference

# Largest difference from fp64, relative to the largest sum of terms.
OUT_TOLERANCE = {torch.float64: 1e-12, torch.float32: 2.5e-6, torch.bfloat16: 6e-3}
GRAD_TOLERANCE = {torch.float64: 1e-12, torch.float32: 6e-6, torch.bfloat16: 2e-2}  # of sums that cancel


def problem(lengths, heads=4, kv_heads=2, width=8, value_width=None, sinks=True, dtype=torch.float32, key_lengths=None):
    """(q, k, v, sinks), cu_seqlens, cu_seqlens_k or None"""
    cu, cu_k = (torch.tensor([0, *x]).cumsum(0).to(torch.int32) for x in (lengths, key_lengths or lengths))
    q = torch.randn(int(cu[-1]), heads, width)
    k = torch.randn(int(cu_k[-1]), kv_heads, width)
    v = torch.randn(int(cu_k[-1]), kv_heads, value_width or width)
    tensors = [x.to(dtype).requires_grad_() for x in (q, k, v)]
    tensors.append(torch.randn(heads).to(dtype).requires_grad_() if sinks else None)
    return tensors, cu, None if key_lengths is None else cu_k


def outputs(function, tensors, direction=None, **options):
    """Output and all gradients; direction is what is propagated."""
    out = function(*tensors, **options)
    direction = torch.randn_like(out) if direction is None else direction.to(out.dtype)
    given_ = [t for t in tensors if t is not None]
    grads = torch.autograd.grad(out, given_, direction) if out.numel() else [torch.zeros_like(t) for t in given_]
    return [out, *grads], direction


def compare(tensors, cu_seqlens, cu_seqlens_k=None, **options):
    dtype = tensors[0].dtype
    options |= {"cu_seqlens": cu_seqlens, "cu_seqlens_k": cu_seqlens_k}
    found, direction = outputs(sink_attention, tensors, **options)
    exact = [t if t is None else t.detach().double().requires_grad_() for t in tensors]
    right, _ = outputs(sink_attention_reference, exact, direction.double(), **options)
    for name, a, b in zip(("out", "grad of q", "grad of k", "grad of v", "grad of sinks"), found, right, strict=False):
        assert a.shape == b.shape and a.dtype == dtype
        if not b.numel():
            continue
        # What cancels is as exact as its terms, which are about 1; those of outputs, scores and sinks are counted below.
        size = output_terms(exact, options) if name == "out" else b.abs().max().clamp(min=1.0)
        if name in ("grad of q", "grad of k"):
            size = size.clamp(min=score_terms(exact, of_queries=name == "grad of q", scale=options.get("scale")))
        if name == "grad of sinks":
            size += sink_terms(exact, right[0], direction.double(), options)
        error = (a.double() - b).abs().max() / size
        assert error <= (OUT_TOLERANCE if name == "out" else GRAD_TOLERANCE)[dtype], f"{name}: {error:.2e}"


@torch.no_grad()
def output_terms(exact, options) -> torch.Tensor:
    """Largest sum of the terms of an output without their signs: the mean of a thousand values is far below them."""
    q, k, v, sinks = exact
    return sink_attention_reference(q, k, v.abs(), sinks, **options).max()


def score_terms(exact, *, of_queries, scale) -> float:
    """What a score's gradient adds to that of q or k: the norm of the D_v products of about 1 that it sums, times the scale and
    the largest key or query. A key has one of each head of its group."""
    q, k, v, _ = exact
    norm = v.shape[-1] ** 0.5 * (q.shape[-1] ** -0.5 if scale is None else scale)
    factors = k if of_queries else q * (q.shape[1] / k.shape[1]) ** 0.5
    return norm * float(factors.detach().abs().max()) if factors.numel() else 0.0


@torch.no_grad()
def sink_terms(exact, out, direction, options) -> torch.Tensor:
    """Norm over tokens of the terms whose sum is a sink's gradient, for the head with the largest."""
    q, k, v, sinks = exact
    on_keys = sink_attention_reference(q, k, torch.ones_like(v), sinks, **options)[..., :1]
    return ((1 - on_keys) * out * direction).sum(-1).square().sum(0).sqrt().max()


@settings(max_examples=80)
@given(
    lengths=st.lists(st.integers(0, 40) | st.integers(60, 140), min_size=1, max_size=7),
    window=st.none() | st.integers(1, 150),
    heads=st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 2), (8, 1)]),
    sinks=st.booleans(),
    widths=st.sampled_from([(8, 8), (64, 64), (24, 40), (128, 128), (20, 12)]),
    scale=st.none() | st.just(0.05),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    seed=st.integers(0, 2**31),
)
def test_packs(lengths, window, heads, sinks, widths, scale, dtype, seed):
    torch.manual_seed(seed)
    options = {"width": widths[0], "value_width": widths[1], "sinks": sinks, "dtype": dtype}
    tensors, cu, _ = problem(lengths, *heads, **options)
    compare(tensors, cu, window=window, scale=scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("window", [None, 1, 17, 128, 700])
def test_long_sequences(window, dtype):
    """Longer than one task of the backward."""
    tensors, cu, _ = problem([1100, 3, 0, 513, 512, 1], heads=2, kv_heads=1, width=64, dtype=dtype)
    compare(tensors, cu, window=window)


@settings(max_examples=30)
@given(
    pairs=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 90)), min_size=1, max_size=5),
    window=st.none() | st.integers(1, 60),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 2**31),
)
def test_more_keys_than_queries(pairs, window, dtype, seed):
    torch.manual_seed(seed)
    lengths = [queries for queries, _ in pairs]
    tensors, cu, cu_k = problem(lengths, dtype=dtype, key_lengths=[q + more for q, more in pairs])
    compare(tensors, cu, cu_k, window=window)


def test_more_keys_than_queries_over_several_chunks():
    tensors, cu, cu_k = problem([300, 40], width=16, key_lengths=[1300, 700])
    compare(tensors, cu, cu_k)
    compare(tensors, cu, cu_k, window=600)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sink_of_minus_infinity_is_exactly_plain_attention(dtype):
    tensors, cu, _ = problem([70, 5, 130], width=64, dtype=dtype)
    direction = torch.randn(205, 4, 64)
    none, _ = outputs(sink_attention, [*tensors[:3], None], direction, cu_seqlens=cu, window=50)
    nothing = torch.full((4,), -torch.inf, dtype=dtype, requires_grad=True)
    least, _ = outputs(sink_attention, [*tensors[:3], nothing], direction, cu_seqlens=cu, window=50)
    for a, b in zip(none, least, strict=False):
        assert torch.equal(a, b)
    assert least[4].eq(0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_runs_are_bit_identical(dtype):
    tensors, cu, _ = problem([1100, 30, 600], width=64, dtype=dtype)
    first, direction = outputs(sink_attention, tensors, cu_seqlens=cu)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            again, _ = outputs(sink_attention, tensors, direction, cu_seqlens=cu)
            assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    finally:
        torch.set_num_threads(threads)


def test_the_gradient_of_one_heads_sink_does_not_depend_on_the_threads():
    tensors, cu, _ = problem([70_000], heads=1, kv_heads=1, width=8)
    found, threads, direction = [], torch.get_num_threads(), torch.randn(70_000, 1, 8)
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            found.append(outputs(sink_attention, tensors, direction, cu_seqlens=cu, window=3)[0][4])
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*found)


def test_a_window_longer_than_any_sequence_is_none():
    (q, k, v, sinks), cu, _ = problem([40, 7])
    whole = sink_attention(q, k, v, sinks, cu_seqlens=cu)
    for window in (40, 41, 2**31, 2**32 + 1, 2**62):
        assert torch.equal(sink_attention(q, k, v, sinks, cu_seqlens=cu, window=window), whole)


@pytest.mark.parametrize("which", ["q", "k", "v"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_comes_out_where_it_is_seen(which, dtype):
    (q, k, v, sinks), cu, _ = problem([70, 20], dtype=dtype)
    with torch.no_grad():
        {"q": q, "k": k, "v": v}[which][30] = torch.nan
    found, _ = outputs(sink_attention, (q, k, v, sinks), cu_seqlens=cu)
    assert found[0][30].isnan().all() and found[0][70:].isfinite().all()
    assert any(grad.isnan().any() for grad in found[1:])


def test_a_sequence_does_not_depend_on_its_neighbours():
    (q, k, v, sinks), cu, _ = problem([40, 90, 25], width=64)
    whole = sink_attention(q, k, v, sinks, cu_seqlens=cu)
    for start, end in zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True):
        part = [x[start:end] for x in (q, k, v)]
        alone = sink_attention(*part, sinks, cu_seqlens=torch.tensor([0, end - start]))
        assert torch.equal(whole[start:end], alone)


def test_large_scores_do_not_overflow():
    tensors, cu, _ = problem([80], width=8)
    with torch.no_grad():
        tensors[0].mul_(100)
        tensors[3].copy_(torch.tensor([-1e30, 300.0, -300.0, 1e4]))
    found, _ = outputs(sink_attention, tensors, cu_seqlens=cu)
    assert all(x.isfinite().all() for x in found)
    assert found[0][:, 3].abs().max() == 0  # the sink takes all


def test_gradients_by_finite_differences():
    tensors, cu, _ = problem([5, 1, 0, 7], width=3, value_width=2, dtype=torch.float64)
    for window in (None, 3):
        call = lambda *t, w=window: sink_attention(*t, cu_seqlens=cu, window=w)  # noqa: E731
        assert torch.autograd.gradcheck(call, tensors)
        definition = lambda *t, w=window: sink_attention_reference(*t, cu_seqlens=cu, window=w)  # noqa: E731
        assert torch.autograd.gradcheck(definition, tensors)


def test_small_plain_tiles_change_nothing(monkeypatch):
    monkeypatch.setattr(sink_attention_torch, "_TILE_SCORES", 600)
    tensors, cu, _ = problem([300, 9, 20, 11], heads=2, kv_heads=1, dtype=torch.float64)
    compare(tensors, cu, window=50)
    assert len(sink_attention_torch._tiles(cu, cu, 50, 2)) > 10


def test_a_sink_takes_its_share():
    """One token sees itself and the sink: out = v / (1 + exp(sink - score))."""
    q, k, v = torch.ones(1, 1, 4), torch.ones(1, 1, 4), torch.ones(1, 1, 4)
    out = sink_attention(q, k, v, torch.tensor([2.0]), cu_seqlens=torch.tensor([0, 1]))
    torch.testing.assert_close(out, torch.full_like(out, 0.5))  # score = 4 / sqrt(4) = 2
    huge = sink_attention(q, k, v, torch.tensor([500.0]), cu_seqlens=torch.tensor([0, 1]))
    assert float(huge.abs().max()) == 0.0


def test_borders_can_be_looked_at_once():
    (q, k, v, sinks), cu, _ = problem([4, 0, 9])
    sequences = PackedSequences.of(cu, q.device)
    assert (sequences.borders.tolist(), sequences.max_length) == ([0, 4, 4, 13], 9)
    assert torch.equal(
        sink_attention(q, k, v, sinks, cu_seqlens=sequences), sink_attention(q, k, v, sinks, cu_seqlens=cu)
    )


BAD = {
    "cu_seqlens too short": ({"cu_seqlens": torch.tensor([0, 4])}, "cu_seqlens must run from 0 to 8 tokens, not to 4"),
    "cu_seqlens not from 0": ({"cu_seqlens": torch.tensor([1, 8])}, "cu_seqlens starts at 1"),
    "cu_seqlens falls": ({"cu_seqlens": torch.tensor([0, 6, 4, 8])}, "cu_seqlens falls after entry 1"),
    "cu_seqlens empty": (
        {"cu_seqlens": torch.zeros(0, dtype=torch.int32)},
        r"cu_seqlens must be integers of shape \[S \+ 1\]",
    ),
    "cu_seqlens float": ({"cu_seqlens": torch.tensor([0.0, 8.0])}, "cu_seqlens must be integers"),
    "more queries than keys": ({"cu_seqlens_k": torch.tensor([0, 3, 8])}, "sequence 0 has more queries than keys"),
    "borders of another length": ({"cu_seqlens_k": torch.tensor([0, 8])}, "differ in length"),
    "no heads": ({"q": torch.zeros(8, 0, 8), "sinks": torch.zeros(0)}, "heads and widths must be at least 1"),
    "no width": ({"q": torch.zeros(8, 4, 0), "k": torch.zeros(8, 2, 0)}, "heads and widths must be at least 1"),
    "window": ({"window": 0}, "window 0"),
    "sinks": ({"sinks": torch.zeros(2)}, r"sinks \[2\] for 4 heads"),
    "integer sinks": ({"sinks": torch.zeros(4, dtype=torch.int64)}, "sinks are torch.int64"),
    "heads": ({"q": torch.zeros(8, 3, 8)}, "do not fit"),
    "width": ({"k": torch.zeros(8, 2, 16)}, "do not fit"),
    "two dimensions": ({"q": torch.zeros(8, 32)}, r"must be \[T, H, D\]"),
    "types": ({"v": torch.zeros(8, 2, 8, dtype=torch.bfloat16)}, "v is torch.bfloat16"),
    "half precision": ({"q": torch.zeros(8, 4, 8, dtype=torch.float16)}, "q is torch.float16"),
    "device": ({"k": torch.zeros(8, 2, 8, device="meta")}, "k is on meta"),
    "not contiguous": ({"k": torch.zeros(2, 8, 8).transpose(0, 1)}, "k is not contiguous"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_named(name):
    change, message = BAD[name]
    (q, k, v, sinks), cu, _ = problem([4, 4])
    arguments = {"q": q, "k": k, "v": v, "sinks": sinks, "cu_seqlens": cu} | change
    with pytest.raises(ValueError, match=message):
        sink_attention(**arguments)


@pytest.mark.parametrize(
    ("dtype", "widths", "capability", "takes"),
    [
        (torch.bfloat16, (128, 128), (9, 0), True),
        (torch.bfloat16, (192, 128), (8, 0), True),
        (torch.bfloat16, (64, 64), (12, 0), True),
        (torch.bfloat16, (256, 256), (8, 9), True),
        (torch.bfloat16, (264, 264), (9, 0), False),
        (torch.bfloat16, (100, 100), (9, 0), False),
        (torch.bfloat16, (64, 128), (9, 0), False),
        (torch.bfloat16, (128, 128), (7, 5), False),
        (torch.float32, (128, 128), (9, 0), False),
    ],
)
@pytest.mark.parametrize("built", [True, False])
def test_bf16_on_a_gpu_takes_flash_attention_also_without_our_kernels(
    dtype, widths, capability, takes, built, monkeypatch
):
    module = sys.modules["megatron_rl.ops.sink_attention"]
    kernels = SimpleNamespace(cuda=built, flash_forward="f", flash_backward="b")
    monkeypatch.setattr(module, "compiled", kernels)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: capability)
    sequences = PackedSequences.of(torch.tensor([0, 5, 9]), torch.device("cpu"))
    q, v = (SimpleNamespace(is_cuda=True, dtype=dtype, device="cuda", shape=(9, 2, width)) for width in widths)
    forward, backward, borders = module._kernels(q, v, sequences, sequences, "torch")
    if takes:
        theirs = kernels if built else sink_attention_torch
        assert (forward, backward) == (theirs.flash_forward, theirs.flash_backward)
        assert borders == (sequences.on_device, sequences.on_device, 5, 5)
    else:
        assert forward is sink_attention_torch.forward and borders == (sequences.borders, sequences.borders)


def test_the_sink_around_torchs_flash_attention_in_plain_torch():
    """The composition, with torch's flash attention for the CPU in place of that for CUDA."""
    tokens, heads, width, scale = 150, 3, 16, 0.3
    q, k, v, grad = torch.randn(4, 1, heads, tokens, width).unbind()
    sinks = torch.randn(heads) * 3
    sinks[1] = -torch.inf
    aten, as_tokens = torch.ops.aten, lambda x: x[0].transpose(0, 1).contiguous()
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True, scale=scale)
    o, lse = as_tokens(out), lse[0].contiguous()
    plain = o[:, 1].clone()
    sink_attention_torch.apply_sink(o, lse, sinks)
    assert torch.equal(o[:, 1], plain), "a sink of -inf changes nothing"
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
    grads = backward(grad, q, k, v, o.transpose(0, 1)[None], lse[None], 0.0, True, scale=scale)
    grad_sinks = sink_attention_torch.sink_gradient(as_tokens(grad), o, lse, sinks)
    found = [o, *(as_tokens(x) for x in grads), grad_sinks]

    leaves = [as_tokens(x).double().requires_grad_() for x in (q, k, v)] + [sinks.double().requires_grad_()]
    expected = sink_attention_reference(*leaves, cu_seqlens=torch.tensor([0, tokens]), scale=scale)
    right = [expected, *torch.autograd.grad(expected, leaves, as_tokens(grad).double())]
    for ours, theirs in zip(found, right, strict=True):
        torch.testing.assert_close(ours.double(), theirs, atol=5e-6, rtol=1e-5)


def test_rows_without_keys_and_padded_log_sums():
    """What a flash attention may return: -inf where a query sees no key, columns behind the last token."""
    out, lse = torch.randn(3, 2, 8), torch.randn(2, 5)
    out[1, 0], lse[0, 1], lse[1, 1] = 0.0, -torch.inf, -torch.inf
    sinks, padding = torch.tensor([0.5, -torch.inf]), lse[:, 3:].clone()
    sink_attention_torch.apply_sink(out, lse, sinks)
    grad = sink_attention_torch.sink_gradient(torch.randn(3, 2, 8), out, lse, sinks)
    assert lse[0, 1] == 0.5 and lse[1, 1] == -torch.inf and torch.equal(lse[:, 3:], padding)
    assert out.isfinite().all() and grad.isfinite().all() and grad[1] == 0


@pytest.fixture
def flash_on_the_cpu():
    """Operators of torch that exist on CUDA alone get a CPU kernel: our tiles, which the tests above compare with fp64."""

    def forward(q, k, v, cu_q, cu_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *, scale=None,
                window_size_left=None, window_size_right=None, **unused):  # fmt: skip
        assert is_causal and not dropout_p and v.shape[2] == q.shape[2] and max_q >= 2 and not any(unused.values())
        assert (window_size_left is None) == (window_size_right is None) and not window_size_right
        window = 0 if window_size_left is None else window_size_left + 1
        out, lse = sink_attention_torch.forward(q, k, v, None, cu_q.long(), cu_k.long(), window, scale)
        return out, torch.nn.functional.pad(lse, (0, 2)), q.new_empty(0), q.new_empty(0), q.new_empty(0)

    def backward(grad, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, dropout_p, is_causal, rng_state, unused, *,
                 scale=None, window_size_left=None, window_size_right=None):  # fmt: skip
        assert grad.shape == out.shape == (*q.shape[:2], v.shape[2])
        window = 0 if window_size_left is None else window_size_left + 1
        lse = lse[:, : len(q)].contiguous()
        return sink_attention_torch.backward(grad, q, k, v, None, out, lse, cu_q.long(), cu_k.long(), window, scale)[:3]

    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_flash_attention_forward", forward, "CPU")
        library.impl("_flash_attention_backward", backward, "CPU")
        yield


@pytest.mark.parametrize("with_sinks", [True, False])
@pytest.mark.parametrize(
    ("window", "value_width", "key_lengths"), [(0, 16, None), (4, 16, None), (0, 8, None), (3, 16, (20, 3, 7))]
)
def test_flash_attention_is_called_as_torch_declares_it(with_sinks, window, value_width, key_lengths, flash_on_the_cpu):
    lengths = (17, 1, 5)
    shape = {"width": 16, "value_width": value_width, "key_lengths": key_lengths}
    (q, k, v, sinks), cu, cu_k = problem(lengths, sinks=with_sinks, **shape)
    q, k, v = (x.detach() for x in (q, k, v))
    sinks = None if sinks is None else sinks.detach()
    borders = (cu, cu if cu_k is None else cu_k, max(lengths), max(key_lengths or lengths))
    options = (*borders, window, 0.25)
    out, lse, *more = sink_attention_torch.flash_forward(q, k, v, sinks, *options)
    direction = torch.randn_like(out)
    found = [out, *sink_attention_torch.flash_backward(direction, q, k, v, sinks, out, lse, *options, *more)]
    leaves = [x.double().requires_grad_() for x in (q, k, v)] + (
        [sinks.double().requires_grad_()] if with_sinks else []
    )
    expected = sink_attention_reference(
        *leaves, *([] if with_sinks else [None]), cu_seqlens=cu, cu_seqlens_k=cu_k, window=window or None, scale=0.25
    )
    right = [expected, *torch.autograd.grad(expected, leaves, direction.double())]
    assert (found[-1] is None) == (not with_sinks)
    for ours, theirs in zip(found, right, strict=False):
        torch.testing.assert_close(ours.double(), theirs, atol=1e-5, rtol=1e-5)


def test_flash_attention_without_tokens():
    q, v = torch.randn(0, 2, 16), torch.randn(0, 2, 8)
    sinks, cu = torch.randn(2), torch.zeros(1, dtype=torch.int32)
    out, lse, *more = sink_attention_torch.flash_forward(q, q, v, sinks, cu, cu, 0, 0, 0, 1.0)
    grads = sink_attention_torch.flash_backward(out, q, q, v, sinks, out, lse, cu, cu, 0, 0, 0, 1.0, *more)
    assert out.shape == (0, 2, 8) and lse.shape == (2, 0)
    assert [g.shape for g in grads] == [q.shape, q.shape, v.shape, (2,)] and not grads[3].any()
