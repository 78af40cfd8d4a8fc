"""Products by group against fp64: torch goes group by group on a CPU, by the definition that its GPU kernel has."""

from __future__ import annotations

import pytest
import torch

from megatron_rl.ops import matmuls as ops

CPU = torch.device("cpu")
EPS = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}
DTYPES = pytest.mark.parametrize("dtype", EPS)


def groups() -> list[int]:
    """Rows of each of some groups, of which some have none."""
    counts = torch.randint(0, 24, (int(torch.randint(3, 9, ())),)).tolist()
    counts[1] = 0
    counts[-1] += 1
    return counts


def parts(x: torch.Tensor, counts: list[int]) -> tuple[torch.Tensor, ...]:
    return x.detach().double().split(counts)


def near(found: torch.Tensor, exact: torch.Tensor, terms: torch.Tensor, *, sums: float = 2.0**-18) -> bool:
    """Rounded to its type, after sums of at most 200 terms in fp32, which round to 2^-18 of the sum of their sizes."""
    return bool(((found.double() - exact).abs() <= EPS[found.dtype] * exact.abs() + sums * terms).all())


@pytest.fixture(autouse=True)
def nothing_is_written_where_there_are_no_rows(monkeypatch):
    """As on some GPUs: sums over no rows are what was in memory."""
    grouped = torch.nn.functional.grouped_mm

    def multiply(left: torch.Tensor, right: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
        out = grouped(left, right, offs=offs)
        if out.ndim == 3:
            out[offs.diff(prepend=offs.new_zeros(1)) == 0] = torch.nan
        return out

    monkeypatch.setattr(ops.F, "grouped_mm", multiply)


@DTYPES
def test_products_and_their_gradients(dtype):
    counts = groups()
    inputs, outputs = 8 * int(torch.randint(1, 6, ())), 8 * int(torch.randint(1, 6, ()))
    x, grad = torch.randn(sum(counts), inputs).to(dtype), torch.randn(sum(counts), outputs).to(dtype)
    weights = [torch.randn(outputs, inputs).to(dtype) for _ in counts]
    ends, rows, grads, exact = (
        ops.ends_of(counts, CPU),
        parts(x, counts),
        parts(grad, counts),
        [w.double() for w in weights],
    )
    for found, left, right in (
        ([ops.product(x, ends, weights)], rows, [w.t() for w in exact]),
        ([ops.input_gradient(grad, ends, weights)], grads, exact),
        (ops.weight_gradients(grad, x, ends, counts), [g.t() for g in grads], rows),
    ):
        theirs = [a @ b for a, b in zip(left, right, strict=True)]
        terms = [a.abs() @ b.abs() for a, b in zip(left, right, strict=True)]
        if len(found) == 1:
            assert near(found[0], torch.cat(theirs), torch.cat(terms))
        else:
            assert all(near(*three) for three in zip(found, theirs, terms, strict=True))
            assert all(f.is_contiguous() and (count or not f.any()) for f, count in zip(found, counts, strict=True))


@DTYPES
@pytest.mark.parametrize("scaled", [False, True])
def test_biases(dtype, scaled, monkeypatch):
    """With scales in fp32, whose rounding to bf16 would show where terms cancel."""
    counts, outputs = groups(), 40
    monkeypatch.setattr(ops, "_BIAS_NUMBERS", 7 * outputs)  # some rows at a time
    out, grad = (torch.randn(sum(counts), outputs).to(dtype) for _ in range(2))
    biases = torch.randn(len(counts), outputs).to(dtype)
    scales = torch.rand(sum(counts), 1) if scaled else None
    ends, before = ops.ends_of(counts, CPU), out.double()
    ops.add_biases(out, ends, biases, scales)
    weight = torch.ones(sum(counts), 1).double() if scales is None else scales.double()
    of_rows = biases.double().repeat_interleave(torch.tensor(counts), 0)
    assert near(out, before + weight * of_rows, before.abs() + (weight * of_rows).abs())
    found = ops.bias_gradients(grad, ends, counts, scales)
    terms = parts(weight * grad.double(), counts)
    exact, sizes = (torch.stack([f(part).sum(0) for part in terms]) for f in (lambda t: t, torch.abs))
    # Both columns are rounded, and their sum; what of a scale is in neither is 2^-16 of it.
    assert ((found.double() - exact).abs() <= 3 * EPS[dtype] * exact.abs() + 2.0**-15 * sizes).all()
    assert not found[1].any()
    if scales is not None:
        dots = (grad.double() * of_rows).sum(1, keepdim=True)
        assert near(ops.scale_gradients(grad, ends, biases), dots, (grad.double() * of_rows).abs().sum(1, keepdim=True))


def test_only_what_torchs_kernel_takes_is_multiplied_together():
    x = torch.randn(4, 16).bfloat16()
    assert not ops.served(x, 8)  # on a CPU
    assert ops.aligned(2880, 768) and not ops.aligned(2880, 12)
