"""linear_log_probs against the whole head in fp64: any loss by recomputation, sums over tokens on the way."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run_ranks

from megatron_rl.ops import linear_log_probs, masked_log_softmax
from megatron_rl.ops.device import LateChecks
from megatron_rl.ops.masked_log_softmax import KeptTokens, masked_log_softmax_reference


def head(seed: int, tokens=37, width=24, vocabulary=90, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, width, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocabulary, width, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, vocabulary - 3, (tokens,), generator=generator)
    targets[::5] = -100
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets


def clipped(old, advantages):
    """GRPO's terms with an entropy bonus, divided by a number known beforehand."""

    def loss(log_probs, entropy, rows):
        ratio = torch.exp(log_probs - old[rows])
        terms = -torch.minimum(ratio * advantages[rows], ratio.clamp(0.8, 1.2) * advantages[rows])
        return (terms - 0.1 * entropy).sum() / len(old)

    return loss


def logit_rounding(hidden, weight, temperature: float) -> torch.Tensor:
    """[T] how wrong a logit of each token may be: n additions round n products, whose absolute sum bounds each partial sum."""
    products = (hidden.detach().double().abs() @ weight.detach().double().abs().t()).amax(1)
    return hidden.shape[1] * torch.finfo(hidden.dtype).eps / 2 * products / temperature


def whole_head(hidden, weight, targets, log_rho, vocab_size=None):
    logits = (hidden.double() @ weight.double().t())[:, :vocab_size]
    return masked_log_softmax_reference(logits, targets, log_rho=log_rho, temperature=0.7, with_entropy=True)


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**31),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    log_rho=st.sampled_from([None, -20.0]),
    chunk_tokens=st.integers(1, 64),
    on_the_way=st.booleans(),
)
def test_values_and_gradients(seed, dtype, log_rho, chunk_tokens, on_the_way):
    torch.manual_seed(seed)
    hidden, weight, targets = head(seed, dtype=dtype)
    while log_rho is not None and (whole_head(hidden, weight, targets, log_rho).margin - log_rho).abs().min() < 1e-3:
        seed += 1  # rounding would say on which side of the set's border a label is
        hidden, weight, targets = head(seed, dtype=dtype)
    if dtype == torch.bfloat16:
        # Sums of eighths are exact, so a logit is rounded alike in whatever order a matrix product adds.
        hidden, weight = ((x.detach() * 8).round().div(8).requires_grad_() for x in (hidden, weight))
    rows, everything = targets != -100, torch.arange(len(targets))
    expected = whole_head(hidden, weight, targets, log_rho)
    if dtype == torch.bfloat16:  # what rounded logits give
        logits = hidden @ weight.t()
        expected = masked_log_softmax(logits, targets, log_rho=log_rho, temperature=0.7, with_entropy=True)
    # Log-ratios of 0.05, 0.15 and so on: none is within rounding of the clip's borders, log 0.8 and log 1.2.
    moved = 0.1 * torch.randint(-6, 6, (37,)) + 0.05
    old = torch.where(expected.in_support, expected.log_probs.detach() + moved, 0.0)
    loss = clipped(old, torch.where(expected.in_support, torch.randn(37, dtype=torch.float64), 0.0))
    options = {"log_rho": log_rho, "temperature": 0.7, "with_entropy": True, "chunk_tokens": chunk_tokens}
    out = linear_log_probs(hidden, weight, targets, **options, token_loss=loss if on_the_way else None)
    assert torch.equal(out.in_support, expected.in_support)
    # A log-prob is wrong by twice what a logit is, and an entropy by that times the mean of |1 + log p|; bf16 logits are the
    # same here and there. Beyond that a softmax rounds some 32 times.
    rounding = 2 * logit_rounding(hidden, weight, 0.7) if dtype != torch.bfloat16 else torch.zeros(len(targets))
    softmax = 16 * torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    within = (2 + expected.entropy.detach().double()) * rounding + softmax * (1 + expected.log_probs.detach().abs())
    for name in ("log_probs", "entropy", "coverage", "margin", "pruned"):
        ours, theirs = (getattr(x, name).detach().double() for x in (out, expected))
        assert ((ours - theirs).abs() <= within)[expected.in_support].all(), name
    assert not out.log_probs[~rows].any() and not out.in_support[~rows].any()

    def total(x):
        return 7.0 * loss(torch.where(x.in_support, x.log_probs, 0.0), x.entropy, everything)

    found = torch.autograd.grad(total(out), (hidden, weight))
    right = torch.autograd.grad(total(expected), (hidden, weight))
    for ours, theirs in zip(found, right, strict=True):
        assert ours.dtype == dtype
        error = (ours.double() - theirs.double()).norm() / theirs.norm()
        assert error < {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 0.02}[dtype]


def fp32_errors(found, right) -> float:
    return float((found.double() - right.double()).norm() / right.double().norm())


@pytest.mark.parametrize("chunk_tokens", [8, 64])
@pytest.mark.parametrize("on_the_way", [False, True])
def test_fp32_logits_of_a_bf16_head(chunk_tokens, on_the_way):
    """Logits of 16 to 32 against fp64: the products are exact, so log-probs are those of fp32, and not 0.1 off."""
    seed = torch.seed() % 2**31
    print(f"seed {seed}")
    hidden, weight, targets = head(seed, vocabulary=8200, dtype=torch.bfloat16)  # more rows than are fp32 at a time
    with torch.no_grad():
        hidden *= 4.0
    rows = targets != -100
    logits = (hidden.double() @ weight.double().t()).detach()
    assert logits.abs().max() > 32
    exact = whole_head(hidden, weight, targets, None)
    loss = lambda log_probs, entropy, rows: (-log_probs - 0.1 * entropy).sum() / 37  # noqa: E731
    options = {"log_rho": None, "temperature": 0.7, "with_entropy": True, "chunk_tokens": chunk_tokens}
    token_loss = loss if on_the_way else None
    out = linear_log_probs(hidden, weight, targets, **options, token_loss=token_loss, fp32_logits=True)
    assert out.log_probs.dtype == torch.float32
    # 24 products a logit, summed in fp32, and the softmax; the temperature multiplies by 1.4.
    bound = 1.5 * 32 * 2**-23 * float(logits.abs().max())
    assert (out.log_probs.double() - exact.log_probs)[rows].abs().max() < bound
    rounded = linear_log_probs(hidden, weight, targets, **options)
    assert (rounded.log_probs.double() - exact.log_probs)[rows].abs().max() > 100 * bound

    found = torch.autograd.grad(loss(out.log_probs, out.entropy, None), (hidden, weight))
    right = torch.autograd.grad(loss(exact.log_probs[rows], exact.entropy[rows], None), (hidden, weight))
    for ours, theirs in zip(found, right, strict=True):
        assert ours.dtype == torch.bfloat16
        assert fp32_errors(ours, theirs) < 2 * 2**-8  # rounded once in the logits' gradient and once in the result


def test_both_ways_give_the_same_bits_where_the_loss_is_the_same():
    hidden, weight, targets = head(3)
    loss = lambda log_probs, entropy, rows: -log_probs.sum() / 50  # noqa: E731
    grads = []
    for token_loss in (None, loss):
        out = linear_log_probs(hidden, weight, targets, log_rho=None, chunk_tokens=8, token_loss=token_loss)
        grads.append(torch.autograd.grad(loss(out.log_probs, None, None), (hidden, weight)))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_the_logits_of_more_than_one_chunk_never_exist(monkeypatch):
    seen = []
    product = torch.Tensor.__matmul__
    monkeypatch.setattr(
        torch.Tensor, "__matmul__", lambda a, b: (seen.append(tuple(product(a, b).shape)), product(a, b))[1]
    )
    hidden, weight, targets = head(0, tokens=40)
    out = linear_log_probs(hidden, weight, targets, log_rho=-13.0, chunk_tokens=6)
    out.log_probs.clamp(min=-50).sum().backward()
    heads = [shape for shape in seen if shape[1] == 90]
    assert len(heads) == 2 * 6 and max(rows for rows, _ in heads) == 6  # 32 tokens count, twice


def test_padding_columns_belong_to_no_softmax():
    hidden, weight, targets = head(1, vocabulary=90)
    with torch.no_grad():
        weight[87:] = 100.0
    out = linear_log_probs(hidden, weight, targets, log_rho=None, temperature=0.7, with_entropy=True, vocab_size=87)
    expected = whole_head(hidden, weight, targets, None, vocab_size=87)
    torch.testing.assert_close(out.log_probs.double(), expected.log_probs, atol=2e-5, rtol=1e-5)
    (grad,) = torch.autograd.grad(out.log_probs.sum(), weight)
    assert not grad[87:].any() and grad[:87].any()


def test_a_loss_that_is_no_sum_over_tokens_is_named():
    """GSPO: each token's gradient depends on the log-probs of its whole sequence."""
    hidden, weight, targets = head(2)

    def gspo(log_probs, entropy, rows):
        return torch.exp(log_probs.mean())

    out = linear_log_probs(hidden, weight, targets, log_rho=None, chunk_tokens=8, token_loss=gspo)
    with pytest.raises(RuntimeError, match="not the gradient of token_loss times one number.*leave token_loss out"):
        gspo(out.log_probs[targets != -100], None, None).backward()
    out = linear_log_probs(hidden, weight, targets, log_rho=None, chunk_tokens=8)
    gspo(out.log_probs[targets != -100], None, None).backward()


@pytest.mark.parametrize("on_the_way", [False, True])
def test_rows_that_are_known_and_errors_that_wait_change_nothing(on_the_way):
    hidden, weight, targets = head(4)
    loss = lambda log_probs, entropy, rows: -log_probs.sum() / 50  # noqa: E731
    options = {"log_rho": -13.0, "chunk_tokens": 8, "token_loss": loss if on_the_way else None}
    late = LateChecks()
    given = {"rows": (targets != -100).nonzero()[:, 0], "late": late}
    outs = [linear_log_probs(hidden, weight, targets, **options, **more) for more in ({}, given)]
    grads = [torch.autograd.grad(loss(out.log_probs, None, None), (hidden, weight)) for out in outs]
    late.look()
    assert torch.equal(outs[0].log_probs, outs[1].log_probs)
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_errors_wait_until_they_are_looked_at():
    hidden, weight, targets = head(5)
    late = LateChecks()
    options = {"log_rho": None, "chunk_tokens": 8, "rows": (targets != -100).nonzero()[:, 0], "late": late}
    bad = int(options["rows"][-1])
    with torch.no_grad():
        linear_log_probs(hidden.index_fill(0, torch.tensor(bad), torch.nan), weight, targets, **options)
    with pytest.raises(ValueError, match=f"row {bad} of the logits"):
        late.look()
    out = linear_log_probs(hidden, weight, targets, **options, token_loss=lambda log_probs, *_: log_probs.mean().exp())
    out.log_probs[options["rows"]].mean().exp().backward()
    with pytest.raises(RuntimeError, match="not the gradient of token_loss times one number"):
        late.look()
    late.look()  # what was said is not said again


@pytest.mark.parametrize("change", ["sign of a small one", "nan"])
def test_each_tokens_gradient_is_compared(change):
    """However large another token's is."""
    hidden, weight, targets = head(2)
    scale = torch.full((37,), 1.0).index_fill(0, torch.tensor(1), 2e4)
    came = scale.index_fill(0, torch.tensor(7), -1.0 if change == "sign of a small one" else torch.nan)
    out = linear_log_probs(
        hidden, weight, targets, log_rho=None, chunk_tokens=8, token_loss=lambda x, _, rows: (x * scale[rows]).sum()
    )
    with pytest.raises(RuntimeError, match="not the gradient of token_loss times one number"):
        (out.log_probs * came).sum().backward()


def test_without_gradients_the_loss_is_not_asked():
    hidden, weight, targets = head(2)
    with torch.no_grad():
        linear_log_probs(hidden, weight, targets, log_rho=None, chunk_tokens=8, token_loss=lambda *_: 1 / 0)


def test_backward_twice_through_the_same_graph():
    for chunk_tokens in (8, 64):
        hidden, weight, targets = head(4)
        out = linear_log_probs(hidden, weight, targets, log_rho=None, chunk_tokens=chunk_tokens)
        first, second = (torch.autograd.grad(out.log_probs.sum(), weight, retain_graph=True)[0] for _ in range(2))
        assert torch.equal(first, second)


def test_nothing_to_do():
    hidden, weight, targets = head(5)
    out = linear_log_probs(hidden, weight, torch.full_like(targets, -100), log_rho=None, with_entropy=True)
    assert not out.log_probs.any() and out.coverage.eq(1).all() and not out.pruned.any()
    out.log_probs.sum().backward()
    assert not hidden.grad.any() and not weight.grad.any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(37, 23)}, r"hidden \[37, 23\], weight \[90, 24\]"),
        ({"hidden": torch.zeros(37, 24, dtype=torch.bfloat16)}, "hidden is torch.bfloat16, weight torch.float32"),
        ({"targets": torch.zeros(36, dtype=torch.int64)}, r"targets \[36\]"),
        ({"targets": torch.zeros(37, dtype=torch.int32)}, "targets are torch.int32"),
        ({"targets": torch.arange(37).where(torch.arange(37) != 31, 90)}, "target 90 of row 31 is outside .* 90"),
        ({"targets": torch.full((37,), 88), "vocab_size": 87}, "target 88 of row 0 is outside the vocabulary of 87"),
        ({"hidden": torch.zeros(37, 24).index_fill(0, torch.tensor(31), torch.nan)}, "row 31 of the logits .* NaN"),
        ({"hidden": torch.zeros(37, 24, dtype=torch.float16)}, "hidden is torch.float16"),
        ({"weight": torch.zeros(90, 24, device="meta")}, "weight on meta"),
        ({"chunk_tokens": 0}, "chunk_tokens 0"),
        ({"vocab_size": 0}, "vocab_size 0"),
        ({"temperature": 0.0}, "temperature 0.0"),
        ({"log_rho": 0.5}, "log_rho 0.5"),
    ],
)
def test_bad_arguments_are_named(change, message):
    hidden, weight, targets = head(6)
    arguments = {"hidden": hidden, "weight": weight, "targets": targets, "log_rho": None, "chunk_tokens": 8} | change
    with pytest.raises(ValueError, match=message):
        linear_log_probs(**arguments)


def kept_sets(seed: int, targets: torch.Tensor, vocabulary: int) -> tuple[KeptTokens, torch.Tensor]:
    """Random sets that hold the target, none for every fourth token; and the same as a mask [T, V]."""
    generator = torch.Generator().manual_seed(seed + 100)
    inside = torch.rand(len(targets), vocabulary, generator=generator) < 0.2
    inside[torch.arange(len(targets)), targets.clamp(min=0)] = True
    inside[::4] = False
    sets = [row.nonzero()[:, 0] for row in inside]
    sets = [ids[torch.randperm(len(ids), generator=generator)] for ids in sets]
    inside[::4] = True
    borders = torch.tensor([0] + [len(ids) for ids in sets]).cumsum(0)
    return KeptTokens.of(torch.cat(sets), borders), inside


@pytest.mark.parametrize("chunk_tokens", [8, 64])
@pytest.mark.parametrize("on_the_way", [False, True])
def test_the_softmax_is_over_the_kept_tokens(chunk_tokens, on_the_way):
    seed = torch.seed() % 2**31
    print(f"seed {seed}")
    hidden, weight, targets = head(seed, dtype=torch.float64)
    kept, inside = kept_sets(seed, targets, 90)
    logits = torch.where(inside, hidden @ weight.t(), -torch.inf)
    expected = masked_log_softmax_reference(logits, targets, log_rho=None, temperature=0.7, with_entropy=True)
    loss = lambda log_probs, entropy, rows: (log_probs + 0.1 * entropy).sum() / 37  # noqa: E731
    options = {"temperature": 0.7, "with_entropy": True, "chunk_tokens": chunk_tokens, "kept": kept}
    out = linear_log_probs(hidden, weight, targets, log_rho=None, token_loss=loss if on_the_way else None, **options)
    torch.testing.assert_close(out.log_probs, expected.log_probs, atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(out.entropy, expected.entropy, atol=1e-10, rtol=1e-10)
    found = torch.autograd.grad(loss(out.log_probs, out.entropy, None), (hidden, weight))
    # The definition's own gradient is NaN at -inf: by hand, p - onehot within the set.
    p = (logits / 0.7).softmax(-1).detach()
    counts = (targets != -100)[:, None]
    own = torch.nn.functional.one_hot(targets.clamp(min=0), 90)
    log_p = torch.where(p > 0, p.clamp(min=1e-300).log(), 0.0)
    entropy = -(p * log_p).sum(-1, keepdim=True)
    at_logits = torch.where(counts, (own - p - 0.1 * p * (log_p + entropy)) / 0.7 / 37, 0.0)
    right = (at_logits @ weight.detach(), at_logits.t() @ hidden.detach())
    for ours, theirs in zip(found, right, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=1e-9)


def fp32_on_two_ranks(seed: int) -> tuple:
    dist.init_process_group("gloo")
    hidden, weight, targets = head(seed, dtype=torch.bfloat16)
    share = weight.detach().chunk(2)[dist.get_rank()].contiguous()
    options = {"log_rho": None, "with_entropy": True, "chunk_tokens": 8, "vocab_size": 88, "fp32_logits": True}
    out = linear_log_probs(hidden, share, targets, tp_group=dist.group.WORLD, **options)
    (grad,) = torch.autograd.grad((out.log_probs + 0.2 * out.entropy).sum(), hidden)
    grad = grad.float()
    dist.all_reduce(grad)
    dist.destroy_process_group()
    return out.log_probs.detach().numpy(), grad.numpy()


@pytest.mark.slow
def test_fp32_logits_over_a_sharded_vocabulary():
    seed = torch.seed() % 2**31
    print(f"seed {seed}")
    hidden, weight, targets = head(seed, dtype=torch.bfloat16)
    logits = (hidden.double() @ weight.double().t())[:, :88]
    exact = masked_log_softmax_reference(logits, targets, log_rho=None, with_entropy=True)
    rows = targets != -100
    (grad,) = torch.autograd.grad((exact.log_probs + 0.2 * exact.entropy)[rows].sum(), hidden)
    for log_probs, ours in run_ranks(2, "test_linear_log_probs:fp32_on_two_ranks", (seed,), timeout=120):
        torch.testing.assert_close(torch.tensor(log_probs)[rows].double(), exact.log_probs[rows], atol=1e-4, rtol=0)
        assert fp32_errors(torch.tensor(ours), grad) < 2 * 2**-8


def in_eighths(seed: int):
    """A head in fp32 whose logits are exact in any order of their sums: the set that a border cuts out of them is the same."""
    hidden, weight, targets = head(seed)
    return *((x.detach() * 8).round().div(8).requires_grad_() for x in (hidden, weight)), targets


def inside(log_probs, entropy):
    """A loss of the labels inside the set, whose log-probs are above -12 - log 90."""
    return (torch.where(log_probs > -50.0, log_probs, 0.0) + 0.2 * entropy).sum() / 37


def on_two_ranks(seed: int) -> list:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    results = []
    for on_the_way in (False, True):
        hidden, weight, targets = in_eighths(seed)
        share = weight.detach().chunk(2)[rank].contiguous().requires_grad_()
        loss = lambda log_probs, entropy, rows: inside(log_probs, entropy)  # noqa: E731
        options = {"log_rho": -12.0, "with_entropy": True, "chunk_tokens": 8, "vocab_size": 88}
        options["kept"] = kept_sets(seed, targets, 90)[0]
        out = linear_log_probs(
            hidden, share, targets, tp_group=dist.group.WORLD, token_loss=loss if on_the_way else None, **options
        )
        grads = torch.autograd.grad(loss(out.log_probs, out.entropy, None), (hidden, share))
        dist.all_reduce(grads[0])
        results.append([x.detach().numpy() for x in (out.log_probs, out.entropy, out.coverage, *grads)])
    dist.destroy_process_group()
    return results


def test_two_tensor_parallel_ranks_equal_one():
    seed = torch.seed() % 2**31
    print(f"seed {seed}")
    ranks = run_ranks(2, "test_linear_log_probs:on_two_ranks", (seed,), timeout=120)
    hidden, weight, targets = in_eighths(seed)
    kept, _ = kept_sets(seed, targets, 90)
    out = linear_log_probs(hidden, weight, targets, log_rho=-12.0, with_entropy=True, vocab_size=88, kept=kept)
    loss = inside(out.log_probs, out.entropy)
    right = [out.log_probs, out.entropy, out.coverage, *torch.autograd.grad(loss, (hidden, weight))]
    for rank, results in enumerate(ranks):
        for result in results:
            for i, (ours, theirs) in enumerate(zip(result, right, strict=True)):
                theirs = theirs.chunk(2)[rank] if i == 4 else theirs
                torch.testing.assert_close(torch.tensor(ours), theirs.detach(), atol=1e-5, rtol=1e-5)


def test_agrees_with_the_operator_on_whole_logits():
    hidden, weight, targets = head(7)
    whole = masked_log_softmax(hidden @ weight.t(), targets, log_rho=-15.0, with_entropy=True)
    out = linear_log_probs(hidden, weight, targets, log_rho=-15.0, with_entropy=True, chunk_tokens=64)
    for name in ("log_probs", "entropy", "coverage", "pruned"):
        torch.testing.assert_close(getattr(out, name), getattr(whole, name), atol=3e-6, rtol=2e-6)
