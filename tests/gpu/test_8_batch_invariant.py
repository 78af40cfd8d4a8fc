"""Stage batch_invariant: the operators of ops/batch_invariant.py on this device (CUDA: Triton; CPU: csrc/batch_invariant/).

A row has the same bits alone and among others; the shares of tensor-parallel ranks are subtrees; errors are against fp64;
attention of one query with all its keys is the row of the prefill. Times stand beside torch's own operators.
"""

from __future__ import annotations

import pytest
import torch

from megatron_rl.ops import batch_invariant as ops
from megatron_rl.ops import sink_attention

HEADS = {  # query heads, key heads, width, window, sinks
    "qwen3": (32, 4, 128, None, False),
    "gpt_oss": (64, 8, 64, 128, True),
    "gpt_oss_full": (64, 8, 64, None, True),
}
SHAPES = [(2048, 5120), (768, 2048), (2048, 128), (2880, 5120), (4096, 2048)]
ROWS = (1, 2, 7, 16, 64, 129, 512, 1024)
ERROR = {torch.float32: 2e-6, torch.bfloat16: 3e-3}
"""Of the rounding to the type, over the norm of the result; fp32's is that of a sum of 4,096."""
SUMS = {torch.float32: 2e-6, torch.bfloat16: 1e-5}
"""Of sums in fp32, before that rounding: tensor cores cut where others round."""
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def scaled(size: int, device: torch.device) -> int:
    """On a CPU a part is enough to try the test."""
    return size if device.type == "cuda" else max(8, size // 16)


def matrix(rows: int, columns: int, dtype: torch.dtype, device: torch.device, scale: float = 1.0) -> torch.Tensor:
    return (scale * torch.randn(rows, columns, device=device)).to(dtype)


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def rows_as_among_all(operator, x: torch.Tensor) -> dict[str, bool]:
    """For numbers of rows, from the first row and from a later one: whether they have the bits that they have among all."""
    whole = operator(x)
    found = {}
    for count in (count for count in ROWS if count <= len(x)):
        first = min(len(x) // 3, len(x) - count)
        found[str(count)] = torch.equal(operator(x[:count]), whole[:count])
        found[f"{count} from {first}"] = torch.equal(operator(x[first : first + count]), whole[first : first + count])
    return found


def microseconds(operator, *inputs: torch.Tensor) -> float:
    """Median of 20 calls."""
    found = []
    for _ in range(23):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        operator(*inputs)
        end.record()
        end.synchronize()
        found.append(1000 * start.elapsed_time(end))
    return round(sorted(found[3:])[10], 1)


@DTYPES
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_product(inputs, outputs, dtype, device, record_property):
    x = matrix(1024, inputs, dtype, device)
    weight = matrix(scaled(outputs, device), inputs, dtype, device, inputs**-0.5)
    same = rows_as_among_all(lambda rows: ops.linear(rows, weight), x)
    record_property("rows_as_among_1024", same)
    whole, in_fp32 = ops.linear(x, weight), ops.linear(x, weight, dtype=torch.float32)
    exact = x.double() @ weight.double().t()
    errors = {"own type": relative_error(whole, exact), "fp32 result": relative_error(in_fp32, exact)}
    record_property("relative_error", errors)
    assert all(same.values()), same
    assert torch.equal(in_fp32.to(dtype), whole)
    assert torch.equal(ops.linear(x, weight), whole)
    assert errors["own type"] < ERROR[dtype] and errors["fp32 result"] < SUMS[dtype]


@DTYPES
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
@pytest.mark.parametrize("rows", [1, 64, 1024])
def test_shares_of_tensor_parallel_ranks(rows, inputs, outputs, dtype, device, record_property):
    """What the ranks' shares of the inputs add up to, as a tree, and each rank's outputs."""
    x = matrix(rows if device.type == "cuda" else min(rows, 64), inputs, dtype, device)
    weight = matrix(scaled(outputs, device), inputs, dtype, device, inputs**-0.5)
    whole, sums = ops.linear(x, weight), ops.square_sums(x)
    same = {}
    for ranks in (ranks for ranks in (2, 4, 8) if ranks <= ops.parts(inputs)):
        parts = ops.parts(inputs) // ranks
        shares = list(zip(x.chunk(ranks, 1), weight.chunk(ranks, 1), strict=True))
        products = [ops.linear(a, b.contiguous(), dtype=torch.float32, of_parts=parts) for a, b in shares]
        squares = [ops.square_sums(a, of_parts=parts) for a, _ in shares]
        outs = [ops.linear(x, rows_of_weight) for rows_of_weight in weight.chunk(ranks)]
        same[ranks] = {
            "inputs": torch.equal(ops.tree_sum(products).to(dtype), whole),
            "outputs": torch.equal(torch.cat(outs, 1), whole),
            "square sums": torch.equal(ops.tree_sum(squares), sums),
        }
    record_property("same", same)
    assert all(all(found.values()) for found in same.values()), same


@DTYPES
@pytest.mark.parametrize(("inputs", "outputs"), [(2048, 1536), (768, 2048), (2880, 5760)])
def test_experts_products(inputs, outputs, dtype, device, record_property):
    """A token among others of its expert, alone with it, and by the plain product with that expert's weight."""
    experts = 32
    counts = torch.randint(0, scaled(200, device), (experts,)).tolist()
    counts[0], counts[1], counts[2] = 97, 0, 1
    x = matrix(sum(counts), inputs, dtype, device)
    weights = [matrix(scaled(outputs, device), inputs, dtype, device, inputs**-0.5) for _ in range(experts)]
    whole = ops.grouped_linear(x, counts, weights)
    same = {}
    for count in (1, 8, 40):
        out = ops.grouped_linear(torch.cat([x[:count], x[97:]]), [count, *counts[1:]], weights)
        same[f"{count} of 97"] = torch.equal(out, torch.cat([whole[:count], whole[97:]]))
    parts = list(zip(x.split(counts), weights, strict=True))
    same["one by one"] = torch.equal(torch.cat([ops.linear(rows, weight) for rows, weight in parts]), whole)
    record_property("same", same)
    exact = torch.cat([rows.double() @ weight.double().t() for rows, weight in parts])
    record_property("relative_error", relative_error(whole, exact))
    assert all(same.values()), same
    assert relative_error(whole, exact) < ERROR[dtype]


@DTYPES
def test_rows_of_other_operators(dtype, device, record_property):
    width = 2048
    x, weight = matrix(1024, width, dtype, device), matrix(1, width, dtype, device)[0]
    places = torch.randint(0, 1024, (1024, 8), device=device)
    tokens = torch.arange(1024, device=device)[:, None]
    operators = {
        "rms_norm": (lambda rows: ops.rms_norm(rows, weight, 1e-6), x),
        "square_sums": (ops.square_sums, x),
        "swish": (lambda rows: ops.swish(rows, 1.702), x),
        "combine": (lambda rows: ops.combine(x, places[rows[:, 0]]), tokens),
    }
    exact = {
        "rms_norm": x.double() * (x.double().square().mean(1, keepdim=True) + 1e-6).rsqrt() * weight.double(),
        "square_sums": x.double().square().sum(1),
        "swish": x.double() * (1.702 * x.double()).sigmoid(),
        "combine": x.double()[places].sum(1),
    }
    same = {name: rows_as_among_all(*operator) for name, operator in operators.items()}
    errors = {name: relative_error(operator(rows), exact[name]) for name, (operator, rows) in operators.items()}
    record_property("rows_as_among_1024", same)
    record_property("relative_error", errors)
    assert all(all(found.values()) for found in same.values()), same
    assert max(errors.values()) < ERROR[dtype], errors


@pytest.mark.parametrize("experts", [8, 60, 128, 256])
def test_router(experts, device, record_property):
    """Softmax, sigmoid and choice of logits with ties and a NaN."""
    logits = 2 * torch.randn(1024, experts, device=device)
    logits = logits.round() if experts == 60 else logits
    same = {f.__name__: rows_as_among_all(f, logits) for f in (ops.softmax, ops.sigmoid)}
    same["topk"] = rows_as_among_all(lambda rows: ops.topk(rows, 8), logits)
    errors = {
        "softmax": relative_error(ops.softmax(logits), logits.double().softmax(1)),
        "sigmoid": relative_error(ops.sigmoid(logits), logits.double().sigmoid()),
    }
    record_property("rows_as_among_1024", same)
    record_property("relative_error", errors)
    assert all(all(found.values()) for found in same.values()), same
    assert max(errors.values()) < 1e-6
    in_order = logits.cpu().sort(dim=1, descending=True, stable=True).indices[:, :8]
    assert torch.equal(ops.topk(logits, 8).cpu(), in_order)
    logits[0, 0], logits[0, 2] = float("nan"), float("-inf")
    assert ops.topk(logits, experts)[0, -2:].tolist() == [2, 0]


def test_log_softmax(device, record_property):
    """Over a vocabulary: rows alone, ranks' columns by themselves, and log-probs as the trainer asks for them."""
    logits = 4 * torch.randn(129, scaled(151_936, device), device=device)
    whole = ops.log_softmax(logits)
    record_property("rows_as_among_129", same := rows_as_among_all(ops.log_softmax, logits))
    exact = logits.double().log_softmax(1)
    record_property("largest_error", error := float((whole.double() - exact).abs().max()))
    assert all(same.values()), same
    assert error < 1e-5
    kernels, most = ops._kernels_of(logits), logits.amax(1)
    sums = kernels.exponential_sums(logits, most)
    for ranks in (2, 8):
        shares = [kernels.exponential_sums(share, most) for share in logits.chunk(ranks, 1)]
        assert torch.equal(torch.stack(shares).sum(0), sums)
    columns = logits.topk(3, 1).indices[:, 1].contiguous()
    assert torch.equal(ops.log_probs(logits, columns, None, 1.0), whole.gather(1, columns[:, None])[:, 0])


def test_rotary(device, record_property):
    frequencies = torch.tensor([10_000 ** (-2 * i / 128) for i in range(64)], device=device)
    positions = scaled(32_768, device)
    cosines, sines = ops._kernels_of(frequencies).rotary(positions, frequencies)
    angles = (torch.arange(positions, device=device, dtype=torch.float32)[:, None] * frequencies).double()
    assert torch.equal(cosines[:77], ops._kernels_of(frequencies).rotary(77, frequencies)[0])
    error = max(float((cosines - angles.cos()).abs().max()), float((sines - angles.sin()).abs().max()))
    record_property("largest_error", error)
    assert error < 1e-7
    if device.type == "cuda":
        on_cpu = ops._kernels.rotary(positions, frequencies.cpu())
        record_property("as_on_the_cpu", torch.equal(cosines.cpu(), on_cpu[0]) and torch.equal(sines.cpu(), on_cpu[1]))


@DTYPES
@pytest.mark.parametrize("family", HEADS)
def test_decode_is_prefill(family, dtype, device, record_property):
    """One query with all its keys against the same row of the whole: by itself, with others, and as the end of a chunk."""
    heads, kv_heads, width, window, with_sinks = HEADS[family]
    length = 1100 if device.type == "cuda" else 200
    shapes = ((heads, width), (kv_heads, width), (kv_heads, width))
    q, k, v = (torch.randn(length, *shape, device=device).to(dtype) for shape in shapes)
    sinks = torch.randn(heads, device=device) if with_sinks else None
    whole = sink_attention(q, k, v, sinks, cu_seqlens=torch.tensor([0, length]), window=window)

    def rows(first: int, end: int) -> torch.Tensor:
        borders = {"cu_seqlens": torch.tensor([0, end - first]), "cu_seqlens_k": torch.tensor([0, end])}
        return sink_attention(q[first:end], k[:end], v[:end], sinks, **borders, window=window)

    places = [p for p in (0, 1, 15, 63, 64, 127, 128, 199, 300, 777, 1023, 1024, 1099) if p < length]
    same: dict[str, object] = {
        "alone": {p: torch.equal(rows(p, p + 1)[0], whole[p]) for p in places},
        "chunk of 50": {p: torch.equal(rows(max(0, p - 49), p + 1), whole[max(0, p - 49) : p + 1]) for p in places},
    }
    ends = torch.tensor([0, *(p + 1 for p in places)]).cumsum(0)
    packed = sink_attention(
        q[places],
        *(torch.cat([x[: p + 1] for p in places]) for x in (k, v)),
        sinks,
        cu_seqlens=torch.arange(len(places) + 1),
        cu_seqlens_k=ends,
        window=window,
    )
    same["a batch of decodes"] = {p: torch.equal(row, whole[p]) for p, row in zip(places, packed, strict=True)}
    record_property("same", same)
    if device.type == "cuda" and dtype == torch.float32:
        return  # plain torch's products, which promise nothing
    assert all(all(found.values()) for found in same.values()), same


@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_speed_of_products(inputs, outputs, cuda, record_property):
    """bf16, beside torch.mm."""
    weight = matrix(outputs, inputs, torch.bfloat16, cuda, inputs**-0.5)
    found = {}
    for rows in (1, 16, 128, 512, 4096):
        x = matrix(rows, inputs, torch.bfloat16, cuda)
        ours, torchs = microseconds(ops.linear, x, weight), microseconds(torch.mm, x, weight.t())
        found[rows] = {
            "ours": ours,
            "torch": torchs,
            "share_of_torchs_speed": round(torchs / ours, 2),
            "tflops": round(2e-6 * rows * inputs * outputs / ours, 1),
        }
    record_property("microseconds", found)


def test_other_tiles(cuda, record_property, monkeypatch):
    """Microseconds of tiles that the product could have, and whether these give the same bits."""
    kernels = ops._triton()
    inputs, outputs = 2048, 5120
    weight = matrix(outputs, inputs, torch.bfloat16, cuda, inputs**-0.5)
    batches = {rows: matrix(rows, inputs, torch.bfloat16, cuda) for rows in (16, 4096)}
    chosen = {rows: ops.linear(x, weight) for rows, x in batches.items()}
    found = {"torch": {rows: microseconds(torch.mm, x, weight.t()) for rows, x in batches.items()}}
    tiles = [
        kernels._TILES[torch.bfloat16],
        kernels._Tile(128, 128, 64, warps=8, stages=4),
        kernels._Tile(128, 128, 64, warps=8, stages=3, registers=128),
        kernels._Tile(128, 256, 64, warps=8, stages=3),
        kernels._Tile(128, 256, 64, warps=16, stages=3),
        kernels._Tile(64, 256, 64, warps=8, stages=3),
    ]
    for tile in tiles:
        monkeypatch.setitem(kernels._TILES, torch.bfloat16, tile)
        times = {rows: microseconds(ops.linear, x, weight) for rows, x in batches.items()}
        same = {rows: torch.equal(ops.linear(x, weight), chosen[rows]) for rows, x in batches.items()}
        found[str(tile)] = times | {"same bits": same}
        record_property("microseconds", found)


@pytest.mark.parametrize("tokens", [4, 512, 4096])
def test_speed_of_experts(tokens, cuda, record_property):
    """128 experts of Qwen3-30B-A3B, 8 a token, beside torch._grouped_mm, whose ends are on the GPU already."""
    experts, inputs, outputs = 128, 2048, 1536
    chosen = torch.rand(tokens, experts).topk(8, 1).indices.flatten()
    counts = torch.bincount(chosen, minlength=experts)
    x = matrix(8 * tokens, inputs, torch.bfloat16, cuda)
    stacked = (torch.randn(experts, outputs, inputs, device=cuda) / inputs**0.5).bfloat16()
    ends = counts.cumsum(0).to(device=cuda, dtype=torch.int32)
    on_host, weights = counts.tolist(), list(stacked)
    found = {
        "ours": microseconds(lambda: ops.grouped_linear(x, on_host, weights)),
        "torch": microseconds(lambda: torch._grouped_mm(x, stacked.transpose(1, 2), offs=ends)),
    }
    record_property("microseconds", found)


def test_speed_of_other_operators(cuda, record_property):
    x, logits = matrix(4096, 2048, torch.bfloat16, cuda), torch.randn(512, 151_936, device=cuda)
    scores = torch.randn(4096, 128, device=cuda)
    norm = torch.nn.RMSNorm(2048, eps=1e-6, device=cuda, dtype=torch.bfloat16)
    rows, places = matrix(8 * 4096, 2048, torch.bfloat16, cuda), torch.randperm(8 * 4096, device=cuda).view(4096, 8)
    pairs = {
        "rms_norm": (lambda: ops.rms_norm(x, norm.weight, 1e-6), lambda: norm(x)),
        "silu": (lambda: ops.swish(x), lambda: torch.nn.functional.silu(x)),
        "log_softmax, 512 rows": (lambda: ops.log_softmax(logits), lambda: logits.log_softmax(1)),
        "log_softmax, 1 row": (lambda: ops.log_softmax(logits[:1]), lambda: logits[:1].log_softmax(1)),
        "softmax of 128": (lambda: ops.softmax(scores), lambda: scores.softmax(1)),
        "topk of 128": (lambda: ops.topk(scores, 8), lambda: scores.topk(8, 1)),
        "combine": (lambda: ops.combine(rows, places), lambda: rows[places].sum(1)),
    }
    with torch.no_grad():
        found = {name: {"ours": microseconds(a), "torch": microseconds(b)} for name, (a, b) in pairs.items()}
    record_property("microseconds", found)
