"""masked_log_softmax against an independent fp64 oracle, by hand, by finite differences, and over two processes."""

from __future__ import annotations

import math
import os
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run_ranks

from megatron_rl.ops import masked_log_softmax_torch
from megatron_rl.ops.extensions import masked_log_softmax as compiled
from megatron_rl.ops.masked_log_softmax import masked_log_softmax, masked_log_softmax_reference


def oracle(logits: torch.Tensor, targets: torch.Tensor, log_rho: float | None, temperature: float):
    """Row by row in fp64 from the definition; the set is taken in fp32, as it is defined."""
    scaled = logits.float() / temperature
    rows = []
    for z32, z, target in zip(scaled, scaled.double(), targets.tolist(), strict=True):
        if target == -100:
            rows.append((0.0, False, 1.0, 0.0))
            continue
        threshold = -torch.inf if log_rho is None else z32.max() + log_rho
        safe = (z32 >= threshold) & (z32 > -torch.inf)
        p_full = torch.exp(z - z.max())
        p = torch.where(safe, p_full, 0.0)
        coverage = float(p.sum() / p_full.sum())
        p = p / p.sum()
        log_prob = float(p[target].log()) if safe[target] else -math.inf
        entropy = -sum(float(x) * math.log(float(x)) for x in p if x > 0)
        rows.append((log_prob, bool(safe[target]), coverage, entropy))
    return [torch.tensor(column) for column in zip(*rows, strict=True)]


def batch(seed: int, rows: int, columns: int, dtype: torch.dtype, ignored: bool = True, low: bool = True):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, columns, generator=generator) * 5
    if low and columns > 3:
        logits[:, 1] = -torch.inf
    targets = torch.randint(0, columns, (rows,), generator=generator)
    if low:
        targets[targets == 1] = 0
    if ignored:
        targets[:: max(2, rows // 2)] = -100
    return logits.to(dtype), targets


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 9),
    columns=st.sampled_from([2, 7, 64, 1000]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    log_rho=st.sampled_from([None, 0.0, -1.0, -5.0, -13.0, -200.0]),
    temperature=st.sampled_from([1.0, 0.6, 1.7]),
)
def test_values_match_the_definition(seed, rows, columns, dtype, log_rho, temperature):
    logits, targets = batch(seed, rows, columns, dtype)
    out = masked_log_softmax(logits, targets, log_rho=log_rho, temperature=temperature, with_entropy=True)
    log_probs, in_support, coverage, entropy = oracle(logits, targets, log_rho, temperature)
    assert out.log_probs.dtype == torch.float32
    assert torch.equal(out.in_support, in_support)
    torch.testing.assert_close(out.log_probs, log_probs, atol=3e-6, rtol=2e-6, check_dtype=False)
    torch.testing.assert_close(out.coverage, coverage, atol=0, rtol=1e-5, check_dtype=False)
    torch.testing.assert_close(out.pruned, 1 - coverage.double(), atol=2e-6, rtol=0, check_dtype=False)
    torch.testing.assert_close(out.entropy, entropy, atol=5e-6, rtol=2e-6, check_dtype=False)
    scaled, counts = (logits.float() / temperature).double(), targets != -100
    margin = scaled.gather(1, targets.clamp(min=0)[:, None])[:, 0] - scaled.max(1).values
    torch.testing.assert_close(out.margin, torch.where(counts, margin, 0.0), atol=0, rtol=1e-6, check_dtype=False)
    reference = masked_log_softmax_reference(logits, targets, log_rho=log_rho, temperature=temperature).margin
    torch.testing.assert_close(out.margin, reference, atol=0, rtol=1e-6)
    if log_rho is not None:
        on_the_border = out.in_support != (counts & (out.margin >= log_rho))
        assert ((out.margin - log_rho)[on_the_border].abs() < 1e-4).all()


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**31),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    log_rho=st.sampled_from([None, -2.0, -13.0]),
    temperature=st.sampled_from([1.0, 0.7]),
    with_entropy=st.booleans(),
)
def test_gradients_match_autograd_on_the_reference_in_fp64(seed, dtype, log_rho, temperature, with_entropy):
    logits, targets = batch(seed, 6, 90, dtype)
    options = {"log_rho": log_rho, "temperature": temperature, "with_entropy": with_entropy}
    generator = torch.Generator().manual_seed(seed + 1)
    g, g_entropy = torch.randn(2, 6, generator=generator, dtype=torch.float64)

    def gradient(function, x):
        out = function(x, targets, **options)
        total = (torch.where(out.in_support, out.log_probs, 0.0) * g).sum()
        if with_entropy:
            total = total + (out.entropy * g_entropy).sum()
        return torch.autograd.grad(total, x)[0]

    ours = gradient(masked_log_softmax, logits.clone().requires_grad_())
    # The set of the fp64 reference must be the fp32 one: the scaled logits are rounded as the operator rounds them.
    exact = ((logits.float() / temperature).double() * temperature).requires_grad_()
    theirs = gradient(masked_log_softmax_reference, exact)
    assert ours.dtype == dtype
    tolerance = {"atol": 3e-6, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 1e-5, "rtol": 5e-3}
    torch.testing.assert_close(ours.double(), theirs, **tolerance)


@pytest.mark.parametrize("log_rho", [None, -3.0])
def test_gradcheck_in_fp64(log_rho):
    logits, targets = batch(3, 4, 11, torch.float64)
    logits[:, 1] = -40.0  # finite differences need finite logits

    def function(x):
        out = masked_log_softmax(x, targets, log_rho=log_rho, temperature=0.8, with_entropy=True)
        return torch.where(out.in_support, out.log_probs, 0.0), out.entropy

    assert torch.autograd.gradcheck(function, (logits.requires_grad_(),))


def test_three_logits_by_hand():
    # p = (4, 2, 1) / 7; with rho = 0.3 the last is cut (1/4 < 0.3): the rest is (2/3, 1/3).
    logits = torch.log(torch.tensor([[4.0, 2.0, 1.0]] * 3)).requires_grad_()
    out = masked_log_softmax(logits, torch.tensor([1, 2, 0]), log_rho=math.log(0.3), with_entropy=True)
    torch.testing.assert_close(out.log_probs, torch.tensor([math.log(1 / 3), -math.inf, math.log(2 / 3)]))
    assert out.in_support.tolist() == [True, False, True]
    torch.testing.assert_close(out.coverage, torch.full((3,), 6 / 7))
    entropy = -(2 / 3 * math.log(2 / 3) + 1 / 3 * math.log(1 / 3))
    torch.testing.assert_close(out.entropy, torch.full((3,), entropy))
    out.log_probs[:2].sum().backward()
    expected = torch.tensor([[-2 / 3, 2 / 3, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    torch.testing.assert_close(logits.grad, expected)
    assert logits.grad[:, 2].tolist() == [0.0, 0.0, 0.0]


def test_gradient_is_exactly_zero_where_it_must_be():
    logits, targets = batch(5, 40, 300, torch.float32)
    logits[targets == -100] = torch.nan  # ignored rows may hold anything
    logits.requires_grad_()
    out = masked_log_softmax(logits, targets, log_rho=-8.0, with_entropy=True)
    out.log_probs.sum().backward()
    counts = targets != -100
    assert (~out.in_support & counts).any()
    safe = logits.detach() >= logits.detach().amax(-1, keepdim=True) - 8.0
    assert logits.grad.isfinite().all()
    assert not logits.grad[~safe].any()
    assert not logits.grad[~out.in_support].any()
    assert logits.grad[out.in_support].any(-1).all()
    assert out.log_probs[~counts].eq(0).all() and out.entropy[~counts].eq(0).all()


def test_plain_is_torchs_log_softmax_in_every_block_size():
    for columns in (33, 2**18 + 5):  # many rows a block; a row larger than a block
        logits = torch.randn(5, columns)
        targets = torch.randint(0, columns, (5,))
        out = masked_log_softmax(logits, targets, log_rho=None)
        expected = logits.double().log_softmax(-1).gather(1, targets[:, None])[:, 0]
        torch.testing.assert_close(out.log_probs.double(), expected, atol=3e-6, rtol=2e-6)
        assert out.in_support.all() and out.entropy is None and out.coverage.eq(1).all()


def test_no_rows():
    logits = torch.zeros(0, 8, requires_grad=True)
    out = masked_log_softmax(logits, torch.zeros(0, dtype=torch.int64), log_rho=-13.0, with_entropy=True)
    out.log_probs.sum().backward()
    assert out.log_probs.shape == (0,) and logits.grad.shape == (0, 8)


def every_output(logits, targets, **options):
    """Values, and the gradient of two of them."""
    logits = logits.clone().requires_grad_()
    out = masked_log_softmax(logits, targets, with_entropy=True, **options)
    total = torch.where(out.in_support, out.log_probs, 0.0).sum() + 0.3 * out.entropy.sum()
    gradient = torch.autograd.grad(total, logits)[0]
    return [out.log_probs, out.in_support, out.coverage, out.entropy, gradient, out.margin, out.pruned]


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**31),
    columns=st.sampled_from([1, 3, 15, 16, 17, 63, 64, 65, 4096, 5000]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    log_rho=st.sampled_from([None, -3.0, -13.0]),
    temperature=st.sampled_from([1.0, 0.3, 1.9]),
)
def test_the_compiled_kernels_agree_with_the_plain_ones(seed, columns, dtype, log_rho, temperature):
    """Sets bit by bit; all vector widths have their tails among the column counts."""
    logits, targets = batch(seed, 5, columns, dtype)
    rows = masked_log_softmax_torch.extremes(logits, targets, 0)
    ours = compiled.extremes(logits, targets, 0)
    assert torch.equal(ours, rows)
    most = rows[0].contiguous()
    factors = torch.randn(3, 5, generator=torch.Generator().manual_seed(seed + 1))
    options = {"log_rho": log_rho, "temperature": temperature}
    factors[2] *= masked_log_softmax(logits, targets, **options).in_support  # nothing is added outside the set
    grads = [torch.empty_like(logits) for _ in range(2)]
    sums = []
    for kernels, out in zip((compiled, masked_log_softmax_torch), grads, strict=True):
        sums.append(kernels.sums(logits, most, **options, with_entropy=True))
        kernels.gradient(logits, targets, 0, most, factors, **options, out=out)
    # d = z / temperature - its maximum is as exact as those two are, and so are the sums of e^d and of d e^d; the
    # gradient's (factor + slope d) e^d may even cancel to next to nothing.
    rounding = torch.finfo(torch.float32).eps * most.abs() / temperature
    found, expected = sums
    within = 1e-5 * expected.abs() + 1e-6 + rounding * (expected[1] + expected[2].abs())
    assert ((found - expected).abs() <= within).all()
    for one, other in (grads, grads[::-1]):  # what is zero here is zero, or nearly, there
        assert (other.abs()[one.abs() > 2e-30] > 5e-31).all()
    found, expected = (g.float() for g in grads)
    relative = 1e-5 if dtype == torch.float32 else 1e-2
    within = relative * expected.abs() + 1e-6 + (rounding * factors[1].abs())[:, None]
    assert ((found - expected).abs() <= within).all()


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**31),
    log_rho=st.sampled_from([None, -3.0]),
    temperature=st.sampled_from([1.0, 0.7]),
    with_entropy=st.booleans(),
    vocabulary=st.sampled_from([None, 60]),
)
def test_what_a_gpu_computes_of_a_row_is_what_plain_torch_does(seed, log_rho, temperature, with_entropy, vocabulary):
    """On the CPU, where plain torch runs, but for the last bits of a logarithm: the functions that a GPU's threads call."""
    logits, targets = batch(seed, 7, 64, torch.float32)
    logits[-1] = -torch.inf
    options = (log_rho, temperature, with_entropy)
    sums = compiled.extremes_and_sums(logits, targets, *options)
    found, expected = (k.finish(targets, *sums, *options, vocabulary) for k in (compiled, masked_log_softmax_torch))
    assert len(found) == len(expected) == 8
    good = ~expected[6]
    assert expected[6].tolist() == [False] * 6 + [int(targets[-1]) != -100]
    assert (found[3] is None) == (not with_entropy) and (found[7] is None) == (vocabulary is None)
    within = {"atol": 2e-6, "rtol": 2e-6}
    for ours, theirs in zip(found, expected, strict=True):
        if theirs is not None:
            assert ours.dtype == theirs.dtype
            torch.testing.assert_close(ours[good], theirs[good], **within)
    safe_sum, grads = sums[1][0], torch.randn(2, 7, generator=torch.Generator().manual_seed(seed))
    for sent in ((grads[0], None), (None, grads[1]), tuple(grads)):
        given = (targets, expected[1], safe_sum, expected[3], *sent, temperature)
        ours, theirs = (kernels.factors(*given)[:, good] for kernels in (compiled, masked_log_softmax_torch))
        torch.testing.assert_close(ours, theirs, **within)
    with pytest.raises(ValueError, match=r"sums must be .* \[3, 7\], contiguous"):
        compiled.finish(targets, sums[0], sums[1][:2], *options, vocabulary)


def test_ties_at_the_threshold_belong_to_the_set():
    """max - 2 exactly, one bit above and one bit below it, at several temperatures."""
    for temperature in (1.0, 0.5, 0.7, 1.3, 100.0):
        most = torch.tensor(3.0)
        bound = most / temperature - 2.0
        near = [bound * temperature]
        for _ in range(4):
            near = [near[0].nextafter(torch.tensor(-1e9)), *near, near[-1].nextafter(torch.tensor(1e9))]
        logits = torch.stack([most, *near])[None]
        out = masked_log_softmax(
            logits.expand(10, 10).contiguous(), torch.arange(10), log_rho=-2.0, temperature=temperature
        )
        expected = logits[0] / temperature >= bound
        assert torch.equal(out.in_support, expected) and 1 < int(expected.sum()) < 10


def test_rows_of_equal_logits():
    for value in (0.0, -5.0, 1e30, -1e30):
        for columns in (1, 1000):
            out = masked_log_softmax(
                torch.full((2, columns), value), torch.tensor([0, columns - 1]), log_rho=-1.0, with_entropy=True
            )
            torch.testing.assert_close(out.log_probs, torch.full((2,), -math.log(columns)))
            torch.testing.assert_close(out.entropy, torch.full((2,), math.log(columns)))
            assert out.coverage.eq(1).all() and out.in_support.all()


def test_a_set_of_one_element():
    logits = torch.tensor([[0.0, 7.0, 6.9, -3.0]] * 3)
    found = every_output(logits, torch.tensor([1, 2, 0]), log_rho=-0.05)
    assert found[0].tolist() == [0.0, -math.inf, -math.inf] and found[3].eq(0).all()
    assert found[4].abs().max() < 1e-6


def test_very_large_logits_of_either_sign():
    logits = torch.tensor([[3e38, -3e38, 2.9e38, -math.inf], [-3e38, -3.1e38, -3.4e38, -math.inf]])
    found = every_output(logits, torch.tensor([0, 0]), log_rho=None)
    assert found[0].tolist() == [0.0, 0.0] and all(x.float().isfinite().all() for x in found)
    with pytest.raises(ValueError, match="row 0 .* NaN, .inf"):  # beyond fp32 once divided by the temperature
        masked_log_softmax(logits, torch.tensor([0, 0]), log_rho=None, temperature=0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_runs_are_bit_identical(dtype):
    logits, targets = batch(11, 33, 4099, dtype)
    first = every_output(logits, targets, log_rho=-9.0, temperature=0.9)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            again = every_output(logits, targets, log_rho=-9.0, temperature=0.9)
            assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_gradient_in_the_place_of_the_logits(dtype):
    source, targets = batch(12, 9, 200, dtype)
    leaf = source.clone().requires_grad_()
    expected = every_output(source, targets, log_rho=-6.0)[4]
    logits = leaf * 1.0
    out = masked_log_softmax(logits, targets, log_rho=-6.0, with_entropy=True, inplace_backward=True)
    total = torch.where(out.in_support, out.log_probs, 0.0).sum() + 0.3 * out.entropy.sum()
    (grad,) = torch.autograd.grad(total, logits, retain_graph=True)
    assert torch.equal(grad, expected) and grad.data_ptr() == logits.data_ptr()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(total, logits)
    for own in (leaf, leaf.view(9, 200)):
        with pytest.raises(ValueError, match="a leaf or a view of a leaf"):
            masked_log_softmax(own, targets, log_rho=None, inplace_backward=True)


def test_beyond_the_logits_there_is_hardly_any_memory():
    """Peak of the resident memory over one forward and backward, after a first one."""
    clear = Path("/proc/self/clear_refs")
    if not os.access(clear, os.W_OK):
        pytest.skip("the peak of this process cannot be set back")

    def resident(key: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

    leaf = torch.zeros(256, 151936, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.zeros(256, dtype=torch.int64)
    for _ in range(2):
        logits = leaf + 1
        clear.write_text("5")  # the peak becomes what is resident now
        before = resident("VmRSS")
        out = masked_log_softmax(logits, targets, log_rho=-13.0, with_entropy=True, inplace_backward=True)
        torch.autograd.grad(out.log_probs.sum() + out.entropy.sum(), logits)
        extra = resident("VmHWM") - before
    assert extra <= 0.05 * logits.nbytes


BAD = {
    "logits of one dimension": ({"logits": torch.zeros(8)}, r"logits \[8\] must be \[T, V\]"),
    "targets of another length": ({"targets": torch.zeros(5, dtype=torch.int64)}, r"targets \[5\] \[T\]"),
    "integer logits": ({"logits": torch.zeros(4, 8, dtype=torch.int64)}, "logits are torch.int64"),
    "half precision": ({"logits": torch.zeros(4, 8, dtype=torch.float16)}, "logits are torch.float16"),
    "targets of another type": ({"targets": torch.zeros(4, dtype=torch.int32)}, "targets are torch.int32"),
    "not contiguous": ({"logits": torch.zeros(8, 4).t()}, "logits are not contiguous"),
    "devices": ({"targets": torch.zeros(4, dtype=torch.int64, device="meta")}, "targets are on meta, logits on cpu"),
    "temperature": ({"temperature": 0.0}, "temperature 0.0"),
    "temperature of 0 in fp32": ({"temperature": 1e-46}, "temperature 1e-46 must be above 0, and a number of fp32"),
    "temperature not a number": ({"temperature": math.nan}, "temperature nan"),
    "log_rho": ({"log_rho": 0.1}, "log_rho 0.1 must be at most 0"),
    "log_rho not a number": ({"log_rho": math.nan}, "log_rho nan"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_named(name):
    change, message = BAD[name]
    arguments = {"logits": torch.zeros(4, 8), "targets": torch.zeros(4, dtype=torch.int64), "log_rho": None} | change
    with pytest.raises(ValueError, match=message):
        masked_log_softmax(**arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda z, t: z[2].fill_(torch.nan), "row 2 .* NaN"),
        (lambda z, t: z[3, 1].fill_(torch.inf), r"row 3 .* \+inf"),
        (lambda z, t: z[1].fill_(-torch.inf), "row 1 .* no value above -inf"),
        (lambda z, t: t[3].fill_(8), "target 8 of row 3"),
        (lambda z, t: t[0].fill_(-1), "target -1 of row 0"),
    ],
)
def test_errors_name_the_row(change, message):
    logits, targets = torch.randn(4, 8), torch.tensor([0, 1, 2, 7])
    change(logits, targets)
    with pytest.raises(ValueError, match=message):
        masked_log_softmax(logits, targets, log_rho=-13.0)


def on_two_ranks() -> list:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    results = []
    for seed, dtype, log_rho in [(0, torch.float32, -6.0), (1, torch.bfloat16, None), (2, torch.float32, -13.0)]:
        logits, targets = batch(seed, 16, 50, dtype)
        share = logits.chunk(2, dim=1)[rank].contiguous().requires_grad_()
        out = masked_log_softmax(
            share, targets, log_rho=log_rho, temperature=1.3, tp_group=dist.group.WORLD, with_entropy=True
        )
        (torch.where(out.in_support, out.log_probs, 0.0).sum() + 0.3 * out.entropy.sum()).backward()
        fields = (out.log_probs, out.in_support, out.coverage, out.entropy, share.grad, out.margin)
        results.append([x.detach().float().numpy() for x in fields])
    logits, targets, _ = of_small_tails(2)
    share = logits.float().chunk(2, dim=1)[rank].contiguous()
    tails = masked_log_softmax(share, targets, log_rho=-13.0, tp_group=dist.group.WORLD).pruned.numpy()
    broken, targets = batch(9, 8, 50, torch.float32, ignored=False)
    broken[5, 40] = torch.nan  # in the second rank's share: both must raise, neither may hang
    try:
        masked_log_softmax(broken.chunk(2, dim=1)[rank].contiguous(), targets, log_rho=None, tp_group=dist.group.WORLD)
        results.append("no error")
    except ValueError as error:
        results.append(str(error))
    dist.destroy_process_group()
    return [*results, tails]


def of_small_tails(seed: int):
    """Logits [8, 400] fp64 of numbers of fp32, targets, and the mass of what e^-13 prunes: 1e-9 to 1e-6.

    Between 100 and 300 tokens of a row are the tail, the others are within e^-12 of the likeliest. The mass is added up in
    fp64, the tail by itself.
    """
    rng = np.random.default_rng(seed)
    logits, masses = np.empty((8, 400)), []
    for row, size in enumerate(10.0 ** rng.uniform(-9, -6, 8)):
        tail = rng.permutation(400) < rng.integers(100, 300)
        top = np.where(tail, -np.inf, rng.uniform(-12, 0, 400))
        top[np.argmax(top)] = 0.0
        raw = np.where(tail, rng.uniform(-1.5, 1.5, 400), -np.inf)
        shift = np.log(size * np.exp(top).sum() / np.exp(raw).sum())
        logits[row] = np.where(tail, raw + shift, top).astype(np.float32)
        assert (logits[row][tail] < -13.1).all()
        pruned = np.exp(logits[row][tail]).sum()
        masses.append(pruned / (pruned + np.exp(logits[row][~tail]).sum()))
    return torch.tensor(logits), torch.zeros(8, dtype=torch.int64), torch.tensor(masses, dtype=torch.float64)


@pytest.mark.parametrize("path", ["compiled", "plain", "fp64", "definition", "reference in fp32"])
def test_a_pruned_mass_far_below_the_rounding_of_one_is_right(path, monkeypatch):
    """1 - coverage in fp32 knows multiples of 6e-8 alone."""
    logits, targets, masses = of_small_tails(int(np.random.SeedSequence().entropy % 2**32))
    assert masses.min() > 9e-10 and masses.max() < 1.1e-6
    given = logits if path in ("fp64", "definition") else logits.float()
    if path == "plain":
        module = sys.modules[masked_log_softmax.__module__]
        monkeypatch.setattr(module, "_kernels", lambda _: masked_log_softmax_torch)
    by = masked_log_softmax_reference if path in ("definition", "reference in fp32") else masked_log_softmax
    found = by(given, targets, log_rho=-13.0)
    # |d| < 32 is rounded to fp32: a relative error of 1e-6 in e^d, so in a sum of positive terms; the kernel scales d before.
    torch.testing.assert_close(found.pruned.double(), masses, rtol=1e-5, atol=0)
    assert not by(given, targets, log_rho=None).pruned.any(), "the whole vocabulary prunes nothing"
    ignored = by(given, torch.full_like(targets, -100), log_rho=-13.0)
    assert not ignored.pruned.any() and ignored.coverage.eq(1).all()


def test_two_ranks_equal_one():
    results = run_ranks(2, "test_masked_log_softmax:on_two_ranks", timeout=120)
    for index, (seed, dtype, log_rho) in enumerate(
        [(0, torch.float32, -6.0), (1, torch.bfloat16, None), (2, torch.float32, -13.0)]
    ):
        logits, targets = batch(seed, 16, 50, dtype)
        logits.requires_grad_()
        out = masked_log_softmax(logits, targets, log_rho=log_rho, temperature=1.3, with_entropy=True)
        (torch.where(out.in_support, out.log_probs, 0.0).sum() + 0.3 * out.entropy.sum()).backward()
        whole = [out.log_probs, out.in_support, out.coverage, out.entropy]
        for rank in range(2):
            for ours, expected in zip(results[rank][index], whole, strict=False):
                torch.testing.assert_close(torch.tensor(ours), expected.detach().float(), atol=2e-6, rtol=2e-6)
            torch.testing.assert_close(torch.tensor(results[rank][index][5]), out.margin, atol=0, rtol=0)
            grad = torch.tensor(results[rank][index][4])
            expected = logits.grad.float().chunk(2, dim=1)[rank]
            torch.testing.assert_close(grad, expected, atol=2e-6, rtol=1e-5 if dtype == torch.float32 else 5e-3)
    for rank in range(2):
        assert "row 5" in results[rank][3]
        tails = torch.tensor(results[rank][4]).double()
        torch.testing.assert_close(tails, of_small_tails(2)[2], rtol=1e-5, atol=0)


def test_gradient_flows_through_a_head_in_any_precision():
    generator = torch.Generator().manual_seed(random.randrange(2**31))
    hidden = torch.randn(12, 16, generator=generator, dtype=torch.bfloat16).requires_grad_()
    weight = torch.randn(40, 16, generator=generator, dtype=torch.bfloat16).requires_grad_()
    targets = torch.randint(0, 40, (12,), generator=generator)
    masked_log_softmax(hidden @ weight.t(), targets, log_rho=None).log_probs.mean().backward()
    exact_hidden, exact_weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    (exact_hidden @ exact_weight.t()).log_softmax(-1).gather(1, targets[:, None]).mean().backward()
    error = (weight.grad.double() - exact_weight.grad).norm() / exact_weight.grad.norm()
    assert error < 2e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("log_rho", [None, -13.0])
def test_the_lowest_number_is_no_minus_infinity(dtype, log_rho):
    """Its distance from the maximum overflows; it belongs to the whole vocabulary, with a gradient of 0."""
    logits, _ = batch(1, 3, 70, dtype, low=False)
    logits[:, 5] = torch.finfo(dtype).min
    logits.requires_grad_()
    out = masked_log_softmax(logits, torch.tensor([0, 5, 1]), log_rho=log_rho, with_entropy=True)
    assert out.in_support.tolist()[1] == (log_rho is None)
    (torch.where(out.in_support, out.log_probs, 0.0).sum() + out.entropy.sum()).backward()
    assert logits.grad.isfinite().all() and not logits.grad[::2, 5].any()
