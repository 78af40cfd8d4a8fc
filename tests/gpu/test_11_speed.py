"""Stage speed: each operator that was made faster beside its former way, in turns: ms, launches, memory, errors, the floor.

The experts of a layer in one product, the sum of the head's gradient, what follows from the log-softmax's sums, the norm of the
gradients; at the widths of Qwen3-30B-A3B and gpt-oss-20b. The floor is what the products (at the speed of a large one) and the
bytes that must be moved (at that of a copy) take, both measured here.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron.core import utils as megatron_utils

from megatron_rl.models.experts import GroupedExperts, Groups, _GroupedLinear
from megatron_rl.ops import linear_log_probs, masked_log_softmax, matmuls
from megatron_rl.ops import masked_log_softmax_torch as plain
from megatron_rl.ops.extensions import masked_log_softmax as compiled
from megatron_rl.ops.masked_log_softmax import check_targets, masked_log_softmax_reference
from megatron_rl.ops.matmuls import HeadGradients, scaled, token_chunks
from megatron_rl.platform.megatron import gradients

BF16 = torch.bfloat16
EXPERTS = {  # hidden size, inner size, experts, tokens times experts of a token, biases
    "qwen3": (2048, 768, 128, 16_384 * 8, False),
    "gpt_oss": (2880, 2880, 32, 16_384 * 4, True),
}
HEADS = {"qwen3": (2048, 151_936), "gpt_oss": (2880, 201_088)}
ROUNDS = 7
Way = Callable[[], Any]


def clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def milliseconds(ways: dict[str, Way], device: torch.device, rounds: int = ROUNDS) -> dict[str, float]:
    """Medians of calls in turns, from an idle device to an idle device; the first two rounds are not counted."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 2):
        for name, way in ways.items():
            start = clock(device)
            way()
            times[name].append(1e3 * (clock(device) - start))
    return {name: round(statistics.median(found[2:]), 4) for name, found in times.items()}


def profiled(way: Way, device: torch.device) -> dict[str, float]:
    """Launches, milliseconds that the device is busy, reads and waits of the host, and the peak of memory."""
    gpu, activity = device.type == "cuda", torch.profiler.ProfilerActivity
    before = torch.cuda.memory_allocated() if gpu else 0
    if gpu:
        torch.cuda.reset_peak_memory_stats()
    with torch.profiler.profile(activities=[activity.CPU, *([activity.CUDA] if gpu else [])]) as profile:
        kept = way()
        clock(device)
    events = list(profile.events() or [])
    launched = [e for e in events if str(e.device_type).endswith("CUDA")]
    del kept
    return {
        "launches": len(launched),
        "busy_ms": round(sum(e.time_range.elapsed_us() for e in launched) / 1e3, 4),
        "reads": sum(e.name == "aten::_local_scalar_dense" for e in events),
        "waits": sum(e.name == "cudaStreamSynchronize" for e in events),
        "peak_mb": round((torch.cuda.max_memory_allocated() - before) / 1e6) if gpu else 0,
    }


def compare(ways: dict[str, Way], device: torch.device, floor: float) -> dict[str, dict[str, float]]:
    """`milliseconds` and `profiled` of each way, and its time over the floor in ms."""
    times = milliseconds(ways, device)
    shares = {name: round(ms / floor, 2) if floor else 0.0 for name, ms in times.items()}
    return {
        name: {"ms": times[name], "over_floor": shares[name], **profiled(way, device)} for name, way in ways.items()
    }


@pytest.fixture(scope="module")
def floor(device) -> Callable[..., float]:
    """Ms that so many operations of products in bf16 and so many bytes moved take at least."""
    size = 8192 if device.type == "cuda" else 64
    a, b = (torch.randn(size, size, device=device, dtype=BF16) for _ in range(2))
    source, target = (torch.empty(1 << 28 if size > 64 else 1 << 16, device=device) for _ in range(2))
    found = milliseconds({"product": lambda: a @ b, "copy": lambda: target.copy_(source)}, device)
    operations, bytes_moved = 2 * size**3 / found["product"], 2 * source.nbytes / found["copy"]
    return lambda flops=0.0, moved=0.0: flops / operations + moved / bytes_moved


def relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


# -- experts -----------------------------------------------------------------------------------------------------------


class Experts:
    """Both linear layers of a layer's experts, one of which has no tokens; the activation between them is left out."""

    def __init__(self, model: str, device: torch.device) -> None:
        hidden, inner, experts, rows, biased = EXPERTS[model]
        if device.type != "cuda":
            hidden, inner, experts, rows = 64, 48, 8, 200
        shares = torch.rand(experts) + 0.1
        shares[1] = 0.0
        self.counts = torch.multinomial(shares, rows, replacement=True).bincount(minlength=experts).tolist()
        self.shapes = [(2 * inner, hidden), (hidden, inner)]

        def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return scale * torch.randn(*shape, device=device, dtype=BF16)

        self.inputs = [normal(rows, width).requires_grad_() for _, width in self.shapes]
        self.sent = [normal(rows, out) for out, _ in self.shapes]
        self.weights = [
            [normal(out, width, scale=width**-0.5).requires_grad_() for _ in range(experts)]
            for out, width in self.shapes
        ]
        self.biases = [normal(experts, out).requires_grad_() if biased else None for out, _ in self.shapes]
        self.scales = [None, torch.rand(rows, 1, device=device).requires_grad_() if biased else None]
        self.groups = {
            "now": Groups(self.counts, matmuls.ends_of(self.counts, device)),
            "former": Groups(self.counts, None),
        }

    def forward(self, way: str) -> list[Any]:
        layers = zip(self.inputs, self.biases, self.scales, self.weights, strict=True)
        return [
            _GroupedLinear.apply(x, self.groups[way], biases, scales, GroupedExperts.product, *weights)
            for x, biases, scales, weights in layers
        ]

    def leaves(self) -> list[torch.Tensor]:
        others = [x for x in (*self.biases, *self.scales) if x is not None]
        return [*self.inputs, *self.weights[0], *self.weights[1], *others]

    def both(self, way: str) -> list[torch.Tensor]:
        """Outputs, and the gradients of `leaves`."""
        out = self.forward(way)
        return [*(x.detach() for x in out), *torch.autograd.grad(out, self.leaves(), self.sent)]

    def work(self) -> float:
        """Operations of a forward's products."""
        return sum(2.0 * len(x) * out * width for x, (out, width) in zip(self.inputs, self.shapes, strict=True))

    def bytes_moved(self) -> float:
        """Bytes of inputs, outputs and weights, each moved once by a forward."""
        tensors = [*self.inputs, *self.sent, *self.weights[0], *self.weights[1]]
        return sum(x.nbytes for x in tensors)

    def exact(self, layer: int, expert: int) -> tuple[slice, list[torch.Tensor]]:
        """An expert's rows; their outputs, the gradients of their inputs and of the weight, in fp64."""
        start = sum(self.counts[:expert])
        rows = slice(start, start + self.counts[expert])
        x, sent = (t.detach()[rows].double() for t in (self.inputs[layer], self.sent[layer]))
        weight, biases, scales = self.weights[layer][expert].detach().double(), self.biases[layer], self.scales[layer]
        out = x @ weight.t()
        if biases is not None:
            bias = biases.detach()[expert].double()
            out += bias if scales is None else scales.detach()[rows].double() * bias
        return rows, [out, sent @ weight, sent.t() @ x]

    def errors(self, found: list[torch.Tensor]) -> dict[str, float]:
        """Errors of `both` for the expert with most tokens. An expert without tokens has a gradient of zeros."""
        count, most = len(self.counts), max(range(len(self.counts)), key=self.counts.__getitem__)
        errors = {}
        for layer in range(2):
            of_weights = found[4 + layer * count : 4 + (layer + 1) * count]
            assert not of_weights[1].any(), f"fc{layer + 1}: an expert without tokens has a gradient"
            rows, exact = self.exact(layer, most)
            ours = (found[layer][rows], found[2 + layer][rows], of_weights[most])
            for name, a, b in zip(("out", "input", "weight"), ours, exact, strict=True):
                errors[f"fc{layer + 1} {name}"] = relative(a, b)
        return errors


@pytest.mark.parametrize("model", EXPERTS)
def test_experts_of_a_layer(model, device, floor, record_property):
    experts = Experts(model, device)
    if device.type == "cuda":
        assert matmuls.served(experts.inputs[0], len(experts.counts))
    found = {way: experts.both(way) for way in experts.groups}
    errors = {way: experts.errors(tensors) for way, tensors in found.items()}
    record_property("errors", errors)
    others = slice(4 + 2 * len(experts.counts), None)
    apart = {}
    for name, now, former in zip(
        ("out 1", "out 2", "input 1", "input 2", "bias 1", "bias 2", "scales"),
        [*found["now"][:4], *found["now"][others]],
        [*found["former"][:4], *found["former"][others]],
        strict=False,  # not all have biases
    ):
        apart[name] = relative(now, former.double())
    record_property("now_beside_former", apart)
    del found, now, former
    record_property("tokens_of_experts", {"most": max(experts.counts), "least": min(experts.counts)})
    whole, part = (floor(times * experts.work(), times * experts.bytes_moved()) for times in (3, 1))
    ways: dict[str, Way] = {way: lambda way=way: experts.both(way) for way in experts.groups}
    record_property("forward_and_backward", {"floor_ms": round(whole, 4), **compare(ways, device, whole)})
    with torch.no_grad():
        ways = {way: lambda way=way: experts.forward(way) for way in experts.groups}
        record_property("forward", {"floor_ms": round(part, 4), **compare(ways, device, part)})
        stacks: dict[str, Way] = {f"fc{i + 1}": lambda w=w: torch.stack(w) for i, w in enumerate(experts.weights)}
        moved = {f"fc{i + 1}": floor(moved=2 * sum(x.nbytes for x in w)) for i, w in enumerate(experts.weights)}
        record_property("stack", {"ms": milliseconds(stacks, device), "floor_ms": moved})
    # Rounding to bf16 is 1.7e-3 of a result's norm, once or twice; sums are in fp32.
    assert all(error < 4e-3 for of_way in errors.values() for error in of_way.values()), errors
    assert all(value < 8e-3 for value in apart.values()), apart


# -- the head ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", HEADS)
def test_the_gradient_of_the_heads_weight(model, device, floor, record_property):
    """The backward of four chunks: products of both gradients, their sums, and what scales and rounds them."""
    (width, columns), tokens, size = HEADS[model], 8192, 2048
    if device.type != "cuda":
        width, columns, tokens, size = 64, 512, 64, 16
    hidden = torch.randn(tokens, width, device=device, dtype=BF16)
    weight = torch.randn(columns, width, device=device, dtype=BF16)
    slopes = torch.randn(size, columns, device=device, dtype=BF16)
    factor, chunks = torch.full((1,), 0.37, device=device), token_chunks(tokens, size)

    def now() -> tuple[torch.Tensor, torch.Tensor]:
        found = HeadGradients(hidden, weight, len(chunks), of_weight=True)
        for chunk in chunks:
            found.add(chunk, hidden[chunk], weight, slopes)
        assert found.weight is not None
        return found.weight, scaled(found.weight, factor, BF16)

    def former() -> tuple[torch.Tensor, torch.Tensor]:
        of_hidden, total = torch.empty_like(hidden), torch.zeros_like(weight, dtype=torch.float32)
        for chunk in chunks:
            of_hidden[chunk] = slopes @ weight
            total += slopes.t() @ hidden[chunk]
        return total, (total * factor).to(BF16)

    ways: dict[str, Way] = {"now": now, "former": former}
    few = torch.arange(0, columns, max(1, columns // 256), device=device)
    exact = slopes[:, few].double().t() @ hidden.double().unflatten(0, (-1, size)).sum(0)
    errors = {}
    for name, way in ways.items():
        total, rounded = (x[few] for x in way())
        errors[name] = {"sum": relative(total, exact), "rounded": relative(rounded, 0.37 * exact)}
    record_property("errors", errors)
    products = floor(4.0 * tokens * columns * width)
    last = floor(moved=6.0 * columns * width)
    record_property("backward", {"floor_ms": round(products + last, 4), **compare(ways, device, products + last)})
    sums = torch.randn(columns, width, device=device)
    ways = {"now": lambda: scaled(sums, factor, BF16), "former": lambda: (sums * factor).to(BF16)}
    record_property("scale_and_round", {"floor_ms": round(last, 4), **compare(ways, device, last)})
    assert torch.equal(ways["now"](), ways["former"]())
    targets = torch.randint(0, columns, (tokens,), device=device)
    leaves = (hidden.requires_grad_(), weight.requires_grad_())

    def whole() -> tuple[torch.Tensor, ...]:
        loss = lambda log_probs, *_: -log_probs.sum() / tokens  # noqa: E731
        out = linear_log_probs(hidden, weight, targets, log_rho=None, chunk_tokens=size, token_loss=loss)
        return torch.autograd.grad(loss(out.log_probs), leaves)

    record_property("linear_log_probs_ms", milliseconds({"now": whole}, device, 3))
    if device.type == "cuda":
        assert errors["now"]["sum"] < 1e-4 < errors["former"]["sum"]  # in fp32, where each chunk was rounded to bf16
    assert max(found["rounded"] for found in errors.values()) < 5e-3


# -- log-softmax -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", HEADS)
def test_log_softmax(model, device, floor, record_property, monkeypatch):
    rows, columns = (8192, HEADS[model][1]) if device.type == "cuda" else (16, 4096)
    leaf = (2 * torch.randn(rows, columns, device=device, dtype=BF16)).requires_grad_()
    targets = leaf.detach()[:, :512].argmax(1).contiguous()
    targets[::9] = -100
    direction = torch.randn(2, rows, device=device)
    module = sys.modules["megatron_rl.ops.masked_log_softmax"]

    def by(kernels: Any, backward: bool) -> Any:
        """The small part between the kernels in one launch each, or in plain torch, with a check of the targets before."""
        monkeypatch.setattr(module, "_row_kernels", lambda _: kernels)
        if kernels is plain:
            check_targets(targets, columns)
        out = masked_log_softmax(leaf, targets, log_rho=-13.0, temperature=0.8, with_entropy=True)
        if not backward:
            return out
        assert out.entropy is not None
        return torch.autograd.grad((out.log_probs, out.entropy), leaf, tuple(direction))[0]

    few = slice(0, 32)
    scaled_logits = ((leaf.detach()[few].float() / 0.8).double() * 0.8).requires_grad_()
    right = masked_log_softmax_reference(scaled_logits, targets[few], log_rho=-13.0, temperature=0.8, with_entropy=True)
    worst = {}
    for name, kernels in (("now", compiled), ("former", plain)):
        found = by(kernels, False)
        assert torch.equal(found.in_support[few], right.in_support)
        counted = right.in_support | (targets[few] == -100)
        pairs = {
            n: (getattr(found, n).detach()[few].double(), getattr(right, n).detach())
            for n in ("log_probs", "entropy", "coverage")
        }
        worst[name] = {n: float((a - b)[counted].abs().max()) for n, (a, b) in pairs.items()}
    record_property("worst", worst)
    apart = relative(by(compiled, True)[:1024], by(plain, True)[:1024].double())
    record_property("gradient_beside_former", apart)
    assert max(value for found in worst.values() for value in found.values()) <= 2e-5 and apart < 1e-3
    read = floor(moved=leaf.nbytes)
    for name, backward, least in (("forward", False, read), ("forward_and_backward", True, 3 * read)):
        ways: dict[str, Way] = {n: lambda k=k, b=backward: by(k, b) for n, k in (("now", compiled), ("former", plain))}
        record_property(name, {"floor_ms": round(least, 4), **compare(ways, device, least)})


# -- the norm of the gradients -----------------------------------------------------------------------------------------


def test_the_norm_of_the_gradients(device, floor, record_property):
    """As many tensors as four layers of Qwen3-30B-A3B have by Megatron's stand-in, 1.0 B numbers in all."""
    sizes = [3_100_000] * 318 if device.type == "cuda" else [1000] * 30
    buffer, flag = torch.randn(sum(sizes), device=device), torch.zeros(1, dtype=torch.int, device=device)
    grads = list(buffer.split(sizes))
    exact = sum(float(part.double().square().sum()) for part in grads) ** 0.5
    former, read = megatron_utils.local_multi_tensor_l2_norm, floor(moved=buffer.nbytes)
    ways: dict[str, Way] = {
        "now": lambda: gradients.l2_norm(0, flag, [grads], False)[0].item(),
        "former": lambda: former(0, flag, [grads], False)[0].item(),
    }
    errors = {name: abs(way() / exact - 1) for name, way in ways.items()}
    record_property("errors", errors)
    record_property("norm", {"floor_ms": round(read, 4), **compare(ways, device, read)})
    clips: dict[str, Way] = {
        "now": lambda: gradients.scale(0, flag, [grads, grads], 0.999),
        "former": lambda: megatron_utils.local_multi_tensor_scale(0, flag, [grads, grads], 0.999),
    }
    record_property("clip", {"floor_ms": round(2 * read, 4), **compare(clips, device, 2 * read)})
    assert max(errors.values()) < 1e-5
    assert profiled(ways["now"], device)["reads"] == 1
