"""The Triton kernels of batch-invariant operators without a GPU.

Functions `interpreted_*` run in Triton's interpreter on tensors of the CPU, for which Triton must be told before it is
imported: `test_in_the_interpreter` runs them in a process of their own. The interpreter says whether the right numbers are
read, added up and written; it forgives types, so the kernels are also compiled for sm_90.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_rl.ops import batch_invariant as ops

triton = pytest.importorskip("triton")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@pytest.fixture(scope="module")
def kernels():
    return ops._triton()


@pytest.fixture(autouse=True)
def _interpreter_as_a_gpu(monkeypatch):
    """Its products are BLAS's, whose sums depend on a row's place in the tile, and take bf16 for integers; it also cuts what a
    GPU rounds to bf16."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    from triton.runtime import interpreter

    def numbers(x: np.ndarray, dtype, to, rounding) -> np.ndarray:
        tensor = torch.from_numpy(np.ascontiguousarray(x))
        if to == triton.language.bfloat16:
            return tensor.bfloat16().view(torch.uint16).numpy()
        return tensor.view(torch.bfloat16).float().numpy()

    def dot(self, a, b, total, input_precision, max_num_imprecise_acc):
        bf16 = a.dtype == triton.language.bfloat16
        rows, columns = (numbers(x.data, x.dtype, triton.language.float32, None) if bf16 else x.data for x in (a, b))
        sums = total.data.copy()
        for i in range(len(columns)):
            sums += rows[:, i : i + 1] * columns[i : i + 1]
        return interpreter.TensorHandle(sums, total.dtype.scalar)

    monkeypatch.setattr(interpreter, "_convert_float", numbers)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)


@pytest.mark.slow
def test_in_the_interpreter():
    command = [
        sys.executable,
        "-m",
        "pytest",
        __file__,
        "-q",
        "-p",
        "no:cacheprovider",
        "-o",
        "python_functions=interpreted_*",
    ]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0 and "skipped" not in done.stdout, done.stdout[-5000:]


def test_it_needs_torch_and_triton_alone():
    """An engine's process loads it by its path, without the package."""
    path = Path(ops.__file__).with_name("batch_invariant_triton.py")
    code = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("operators", {str(path)!r})
sys.modules["operators"] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
assert not [name for name in sys.modules if name.startswith("megatron")]
"""
    subprocess.run([sys.executable, "-c", code], check=True)


# -- in the interpreter ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inputs", "parts", "dtype"),
    [(40, 1, torch.float32), (256, 2, torch.bfloat16), (360, 4, torch.bfloat16), (64, 8, torch.float32)],
)
def interpreted_product(inputs, parts, dtype, kernels, monkeypatch):
    """Groups with edges in all directions: against fp64, rows alone, the parts' own programs, ranks' shares."""
    counts, outputs, result = [0, 131, 1, 0, 20], 75, dtype
    x = torch.randn(152, inputs + 8).to(dtype)[:, :inputs]  # with a stride of its own
    weights = [(torch.randn(outputs, inputs) / inputs**0.5).to(dtype) for _ in counts]
    split = kernels.product(x, counts, weights, parts, result)
    monkeypatch.setattr(kernels, "_FEW_TILES", 0)
    whole = kernels.product(x, counts, weights, parts, result)
    assert whole.dtype == result and torch.equal(split, whole)
    assert torch.equal(kernels.product(x, counts, weights, parts, torch.float32).to(result), whole)
    exact = torch.cat([a.double() @ w.double().t() for a, w in zip(x.split(counts), weights, strict=True)])
    assert (whole - exact).norm() / exact.norm() < (1e-6 if result == torch.float32 else 3e-3)
    for row, group in ((77, 1), (131, 2), (151, 4)):
        alone = kernels.product(x[row : row + 1], [1], weights[group : group + 1], parts, result)
        assert torch.equal(alone[0], whole[row]), row
    for ranks in (ranks for ranks in (2, 4, 8) if ranks <= parts):
        shares = zip(x.chunk(ranks, 1), zip(*(w.chunk(ranks, 1) for w in weights), strict=True), strict=True)
        sums = [kernels.product(a, counts, w, parts // ranks, torch.float32) for a, w in shares]
        assert torch.equal(ops.tree_sum(sums).to(result), whole)


def interpreted_product_of_many_parts_and_mixed_types(kernels):
    x, weight = torch.randn(3, 64), torch.randn(5, 64).bfloat16()
    for a, b in ((x, weight), (x.bfloat16(), weight.float())):
        out = kernels.product(a, [3], [b], 16, torch.float32)
        exact = a.double() @ b.double().t()
        assert (out - exact).norm() / exact.norm() < 1e-6
    sums = [kernels.product(x[:, i : i + 4], [3], [weight[:, i : i + 4]], 1, torch.float32) for i in range(0, 64, 4)]
    assert torch.equal(kernels.product(x, [3], [weight], 16, torch.float32), ops.tree_sum(sums))


def interpreted_product_without_rows_or_inputs(kernels):
    weight = torch.randn(5, 8)
    assert kernels.product(torch.randn(0, 8), [0], [weight], 2, torch.bfloat16).shape == (0, 5)
    assert kernels.product(torch.randn(3, 0), [3], [weight[:, :0]], 1, torch.float32).equal(torch.zeros(3, 5))


def interpreted_product_of_rows_between_others_that_are_not_numbers(kernels):
    """What is read behind an edge must not leak into a row."""
    x, weight = torch.full((40, 24), float("nan")), torch.randn(9, 24)
    x[7] = torch.randn(24)
    out = kernels.product(x, [7, 1, 32], [weight + 1, weight, weight - 1], 2, torch.float32)
    assert torch.equal(out[7:8], kernels.product(x[7:8], [1], [weight], 2, torch.float32))


@DTYPES
@pytest.mark.parametrize("width", [24, 2560])
def interpreted_square_sums(width, dtype, kernels):
    x = torch.randn(5, width).to(dtype)
    sums = kernels.square_sums(x, 8)
    torch.testing.assert_close(sums.double(), x.double().square().sum(1), rtol=1e-6, atol=0)
    assert torch.equal(kernels.square_sums(x[3:4], 8), sums[3:4])
    for ranks in (2, 4, 8):
        shares = [kernels.square_sums(share, 8 // ranks) for share in x.chunk(ranks, 1)]
        assert torch.equal(ops.tree_sum(shares), sums)


@DTYPES
@pytest.mark.parametrize("width", [1, 70, 1500])
def interpreted_number_by_number(width, dtype, kernels):
    """scale_rows as the compiled kernel has it to the bit; swish within the rounding of an exponential."""
    x = 20 * torch.randn(4, width + 1).to(dtype)[:, :width]
    factors, weight = torch.rand(4), torch.randn(width).to(dtype)
    assert torch.equal(kernels.scale_rows(x, factors, weight), ops._kernels.scale_rows(x, factors, weight))
    x[0, 0], x[1, 0] = -1e4, float("nan")
    for slope, alone in ((1.0, False), (1.702, False), (1.0, True)):
        gate = (slope * x.double()).sigmoid()
        exact = gate if alone else x * gate
        found = kernels.swish(x, slope, alone)
        assert found.dtype == dtype
        rounding = 1e-5 if dtype == torch.float32 else 4e-3
        torch.testing.assert_close(found.double(), exact, rtol=rounding, atol=1e-30, equal_nan=True)


@pytest.mark.parametrize("columns", [1, 60, 1500])
def interpreted_softmax(columns, kernels):
    x = 5 * torch.randn(6, columns)
    x[:, columns // 2 + 1 :: 3] = -torch.inf
    torch.testing.assert_close(kernels.softmax(x).double(), x.double().softmax(1), rtol=3e-6, atol=1e-12)
    assert torch.equal(kernels.softmax(x[4:5])[0], kernels.softmax(x)[4])


@pytest.mark.parametrize(("columns", "k"), [(1, 1), (8, 8), (60, 4), (257, 9)])
def interpreted_topk(columns, k, kernels):
    """Ties, both zeros, infinities and NaNs: as the compiled kernel has it."""
    x = torch.randn(40, columns).mul(2).round()
    x.view(-1)[::7] = -0.0
    x.view(-1)[::11], x.view(-1)[3::13], x.view(-1)[5::17] = torch.nan, torch.inf, -torch.inf
    assert torch.equal(kernels.topk(x, k), ops._kernels.topk(x, k))


@DTYPES
@pytest.mark.parametrize("count", [0, 1, 3])
def interpreted_combine(count, dtype, kernels):
    x, places = torch.randn(9, 1100).to(dtype), torch.randint(0, 9, (4, count))
    assert torch.equal(kernels.combine(x, places), ops._kernels.combine(x, places))


@pytest.mark.parametrize("columns", [5, 40_000])
def interpreted_exponential_sums(columns, kernels):
    x = 6 * torch.randn(3, columns)
    x[1, ::2] = -torch.inf
    most = x.amax(1)
    sums = kernels.exponential_sums(x, most)
    exact = (x.double() - most[:, None]).logsumexp(1)
    torch.testing.assert_close(kernels.log_of_sums(sums), exact, rtol=0, atol=1e-6)
    torch.testing.assert_close(kernels.log_of_sums(sums), ops._kernels.log_of_sums(sums), rtol=1e-15, atol=0)
    shares = [
        kernels.exponential_sums(share, most) for share in (x[:, :1], x[:, 1 : columns // 2], x[:, columns // 2 :])
    ]
    assert torch.equal(sum(shares), sums)
    small = torch.tensor([[0.0, -29.4, -29.9]])  # 1, and 0.75 and 0.45 units
    assert kernels.exponential_sums(small, torch.zeros(1)).tolist() == [2**kernels.FRACTION + 1]


def interpreted_rotary(kernels):
    frequencies = torch.tensor([1.0, 0.1, 1e-4])
    for found, exact in zip(kernels.rotary(3000, frequencies), ops._kernels.rotary(3000, frequencies), strict=True):
        torch.testing.assert_close(found, exact, rtol=0, atol=6e-8)


def interpreted_errors(kernels):
    x, weight = torch.randn(3, 8), torch.randn(5, 8)
    bad = [
        (lambda: kernels.product(x, [2], [weight], 1, torch.float32), "counts are of 2 rows, x has 3"),
        (lambda: kernels.product(x, [3], [weight, weight], 1, torch.float32), "one weight for each count"),
        (lambda: kernels.product(x, [3], [weight[:, :4]], 1, torch.float32), "weights have 4 inputs, x has 8"),
        (lambda: kernels.product(x, [3, 0], [weight, weight[:, :4]], 1, torch.float32), "weight 1 is"),
        (lambda: kernels.product(x, [3], [weight], 3, torch.float32), "power of two that divides 8"),
        (lambda: kernels.product(x, [3], [weight], 1, torch.float64), "result must be fp32 or bf16"),
        (lambda: kernels.product(x.t(), [8], [weight[:, :3]], 1, torch.float32), "contiguous rows"),
        (lambda: kernels.square_sums(x.half(), 1), "x must be"),
        (lambda: kernels.scale_rows(x, torch.rand(2), weight[0]), "factors must be one fp32 number a row"),
        (lambda: kernels.scale_rows(x, torch.rand(3), weight[0, :4]), "weight must be"),
        (lambda: kernels.softmax(x.bfloat16()), "x must be torch.float32"),
        (lambda: kernels.topk(x, 9), "k must be at most 8"),
        (lambda: kernels.combine(x, torch.zeros(2, 2)), "places must be int64"),
        (lambda: kernels.exponential_sums(x, torch.zeros(2)), "most must be one fp32 number a row"),
    ]
    for call, message in bad:
        with pytest.raises(ValueError, match=message):
            call()


# -- compiled ----------------------------------------------------------------------------------------------------------


def compiled(kernel, types: dict[str, str], constants: dict[str, object], warps: int = 4, stages: int = 3):
    """What Triton makes of a kernel for sm_90; pointers are aligned as torch's are."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    signature = {name: types.get(name, "constexpr" if name in constants else "i32") for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name].startswith("*")}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": warps, "num_stages": stages}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


@DTYPES
@pytest.mark.parametrize(
    ("parts", "split", "grouped", "even"),
    [
        (1, False, False, True),
        (1, True, False, True),
        (8, False, False, True),
        (4, False, True, False),
        (1, True, True, False),
    ],
)
def test_product_compiles(parts, split, grouped, even, dtype, kernels):
    pointer = "*fp32" if dtype == torch.float32 else "*bf16"
    tile = kernels._TILES[dtype]
    types = {"x": pointer, "weight": pointer, "out": "*fp32" if split else pointer} | (
        {"table": "*i64"} if grouped else {}
    )
    switches = {"SPLIT": split, "GROUPED": grouped, "EVEN": even, "FP32": dtype == torch.float32, "ALIGNED": True}
    sizes = {"PARTS": parts, "VECTOR": 16 // dtype.itemsize, "COLUMN": 8}
    blocks = {"BLOCK_M": tile.m, "BLOCK_N": tile.n, "BLOCK_K": tile.k}
    constants = switches | sizes | blocks | ({} if grouped else {"table": None})
    binary = compiled(kernels._product_kernel, types, constants, tile.warps, tile.stages)
    ptx = binary.asm["ptx"]
    instructions = set(re.findall(r"\b(?:wgmma\.mma_async|mma)\.\S+", ptx))
    if dtype == torch.bfloat16:
        assert instructions == {"wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16"}
    else:
        assert not instructions and "tf32" not in ptx
    widths = set(re.findall(r"cp\.async\.\w+\.shared\.global \[[^;]*\], \[[^;]*\], (\w+)", ptx))
    assert widths == {"0x10"}, widths
    assert binary.metadata.shared <= 227 * 1024


KERNELS = {
    "_tree_kernel": ({"sums": "*fp32", "out": "*bf16"}, {"PARTS": 16}),
    "_square_sums_kernel": ({"x": "*bf16", "out": "*fp32"}, {"PARTS": 8}),
    "_scale_rows_kernel": ({"x": "*bf16", "factors": "*fp32", "weight": "*bf16", "out": "*bf16"}, {"BLOCK": 1024}),
    "_swish_kernel": ({"x": "*bf16", "out": "*bf16", "slope": "fp32"}, {"ALONE": False, "BLOCK": 1024}),
    "_softmax_kernel": ({"x": "*fp32", "out": "*fp32"}, {"BLOCK": 128}),
    "_topk_kernel": ({"x": "*fp32", "out": "*i64"}, {"BLOCK": 128}),
    "_combine_kernel": ({"x": "*bf16", "places": "*i64", "out": "*bf16"}, {"BLOCK": 1024}),
    "_exponential_sums_kernel": ({"x": "*fp32", "most": "*fp32", "out": "*i64"}, {}),
}


def test_each_kernel_is_compiled_here(kernels):
    found = {name for name, value in vars(kernels).items() if name.endswith("_kernel") and hasattr(value, "arg_names")}
    assert found == {*KERNELS, "_product_kernel"}


@pytest.mark.parametrize("name", KERNELS)
def test_kernel_compiles(name, kernels):
    types, constants = KERNELS[name]
    assert compiled(getattr(kernels, name), types, constants).asm["cubin"]
