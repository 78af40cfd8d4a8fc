"""The statements of "Dynamic Vocabulary Pruning" (Li et al.), on random draws and on examples small enough to enumerate."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.algorithms.correction import bias_bound, rollout_correction
from megatron_rl.metrics import mismatch
from megatron_rl.ops import masked_log_softmax

WORDS, HORIZON = 4, 3
TRAJECTORIES = torch.tensor(list(itertools.product(range(WORDS), repeat=HORIZON)))
"""[64, 3]: all of them."""
STATES = [sum(WORDS**i for i in range(t)) for t in range(HORIZON)]
"""First row of the states after t words in a table of logits; there are 1 + 4 + 16."""
seeds = st.integers(0, 2**31)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_table(seed: int, scale: float = 2.0) -> torch.Tensor:
    """[states, words] fp64 logits: a policy of whole trajectories."""
    return scale * torch.randn(1 + 4 + 16, WORDS, generator=generator(seed), dtype=torch.float64)


def visited() -> torch.Tensor:
    """[64, 3] state in which each word of each trajectory is chosen."""
    codes = [
        sum((TRAJECTORIES[:, i] * WORDS ** (t - 1 - i) for i in range(t)), torch.zeros(64).long())
        for t in range(HORIZON)
    ]
    return torch.stack([codes[t] + STATES[t] for t in range(HORIZON)], 1)


def token_log_probs(table: torch.Tensor, rho: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    """[64, 3] log-probs of each word of each trajectory, and the coverage there."""
    log_rho = None if rho is None else math.log(rho)
    found = masked_log_softmax(table[visited().flatten()], TRAJECTORIES.flatten(), log_rho=log_rho)
    return found.log_probs.view(-1, HORIZON), found.coverage.view(-1, HORIZON)


# -- proposition 4.2 -----------------------------------------------------------------------------------------------------


@settings(max_examples=80)
@given(seed=seeds, noise=st.sampled_from([1e-4, 1e-2, 0.3, 2.0]), scale=st.sampled_from([0.5, 3.0, 10.0]))
def test_the_error_of_a_log_prob_is_bounded_by_one_minus_p(seed, noise, scale):
    """|d_a| <= 2 e (1 - p_a) with p_a at a point between the two logit vectors, where 1 - p is at most e^(2e) times the
    trainer's: the printed bound, with the trainer's p, is its limit for small e."""
    draw = generator(seed)
    logits = scale * torch.randn(200, 50, generator=draw, dtype=torch.float64)
    error = noise * (2 * torch.rand(200, 50, generator=draw, dtype=torch.float64) - 1)
    train, engine = logits.log_softmax(-1), (logits + error).log_softmax(-1)
    rest = -torch.expm1(train)
    assert ((train - engine).abs() <= 2 * noise * math.exp(2 * noise) * rest + 1e-13).all()


@settings(max_examples=30)
@given(seed=seeds)
def test_the_bound_is_reached_by_the_worst_error_and_only_in_the_limit_as_printed(seed):
    logits = 2 * torch.randn(50, generator=generator(seed), dtype=torch.float64)
    train = logits.log_softmax(-1)
    token = int(train.argmin())
    for noise in (1e-5, 1.0):
        error = torch.full_like(logits, noise)
        error[token] = -noise
        d = train[token] - (logits + error).log_softmax(-1)[token]
        printed = 2 * noise * -torch.expm1(train[token])
        # For a likely token an error of one nat moves p itself, and the printed bound with it.
        assert float(d / printed) == pytest.approx(1.0, abs=1e-4 if noise < 1 else 0.5)
    likely = torch.tensor([4.0, 0.0, 0.0], dtype=torch.float64)
    d = likely.log_softmax(-1)[0] - (likely + torch.tensor([-1.0, 1.0, 1.0])).log_softmax(-1)[0]
    assert d > 2 * -torch.expm1(likely.log_softmax(-1)[0]), "the printed bound holds for e = 1 too"


# -- proposition 4.3 -----------------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(seed=seeds, sigma=st.sampled_from([0.01, 0.05]))
def test_the_likeliest_error_of_a_sampled_token_overestimates_it(seed, sigma):
    """The mode of engine - trainer log-prob given that the engine sampled the token is positive, and eq. 13 to O(sigma^4)."""
    logits = 2 * torch.randn(12, generator=generator(seed), dtype=torch.float64)
    p = logits.softmax(-1)
    for token in range(12):
        own = torch.nn.functional.one_hot(torch.tensor(token), 12).double()
        error = torch.zeros(12, dtype=torch.float64)
        for _ in range(200):  # the stationary point of log pi_engine(a) + log P(error) (eq. 15)
            error = sigma**2 * (own - (logits + error).softmax(-1))
        engine = (logits + error).softmax(-1)
        gap = engine[token].log() - p[token].log()
        others = (p * engine).sum() - p[token] * engine[token]
        predicted = sigma**2 * ((1 - p[token]) * (1 - engine[token]) + others)
        assert gap > 0
        assert float(gap) == pytest.approx(float(predicted), rel=10 * sigma**2)


def test_tail_tokens_that_were_sampled_are_overestimated_on_average():
    """By the mismatch metrics' own figure, in a simulation with a fixed seed: the engine's noise decides what is sampled."""
    draw, sigma = generator(5), 0.2
    logits = 4 * torch.randn(64, generator=draw, dtype=torch.float64)
    noisy = logits + sigma * torch.randn(40_000, 64, generator=draw, dtype=torch.float64)
    engine = noisy.log_softmax(-1)
    sampled = torch.multinomial(engine.exp(), 1, generator=draw)
    train = logits.log_softmax(-1)[sampled[:, 0]]
    found = mismatch.law_figures(mismatch.measure(train, engine.gather(1, sampled)[:, 0], torch.ones(40_000)))
    tail = train.exp() < mismatch.TAIL
    assert tail.sum() > 500
    assert found["tail_bias_z"] > 5 and found["tail_bias"] == pytest.approx(sigma**2, rel=0.4)


# -- theorem 5.3, propositions 5.4 to 5.6 --------------------------------------------------------------------------------


@settings(max_examples=40)
@given(seed=seeds, rho=st.sampled_from([0.02, 0.2]), noise=st.sampled_from([0.05, 0.5]))
def test_the_constrained_gradient_estimator_is_unbiased(seed, rho, noise):
    """Over all trajectories: E_engine[ratio grad log pi_train R] = grad J of the pruned objective (eq. 22), with the
    log-probs and the weights that training uses; what is missing are the trajectories that the engine never samples."""
    table = random_table(seed).requires_grad_()
    served = table.detach() + noise * torch.randn(table.shape, generator=generator(seed + 1), dtype=torch.float64)
    rewards = torch.rand(64, generator=generator(seed + 2), dtype=torch.float64)
    train, _ = token_log_probs(table, rho)
    engine, _ = token_log_probs(served, rho)
    inside, possible = (train > -torch.inf).all(1), (engine > -torch.inf).all(1)

    whole = torch.where(inside[:, None], train, 0.0).sum(1)  # log pi_train(y) where it is not 0
    j = (torch.where(inside, whole.exp(), 0.0) * rewards).sum()
    (exact,) = torch.autograd.grad(j, table, retain_graph=True)
    missed = (torch.where(inside & ~possible, whole.exp(), 0.0) * rewards).sum()
    (missing,) = torch.autograd.grad(missed, table, retain_graph=True)

    drawn = possible.nonzero()[:, 0]
    weights = rollout_correction(
        train[drawn].detach(), engine[drawn], torch.ones(len(drawn), HORIZON), level="sequence", mode="none"
    ).weights  # 1, or 0 where a token lies outside the trainer's set
    ratio = rollout_correction(
        train[drawn].detach(),
        engine[drawn],
        torch.ones(len(drawn), HORIZON),
        level="sequence",
        mode="truncate",
        high=1e300,
    ).weights
    assert ((weights == 0) == ~inside[drawn, None]).all() and ((ratio == 0) == (weights == 0)).all()
    terms = ratio[:, 0].double() * torch.where(inside, whole, 0.0)[drawn] * rewards[drawn]
    (estimate,) = torch.autograd.grad((engine[drawn].sum(1).exp() * terms).sum(), table)
    torch.testing.assert_close(estimate + missing, exact, rtol=1e-9, atol=1e-12)


@settings(max_examples=60)
@given(seed=seeds, rho=st.sampled_from([1e-3, 0.02, 0.2, 1.0]))
def test_the_bias_of_pruning_is_bounded(seed, rho):
    table = random_table(seed)
    rewards = 3 * torch.rand(64, generator=generator(seed + 1), dtype=torch.float64)
    (whole, _), (pruned, coverage) = token_log_probs(table, None), token_log_probs(table, rho)
    bias = ((pruned.sum(1).exp() - whole.sum(1).exp()) * rewards).sum().abs()
    assert float(bias) <= bias_bound(3.0, HORIZON, float(coverage.min())) + 1e-12
    # With the mean over the states that the whole policy visits (eq. 26), which is tighter.
    mean = (whole.sum(1).exp()[:, None] * coverage).sum() / HORIZON
    assert float(bias) <= bias_bound(3.0, HORIZON, float(mean)) + 1e-12


def test_pruning_to_one_token_reaches_most_of_the_bound():
    """The bound is about something: one reward on all that was pruned, in a single state."""
    table = torch.tensor([[1.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    found = masked_log_softmax(table, torch.tensor([0]), log_rho=math.log(0.9))
    lost = 1 - table.softmax(-1)[0, 0]
    assert float(found.coverage) == pytest.approx(1 - float(lost))
    assert bias_bound(1.0, 1, float(found.coverage)) == pytest.approx(float(lost))


@settings(max_examples=40)
@given(seed=seeds, rho=st.sampled_from([1e-6, 1e-2, 0.3, 1.0]))
def test_masked_logits_give_the_constrained_policy_and_its_gradient(seed, rho):
    """Proposition 5.6 in fp64, and 5.4: the gradient is that of log pi minus its mean over the safe set."""
    logits = (3 * torch.randn(6, 30, generator=generator(seed), dtype=torch.float64)).requires_grad_()
    safe = logits.detach() >= logits.detach().amax(-1, keepdim=True) + math.log(rho)
    targets = torch.where(safe, torch.rand(6, 30, generator=generator(seed + 1), dtype=torch.float64), -1.0).argmax(-1)
    found = masked_log_softmax(logits, targets, log_rho=math.log(rho))
    full = logits.softmax(-1)
    constrained = torch.where(safe, full, 0.0) / torch.where(safe, full, 0.0).sum(-1, keepdim=True)
    at_target = constrained.gather(-1, targets[:, None])[:, 0]
    torch.testing.assert_close(found.log_probs, at_target.log(), rtol=1e-13, atol=1e-13)
    masked = torch.where(safe, logits, -torch.inf)
    torch.testing.assert_close(masked.softmax(-1), constrained, rtol=1e-13, atol=1e-13)
    (ours,) = torch.autograd.grad(found.log_probs.sum(), logits)
    own = torch.nn.functional.one_hot(targets, 30).double()
    torch.testing.assert_close(ours, own - constrained.detach(), rtol=1e-13, atol=1e-13)
    assert (ours[~safe] == 0).all()
    contrast = (own - full) - torch.einsum(
        "tk,tkj->tj", constrained, torch.eye(30, dtype=torch.float64) - full[:, None]
    )
    torch.testing.assert_close(ours, contrast.detach(), rtol=1e-11, atol=1e-12)
