"""The oneDNN product behind torch.mm: against fp64 for all layouts and sizes, gradients included; installed by activate()."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from sglang_on_cpu import matmul

from tests.preloaded import PYTHON_WITH_PACKAGES

WEIGHTS = [(600, 1000), (1000, 600), (40, 30)]
"""[K, N]: large enough for oneDNN, and not."""


def left_of(rows: int, k: int) -> torch.Tensor:
    return torch.randint(-4095, 4096, (rows, k)).float()


def operands(rows: int, shape: tuple[int, int], *, transposed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole numbers of 12 and 3 bits: a sum of 1,000 products is below 2^24, so that fp32 has it exactly in any order. With
    fewer bits, those of TF32 or bf16, it is another one."""
    k, n = shape
    b = torch.randint(-4, 5, (n, k)).float().t() if transposed else torch.randint(-4, 5, (k, n)).float()
    return left_of(rows, k), b


@pytest.mark.parametrize("rows", [0, 1, matmul.FEW_ROWS, matmul.FEW_ROWS + 1, 200])
@pytest.mark.parametrize("shape", WEIGHTS)
@pytest.mark.parametrize("transposed", [False, True])
def test_equals_fp64(rows, shape, transposed):
    a, b = operands(rows, shape, transposed=transposed)
    for left in (a, a.t().contiguous().t(), left_of(rows, shape[0] + 3)[:, :-3]):
        out = matmul.mm(left, b)
        expected = left.double() @ b.double()
        assert out.shape == expected.shape and out.is_contiguous() and out.dtype == torch.float32
        assert torch.equal(out.double(), expected)


@pytest.mark.parametrize(("dtype", "rows"), [(torch.float64, 64), (torch.bfloat16, matmul.MANY_ROWS - 1)])
def test_other_dtypes_are_torchs_own(dtype, rows):
    a, b = (x.to(dtype) for x in operands(rows, WEIGHTS[0], transposed=True))
    own = torch.mm(a, b, out=a.new_empty(0))  # the kernel that nobody replaces
    assert torch.equal(matmul.mm(a, b), own)


@pytest.mark.parametrize("slow", [False, True])
def test_many_rows_in_bf16_go_through_fp32_where_the_processor_is_slow(slow, monkeypatch):
    monkeypatch.setattr(matmul, "slow_bf16", lambda: slow)
    a, b = (x.bfloat16() for x in operands(matmul.MANY_ROWS, WEIGHTS[0], transposed=False))
    out = matmul.mm(a, b)
    assert out.dtype == torch.bfloat16 and out.is_contiguous()
    if slow:
        expected = a.double() @ b.double()
        assert torch.equal(out, expected.bfloat16())  # the one rounding of a sum that fp32 has exactly
    else:
        assert torch.equal(out, torch.mm(a, b, out=a.new_empty(0)))


@pytest.mark.parametrize(
    ("rows", "shape", "transposed", "by_onednn"),
    [
        (matmul.FEW_ROWS, WEIGHTS[0], True, True),
        (matmul.FEW_ROWS, WEIGHTS[0], False, False),  # slower than torch's own: benchmarks/matmul.py
        (200, WEIGHTS[0], True, True),
        (200, WEIGHTS[0], False, True),
        (200, WEIGHTS[2], True, False),
    ],
)
def test_only_what_onednn_does_faster_goes_to_it(rows, shape, transposed, by_onednn, monkeypatch):
    calls, linear = [], matmul._linear
    monkeypatch.setattr(matmul, "_linear", lambda x, weight: calls.append(0) or linear(x, weight))
    a, b = operands(rows, shape, transposed=transposed)
    matmul.mm(a, b)
    assert bool(calls) == by_onednn


def test_installed_it_serves_products_and_their_gradients():
    """In a process of its own, with the calls to oneDNN counted: linear layers, gradients, torch's errors."""
    source = """
import torch
from megatron_rl.platform import activate
from sglang_on_cpu import matmul
activate()
calls, linear = [], matmul._linear
matmul._linear = lambda x, weight: calls.append(x.shape[0]) or linear(x, weight)
x, w = torch.randn(2, 50, 600, requires_grad=True), torch.randn(1000, 600, requires_grad=True)
torch.nn.functional.linear(x, w).square().sum().backward()
assert calls == [100, 100], calls  # forward and the gradient of x; the gradient of w is torch's
x64, w64 = x.detach().double().requires_grad_(), w.detach().double().requires_grad_()
(x64 @ w64.t()).square().sum().backward()
for ours, exact in ((x.grad, x64.grad), (w.grad, w64.grad)):
    assert (ours - exact).abs().max() < 3e-6 * exact.abs().max()
for a, b in ((torch.ones(2, 3), torch.ones(4, 5)), (torch.ones(2, 3), torch.ones(3)), (torch.ones(3), torch.ones(3, 3)),
             (torch.ones(2, 600), torch.ones(601, 1000))):
    try:
        torch.mm(a, b)
    except RuntimeError as error:
        assert "mat" in str(error)
    else:
        raise AssertionError("no error")
"""
    repository = Path(__file__).resolve().parents[2]
    command = [PYTHON_WITH_PACKAGES, "-c", source]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
