"""Stage kernels: the operators against fp64 at the head shapes of the models, compute-sanitizer, and their speed."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_rl.ops import linear_log_probs, masked_log_softmax, sink_attention
from megatron_rl.ops.masked_log_softmax import masked_log_softmax_reference
from megatron_rl.ops.sink_attention import sink_attention_reference

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
VOCABULARIES = {"qwen3": 151_936, "gpt_oss": 201_088}
HEADS = {  # query heads, key heads, width, width of values, window, sinks
    "qwen3": (32, 4, 128, 128, None, False),
    "gpt_oss": (64, 8, 64, 64, 128, True),
    "gpt_oss_full": (64, 8, 64, 64, None, True),
    "moonlight": (16, 16, 192, 128, None, False),
}
# As in tests/ops, where their arithmetic is told; of the largest entry.
OUT = {torch.float32: 2.5e-6, torch.bfloat16: 6e-3}
GRADIENT = {torch.float32: 6e-6, torch.bfloat16: 2e-2}


def scaled(size: int, device: torch.device) -> int:
    """On a CPU a part is enough to try the test."""
    return size if device.type == "cuda" else max(8, size // 64)


@pytest.mark.parametrize("log_rho", [None, -13.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", VOCABULARIES)
def test_masked_log_softmax(family, dtype, log_rho, device, record_property):
    """Values, entropy, coverage and gradient, 512 rows of the whole vocabulary."""
    rows, columns = scaled(512, device), scaled(VOCABULARIES[family], device)
    logits = (5 * torch.randn(rows, columns, device=device)).to(dtype).requires_grad_()
    targets = logits.detach().topk(4, dim=1).indices[:, 2].contiguous()
    targets[::7] = -100
    found = masked_log_softmax(logits, targets, log_rho=log_rho, temperature=0.8, with_entropy=True)
    direction = torch.randn(2, rows, device=device)
    (gradient,) = torch.autograd.grad((found.log_probs, found.entropy), logits, tuple(direction))
    worst = {"log_probs": 0.0, "entropy": 0.0, "coverage": 0.0, "gradient": 0.0}
    for part in torch.arange(rows, device=device).split(64):  # in fp64 a row is 1.6 MB
        # The safe set is that of fp32: scaled logits rounded as the operator rounds them.
        exact = ((logits.detach()[part].float() / 0.8).double() * 0.8).requires_grad_()
        right = masked_log_softmax_reference(exact, targets[part], log_rho=log_rho, temperature=0.8, with_entropy=True)
        assert torch.equal(found.in_support[part], right.in_support)
        sent = tuple(direction[:, part].double())
        (slope,) = torch.autograd.grad((right.log_probs, right.entropy), exact, sent)
        for name in ("log_probs", "entropy", "coverage"):
            ours, theirs = (getattr(one, name).detach().double() for one in (found, right))
            ours = ours[part]
            inside = right.in_support | (targets[part] == -100)
            worst[name] = max(worst[name], float((ours - theirs)[inside].abs().max()))
        rounding = 2e-6 if dtype == torch.float32 else 5e-3
        excess = (gradient[part].double() - slope).abs() - rounding * slope.abs()
        worst["gradient"] = max(worst["gradient"], float(excess.max()))
    record_property("worst", worst)
    assert worst["log_probs"] <= 2e-5 and worst["entropy"] <= 2e-5 and worst["coverage"] <= 1e-5
    assert worst["gradient"] <= 1e-5


@pytest.mark.parametrize(
    ("dtype", "fp32_logits"), [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)]
)
def test_the_head_in_chunks(dtype, fp32_logits, device, record_property):
    """linear_log_probs with gpt-oss's head: log-probs and both gradients against fp64."""
    tokens, width, columns = scaled(512, device), scaled(2880, device), scaled(201_088, device)
    hidden = torch.randn(tokens, width, device=device).to(dtype).requires_grad_()
    weight = (torch.randn(columns, width, device=device) / width**0.5).to(dtype).requires_grad_()
    targets = torch.randint(0, columns, (tokens,), device=device)
    options = {"log_rho": None, "chunk_tokens": tokens // 3, "fp32_logits": fp32_logits}
    found = linear_log_probs(hidden, weight, targets, **options)
    direction = torch.randn(tokens, device=device)
    gradients = torch.autograd.grad(found.log_probs, (hidden, weight), direction)
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    right = (exact[0] @ exact[1].t()).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    slopes = torch.autograd.grad(right, exact, direction.double())
    error = float((found.log_probs.detach().double() - right.detach()).abs().max())
    relative = [float((a.double() - b).abs().max() / b.abs().max()) for a, b in zip(gradients, slopes, strict=True)]
    record_property("worst", {"log_probs": error, "hidden": relative[0], "weight": relative[1]})
    # bf16 logits of about 4 are 1/64 apart: half of that on the target's, and less on the sum's.
    assert error <= (3e-5 if dtype == torch.float32 or fp32_logits else 2e-2)
    assert max(relative) <= (2e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", HEADS)
def test_sink_attention(family, dtype, device, record_property):
    """A pack of uneven sequences: output and every gradient, the sinks' included."""
    heads, kv_heads, width, value_width, window, with_sinks = HEADS[family]
    lengths = [1100, 1, 333, 64, 128, 129, 700] if device.type == "cuda" else [70, 1, 33]
    borders = torch.tensor([0, *lengths]).cumsum(0)
    total = int(borders[-1])
    shapes = ((heads, width), (kv_heads, width), (kv_heads, value_width))
    tensors = [torch.randn(total, *shape, device=device).to(dtype).requires_grad_() for shape in shapes]
    sinks = torch.randn(heads, device=device).requires_grad_() if with_sinks else None
    leaves = [*tensors, *([sinks] if with_sinks else [])]
    out = sink_attention(*tensors, sinks, cu_seqlens=borders, window=window)
    direction = torch.randn_like(out)
    gradients = torch.autograd.grad(out, leaves, direction)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    of_sinks = exact[3] if with_sinks else None
    right = sink_attention_reference(*exact[:3], of_sinks, cu_seqlens=borders, window=window)
    slopes = torch.autograd.grad(right, exact, direction.double())
    names = ("out", "q", "k", "v", "sinks")
    errors = {}
    for name, ours, theirs in zip(names, (out, *gradients), (right, *slopes), strict=False):
        size = theirs.abs().max() if name == "out" else theirs.abs().max().clamp(min=1.0)
        if name == "sinks":  # a sum over tokens that cancels: as exact as the norm of its terms, about sqrt(T)
            size = size + total**0.5
        errors[name] = float((ours.detach().double() - theirs).abs().max() / size)
    record_property("worst", errors)
    assert errors.pop("out") <= OUT[dtype]
    assert max(errors.values()) <= GRADIENT[dtype]


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss"])
def test_an_eighteen_thousand_token_pack(family, device, record_property):
    """As a recipe's micro-batch: one long sequence and many short ones. Some rows against fp64, all gradients finite."""
    heads, kv_heads, width, value_width, window, with_sinks = HEADS[family]
    lengths = [16_384, *[64] * 32] if device.type == "cuda" else [256, 8, 8]
    borders = torch.tensor([0, *lengths]).cumsum(0)
    total = int(borders[-1])
    shapes = ((heads, width), (kv_heads, width), (kv_heads, value_width))
    q, k, v = (torch.randn(total, *s, device=device).bfloat16().requires_grad_() for s in shapes)
    sinks = torch.randn(heads, device=device).requires_grad_() if with_sinks else None
    before = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    out = sink_attention(q, k, v, sinks, cu_seqlens=borders, window=window)
    out.backward(torch.randn_like(out))
    if device.type == "cuda":
        record_property("peak_mb", round((torch.cuda.max_memory_allocated() - before) / 1e6))
    assert all(bool(x.grad.isfinite().all()) for x in (q, k, v, *([sinks] if with_sinks else [])))
    for row in (0, lengths[0] // 2, lengths[0] - 1, total - 1):
        start = 0 if row < lengths[0] else total - lengths[-1]
        first = max(start, row + 1 - window) if window else start
        keys, values = (x.detach()[first : row + 1].double().repeat_interleave(heads // kv_heads, 1) for x in (k, v))
        scores = torch.einsum("hd,jhd->hj", q.detach()[row].double(), keys) * width**-0.5
        if with_sinks:
            scores = torch.cat([scores, sinks.detach().double()[:, None]], 1)
        weights = scores.softmax(-1)[:, : len(keys)]
        right = torch.einsum("hj,jhd->hd", weights, values)
        assert float((out.detach()[row].double() - right).abs().max() / right.abs().max()) <= OUT[torch.bfloat16]


def test_runs_are_bit_identical(device):
    logits = torch.randn(64, scaled(151_936, device), device=device).bfloat16()
    targets = torch.zeros(64, dtype=torch.int64, device=device)
    first, again = (masked_log_softmax(logits, targets, log_rho=-13.0, with_entropy=True) for _ in range(2))
    assert torch.equal(first.log_probs, again.log_probs) and torch.equal(first.entropy, again.entropy)
    q, k, v = (torch.randn(300, h, 64, device=device).bfloat16() for h in (8, 2, 2))
    sinks, borders = torch.randn(8, device=device), torch.tensor([0, 100, 300])
    assert torch.equal(*(sink_attention(q, k, v, sinks, cu_seqlens=borders) for _ in range(2)))


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_compute_sanitizer_finds_nothing(tool, cuda, record_property):
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if sanitizer is None:
        pytest.skip("no compute-sanitizer on the PATH")
    # Ours alone: the libraries' kernels are many, and not ours to mend.
    ours = [f"--kernel-name=kernel_substring={name}" for name in ("masked_log_softmax", "sink_attention")]
    command = [sanitizer, "--tool", tool, *ours, "--error-exitcode", "86"]
    done = subprocess.run(
        [*command, sys.executable, str(HERE / "sanitized.py")],
        capture_output=True,
        text=True,
        timeout=400,
        # An allocation a tensor: within torch's pools an access out of bounds hits other tensors, unseen.
        env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    )
    output = done.stdout + done.stderr
    summary = re.findall(r"={9} (?:ERROR|RACECHECK) SUMMARY: .*", output)
    record_property("summary", summary)
    if not summary and re.search(r"not supported|unable to|failed to initialize", output, re.IGNORECASE):
        pytest.skip(f"compute-sanitizer cannot run here: {output[-200:]}")
    assert done.returncode == 0 and summary, output[-3000:]
    assert "ran" in output


def test_speed_beside_the_floor(cuda, tmp_path, record_property):
    """benchmarks/kernels.py with its own competitors; figures, no bound."""
    out = tmp_path / "kernels.json"
    command = [sys.executable, "benchmarks/kernels.py", "--json", str(out), "--rounds", "7"]
    subprocess.run(command, cwd=REPOSITORY, check=True, timeout=420)
    record_property("kernels", json.loads(out.read_text()))
