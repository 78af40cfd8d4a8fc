"""The CUDA kernels of sink_attention, emulated on the CPU: against fp64, under random schedules, and with planted bugs."""

from __future__ import annotations

import math
import random

import pytest
import torch
from emulation import Emulated, Guarded, compile_emulated, fails
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.ops.sink_attention import sink_attention_reference

INF = math.inf
TYPES = [torch.float32, torch.bfloat16]
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2**-8}


@pytest.fixture(scope="module")
def kernels(tmp_path_factory) -> Emulated:
    return Emulated(compile_emulated("sink_attention", tmp_path_factory.mktemp("emulated")))


class Case:
    """Outputs of plain attention, log-sum-exps with padded rows, sinks, and a gradient of the output."""

    def __init__(self, seed: int):
        rng = random.Random(seed)
        generator = torch.Generator().manual_seed(seed)
        self.tokens, self.heads = rng.choice([1, 5, 127, 128, 129, 300]), rng.choice([1, 2, 3])
        self.width, self.dtype = rng.choice([8, 24, 64, 72]), rng.choice(TYPES)
        self.offset, self.padding, self.schedule = rng.choice([0, 0, 1]), rng.choice([0, 3]), rng.randint(0, 2**31)
        self.o, self.grad_o = torch.randn(2, self.tokens, self.heads, self.width, generator=generator).to(self.dtype)
        self.lse = torch.randn(self.heads, self.tokens + self.padding, generator=generator) * 4
        self.sinks = torch.randn(self.heads, generator=generator) * 4
        if rng.random() < 0.5:
            self.sinks[rng.randrange(self.heads)] = -INF
        if rng.random() < 0.5:
            row = rng.randrange(self.tokens)  # without a key
            self.lse[:, row], self.o[row] = -INF, 0
        self.lse[:, self.tokens :] = torch.nan


def run(kernels: Emulated, case: Case) -> list[torch.Tensor]:
    """o', lse' and the sinks' gradient for them."""
    kernels.set_schedule(case.schedule)
    shape = (TYPES.index(case.dtype), case.tokens, case.heads, case.width, case.lse.shape[1])
    o, grad_o = (Guarded(x, case.offset) for x in (case.o, case.grad_o))
    lse = Guarded(case.lse)
    kernels.call("apply", o.tensor, lse.tensor, case.sinks, *shape)
    workspace = Guarded(torch.full((kernels.library.gradient_rows(case.tokens), case.heads), torch.nan))
    grad_sinks = Guarded(torch.full((case.heads,), torch.nan))
    arrays = (grad_o.tensor, o.tensor, lse.tensor, case.sinks)
    kernels.call("gradient", *arrays, *shape, workspace.tensor, grad_sinks.tensor)
    for x in (o, lse, workspace, grad_sinks):
        x.check()
    return [o.tensor, lse.tensor, grad_sinks.tensor]


def bits(x: torch.Tensor) -> list[int]:
    return x.contiguous().view(torch.uint8).flatten().tolist()


def check(kernels: Emulated, case: Case) -> None:
    o, lse, grad_sinks = run(kernels, case)
    t = case.tokens
    assert lse[:, t:].isnan().all()
    lse, plain_lse, sinks = lse[:, :t].double(), case.lse[:, :t].double(), case.sinks.double()[:, None]
    expected = torch.logaddexp(plain_lse, sinks)
    torch.testing.assert_close(lse, expected, atol=1e-6, rtol=1e-6)
    factor = torch.where(plain_lse == -INF, 0.0, torch.exp(plain_lse - expected)).T[..., None]
    tolerance = ROUNDING[case.dtype]
    torch.testing.assert_close(o.double(), case.o.double() * factor, atol=1e-7, rtol=tolerance)

    weights = torch.where(sinks == -INF, 0.0, torch.exp(sinks - lse))
    products = (case.grad_o.double() * o.double()).sum(-1).T
    scale = float((weights[..., None] * (case.grad_o.double() * o.double()).abs().transpose(0, 1)).sum((1, 2)).max())
    torch.testing.assert_close(grad_sinks.double(), -(weights * products).sum(-1), atol=2e-6 * scale, rtol=0)
    for head in (case.sinks == -INF).nonzero().flatten().tolist():
        assert bits(o[:, head]) == bits(case.o[:, head])
        assert bits(lse[head].float()) == bits(case.lse[head, :t])
        assert bits(grad_sinks[head : head + 1]) == [0] * 4


@settings(max_examples=40)
@given(seed=st.integers(0, 2**31))
def test_kernels_match_the_definition(kernels, seed):
    check(kernels, Case(seed))


@settings(max_examples=10)
@given(seed=st.integers(0, 2**31))
def test_results_do_not_depend_on_the_schedule(kernels, seed):
    case = Case(seed)
    first = run(kernels, case)
    case.schedule += 1
    for a, b in zip(first, run(kernels, case), strict=True):
        assert bits(a) == bits(b)


def test_around_torchs_flash_attention_they_give_attention_with_sinks(kernels):
    """What csrc/sink_attention/binding.cpp composes on CUDA, with torch's flash attention for the CPU in its place."""
    tokens, heads, width, scale = 150, 3, 16, 0.3
    kernels.set_schedule(int(torch.randint(1000, ())))
    q, k, v, grad = torch.randn(4, 1, heads, tokens, width).unbind()
    sinks, as_tokens = torch.randn(heads) * 3, lambda x: x[0].transpose(0, 1).contiguous()
    sinks[1] = -INF
    aten = torch.ops.aten
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True, scale=scale)
    o, lse = as_tokens(out), lse[0].contiguous()
    shape = (0, tokens, heads, width, tokens)
    kernels.call("apply", o, lse, sinks, *shape)
    grad_sinks, workspace = torch.empty(heads), torch.empty(kernels.library.gradient_rows(tokens), heads)
    kernels.call("gradient", as_tokens(grad), o, lse, sinks, *shape, workspace, grad_sinks)
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
    grads = backward(grad, q, k, v, o.transpose(0, 1)[None], lse[None], 0.0, True, scale=scale)
    found = [o, *(as_tokens(x) for x in grads), grad_sinks]

    leaves = [as_tokens(x).double().requires_grad_() for x in (q, k, v)] + [sinks.double().requires_grad_()]
    expected = sink_attention_reference(*leaves, cu_seqlens=torch.tensor([0, tokens]), scale=scale)
    right = [expected, *torch.autograd.grad(expected, leaves, as_tokens(grad).double())]
    for ours, theirs in zip(found, right, strict=True):
        torch.testing.assert_close(ours.double(), theirs, atol=5e-6, rtol=1e-5)


def test_no_tokens(kernels):
    empty, sinks, out = torch.empty(0), torch.zeros(2), torch.full((2,), torch.nan)
    kernels.call("apply", empty, empty, sinks, 0, 0, 2, 8, 0)
    kernels.call("gradient", empty, empty, empty, sinks, 0, 0, 2, 8, 0, empty, out)
    assert out.tolist() == [0.0, 0.0]


def test_what_does_not_fit_a_launch_is_an_error(kernels):
    nothing = torch.empty(0)
    with pytest.raises(RuntimeError, match="apply_sink: more rows than"):
        kernels.call("apply", nothing, nothing, nothing, 0, 1 << 40, 8, 8, 1 << 40)


BUGS = {
    "a missing barrier": ("    }\n    __syncthreads();\n    for_each_group", "    }\n    for_each_group"),
    "a token too many": ("all_tokens - first_token < TOKENS ? all", "all_tokens - first_token < TOKENS ? 1 + all"),
    "padded log-sum-exps read as if they were not": (
        "expf(sink - lse[tile.head * lse_stride",
        "expf(sink - lse[tile.head * tokens",
    ),
    "lse' read where lse is meant": ("1.0f / (1.0f + expf(sink - plain))", "1.0f / (1.0f + expf(sink - sum))"),
    "a sink of -inf not set apart": ("if (sink != -INFINITY) {", "if (sink != INFINITY) {"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_caught(bug, tmp_path):
    edits = {"sink_attention/kernels.cuh": BUGS[bug]}
    broken = Emulated(compile_emulated("sink_attention", tmp_path, edits, alignment=False))
    assert fails(lambda seed: check(broken, Case(seed)))
