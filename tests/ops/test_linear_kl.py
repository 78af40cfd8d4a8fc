"""linear_kl and linear_topk_kl against their definitions in fp64, with bounds from the arithmetic of the types."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st
from ranks import run_ranks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_rl.ops import linear_kl, linear_log_probs, linear_topk_kl
from megatron_rl.ops.distillation_kl import kl_reference

DIRECTIONS = ("forward", "reverse", "jensen_shannon")
FP32, FP64, BF16 = torch.float32, torch.float64, torch.bfloat16


def fresh_seed() -> int:
    seed = torch.seed() % 2**31
    print(f"seed {seed}")
    random.seed(seed)
    return seed


@dataclass
class Pair:
    """A student's and a teacher's head; the teacher's is of another width."""

    hidden: torch.Tensor
    weight: torch.Tensor
    teacher_hidden: torch.Tensor
    teacher_weight: torch.Tensor

    def arguments(self) -> tuple[torch.Tensor, ...]:
        return self.hidden, self.weight, self.teacher_hidden, self.teacher_weight

    def leaves(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.hidden, self.weight


def pair(seed: int, tokens=37, vocabulary=90, dtype=FP64, teacher_dtype=None, scale=1.0) -> Pair:
    """Numbers are eighths where a type is bf16: their sums are exact, so a logit is rounded alike in any order."""
    generator = torch.Generator().manual_seed(seed)

    def tensor(rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        made = torch.randn(rows, width, generator=generator, dtype=FP64)
        return ((made * 8).round() / 8 if dtype == BF16 else made).to(dtype)

    teacher_dtype = teacher_dtype or dtype
    hidden, weight = (tensor(rows, 24, dtype) for rows in (tokens, vocabulary))
    teacher_hidden, teacher_weight = (tensor(rows, 17, teacher_dtype) for rows in (tokens, vocabulary))
    hidden, teacher_hidden = hidden * scale, teacher_hidden * scale
    return Pair(hidden.requires_grad_(), weight.requires_grad_(), teacher_hidden, teacher_weight)


def exact_logits(hidden: torch.Tensor, weight: torch.Tensor, vocab_size: int | None, fp32_logits=False) -> torch.Tensor:
    """In fp64; of bf16 the rounded ones, with the gradient of the unrounded."""
    logits = hidden.double() @ weight.double().t()
    if hidden.dtype == BF16 and not fp32_logits:
        logits = logits + ((hidden @ weight.t()).double() - logits).detach()
    return logits[:, :vocab_size]


@dataclass
class Bounds:
    """What rounding may do to a token's value, and to each element of the gradients of a sum with weights `sent`."""

    value: torch.Tensor
    hidden: torch.Tensor
    weight: torch.Tensor


def bounds(p: Pair, logits, teacher_logits, temperature: float, sent: torch.Tensor, fp32_logits=False) -> Bounds:
    """First-order bounds.

    u: a rounding of the softmaxes' type. A logit of n products is off by n u sum |products|, a log-softmax s or t by e: twice
    that and the rounding of itself. A value, a mean of t - s under weights that are off by e, by e (2 + mean |t - s|).
    An element of the logits' gradient is made of the two probabilities times differences, each off by e.
    """
    work = torch.promote_types(torch.promote_types(p.hidden.dtype, p.teacher_hidden.dtype), FP32)
    vocabulary = logits.shape[1]
    u = torch.finfo(work).eps
    pairs = ((p.hidden, p.weight), (p.teacher_hidden, p.teacher_weight))
    e = torch.zeros(len(p.hidden), 1, dtype=FP64)
    for (h, w), z in zip(pairs, (logits, teacher_logits), strict=True):
        # Rounded bf16 logits are the same here and there.
        products = (h.double().abs() @ w.double().abs()[:vocabulary].t()).amax(1, keepdim=True) * h.shape[1]
        products = products if h.dtype != BF16 or fp32_logits else torch.zeros_like(products)
        e = e + 2 * u * (products + 4 * z.abs().amax(1, keepdim=True)) / temperature + 16 * u
    s, t = ((z / temperature).log_softmax(1).detach() for z in (logits, teacher_logits))
    far = (t - s).abs()
    both = s.exp() + t.exp() + torch.finfo(work).tiny  # below that nothing is exact
    mean = (both * far).sum(1, keepdim=True)
    value = (e * (2 + mean) + 4 * u * mean)[:, 0]
    at_logits = sent.abs()[:, None] * both * (1 + far + mean) / temperature
    rounding = torch.finfo(p.weight.dtype).eps
    steps = {0: 3.0, 1: 3.0} if p.weight.dtype == BF16 else {0: vocabulary, 1: len(p.hidden)}
    at_hidden = ((4 * e + steps[0] * rounding) * at_logits) @ p.weight.double().abs()[:vocabulary]
    at_weight = ((4 * e + steps[1] * rounding) * at_logits).t() @ p.hidden.double().abs()
    padding = torch.zeros(len(p.weight) - vocabulary, p.weight.shape[1], dtype=FP64)
    return Bounds(value, at_hidden, torch.cat([at_weight, padding]))


def assert_within(found: torch.Tensor, right: torch.Tensor, bound: torch.Tensor) -> None:
    off = (found.detach().double() - right.detach().double()).abs()
    assert off.isfinite().all() and (off <= bound).all(), (
        f"off by up to {(off / bound.clamp(min=1e-300)).max():.3g} bounds"
    )


def compare(p: Pair, *, temperature=1.0, direction="forward", mix=0.5, vocab_size=None, fp32_logits=False, **options):
    """Value and gradients of a random weighted sum against fp64."""
    found = linear_kl(
        *p.arguments(),
        temperature=temperature,
        direction=direction,
        mix=mix,
        vocab_size=vocab_size,
        fp32_logits=fp32_logits,
        **options,
    )
    work = torch.promote_types(torch.promote_types(p.hidden.dtype, p.teacher_hidden.dtype), FP32)
    assert found.dtype == work and found.shape == p.hidden.shape[:1]
    logits, teacher_logits = (
        exact_logits(h, w, vocab_size, fp32_logits)
        for h, w in ((p.hidden, p.weight), (p.teacher_hidden, p.teacher_weight))
    )
    right = kl_reference(logits, teacher_logits, temperature=temperature, direction=direction, mix=mix)
    sent = torch.randn(len(found), dtype=FP64)
    bound = bounds(p, logits, teacher_logits, temperature, sent, fp32_logits)
    assert_within(found, right, bound.value)
    gradients = torch.autograd.grad(found, p.leaves(), sent.to(work))
    slopes = torch.autograd.grad(right, p.leaves(), sent)
    for ours, theirs, most in zip(gradients, slopes, (bound.hidden, bound.weight), strict=True):
        assert ours.dtype == p.hidden.dtype
        assert_within(ours, theirs, most)


SEEDS = st.integers(0, 2**31)
CHUNKS = st.integers(1, 64)


@settings(max_examples=60)
@given(
    seed=SEEDS,
    tokens=st.integers(1, 50),
    dtypes=st.sampled_from([(FP64, FP64), (FP32, FP32), (FP32, BF16), (BF16, BF16), (BF16, FP32), (FP64, BF16)]),
    direction=st.sampled_from(DIRECTIONS),
    chunk_tokens=CHUNKS,
    vocab_size=st.none() | st.integers(2, 90),
    temperature=st.just(1.0) | st.floats(0.5, 3.0),
    mix=st.floats(0.05, 0.95),
)
def test_values_and_gradients(seed, tokens, dtypes, direction, chunk_tokens, vocab_size, temperature, mix):
    torch.manual_seed(seed)
    p = pair(seed, tokens, dtype=dtypes[0], teacher_dtype=dtypes[1])
    options = {"mix": mix, "vocab_size": vocab_size, "chunk_tokens": chunk_tokens}
    compare(p, temperature=temperature, direction=direction, **options)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_fp32_logits_of_bf16_heads(direction):
    """Of eighths no bit is lost; more rows than are fp32 at a time."""
    compare(pair(fresh_seed(), 9, 8200, BF16), direction=direction, chunk_tokens=4, fp32_logits=True)


@pytest.mark.parametrize("dtype", [FP32, FP64])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("scale", [30.0, 1000.0])
def test_peaked_distributions(dtype, direction, scale):
    """Logits up to some 10,000: nearly all probabilities are zero in any type."""
    for chunk_tokens in (8, 64):
        p = pair(fresh_seed(), dtype=dtype, scale=scale)
        compare(p, direction=direction, vocab_size=87, chunk_tokens=chunk_tokens)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_padding_columns_belong_to_no_softmax(direction):
    p = pair(fresh_seed())
    kept = linear_kl(*p.arguments(), direction=direction, vocab_size=86, chunk_tokens=8)
    with torch.no_grad():
        p.weight[86:], p.teacher_weight[86:] = 100.0, torch.nan
    changed = linear_kl(*p.arguments(), direction=direction, vocab_size=86, chunk_tokens=8)
    assert torch.equal(kept, changed)
    (grad,) = torch.autograd.grad(changed.sum(), p.weight)
    assert not grad[86:].any() and grad[:86].any()


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("dtype", [FP32, FP64, BF16])
def test_nothing_between_equals_and_little_below_zero(direction, dtype):
    seed = fresh_seed()
    p = pair(seed, dtype=dtype)
    u = torch.finfo(torch.promote_types(dtype, FP32)).eps
    same = linear_kl(*p.leaves(), p.hidden, p.weight, direction=direction, chunk_tokens=8)
    assert same.abs().max() <= 4 * u
    (grad,) = torch.autograd.grad(same.sum(), p.hidden)
    assert grad.abs().max() <= 24 * 4 * u * p.weight.abs().max() * 2
    near = Pair(*p.leaves(), p.hidden.detach() * (1 + 1e-3), p.weight.detach())
    for student, teacher in ((p, near), (p, p)):
        teacher_head = (teacher.hidden, teacher.weight) if teacher is p else (near.teacher_hidden, near.teacher_weight)
        q = Pair(*student.leaves(), *(x.detach() for x in teacher_head))
        value = linear_kl(*q.arguments(), direction=direction)
        logits = [exact_logits(h, w, None) for h, w in (student.leaves(), teacher_head)]
        assert (value >= -bounds(q, *logits, 1.0, torch.ones(37)).value).all()


def test_no_gradient_reaches_the_teacher():
    p = pair(fresh_seed())
    p.teacher_hidden.requires_grad_(), p.teacher_weight.requires_grad_()
    linear_kl(*p.arguments()).sum().backward()
    assert p.teacher_hidden.grad is None and p.teacher_weight.grad is None and p.weight.grad is not None
    frozen = linear_kl(p.hidden.detach(), p.weight.detach(), p.teacher_hidden.detach(), p.teacher_weight.detach())
    assert not frozen.requires_grad


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_no_tokens(direction):
    p = pair(fresh_seed(), tokens=0)
    value = linear_kl(*p.arguments(), direction=direction)
    assert value.shape == (0,)
    value.sum().backward()
    assert p.hidden.grad.shape == (0, 24) and not p.weight.grad.any()


@pytest.mark.parametrize("chunk_tokens", [8, 64])
def test_backward_twice_through_the_same_graph(chunk_tokens):
    p = pair(fresh_seed())
    value = linear_kl(*p.arguments(), direction="reverse", chunk_tokens=chunk_tokens).sum()
    first, second = (torch.autograd.grad(value, p.weight, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_the_weights_gradient_is_summed_in_fp32():
    """600 times the same token, one a chunk: sums in bf16 would stop growing at 256 times."""
    p = pair(fresh_seed(), tokens=1, dtype=BF16)
    many = Pair(p.hidden.repeat(600, 1), p.weight, p.teacher_hidden.repeat(600, 1), p.teacher_weight)
    one, all_of_them = (
        torch.autograd.grad(linear_kl(*x.arguments(), chunk_tokens=1).sum(), p.weight)[0].double() for x in (p, many)
    )
    torch.testing.assert_close(all_of_them, 600 * one, rtol=2**-7, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_forward_is_modelopts_loss_without_the_squared_temperature(temperature):
    from modelopt.torch.distill.losses import LogitsDistillationLoss  # imports Megatron, for which ranks.py prepares it

    p = pair(fresh_seed())
    logits, teacher_logits = p.hidden @ p.weight.t(), p.teacher_hidden @ p.teacher_weight.t()
    theirs = LogitsDistillationLoss(temperature, reduction="none")(logits, teacher_logits)
    ours = temperature**2 * linear_kl(*p.arguments(), temperature=temperature, chunk_tokens=8)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    for a, b in zip(*(torch.autograd.grad(x.mean(), p.leaves()) for x in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("mix", [0.1, 0.5, 0.8])
def test_jensen_shannon_is_trls(mix):
    from trl.experimental.gkd import GKDTrainer

    p = pair(fresh_seed())
    logits, teacher_logits = p.hidden @ p.weight.t(), p.teacher_hidden @ p.teacher_weight.t()
    theirs = GKDTrainer.generalized_jsd_loss(logits, teacher_logits, beta=mix, temperature=1.7, reduction="none")
    ours = linear_kl(*p.arguments(), direction="jensen_shannon", mix=mix, temperature=1.7, chunk_tokens=8)
    torch.testing.assert_close(ours, theirs.sum(-1), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_the_reference_is_that_of_torchs_distributions(direction):
    p = pair(fresh_seed())
    logits, teacher_logits = (x.detach() for x in (p.hidden @ p.weight.t(), p.teacher_hidden @ p.teacher_weight.t()))
    student, teacher = (torch.distributions.Categorical(logits=x / 0.6) for x in (logits, teacher_logits))
    sides = (teacher, student) if direction == "forward" else (student, teacher)
    found = kl_reference(logits, teacher_logits, temperature=0.6, direction=direction)
    torch.testing.assert_close(found, torch.distributions.kl_divergence(*sides), rtol=1e-10, atol=1e-12)


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that an operation makes."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.numel = max([self.numel, *(x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor))])
        return out


@pytest.mark.parametrize("direction", [*DIRECTIONS, "topk forward", "topk reverse"])
@pytest.mark.parametrize(("dtype", "fp32_logits"), [(FP32, False), (BF16, False), (BF16, True)])
def test_the_logits_of_more_than_one_chunk_never_exist(direction, dtype, fp32_logits):
    tokens, vocabulary, chunk = 64, 500, 25
    p = pair(fresh_seed(), tokens, vocabulary, dtype)
    options = {"direction": direction.removeprefix("topk "), "chunk_tokens": chunk, "fp32_logits": fp32_logits}
    ids, log_probs = recorded(p, 5)
    with Largest() as forward:
        if direction.startswith("topk"):
            value = linear_topk_kl(*p.leaves(), ids, log_probs, **options)
        else:
            value = linear_kl(*p.arguments(), **options)
    with Largest() as backward:
        value.sum().backward()
    # Also more than the weight's own 500 x 24.
    assert forward.numel == backward.numel == chunk * vocabulary < tokens * vocabulary


def on_two_ranks(seed: int, vocab_size: int) -> list:
    dist.init_process_group("gloo")
    rank, results = dist.get_rank(), []
    p = pair(seed, dtype=FP64)
    share, teacher_share = (x.detach().chunk(2)[rank].contiguous() for x in (p.weight, p.teacher_weight))
    share.requires_grad_()
    options = {"tp_group": dist.group.WORLD, "vocab_size": vocab_size}
    ids, log_probs = recorded(p, 6, vocab_size)
    for direction, chunk_tokens in itertools.product(DIRECTIONS, (8, 64)):
        more = {**options, "direction": direction, "chunk_tokens": chunk_tokens}
        values = [linear_kl(p.hidden, share, p.teacher_hidden, teacher_share, temperature=0.8, mix=0.3, **more)]
        if direction != "jensen_shannon":
            values.append(linear_topk_kl(p.hidden, share, ids, log_probs, **more))
        for value in values:
            sent = torch.linspace(-1.0, 2.0, len(value), dtype=FP64)
            grads = torch.autograd.grad(value, (p.hidden, share), sent)
            dist.all_reduce(grads[0])
            results.append([x.detach().numpy() for x in (value, *grads)])
    dist.destroy_process_group()
    return results


@pytest.mark.slow
@pytest.mark.parametrize("vocab_size", [86, 44], ids=["some padding", "a rank of padding alone"])
def test_two_tensor_parallel_ranks_equal_one(vocab_size):
    seed = fresh_seed()
    ranks = run_ranks(2, "test_linear_kl:on_two_ranks", (seed, vocab_size), timeout=120)
    p = pair(seed, dtype=FP64)
    ids, log_probs = recorded(p, 6, vocab_size)
    right = []
    for direction, _ in itertools.product(DIRECTIONS, (8, 64)):
        values = [linear_kl(*p.arguments(), direction=direction, vocab_size=vocab_size, temperature=0.8, mix=0.3)]
        if direction != "jensen_shannon":
            values.append(linear_topk_kl(*p.leaves(), ids, log_probs, direction=direction, vocab_size=vocab_size))
        for value in values:
            sent = torch.linspace(-1.0, 2.0, len(value), dtype=FP64)
            right.append([value.detach(), *torch.autograd.grad(value, p.leaves(), sent)])
    for rank, results in enumerate(ranks):
        for ours, theirs in zip(results, right, strict=True):
            expected = [theirs[0], theirs[1], theirs[2].chunk(2)[rank]]
            for a, b in zip(ours, expected, strict=True):
                torch.testing.assert_close(torch.tensor(a), b, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(37, 23)}, r"linear_kl: hidden \[37, 23\], weight \[90, 24\] must be"),
        ({"teacher_weight": torch.zeros(90, 16)}, r"teacher_hidden \[37, 17\], teacher_weight \[90, 16\] must be"),
        ({"teacher_hidden": torch.zeros(36, 17)}, "hidden has 37 rows, teacher_hidden 36"),
        ({"teacher_weight": torch.zeros(91, 17)}, "weight has 90 rows, teacher_weight 91"),
        ({"hidden": torch.zeros(37, 24, dtype=BF16)}, "hidden is torch.bfloat16, weight torch.float32"),
        ({"hidden": torch.zeros(37, 24, dtype=torch.float16)}, "hidden is torch.float16"),
        ({"teacher_hidden": torch.zeros(37, 17, dtype=BF16)}, "teacher_hidden is torch.bfloat16, teacher_weight"),
        ({"weight": torch.zeros(90, 24, device="meta")}, "weight on meta"),
        ({"direction": "backward"}, "direction 'backward' must be one of"),
        ({"temperature": 0.0}, "temperature 0.0 must be above 0"),
        ({"temperature": float("nan")}, "temperature nan"),
        ({"mix": 1.0}, "mix 1.0"),
        ({"vocab_size": 0}, "vocab_size 0"),
        ({"chunk_tokens": 0}, "chunk_tokens 0"),
    ],
)
def test_bad_arguments_are_named(change, message):
    p = pair(0, dtype=FP32)
    names = ("hidden", "weight", "teacher_hidden", "teacher_weight")
    with pytest.raises(ValueError, match=message) as caught:
        linear_kl(**dict(zip(names, p.arguments(), strict=True)) | change)
    assert str(caught.value).startswith("linear_kl: ") and "\n" not in str(caught.value)


def teacher_log_probs(p: Pair, vocab_size: int | None = None) -> torch.Tensor:
    return exact_logits(p.teacher_hidden, p.teacher_weight, vocab_size).log_softmax(1)


def recorded(p: Pair, k: int, vocab_size: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The teacher's k likeliest ids of each token, and their log-probs; in the middle one that is none."""
    log_probs, ids = teacher_log_probs(p, vocab_size).topk(k, dim=1)
    ids[::3, k // 2], log_probs[::3, k // 2] = random.choice([-1, -100]), torch.nan
    return ids, log_probs


def topk_reference(logits: torch.Tensor, ids: torch.Tensor, log_probs: torch.Tensor, direction: str) -> torch.Tensor:
    """The definition, token by token."""
    values = []
    for row, some, logs in zip(logits, ids, log_probs, strict=True):
        chosen = some[some >= 0]
        p = row.softmax(0)
        student = torch.cat([p[chosen], 1 - p[chosen].sum()[None]])
        teacher = logs[some >= 0].double().exp()
        teacher = torch.cat([teacher, 1 - teacher.sum()[None]])
        a, b = (teacher, student) if direction == "forward" else (student, teacher)
        values.append((a * (a / b).log()).sum())
    return torch.stack(values)


@settings(max_examples=40)
@given(
    seed=SEEDS,
    direction=st.sampled_from(["forward", "reverse"]),
    dtype=st.sampled_from([FP64, FP32, BF16]),
    chunk_tokens=CHUNKS,
    vocab_size=st.none() | st.just(86),
    k=st.integers(1, 8),
)
@example(seed=0, direction="forward", dtype=FP32, chunk_tokens=7, vocab_size=None, k=1)
def test_topk_values_and_gradients(seed, direction, dtype, chunk_tokens, vocab_size, k):
    torch.manual_seed(seed)
    p = pair(seed, dtype=dtype)
    with torch.no_grad():
        p.hidden.mul_(0.5), p.teacher_hidden.mul_(0.5)  # so that the definition's own differences are exact enough
    ids, log_probs = recorded(p, k, vocab_size)
    options = {"direction": direction, "vocab_size": vocab_size, "chunk_tokens": chunk_tokens}
    found = linear_topk_kl(*p.leaves(), ids, log_probs, **options)
    assert found.dtype == torch.promote_types(dtype, FP32)
    logits = exact_logits(p.hidden, p.weight, vocab_size)
    right = topk_reference(logits, ids, log_probs, direction)
    sent = torch.randn(len(found), dtype=FP64)
    bound = bounds(p, logits, exact_logits(p.teacher_hidden, p.teacher_weight, vocab_size), 1.0, sent)
    assert_within(found, right, bound.value + 1e-9)
    gradients = torch.autograd.grad(found, p.leaves(), sent.to(found.dtype))
    slopes = torch.autograd.grad(right, p.leaves(), sent)
    for ours, theirs, most in zip(gradients, slopes, (bound.hidden, bound.weight), strict=True):
        assert ours.dtype == dtype
        assert_within(ours, theirs, most + 1e-8)


@pytest.mark.parametrize("direction", ["forward", "reverse"])
@pytest.mark.parametrize("log_dtype", [FP64, FP32])
def test_topk_of_the_whole_vocabulary_is_the_whole_kl(direction, log_dtype):
    p = pair(fresh_seed())
    ids = torch.stack([torch.randperm(90) for _ in range(37)])
    log_probs = teacher_log_probs(p).gather(1, ids).to(log_dtype)
    whole = linear_kl(*p.arguments(), direction=direction)
    found = linear_topk_kl(*p.leaves(), ids, log_probs, direction=direction, chunk_tokens=8)
    u = torch.finfo(log_dtype).eps
    worst = float(log_probs.abs().max()) * u
    torch.testing.assert_close(found, whole, rtol=4 * u, atol=4 * worst * (1 + float(whole.detach().max())))
    gradients = [torch.autograd.grad(x.sum(), p.leaves()) for x in (found, whole)]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e3 * u, atol=1e3 * worst)


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_topk_is_a_lower_bound_that_grows_with_k(direction):
    """And is reached where student and teacher differ at the ids alone."""
    p = pair(fresh_seed())
    whole = linear_kl(*p.arguments(), direction=direction)
    values = []
    for k in (0, 1, 4, 16, 64):
        log_probs, ids = teacher_log_probs(p).topk(k, dim=1)
        values.append(linear_topk_kl(*p.leaves(), ids, log_probs, direction=direction))
    assert values[0].abs().max() < 1e-12 and (values[1] > 1e-6).any()
    for less, more in itertools.pairwise([*values, whole]):
        assert (more - less >= -1e-10 * (1 + whole)).all()

    weight = p.weight.detach().clone()
    weight[:5] += torch.randn(5, 24)
    ids = torch.arange(5).expand(37, 5)
    log_probs = (p.hidden @ weight.t()).detach().log_softmax(1)[:, :5]
    whole = linear_kl(*p.leaves(), p.hidden, weight, direction=direction)
    torch.testing.assert_close(linear_topk_kl(*p.leaves(), ids, log_probs, direction=direction), whole)


@pytest.mark.parametrize("direction", ["forward", "reverse"])
@pytest.mark.parametrize("excess", [0.0, 1e-6, 1e-4])
@pytest.mark.parametrize("dtype", [FP32, FP64])
def test_topk_without_a_rest(direction, excess, dtype):
    """The teacher's probabilities sum to one, or to more by rounding."""
    p = pair(fresh_seed(), dtype=dtype)
    share = torch.rand(37, 4, dtype=FP64) + 0.1
    log_probs = (share / share.sum(1, keepdim=True) * (1 + excess)).log().float()
    ids = torch.stack([torch.randperm(90)[:4] for _ in range(37)])
    found = linear_topk_kl(*p.leaves(), ids, log_probs, direction=direction, chunk_tokens=8)
    grads = torch.autograd.grad(found.sum(), p.leaves())
    assert found.isfinite().all() and all(g.isfinite().all() for g in grads)
    student = (p.hidden @ p.weight.t()).detach().double().log_softmax(1)
    own = student.gather(1, ids)
    a, rest = log_probs.double().exp(), 1 - own.exp().sum(1)
    if direction == "forward":
        right = (a * (log_probs.double() - own)).sum(1)
    else:
        # 1e-6 for the rest, where it is less
        left = (1 - a.sum(1)).clamp(min=2.0**-20)
        right = (own.exp() * (own - log_probs.double())).sum(1) + rest * (rest / left).log()
    # A rest of 1e-7 that rounding has left over: times its logarithm's ratio.
    torch.testing.assert_close(found.detach().double(), right, rtol=1e-4, atol=1e-4)
    if direction == "reverse":
        assert (found > rest * 5).all()  # the student is held to have no rest either


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_topk_of_a_student_whose_rest_is_nothing_in_fp32(direction):
    """Its logarithm is some -600, which no exponential of fp32 tells from zero."""
    p = pair(fresh_seed(), tokens=1, dtype=FP32)
    with torch.no_grad():
        p.hidden.copy_(torch.nn.functional.one_hot(torch.tensor([0]), 24) * 1.0)
        p.weight[:, 0] = 0.0
        p.weight[:3, 0] = 600.0
    ids = torch.arange(3)[None]
    log_probs = torch.tensor([[0.3, 0.2, 0.1]]).log()
    found = linear_topk_kl(*p.leaves(), ids, log_probs, direction=direction)
    grad, _ = torch.autograd.grad(found.sum(), p.leaves())
    a, third = torch.tensor([0.3, 0.2, 0.1], dtype=FP64), 1 / 3
    rest = -600 - torch.tensor(3.0, dtype=FP64).log() + torch.tensor(87.0, dtype=FP64).log()
    forward = (a * (a / third).log()).sum() + 0.4 * (torch.tensor(0.4, dtype=FP64).log() - rest)
    right = forward if direction == "forward" else (third * (third / a).log()).sum()
    torch.testing.assert_close(found[0].double(), right, rtol=1e-6, atol=1e-6)
    assert grad.isfinite().all()
    if direction == "forward":  # 0.4 of the probability is to move from the three to all others: d/dh = -0.4 * 600
        torch.testing.assert_close(float(grad[0, 0]), 0.4 * 600, rtol=1e-5, atol=0)


def test_topk_ids_of_no_probability_are_none():
    p = pair(fresh_seed())
    log_probs, ids = teacher_log_probs(p).topk(6, dim=1)
    ids[:, 4] = -1
    found = linear_topk_kl(*p.leaves(), ids, log_probs, direction="reverse")
    ids[:, 4], log_probs[:, 4] = teacher_log_probs(p).argmin(1), -torch.inf
    assert torch.equal(found, linear_topk_kl(*p.leaves(), ids, log_probs, direction="reverse"))
    nothing = linear_topk_kl(*p.leaves(), torch.full_like(ids, -100), log_probs)
    assert not nothing.any()
    nothing.sum().backward()
    assert p.weight.grad.abs().max() < 1e-12


def test_topk_no_tokens():
    p = pair(fresh_seed(), tokens=0)
    value = linear_topk_kl(*p.leaves(), torch.zeros(0, 3, dtype=torch.int64), torch.zeros(0, 3))
    value.sum().backward()
    assert value.shape == (0,) and p.hidden.grad.shape == (0, 24) and not p.weight.grad.any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(37, 23)}, r"hidden \[37, 23\], weight \[90, 24\] must be"),
        ({"token_ids": torch.zeros(36, 3, dtype=torch.int64)}, r"token_ids \[36, 3\], log_probs \[37, 3\] must be"),
        ({"token_ids": torch.zeros(37, 3, dtype=torch.int32)}, "token_ids are torch.int32"),
        ({"log_probs": torch.zeros(37, 3, dtype=BF16)}, "log_probs are torch.bfloat16"),
        ({"log_probs": torch.zeros(37, 3, device="meta")}, "log_probs on meta"),
        ({"log_probs": torch.full((37, 3), -1.0)}, "row 0 .* sum is above one"),
        ({"token_ids": torch.arange(111).view(37, 3) % 91}, "row 30 .* outside the vocabulary of 90"),
        ({"vocab_size": 2}, "row 0 .* outside the vocabulary of 2"),
        ({"token_ids": torch.arange(3).where(torch.arange(37)[:, None] != 31, 7)}, "row 31 .* an id twice"),
        ({"direction": "jensen_shannon"}, "direction 'jensen_shannon'"),
        ({"vocab_size": 0}, "vocab_size 0"),
        ({"chunk_tokens": 0}, "chunk_tokens 0"),
    ],
)
def test_topk_bad_arguments_are_named(change, message):
    p = pair(0, dtype=FP32)
    arguments = {"hidden": p.hidden, "weight": p.weight, "token_ids": torch.arange(3).expand(37, 3)}
    arguments["log_probs"] = torch.full((37, 3), -2.0)
    with pytest.raises(ValueError, match=message) as caught:
        linear_topk_kl(**arguments | change)
    assert str(caught.value).startswith("linear_topk_kl: ") and "\n" not in str(caught.value)


@pytest.mark.parametrize("chunk", [3, 64])
def test_a_frozen_head_has_no_gradient_and_no_sum_of_one(chunk):
    """As with adapters: that of hidden states is the same, and nothing of the weight's size is made in the backward."""
    hidden, weight, theirs = torch.randn(13, 8), torch.randn(50, 8), torch.randn(13, 8)
    targets = torch.randint(0, 50, (13,))

    def operators(head: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        of_labels = linear_log_probs(inputs, head, targets, log_rho=None, chunk_tokens=chunk).log_probs
        return of_labels.sum() + linear_kl(inputs, head, theirs, weight.flip(0), chunk_tokens=chunk).sum()

    found = []
    for trains in (True, False):
        inputs, head = hidden.clone().requires_grad_(), weight.clone().requires_grad_(trains)
        operators(head, inputs).backward()
        found.append(inputs.grad)
        assert (head.grad is not None) == trains
    assert torch.equal(*found)
