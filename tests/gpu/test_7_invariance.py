"""Stage invariance: whether what an operator gives a row depends on the rows beside it. Bits are compared, not values.

Where it does, the engine and the trainer differ even on the same weights, since their batches do. Our operators must not;
of the libraries' ones it is recorded which do.
"""

from __future__ import annotations

import importlib.util

import pytest
import torch

from megatron_rl.ops import masked_log_softmax, sink_attention

HEADS = {  # query heads, key heads, width, window, sinks
    "qwen3": (32, 4, 128, None, False),
    "gpt_oss": (64, 8, 64, 128, True),
    "gpt_oss_full": (64, 8, 64, None, True),
}
ROWS = (1, 2, 7, 16, 64, 129, 512)


def scaled(size: int, device: torch.device) -> int:
    """On a CPU a part is enough to try the test."""
    return size if device.type == "cuda" else max(8, size // 64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_of_logits_alone(dtype, device):
    """Log-prob, entropy and coverage of pruned rows: each alone, and all together."""
    logits = (4 * torch.randn(16, scaled(151_936, device), device=device)).to(dtype)
    targets = logits.topk(3, dim=1).indices[:, 1].contiguous()
    options = {"log_rho": -13.0, "temperature": 0.8, "with_entropy": True}
    together = masked_log_softmax(logits, targets, **options)
    for row in range(len(logits)):
        alone = masked_log_softmax(logits[row : row + 1], targets[row : row + 1], **options)
        for name in ("log_probs", "entropy", "coverage"):
            assert torch.equal(getattr(alone, name)[0], getattr(together, name)[row]), (row, name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", HEADS)
def test_a_sequence_alone(family, dtype, device, record_property):
    """Attention of a sequence in a pack, by itself, and of its first half: the same bits for the same tokens."""
    heads, kv_heads, width, window, with_sinks = HEADS[family]
    lengths = [333, 1024, 1, 640, 77] if device.type == "cuda" else [33, 64, 1, 40, 7]
    borders = torch.tensor([0, *lengths]).cumsum(0)
    shapes = ((heads, width), (kv_heads, width), (kv_heads, width))
    tensors = [torch.randn(int(borders[-1]), *shape, device=device).to(dtype) for shape in shapes]
    sinks = torch.randn(heads, device=device) if with_sinks else None
    together = sink_attention(*tensors, sinks, cu_seqlens=borders, window=window)
    same = {"alone": True, "first half": True}
    for start, length in zip(borders[:-1].tolist(), lengths, strict=True):
        for case, part in (("alone", length), ("first half", (length + 1) // 2)):
            mine = [tensor[start : start + part] for tensor in tensors]
            out = sink_attention(*mine, sinks, cu_seqlens=torch.tensor([0, part]), window=window)
            same[case] &= torch.equal(out, together[start : start + part])
    record_property("same", same)
    assert same["alone"]
    # Causal: a query's sum should not depend on how far its sequence goes on. In fp32 a GPU has plain torch's products.
    assert same["first half"] or (device.type == "cuda" and dtype == torch.float32)


def _equal_rows(product, rows: torch.Tensor, weight: torch.Tensor) -> dict[int, bool]:
    """For each number of rows: whether they have the bits that they have among all."""
    whole = product(rows, weight)
    return {count: torch.equal(product(rows[:count], weight), whole[:count]) for count in ROWS if count <= len(rows)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inputs", "outputs"), [(2048, 5120), (768, 2048), (2048, 128), (2880, 5120)])
def test_products(inputs, outputs, dtype, device, record_property):
    """torch's own product is recorded; Megatron's batch-invariant kernel must keep its word."""
    rows = torch.randn(1024, inputs, device=device).to(dtype)
    weight = (torch.randn(inputs, outputs, device=device) / inputs**0.5).to(dtype)
    found = {"torch": _equal_rows(torch.mm, rows, weight)}
    if device.type == "cuda":
        from megatron.core.transformer.custom_layers.batch_invariant_kernels import matmul_persistent

        found["megatron"] = _equal_rows(matmul_persistent, rows, weight)
        seconds = {
            name: _microseconds(f, rows, weight) for name, f in (("torch", torch.mm), ("megatron", matmul_persistent))
        }
        record_property("microseconds", seconds)
        exact = rows.double() @ weight.double()
        errors = {
            name: float((f(rows, weight).double() - exact).norm() / exact.norm())
            for name, f in (("torch", torch.mm), ("megatron", matmul_persistent))
        }
        record_property("relative_error", errors)
    record_property("rows_as_among_1024", found)
    assert all(found.get("megatron", {0: True}).values())


def _microseconds(product, *inputs: torch.Tensor) -> float:
    """Median of 20 calls."""
    found = []
    for _ in range(23):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        product(*inputs)
        end.record()
        end.synchronize()
        found.append(1000 * start.elapsed_time(end))
    return sorted(found[3:])[10]


def test_grouped_products(cuda, record_property):
    """Experts' products in one kernel: a token alone in its group, and among others of its expert."""
    experts, inputs, outputs = 16, 2048, 1536
    counts = torch.randint(0, 200, (experts,))
    counts[0] = 97
    rows = torch.randn(int(counts.sum()), inputs, device=cuda).bfloat16()
    weight = (torch.randn(experts, inputs, outputs, device=cuda) / inputs**0.5).bfloat16()
    ends = counts.cumsum(0).to(device=cuda, dtype=torch.int32)
    whole = torch._grouped_mm(rows, weight, offs=ends)
    same = {}
    for count in (1, 8, 40):
        few = counts.clone()
        few[0] = count
        taken = torch.cat([rows[:count], rows[int(counts[0]) :]])
        out = torch._grouped_mm(taken, weight, offs=few.cumsum(0).to(device=cuda, dtype=torch.int32))
        same[count] = torch.equal(out[:count], whole[:count]) and torch.equal(out[count:], whole[int(counts[0]) :])
    record_property("rows_of_an_expert_as_among_97", same)


def test_softmax_and_norm(device, record_property):
    """torch's log-softmax over a vocabulary and its RMS norm."""
    logits = torch.randn(64, scaled(151_936, device), device=device)
    hidden = torch.randn(512, 2048, device=device).bfloat16()
    norm = torch.nn.RMSNorm(2048, device=device, dtype=torch.bfloat16)
    found = {
        "log_softmax": torch.equal(logits[:1].log_softmax(-1), logits.log_softmax(-1)[:1]),
        "rms_norm": torch.equal(norm(hidden[:1]), norm(hidden)[:1]),
    }
    record_property("first_row_alone", found)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton")
def test_megatrons_log_softmax(cuda):
    from megatron.core.transformer.custom_layers.batch_invariant_kernels import log_softmax

    logits = torch.randn(64, 151_936, device=cuda)
    assert torch.equal(log_softmax(logits[:1]), log_softmax(logits)[:1])
