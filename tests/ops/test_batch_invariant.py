"""Operators that give a row the same bits whatever lies beside it: against fp64, alone and among others, cut over ranks."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from transformers import GptOssConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megatron_rl.ops import batch_invariant as ops
from megatron_rl.ops import sink_attention

DTYPES = [torch.float32, torch.bfloat16]
EPSILON = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}
"""Half a step of rounding, relative."""


def number(low: int, high: int) -> int:
    """A random integer, both ends included."""
    return int(torch.randint(low, high + 1, ()))


def some_rows(rows: int) -> list[slice]:
    """A few cuts of so many rows."""
    starts = [number(0, rows - 1) for _ in range(4)]
    return [slice(0, 1), slice(rows - 1, rows), *(slice(s, number(s + 1, rows)) for s in starts)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inputs", [8, 62, 300, 512, 1024, 1100])
def test_product(inputs, dtype):
    rows, outputs = number(1, 150), number(1, 230)
    x, weight = torch.randn(rows, inputs).to(dtype), torch.randn(outputs, inputs).to(dtype)
    out = ops.linear(x, weight, dtype=torch.float32)
    exact = x.double() @ weight.double().t()
    # Each of the K additions rounds a partial sum, which is at most the sum of the absolute products.
    bound = inputs * EPSILON[torch.float32] * (x.double().abs() @ weight.double().abs().t())
    assert ((out.double() - exact).abs() <= bound).all()
    assert torch.equal(ops.linear(x, weight), out.to(dtype))
    for cut in some_rows(rows):
        assert torch.equal(ops.linear(x[cut], weight, dtype=torch.float32), out[cut])
    columns = slice(number(0, outputs - 1), outputs)  # what a column-parallel rank has
    assert torch.equal(ops.linear(x, weight[columns], dtype=torch.float32), out[:, columns])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inputs", [64, 520, 1024, 2048])
def test_shares_of_a_product_are_subtrees(inputs, dtype):
    x, weight = torch.randn(number(1, 40), inputs).to(dtype), torch.randn(number(1, 100), inputs).to(dtype)
    whole, ranks = ops.linear(x, weight, dtype=torch.float32), 2
    while ranks <= ops.parts(inputs):
        cuts = zip(x.chunk(ranks, dim=1), weight.chunk(ranks, dim=1), strict=True)
        shares = [ops.linear(a, b, dtype=torch.float32, of_parts=ops.parts(inputs) // ranks) for a, b in cuts]
        assert torch.equal(ops.tree_sum(shares), whole)
        ranks *= 2


@pytest.mark.parametrize("dtype", DTYPES)
def test_groups_are_products_of_their_own(dtype):
    counts = torch.randint(0, 70, (number(1, 9),)).tolist()
    weights = [torch.randn(50, 40).to(dtype) for _ in counts]
    x = torch.randn(sum(counts), 40).to(dtype)
    out = ops.grouped_linear(x, counts, weights)
    expected = [ops.linear(rows, w) for rows, w in zip(x.split(counts), weights, strict=True)]
    assert torch.equal(out, torch.cat(expected))


def test_threads_do_not_matter():
    x, weight, threads = torch.randn(130, 640), torch.randn(300, 640), torch.get_num_threads()
    found = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(ops.linear(x, weight))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_what_a_product_refuses():
    x, weight = torch.randn(4, 6), torch.randn(3, 6)
    with pytest.raises(ValueError, match="counts are of 3 rows, x has 4"):
        ops.grouped_linear(x, [3], [weight])
    with pytest.raises(ValueError, match="power of two that divides 6"):
        ops.linear(x, weight, of_parts=4)
    with pytest.raises(ValueError, match="must be fp32 or bf16"):
        ops.linear(x.double(), weight)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 13, 64, 130, 1024])
def test_norm(width, dtype):
    x, weight = (3 * torch.randn(number(1, 60), width)).to(dtype), torch.randn(width).to(dtype)
    out = ops.rms_norm(x, weight, 1e-6)
    exact = F.rms_norm(x.double(), (width,), weight.double(), 1e-6)
    # The mean of n squares is right to n roundings, its root to half of that; a few more follow.
    torch.testing.assert_close(out.double(), exact, rtol=(width / 2 + 4) * 2**-24 + EPSILON[dtype], atol=1e-30)
    for cut in some_rows(len(x)):
        assert torch.equal(ops.rms_norm(x[cut], weight, 1e-6), out[cut])
    whole, ranks = ops.square_sums(x), 2
    while ranks <= ops.parts(width):
        shares = [ops.square_sums(part, of_parts=ops.parts(width) // ranks) for part in x.chunk(ranks, dim=1)]
        assert torch.equal(ops.tree_sum(shares), whole)
        ranks *= 2


@pytest.mark.parametrize("dtype", DTYPES)
def test_activations(dtype):
    x = (10 * torch.randn(number(1, 40), number(1, 70))).to(dtype)
    x.view(-1)[0] = number(-200, 200)
    for slope in (1.0, 1.702):
        out = ops.swish(x, slope)
        exact = x.double() * torch.sigmoid(x.double() * slope)
        # exp(y) is as much wrong as y is, absolutely: by 2^-24 of it, and by 2e-7 in itself.
        error = 4e-7 + 2**-23 * slope * x.double().abs() + EPSILON[dtype]
        assert ((out.double() - exact).abs() <= error * exact.abs() + 1e-35).all()
        for cut in some_rows(len(x)):
            assert torch.equal(ops.swish(x[cut], slope), out[cut])
    gates = ops.sigmoid(x.float())
    torch.testing.assert_close(gates, torch.sigmoid(x.float()), rtol=4e-7 + 2**-22 * float(x.abs().max()), atol=1e-37)


def test_softmax_and_the_largest():
    x = 5 * torch.randn(number(1, 50), number(2, 40))
    shares = ops.softmax(x)
    torch.testing.assert_close(shares.double(), x.double().softmax(-1), rtol=1e-5, atol=1e-12)
    for cut in some_rows(len(x)):
        assert torch.equal(ops.softmax(x[cut]), shares[cut])
    k = number(1, x.shape[1])
    rough = x.round()  # with ties
    ids = ops.topk(rough, k)
    expected = torch.sort(rough, dim=-1, descending=True, stable=True).indices[:, :k]
    assert torch.equal(ids, expected)
    rough[0, 0] = math.nan
    assert 0 not in ops.topk(rough, x.shape[1] - 1)[0]


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize(("scores", "over_all"), [("softmax", False), ("softmax", True), ("sigmoid", False)])
def test_routing(scores, over_all, groups):
    experts, topk = 16, 4
    logits = 2 * torch.randn(number(1, 40), experts)
    bias = 0.1 * torch.randn(experts) if scores == "sigmoid" else None
    rule = ops.Routing(topk, scores, over_all, groups, group_topk=2 if groups > 1 else 1, scale=2.5)
    ids = rule.choose(rule.scores_of(logits, bias))
    weights = rule.weights(logits, ids)
    by_choice = logits.double()
    if scores == "sigmoid":
        by_choice = logits.double().sigmoid() + bias.double()
    elif over_all:
        by_choice = logits.double().softmax(-1)
    for row, score in enumerate(by_choice):
        allowed = range(experts)
        if groups > 1:
            in_group = score.view(groups, -1).sort(descending=True).values[:, :2].sum(-1)
            ranked = in_group.sort(descending=True)
            if float(ranked.values[1] - ranked.values[2]) < 1e-5:
                continue  # a tie in fp32
            allowed = [e for e in allowed if e // (experts // groups) in ranked.indices[:2].tolist()]
        best = sorted((float(score[e]) for e in allowed), reverse=True)[:topk]
        # Of two that are closer than fp32 tells, either may come first.
        assert score[ids[row]].tolist() == pytest.approx(best, abs=1e-5), row
        assert set(ids[row].tolist()) <= set(allowed) and len(set(ids[row].tolist())) == topk
    everything = logits.double().sigmoid() if scores == "sigmoid" else logits.double().softmax(-1)
    expected = everything.gather(1, ids)
    expected = expected if over_all else expected / expected.sum(-1, keepdim=True)
    torch.testing.assert_close(weights.double(), 2.5 * expected, rtol=1e-5, atol=1e-9)
    order = torch.randperm(topk)
    assert torch.equal(rule.weights(logits, ids[:, order]), weights[:, order])
    for cut in some_rows(len(logits)):
        assert torch.equal(rule.choose(rule.scores_of(logits[cut], bias)), ids[cut])
        assert torch.equal(rule.weights(logits[cut], ids[cut]), weights[cut])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["swiglu", "gpt_oss"])
def test_experts(kind, dtype):
    """A token's experts alone, and among those of other tokens; against fp64."""
    tokens, hidden, width, experts, topk = number(1, 30), 24, 20, 5, 2
    gate = ops.Gate() if kind == "swiglu" else ops.Gate(slope=1.702, limit=1.0, offset=1.0)
    up, down = torch.randn(experts, 2 * width, hidden).to(dtype), torch.randn(experts, hidden, width).to(dtype)
    biases = [None, None] if kind == "swiglu" else [torch.randn(experts, n).to(dtype) for n in (2 * width, hidden)]
    x, weights = torch.randn(tokens, hidden).to(dtype), torch.rand(tokens, topk)
    ids = torch.stack([torch.randperm(experts)[:topk] for _ in range(tokens)])

    def run(rows: slice) -> torch.Tensor:
        sorted_ids, order = ids[rows].flatten().sort(stable=True)
        counts = torch.bincount(sorted_ids, minlength=experts).tolist()
        sides = (up.unbind(), biases[0]), (down.unbind(), biases[1])
        out = ops.experts(x[rows][order // topk], counts, weights[rows].reshape(-1, 1)[order], gate, *sides)
        return ops.combine(out, order.argsort().view(-1, topk).sort(dim=1).values)

    out = run(slice(0, tokens))
    for cut in some_rows(tokens):
        assert torch.equal(run(cut), out[cut])
    exact = torch.zeros(tokens, hidden, dtype=torch.float64)
    for t in range(tokens):
        for e, p in zip(ids[t].tolist(), weights[t].double(), strict=True):
            wide = up[e].double() @ x[t].double() + (0 if biases[0] is None else biases[0][e].double())
            a, b = wide.chunk(2)
            if gate.limit:
                a, b = a.clamp(max=gate.limit), b.clamp(-gate.limit, gate.limit) + 1
            inner = a * torch.sigmoid(gate.slope * a) * b
            exact[t] += p * (down[e].double() @ inner + (0 if biases[1] is None else biases[1][e].double()))
    scale = exact.abs().amax().clamp(min=1)
    assert (out.double() - exact).abs().amax() <= 30 * EPSILON[dtype] * scale * math.sqrt(width)


def test_sums_over_experts_are_in_the_order_of_places():
    x, places = torch.randn(40, number(1, 50)), torch.randint(0, 40, (number(1, 20), 5))
    total = x[places[:, 0]]
    for j in range(1, 5):
        total = total + x[places[:, j]]
    assert torch.equal(ops.combine(x, places), total)
    with pytest.raises(ValueError, match="rows of x"):
        ops.combine(x, places + 40)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("log_rho", [None, -3.0])
def test_log_probs(temperature, log_rho):
    logits = 4 * torch.randn(number(1, 30), number(2, 700))
    targets = logits.argmax(-1)
    found = ops.log_probs(logits, targets, log_rho, temperature)
    # What is divided is fp32 numbers, and so is the border. From there each term e^-d is wrong by (d + 4) 2^-24 of itself, and
    # d e^-d by less than a half: 2e-6 of a sum that is at least 1.
    in_fp32 = logits / temperature
    scaled = in_fp32.double()
    if log_rho is not None:
        scaled = scaled.masked_fill(in_fp32 < in_fp32.amax(-1, keepdim=True) + log_rho, -math.inf)
    exact = scaled.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=2e-6)
    # What an engine has: it divides, prunes, and takes the log-softmax of all columns.
    engine = logits / temperature
    if log_rho is not None:
        engine = engine.masked_fill(engine < engine.amax(-1, keepdim=True) + log_rho, -math.inf)
    assert torch.equal(ops.log_softmax(engine).gather(1, targets[:, None])[:, 0], found)
    for cut in some_rows(len(logits)):
        assert torch.equal(ops.log_probs(logits[cut], targets[cut], log_rho, temperature), found[cut])


def test_exponentials_add_up_over_any_cut():
    logits = 6 * torch.randn(number(1, 20), number(3, 900))
    most = logits.amax(-1)
    whole = ops._kernels.exponential_sums(logits, most)
    border = number(1, logits.shape[1] - 1)
    parts = [
        ops._kernels.exponential_sums(part.contiguous(), most)
        for part in logits.split([border, logits.shape[1] - border], 1)
    ]
    assert torch.equal(parts[0] + parts[1], whole)
    exact = (logits.double() - most.double()[:, None]).exp().sum(-1)
    torch.testing.assert_close(whole.double() / 2**42, exact, rtol=3e-6, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 5, 70])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_attention_of_a_token_is_the_same_wherever_it_is_computed(with_sinks, window, dtype):
    """In a prefill, in one that is cut in two, and token by token with the keys before it from a cache."""
    heads, kv_heads, width, value_width = 4, 2, number(1, 40), number(1, 40)
    lengths = [number(1, 200) for _ in range(3)]
    borders = torch.tensor([0, *lengths]).cumsum(0)
    q, k = (torch.randn(int(borders[-1]), n, width).to(dtype) for n in (heads, kv_heads))
    v = torch.randn(int(borders[-1]), kv_heads, value_width).to(dtype)
    sinks = torch.randn(heads) if with_sinks else None
    options = {"window": window, "scale": width**-0.5}
    prefill = sink_attention(q, k, v, sinks, cu_seqlens=borders, **options)
    assert torch.equal(ops.attention(q, k, v, sinks, borders, borders, **options), prefill)
    for first, length in zip(borders.tolist(), lengths, strict=False):
        keys, values = k[first : first + length], v[first : first + length]
        for start in {0, number(0, length - 1), length - 1}:
            end = number(start + 1, length)
            part = ops.attention(
                q[first + start : first + end].contiguous(),
                keys[:end].contiguous(),
                values[:end].contiguous(),
                sinks,
                torch.tensor([0, end - start]),
                torch.tensor([0, end]),
                **options,
            )
            assert torch.equal(part, prefill[first + start : first + end]), (start, end, length)


def test_rotary_embedding_is_that_of_transformers():
    config = GptOssConfig()
    rotary = ops.Rotary.of(config.to_dict())
    frequencies, factor = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
    torch.testing.assert_close(torch.tensor(rotary.frequencies), frequencies, rtol=3e-6, atol=0)
    assert rotary.factor == pytest.approx(factor, rel=1e-6)
    cosines, sines = rotary.table(50, torch.float32)
    angles = torch.arange(50).double()[:, None] * torch.tensor(rotary.frequencies).double()
    torch.testing.assert_close(cosines.double(), angles.cos() * rotary.factor, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(sines.double(), angles.sin() * rotary.factor, rtol=1e-6, atol=1e-5)
    longer = rotary.table(77, torch.float32)
    assert torch.equal(longer[0][:50], cosines) and torch.equal(longer[1][:50], sines)
    with pytest.raises(ValueError, match="of the kind 'dynamic'"):
        ops.Rotary.of({"rope_parameters": {"rope_type": "dynamic"}, "num_attention_heads": 2, "hidden_size": 8})


def test_by_head_and_pairs():
    x, weights = torch.randn(number(1, 20), 3, 10), torch.randn(3, 7, 10)
    found = ops.by_head(x, weights)
    # Two sums of 10 products: 10 roundings each, of the sum of their absolute values at most.
    bound = 2 * 10 * EPSILON[torch.float32] * torch.einsum("thk,hnk->thn", x.abs(), weights.abs())
    assert ((found - torch.einsum("thk,hnk->thn", x, weights)).abs() <= bound).all()
    assert torch.equal(ops.by_head(x[:1], weights), found[:1])
    assert ops.half_by_half(torch.arange(6)).tolist() == [0, 2, 4, 1, 3, 5]
