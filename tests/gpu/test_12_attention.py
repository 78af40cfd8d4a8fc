"""Stage attention: the kernels for attention in bf16 that are installed, against fp64, repeated, and beside the floor.

torch: FlashAttention 2 of torch with our sink around it; FA4: FlashAttention 4 with its own sinks, as `sink_attention` calls
it; TE: Transformer Engine's, which is cuDNN's. FlashAttention 4 compiles 24 kernels here, 1 to 4 s each; how many and how
long is recorded. Times are of the GPU alone: the host runs ahead of it, behind a kernel that waits.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch

from megatron_rl.ops import flash, sink_attention
from megatron_rl.ops.sink_attention import sink_attention_reference

TOKENS = (8192, 16_384)
TFLOPS = 790.0
"""A matrix product of bf16 reaches so many on an H100 or H200: 80 % of the data sheet's."""
# As in tests/gpu/test_2_kernels.py, of the largest entry.
OUT, GRADIENT = 6e-3, 2e-2


class Heads(NamedTuple):
    query: int
    key: int
    width: int
    window: int | None
    with_sinks: bool


HEADS = {
    "gpt_oss_full": Heads(64, 8, 64, None, True),
    "gpt_oss": Heads(64, 8, 64, 128, True),
    "qwen3": Heads(32, 4, 128, None, False),
}
Attention = Callable[..., torch.Tensor]
"""(q, k, v, borders on the CPU) -> [T, H, D]."""


class Kernel(NamedTuple):
    name: str
    make: Callable[[Heads, torch.Tensor | None], Attention]
    """(heads, their sinks) -> attention."""


@pytest.fixture(autouse=True)
def cudnn_alone(monkeypatch):
    """Transformer Engine would take FlashAttention 4 too where there are no sinks."""
    for name, value in (("NVTE_FUSED_ATTN", "1"), ("NVTE_FLASH_ATTN", "0"), ("NVTE_UNFUSED_ATTN", "0")):
        monkeypatch.setenv(name, value)


@pytest.fixture(params=["torch", "FA4", "TE"])
def kernel(request) -> Kernel:
    name = request.param
    if name != "torch":
        request.getfixturevalue("cuda")
    if name == "TE":
        pytest.importorskip("transformer_engine.pytorch", exc_type=ImportError)
        return Kernel(name, transformer_engine)
    if name not in flash.installed():
        pytest.skip("no flash-attn-4")
    return Kernel(name, partial(ours, name))


def ours(name: flash.FlashImpl, heads: Heads, sinks: torch.Tensor | None) -> Attention:
    options = {"window": heads.window, "flash_attention": name}
    return lambda q, k, v, borders, **more: sink_attention(q, k, v, sinks, cu_seqlens=borders, **options, **more)


def transformer_engine(heads: Heads, sinks: torch.Tensor | None) -> Attention:
    module = sys.modules["transformer_engine.pytorch"].DotProductAttention(
        heads.query,
        heads.width,
        num_gqa_groups=heads.key,
        attention_dropout=0.0,
        qkv_format="thd",
        attn_mask_type="padding_causal",
        window_size=(heads.window - 1, 0) if heads.window else (-1, 0),
        softmax_type="vanilla" if sinks is None else "learnable",
    )
    if sinks is not None:
        module.softmax_offset = sinks

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, borders: torch.Tensor) -> torch.Tensor:
        cu, longest = borders.to(q.device, torch.int32), int(borders.diff().max())
        lengths = {"cu_seqlens_q": cu, "cu_seqlens_kv": cu, "max_seqlen_q": longest, "max_seqlen_kv": longest}
        return module(q, k, v, **lengths).view(len(q), heads.query, heads.width)

    return attention


def inputs(heads: Heads, queries: int, keys: int, device: torch.device) -> list[torch.Tensor]:
    """q, k, v and, where there are, sinks: leaves."""
    shapes = ((queries, heads.query), (keys, heads.key), (keys, heads.key))
    tensors = [torch.randn(*shape, heads.width, device=device).bfloat16().requires_grad_() for shape in shapes]
    sinks = [torch.nn.Parameter(torch.randn(heads.query, device=device))] if heads.with_sinks else []
    return [*tensors, *sinks]


def sinks_of(leaves: list[torch.Tensor]) -> torch.Tensor | None:
    return leaves[3] if len(leaves) == 4 else None


def lengths_as_borders(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


RESULTS = ("out", "q", "k", "v", "sinks")


@contextlib.contextmanager
def deterministic(wanted: bool = True) -> Iterator[None]:
    torch.use_deterministic_algorithms(wanted)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def errors(
    attention: Attention,
    heads: Heads,
    leaves: list[torch.Tensor],
    borders: torch.Tensor,
    repeatable: bool = False,
    **more: Any,
) -> dict[str, float]:
    """Largest differences of the output and each gradient from fp64, over the largest entry."""
    with deterministic(repeatable):
        out = attention(*leaves[:3], borders, **more)
        direction = torch.randn_like(out)
        gradients = torch.autograd.grad(out, leaves, direction)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    q, k, v, *_ = exact
    right = sink_attention_reference(q, k, v, sinks_of(exact), cu_seqlens=borders, window=heads.window, **more)
    slopes = torch.autograd.grad(right, exact, direction.double())
    found = {}
    for name, a, b in zip(RESULTS, (out, *gradients), (right, *slopes), strict=False):
        assert a.shape == b.shape
        size = b.detach().abs().max().clamp(min=0.0 if name == "out" else 1.0)
        if name == "sinks":  # a sum over tokens that cancels: as exact as the norm of its terms, about sqrt(T)
            size = size + len(out) ** 0.5
        found[name] = float((a.detach().double() - b.detach()).abs().max() / size)
    return found


def compiled() -> int:
    """Kernels that FlashAttention 4 has compiled in this process."""
    from megatron_rl.ops.flash_attention_4 import _interface

    caches = [part.compile_cache.cache for part in vars(_interface()).values() if hasattr(part, "compile_cache")]
    return sum(len(cache) for cache in caches)


@contextlib.contextmanager
def compilations(kernel: Kernel, record_property: Callable[[str, object], None]) -> Iterator[None]:
    """Record how many kernels FlashAttention 4 compiles in the block, and how long that and all else takes."""
    if kernel.name != "FA4":
        yield
        return
    before, start = compiled(), time.perf_counter()
    yield
    record_property("compiled", {"kernels": compiled() - before, "seconds": round(time.perf_counter() - start, 1)})


@pytest.mark.parametrize("family", HEADS)
def test_against_fp64(family, kernel, device, record_property):
    """A pack of uneven sequences: output and every gradient, the sinks' included."""
    heads = HEADS[family]
    lengths = [1100, 1, 333, 64, 128, 129, 700] if device.type == "cuda" else [70, 1, 33]
    leaves = inputs(heads, sum(lengths), sum(lengths), device)
    with compilations(kernel, record_property):
        worst = errors(kernel.make(heads, sinks_of(leaves)), heads, leaves, lengths_as_borders(lengths))
    record_property("worst", dict(worst))
    assert worst.pop("out") <= OUT
    assert max(worst.values()) <= GRADIENT


def clock(device: torch.device) -> Any:
    """A moment, of the GPU's own clock where there is one."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def milliseconds(start: Any, end: Any) -> float:
    return 1000 * (end - start) if isinstance(start, float) else start.elapsed_time(end)


def medians(attention: Attention, leaves: list[torch.Tensor], borders: torch.Tensor, rounds: int) -> dict[str, float]:
    """ms of forward and backward on the GPU, and of the host's part in both together."""
    device, direction, found = leaves[0].device, torch.randn_like(leaves[0]), []
    for _ in range(rounds + 3):
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda._sleep(20_000_000)  # about 10 ms, in which the host launches all of it
        before = time.perf_counter()
        start = clock(device)
        out = attention(*leaves[:3], borders)
        middle = clock(device)
        torch.autograd.grad(out, leaves, direction)
        end, host = clock(device), 1000 * (time.perf_counter() - before)
        if device.type == "cuda":
            torch.cuda.synchronize()
        found.append((milliseconds(start, middle), milliseconds(middle, end), host))
    columns = zip(*found[3:], strict=True)
    return {
        name: round(statistics.median(c), 4) for name, c in zip(("forward", "backward", "host"), columns, strict=True)
    }


@pytest.fixture(scope="module")
def bytes_per_ms(device) -> float:
    """Speed of a copy, read and written."""
    a, b = torch.empty(2, (1 << 30 if device.type == "cuda" else 1 << 22), dtype=torch.uint8, device=device).unbind()
    times = []
    for _ in range(8):
        start = clock(device)
        a.copy_(b)
        end = clock(device)
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(milliseconds(start, end))
    return 2 * a.numel() / statistics.median(times[3:])


def floors(heads: Heads, tokens: int, bytes_per_ms: float) -> dict[str, float]:
    """Least ms by arithmetic (two products of all pairs forward, five backward) and by what is read and written once."""
    hidden = max(0, tokens - (heads.window or tokens))
    pairs = tokens * (tokens + 1) // 2 - hidden * (hidden + 1) // 2
    product = 2 * pairs * heads.width * heads.query / (TFLOPS * 1e9)
    queries, keys = (2 * tokens * number * heads.width for number in (heads.query, heads.key))
    # Read q, k, v and write out; read q, k, v, out and its gradient, and write three gradients.
    moved = 2 * queries + 2 * keys, 4 * queries + 4 * keys
    return {
        "forward flops": 2 * product,
        "backward flops": 5 * product,
        "forward bytes": moved[0] / bytes_per_ms,
        "backward bytes": moved[1] / bytes_per_ms,
    }


@pytest.mark.parametrize("family", HEADS)
def test_speed(family, kernel, device, bytes_per_ms, record_property):
    """Medians beside the floor for one sequence of so many tokens; figures, no bound."""
    heads = HEADS[family]
    record_property("copy_gb_per_s", round(bytes_per_ms / 1e6, 1))
    for tokens in TOKENS if device.type == "cuda" else (256,):
        leaves = inputs(heads, tokens, tokens, device)
        attention, borders = kernel.make(heads, sinks_of(leaves)), torch.tensor([0, tokens])
        times = medians(attention, leaves, borders, 20 if device.type == "cuda" else 3)
        floor = floors(heads, tokens, bytes_per_ms)
        least = sum(max(floor[f"{way} flops"], floor[f"{way} bytes"]) for way in ("forward", "backward"))
        total = times["forward"] + times["backward"]
        tflops = (floor["forward flops"] + floor["backward flops"]) * TFLOPS / total
        figures = {"ms": times, "floor_ms": {name: round(value, 4) for name, value in floor.items()}}
        record_property(
            f"{tokens} tokens", figures | {"over the floor": round(total / least, 2), "tflops": round(tflops, 1)}
        )
        assert total > 0


@pytest.mark.parametrize("family", HEADS)
def test_repeated(family, kernel, device, record_property):
    """Which results have the same bits each time; of ours the output, and the gradients too where torch is asked for it."""
    heads, lengths = HEADS[family], [3000, 1, 1095] if device.type == "cuda" else [40, 1, 23]
    leaves, borders = inputs(heads, sum(lengths), sum(lengths), device), lengths_as_borders(lengths)
    attention, direction = kernel.make(heads, sinks_of(leaves)), torch.randn_like(leaves[0])

    def run() -> list[torch.Tensor]:
        out = attention(*leaves[:3], borders)
        return [out, *torch.autograd.grad(out, leaves, direction)]

    runs = [run() for _ in range(5)]
    same = [all(torch.equal(a, b) for b in others) for a, *others in zip(*runs, strict=True)]
    record_property("same bits", dict(zip(RESULTS, same, strict=False)))
    if kernel.name == "TE":  # its sinks know no determinism
        return
    assert same[0]  # of the output
    with deterministic(), compilations(kernel, record_property):
        runs = [run() for _ in range(5)]
        record_property("deterministic_ms", medians(attention, leaves, borders, 10 if device.type == "cuda" else 1))
    assert all(torch.equal(a, b) for a, *others in zip(*runs, strict=True) for b in others)


UNEVEN = {  # lengths of queries, of keys
    "one token": ([1], None),
    "short ones": ([3, 0, 1, 20], None),
    "one sequence": ([500], None),
    "keys before the queries": ([0, 5, 40, 1, 0, 200], [7, 5, 140, 60, 0, 333]),
    "300 sequences": ([3] * 300, None),  # above 256 FlashAttention 4 has other kernels, which look sequences up
}


@pytest.mark.parametrize("family", ["gpt_oss", "gpt_oss_full"])
def test_borders(family, kernel, device, record_property):
    """Empty sequences, more keys than queries, few tokens, many sequences: with and without determinism, in turn."""
    if kernel.name == "TE":
        pytest.skip("of sink_attention's own borders")
    heads, found = HEADS[family], {}
    for case, (lengths, key_lengths) in UNEVEN.items():
        if case == "300 sequences" and family != "gpt_oss":
            continue
        leaves = inputs(heads, sum(lengths), sum(key_lengths or lengths), device)
        more = {} if key_lengths is None else {"cu_seqlens_k": lengths_as_borders(key_lengths)}
        attention = kernel.make(heads, sinks_of(leaves))
        for way, repeatable in (("", False), (", deterministic", True)):
            worst = errors(attention, heads, leaves, lengths_as_borders(lengths), repeatable, **more)
            found[case + way] = worst
        if kernel.name == "FA4":
            record_property(f"kernels after {case}", compiled())
    record_property("worst", found)
    assert {case: worst for case, worst in found.items() if worst["out"] > OUT or max(worst.values()) > GRADIENT} == {}
