"""Triton kernels of ops/batch_invariant.py for CUDA tensors; csrc/batch_invariant/ holds the CPU kernels.

The result of a row depends only on this row, bit for bit. To reach this, the kernels fix the following, whatever other rows
there are:

- product: each dtype has one tile BLOCK_M x BLOCK_N x BLOCK_K and one number of warps. Every output therefore comes from the
  same kind of tensor-core instruction (bf16) or the same chain of fused multiply-adds (fp32, never TF32). The sum of one part
  of the inputs starts at zero and adds BLOCK_K inputs at a time, from the first to the last. The sums of the parts are then
  added in fp32, pairwise as a tree, and rounded once. If there are few tiles, each part gets its own program, and a second
  kernel adds the same partial sums.
- sums along a row (square_sums, softmax): one program per row, with blocks of fixed width from the first to the last.
- exponential_sums: integers, for which every order gives the same sum.
- everything else is element by element.

The bits depend on the GPU model and the release of Triton, and differ from the bits of the CPU kernels. An engine process
loads this file by its path, so it imports only torch and Triton. Arguments are as in csrc/batch_invariant/binding.cpp.
"""

# Triton kernels have no type annotations, use constants in capitals, and need each `if` on a constant by itself.
# ruff: noqa: ANN001, N803, SIM102
# pyright treats a kernel as a plain Python function, and a constexpr as a value of its annotation.
# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

FRACTION = 42
"""`exponential_sums` are in units of 2^-FRACTION, as in csrc/batch_invariant/cpu.h."""

_LOG2_E = tl.constexpr(1.4426950408889634)
_UNIT = tl.constexpr(2.0**FRACTION)


@dataclass(frozen=True)
class _Tile:
    """Tile sizes. They must not depend on the shape of a product: another tensor-core instruction may sum differently."""

    m: int
    n: int
    k: int
    warps: int
    stages: int
    registers: int | None = None
    """Limit of registers per thread, so that two programs fit on a multiprocessor. Partial sums that wait for their neighbor
    in the tree spill to memory."""


_TILES = {torch.bfloat16: _Tile(128, 128, 64, warps=8, stages=3), torch.float32: _Tile(64, 64, 32, warps=4, stages=2)}
_COLUMN = 8
"""Number of row blocks that are multiplied by one block of weights before the next block of weights is used. Rows and weights
then stay in the L2 cache."""
_FEW_TILES = 64
"""Below this number of tiles, each part gets its own program, so that no multiprocessor is idle. The bits stay the same."""
_MOST_PARTS = 8
"""Largest number of parts that one program adds."""
_BLOCK = tl.constexpr(1024)
"""Elements of a row that are processed together."""
_CHUNK = tl.constexpr(16 * 1024)
"""Columns of a vocabulary per program."""


# Do not compile special code for a number of rows that is 1 or a multiple of 16.
@triton.jit(do_not_specialize=["rows", "outputs", "part_units", "x_units", "w_units", "row_blocks"])
def _product_kernel(
    x,
    weight,
    table,  # int64 [blocks of rows, 3]: address of the weight, first row, end of the rows; unused without GROUPED
    out,
    rows,
    outputs,
    part_units,  # inputs of a part and strides, in units of VECTOR elements
    x_units,
    w_units,
    out_stride,
    row_blocks,
    PARTS: tl.constexpr,
    SPLIT: tl.constexpr,  # each program computes one part, and out is fp32 [parts, rows, outputs]
    GROUPED: tl.constexpr,
    ALIGNED: tl.constexpr,  # the addresses of the table are aligned to 16 bytes
    FP32: tl.constexpr,
    EVEN: tl.constexpr,  # parts are multiples of BLOCK_K
    VECTOR: tl.constexpr,
    COLUMN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    tile = tl.program_id(0)
    column = COLUMN * tl.cdiv(outputs, BLOCK_N)
    first_block = tile // column * COLUMN
    blocks_here = tl.minimum(row_blocks - first_block, COLUMN)
    row_block = first_block + tile % column % blocks_here
    output_block = tile % column // blocks_here

    if GROUPED:
        first_row = tl.load(table + 3 * row_block + 1)
        end_row = tl.load(table + 3 * row_block + 2)
        w = tl.load(table + 3 * row_block).to(tl.pointer_type(weight.dtype.element_ty))
        if ALIGNED:
            w = tl.multiple_of(w, 16)
    else:
        first_row = row_block.to(tl.int64) * BLOCK_M
        end_row = rows.to(tl.int64)
        w = weight
    # Beyond an edge the last row is read again but not written, so that only the end of a part needs a mask.
    m = first_row + tl.arange(0, BLOCK_M)
    n = output_block * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    part_width = part_units * VECTOR
    x_block = x + tl.minimum(m, end_row - 1)[:, None] * (x_units.to(tl.int64) * VECTOR) + k[None, :]
    w_block = w + tl.minimum(n, outputs - 1)[None, :].to(tl.int64) * (w_units * VECTOR) + k[:, None]

    part_blocks = tl.cdiv(part_width, BLOCK_K)
    if SPLIT:
        first_part = tl.program_id(1)
        end_part = first_part + 1
    else:
        first_part = 0
        end_part = PARTS
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    one, two, four = total, total, total  # sums of 1, 2 and 4 parts that wait for their neighbor in the tree
    for step in range(first_part * part_blocks, end_part * part_blocks):
        part = step // part_blocks
        block = step - part * part_blocks
        at = part * part_width + block * BLOCK_K
        if EVEN:
            rows_here = tl.load(x_block + at)
            weights_here = tl.load(w_block + at)
        else:
            left = part_width - block * BLOCK_K
            rows_here = tl.load(x_block + at, mask=k[None, :] < left, other=0.0)
            weights_here = tl.load(w_block + at, mask=k[:, None] < left, other=0.0)
        if FP32:
            rows_here = rows_here.to(tl.float32)
            weights_here = weights_here.to(tl.float32)
        total = tl.dot(rows_here, weights_here, total, input_precision="ieee")
        if not SPLIT and PARTS > 1:
            if block == part_blocks - 1:
                if part & 1 == 0:
                    one = total
                else:
                    total = one + total
                    if PARTS > 2:
                        if part & 2 == 0:
                            two = total
                        else:
                            total = two + total
                            if PARTS > 4:
                                if part & 4 == 0:
                                    four = total
                                else:
                                    total = four + total
                if part < PARTS - 1:
                    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)

    to = out + m[:, None] * out_stride + n[None, :]
    if SPLIT:
        to += tl.program_id(1).to(tl.int64) * rows * out_stride
    tl.store(to, total.to(out.dtype.element_ty), mask=(m[:, None] < end_row) & (n[None, :] < outputs))


@triton.jit
def _tree(x, stride, mask, FIRST: tl.constexpr, COUNT: tl.constexpr):
    if COUNT == 1:
        return tl.load(x + FIRST * stride, mask=mask)
    else:  # Triton must not compile the other branch
        return _tree(x, stride, mask, FIRST, COUNT // 2) + _tree(x, stride, mask, FIRST + COUNT // 2, COUNT // 2)


@triton.jit(do_not_specialize=["size"])
def _tree_kernel(sums, out, size, PARTS: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * _BLOCK + tl.arange(0, _BLOCK)
    total = _tree(sums + at, size, at < size, 0, PARTS)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=at < size)


def product(x: Tensor, counts: Sequence[int], weights: Sequence[Tensor], parts: int, dtype: torch.dtype) -> Tensor:
    """Multiply x [R, K] by the transposed weight [N, K] of each group: [R, N] in `dtype`. counts: rows of each group.

    The sum over K consists of `parts` partial sums (a power of two), added as the module docstring describes. x and weights
    are fp32 or bf16. Products are in fp32 unless both are bf16. Errors: ValueError that names the argument.
    """
    _require(bool(weights) and len(weights) == len(counts), "one weight for each count")
    _matrix(x, "x")
    _require(dtype in _TILES, f"the result must be fp32 or bf16, not {dtype}")
    first, inputs = weights[0], x.shape[1]
    _matrix(first, "weight")
    like = first.shape, first.stride(), first.dtype, x.get_device()  # Triton does not check what an address points to
    for i, weight in enumerate(weights):  # there are hundreds of weights: build a message only on failure
        if (weight.shape, weight.stride(), weight.dtype, weight.get_device()) != like:
            raise ValueError(
                f"weight {i} is {list(weight.shape)} on {weight.device}, but weight 0 is {list(first.shape)} on {x.device}"
            )
    _require(first.shape[1] == inputs, f"weights have {first.shape[1]} inputs, x has {inputs}")
    _require(min(counts) >= 0 and sum(counts) == len(x), f"counts are of {sum(counts)} rows, x has {len(x)}")
    _check_parts(parts, inputs)

    rows, outputs = len(x), len(first)
    out = torch.empty(rows, outputs, dtype=dtype, device=x.device)
    if out.numel() == 0 or inputs == 0:
        return out.zero_()
    fp32 = not x.dtype == first.dtype == torch.bfloat16
    tile = _TILES[torch.float32 if fp32 else torch.bfloat16]
    groups = [(weight, weight.data_ptr(), count) for weight, count in zip(weights, counts, strict=True) if count]
    table, row_blocks = None, triton.cdiv(rows, tile.m)
    if len(groups) > 1:
        table = _blocks_of_rows(groups, tile.m, x.device)
        row_blocks = len(table)
    tiles = row_blocks * triton.cdiv(outputs, tile.n)
    split = parts > _MOST_PARTS or (parts > 1 and tiles < _FEW_TILES)
    sums = torch.empty(parts, rows, outputs, dtype=torch.float32, device=x.device) if split else out
    # Loads have 16 bytes if every offset from an aligned address is a multiple of 16 bytes.
    width = inputs // parts
    vector = math.gcd(8, width, x.stride(0), first.stride(0))
    with _on(x):
        _product_kernel[(tiles, parts if split else 1)](
            x,
            groups[0][0],
            table,
            sums,
            rows,
            outputs,
            width // vector,
            x.stride(0) // vector,
            first.stride(0) // vector,
            outputs,
            row_blocks,
            PARTS=1 if split else parts,
            SPLIT=split,
            GROUPED=table is not None,
            ALIGNED=all(address % 16 == 0 for _, address, _ in groups),
            FP32=fp32,
            EVEN=width % tile.k == 0,
            VECTOR=vector,
            COLUMN=_COLUMN,
            BLOCK_M=tile.m,
            BLOCK_N=tile.n,
            BLOCK_K=tile.k,
            num_warps=tile.warps,
            num_stages=tile.stages,
            maxnreg=tile.registers,
        )
        if split:
            _tree_kernel[(triton.cdiv(out.numel(), _BLOCK.value),)](sums, out, out.numel(), PARTS=parts)
    return out


def _blocks_of_rows(groups: Sequence[tuple[Tensor, int, int]], size: int, device: torch.device) -> Tensor:
    """Return int64 [blocks, 3]: for each block of `size` rows the weight's address, the first row, the end of the group."""
    blocks, start = [], 0
    for _, address, count in groups:
        blocks += [(address, row, start + count) for row in range(start, start + count, size)]
        start += count
    table = torch.tensor(blocks, dtype=torch.int64, device="cpu")
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table


def _on(x: Tensor) -> torch.cuda.device:
    """Make the device of x current, because Triton launches there. No effect for CPU tensors (Triton's interpreter)."""
    return torch.cuda.device(x.device if x.is_cuda else -1)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _matrix(x: Tensor, name: str, *types: torch.dtype) -> None:
    _require(
        x.dim() == 2 and (x.shape[1] <= 1 or x.stride(1) == 1),
        f"{name} must be a matrix with contiguous rows, not {x.shape}",
    )
    types = types or (torch.float32, torch.bfloat16)
    _require(x.dtype in types, f"{name} must be {' or '.join(map(str, types))}, not {x.dtype}")


def _check_parts(parts: int, width: int) -> None:
    _require(
        parts >= 1 and parts & (parts - 1) == 0 and width % parts == 0,
        f"parts must be a power of two that divides {width}",
    )


# -- along a row -------------------------------------------------------------------------------------------------------


@triton.jit
def _square_sum(x, width, COUNT: tl.constexpr):
    if COUNT == 1:
        total = tl.zeros((_BLOCK,), dtype=tl.float32)
        for start in range(0, width, _BLOCK):
            at = start + tl.arange(0, _BLOCK)
            v = tl.load(x + at, mask=at < width, other=0.0).to(tl.float32)
            total = tl.fma(v, v, total)
        return tl.sum(total, axis=0)
    else:
        half = width // 2
        return _square_sum(x, half, COUNT // 2) + _square_sum(x + half, half, COUNT // 2)


@triton.jit
def _square_sums_kernel(x, out, width, stride, PARTS: tl.constexpr):
    row = tl.program_id(0)
    tl.store(out + row, _square_sum(x + row.to(tl.int64) * stride, width, PARTS))


def square_sums(x: Tensor, parts: int) -> Tensor:
    """Return the sum of squares of each row of x [R, d]: fp32 [R]. Errors: ValueError."""
    _matrix(x, "x")
    _check_parts(parts, x.shape[1])
    out = torch.empty(len(x), dtype=torch.float32, device=x.device)
    if len(x):
        with _on(x):
            _square_sums_kernel[(len(x),)](x, out, x.shape[1], x.stride(0), PARTS=parts)
    return out


@triton.jit
def _scale_rows_kernel(x, factors, weight, out, width, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + row * stride + at, mask=at < width).to(tl.float32)
    scaled = v * tl.load(factors + row) * tl.load(weight + at, mask=at < width).to(tl.float32)
    tl.store(out + row * width + at, scaled.to(out.dtype.element_ty), mask=at < width)


def scale_rows(x: Tensor, factors: Tensor, weight: Tensor) -> Tensor:
    """Return x [R, d] times fp32 factors [R] times weight [d] (dtype of x), rounded once. Errors: ValueError."""
    _matrix(x, "x")
    _column(factors, "factors", len(x))
    _require(
        weight.shape == (x.shape[1],) and weight.dtype == x.dtype and weight.is_contiguous(),
        f"weight must be {x.dtype} [{x.shape[1]}]",
    )
    return _by_number(_scale_rows_kernel, x, factors, weight)


@triton.jit
def _swish_kernel(x, out, width, stride, slope, ALONE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + row * stride + at, mask=at < width).to(tl.float32)
    # For v below -88 exp(-v) is infinite and 1 / infinity is 0. NaN stays NaN, because it is not below -88.
    v_slope = v * slope
    e = tl.exp2(tl.where(v_slope < -88.0, -88.0, v_slope) * -_LOG2_E)
    gate = tl.div_rn(1.0, 1.0 + e)
    result = gate if ALONE else v * gate
    tl.store(out + row * width + at, result.to(out.dtype.element_ty), mask=at < width)


def swish(x: Tensor, slope: float, gate_alone: bool) -> Tensor:
    """Return x sigmoid(slope x) for x [R, d], or only sigmoid(slope x), rounded once. Errors: ValueError."""
    _matrix(x, "x")
    return _by_number(_swish_kernel, x, slope=slope, ALONE=gate_alone)


def _by_number(kernel: triton.JITFunction, x: Tensor, *tensors: Tensor, **options: float) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        width = x.shape[1]
        block = min(_BLOCK.value, triton.next_power_of_2(width))
        with _on(x):
            kernel[(len(x), triton.cdiv(width, block))](x, *tensors, out, width, x.stride(0), **options, BLOCK=block)
    return out


def _column(x: Tensor, name: str, rows: int) -> None:
    _require(
        x.shape == (rows,) and x.dtype == torch.float32 and x.is_contiguous(), f"{name} must be one fp32 number a row"
    )


@triton.jit
def _softmax_kernel(x, out, width, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x += row * stride
    out += row * width
    largest = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        v = tl.load(x + at, mask=at < width, other=float("-inf"))
        largest = tl.where(v > largest, v, largest)
    most = tl.max(largest, axis=0)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        v = tl.load(x + at, mask=at < width, other=0.0)
        total += tl.where(at < width, tl.exp2((v - most) * _LOG2_E), 0.0)
    denominator = tl.sum(total, axis=0)
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        v = tl.load(x + at, mask=at < width, other=0.0)
        tl.store(out + at, tl.div_rn(tl.exp2((v - most) * _LOG2_E), denominator), mask=at < width)


def softmax(x: Tensor) -> Tensor:
    """Return the softmax of each row of fp32 x [R, n]. Errors: ValueError."""
    _matrix(x, "x", torch.float32)
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    if out.numel():
        block = min(_BLOCK.value, triton.next_power_of_2(x.shape[1]))  # depends only on the number of columns
        with _on(x):
            _softmax_kernel[(len(x),)](x, out, x.shape[1], x.stride(0), BLOCK=block, num_warps=1 if block <= 256 else 4)
    return out


@triton.jit
def _topk_kernel(x, out, width, stride, k, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    v = tl.load(x + row * stride + column, mask=column < width, other=0.0) + 0.0  # -0 is 0
    bits = v.to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # rises with v
    order = tl.where(v == v, order, -0x80000000)
    # One integer per element, with the index in its lower half. Among equal values the first index gives the largest integer.
    key = (order.to(tl.int64) << 32) | (0x7FFFFFFF - column).to(tl.int64)
    lowest = -0x7FFFFFFFFFFFFFFF - 1
    key = tl.where(column < width, key, lowest)
    for i in range(k):
        best = tl.max(key, axis=0)
        tl.store(out + row * k + i, 0x7FFFFFFF - (best & 0x7FFFFFFF))
        key = tl.where(key == best, lowest, key)


def topk(x: Tensor, k: int) -> Tensor:
    """Return the indices [R, k] int64 of the k largest values of each row of fp32 x [R, n], largest first, NaNs last.

    Among equal values the smaller index comes first. One program processes a row, so n may be in the thousands. Errors:
    ValueError.
    """
    _matrix(x, "x", torch.float32)
    _require(0 <= k <= x.shape[1], f"k must be at most {x.shape[1]}")
    out = torch.empty(len(x), k, dtype=torch.int64, device=x.device)
    if out.numel():
        block = triton.next_power_of_2(x.shape[1])
        with _on(x):
            _topk_kernel[(len(x),)](
                x, out, x.shape[1], x.stride(0), k, BLOCK=block, num_warps=1 if block <= 1024 else 8
            )
    return out


@triton.jit
def _combine_kernel(x, places, out, width, stride, count, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for i in range(count):
        place = tl.load(places + row * count + i)
        total += tl.load(x + place * stride + at, mask=at < width, other=0.0).to(tl.float32)
    tl.store(out + row * width + at, total.to(out.dtype.element_ty), mask=at < width)


def combine(x: Tensor, places: Tensor) -> Tensor:
    """Sum the rows `places` [T, k] of x [R, d] in this order, in fp32, rounded once: [T, d].

    places must lie in [0, R). This is not checked, because the host would have to wait for the GPU. Errors: ValueError.
    """
    _matrix(x, "x")
    _require(
        places.dim() == 2 and places.is_contiguous() and places.dtype == torch.int64, "places must be int64 [T, k]"
    )
    width = x.shape[1]
    out = torch.empty(len(places), width, dtype=x.dtype, device=x.device)
    if out.numel():
        block = min(_BLOCK.value, triton.next_power_of_2(width))
        grid = (len(places), triton.cdiv(width, block))
        with _on(x):
            _combine_kernel[grid](x, places, out, width, x.stride(0), places.shape[1], BLOCK=block)
    return out


@triton.jit
def _exponential_sums_kernel(x, most, out, width, stride):
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * _CHUNK
    x += row * stride
    largest = tl.load(most + row)
    total = tl.zeros((_BLOCK,), dtype=tl.int64)
    for start in range(first, tl.minimum(first + _CHUNK, width), _BLOCK):
        at = start + tl.arange(0, _BLOCK)
        v = tl.load(x + at, mask=at < width, other=float("-inf"))
        e = tl.exp2((v - largest) * _LOG2_E)
        term = (e.to(tl.float64) * _UNIT + 0.5).to(tl.int64)
        total += tl.where(at < width, term, 0)
    tl.store(out + row * tl.num_programs(1) + tl.program_id(1), tl.sum(total, axis=0))


def exponential_sums(x: Tensor, most: Tensor) -> Tensor:
    """Sum exp(x - most) over the columns of fp32 x [R, n], with terms rounded to units of 2^-FRACTION: int64 [R].

    most: fp32 [R], at least the maximum of each row. Errors: ValueError.
    """
    _matrix(x, "x", torch.float32)
    _column(most, "most", len(x))
    chunks = triton.cdiv(x.shape[1], _CHUNK.value)
    out = torch.empty(len(x), chunks, dtype=torch.int64, device=x.device)
    if out.numel():
        with _on(x):
            _exponential_sums_kernel[(len(x), chunks)](x, most, out, x.shape[1], x.stride(0))
    return out.sum(1)


# -- plain torch: element by element, with the same instructions at every index ----------------------------------------------


def log_of_sums(sums: Tensor) -> Tensor:
    """Return the natural logarithm, fp64, of int64 sums in units of 2^-FRACTION. Errors: ValueError."""
    _require(sums.dtype == torch.int64, "sums must be int64")
    return (sums.double() * 2.0**-FRACTION).log()


def rotary(positions: int, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [positions, n] fp32 of position times fp32 frequencies [n]. Errors: ValueError."""
    _column(frequencies, "frequencies", len(frequencies))
    angles = torch.arange(positions, dtype=torch.float32, device=frequencies.device)[:, None] * frequencies
    return angles.double().cos().float(), angles.double().sin().float()
