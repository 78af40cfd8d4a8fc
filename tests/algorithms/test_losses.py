from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.algorithms import kl, losses
from megatron_rl.algorithms.segments import Segments

CLIPS = {"clip_low": 0.2, "clip_high": 0.28}


def random_batch(seed: int, shape: tuple[int, ...]):
    generator = torch.Generator().manual_seed(seed)
    log_probs = -torch.rand(shape, generator=generator, dtype=torch.float64) * 4
    old = log_probs + torch.randn(shape, generator=generator, dtype=torch.float64) * 0.4
    advantages = torch.randn(shape, generator=generator, dtype=torch.float64)
    mask = torch.rand(shape, generator=generator) < 0.7
    return log_probs.requires_grad_(), old, advantages, mask


def packed(seed: int, lengths=(3, 1, 6, 4), padding: int = 3):
    total = sum(lengths) + padding
    log_probs, old, advantages, mask = random_batch(seed, (total,))
    ids = torch.full((total,), -1)
    ids[: sum(lengths)] = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    mask = mask & (ids >= 0)
    mask[0] = mask[4] = True
    return log_probs, old, advantages, mask, Segments(ids, len(lengths))


def policy_terms(name: str, *packed_batch):
    inputs = losses.LossInputs(*packed_batch, **CLIPS)
    return losses.policy_terms(losses.POLICY_LOSSES[name], inputs)


def surrogate_by_definition(log_prob, old, advantage):
    """-min(r A, clip(r) A) and its derivative in log_prob, in Python floats."""
    ratio = math.exp(log_prob - old)
    free, fenced = ratio * advantage, min(max(ratio, 0.8), 1.28) * advantage
    return -min(free, fenced), (0.0 if fenced < free else -free), fenced < free


@settings(max_examples=40)
@given(seed=st.integers(0, 2**31))
def test_clipped_surrogate_is_the_masked_token_mean(seed):
    log_probs, old, advantages, mask = random_batch(seed, (3, 7))
    mask[0, 0] = True
    with_garbage = [torch.where(mask, x, torch.nan) for x in (log_probs, old, advantages)]
    result = losses.clipped_surrogate(*with_garbage, mask, **CLIPS)
    (gradient,) = torch.autograd.grad(result.loss, log_probs)
    count, loss, clipped = int(mask.sum()), 0.0, 0
    for i, j in mask.nonzero().tolist():
        value, slope, cut = surrogate_by_definition(*(float(x[i, j]) for x in (log_probs.detach(), old, advantages)))
        loss += value / count
        clipped += cut
        assert float(gradient[i, j]) == pytest.approx(slope / count, rel=1e-9, abs=1e-12)
    assert float(result.loss.detach()) == pytest.approx(loss, rel=1e-9)
    assert float(result.clip_fraction) == pytest.approx(clipped / count)
    assert not gradient[~mask].any()


def test_clip_fraction_counts_only_where_the_clip_binds():
    # Ratios 2, 2, 0.5, 0.5 with A = +1, -1, +1, -1: the first and the last are held back.
    log_probs = torch.log(torch.tensor([[2.0, 2.0, 0.5, 0.5]])).requires_grad_()
    result = losses.clipped_surrogate(
        log_probs,
        torch.zeros(1, 4),
        torch.tensor([[1.0, -1.0, 1.0, -1.0]]),
        torch.ones(1, 4),
        clip_low=0.2,
        clip_high=0.2,
    )
    torch.testing.assert_close(result.loss, torch.tensor(-(1.2 - 2.0 + 0.5 - 0.8) / 4))
    assert float(result.clip_fraction) == 0.5
    result.loss.backward()
    torch.testing.assert_close(log_probs.grad, torch.tensor([[0.0, 2.0, -0.5, 0.0]]) / 4)


@pytest.mark.parametrize("loss", losses.POLICY_LOSSES)
def test_on_policy_all_losses_have_the_policy_gradient(loss):
    log_probs, _, advantages, mask, segments = packed(1)
    log_probs = log_probs.detach().float().requires_grad_()
    terms, sums = policy_terms(loss, log_probs, log_probs.detach(), advantages.float(), mask, segments)
    (gradient,) = torch.autograd.grad(terms.sum(), log_probs)
    assert torch.equal(gradient, torch.where(mask, -advantages.float(), 0.0))
    assert float(sums["loss/ratio"]) == float(mask.sum())
    assert float(sums["loss/old_kl"]) == float(sums["loss/clip_fraction"]) == 0.0


def test_reinforce_ignores_old_log_probs():
    log_probs, old, advantages, mask, segments = packed(2)
    terms, _ = policy_terms("reinforce", log_probs, old, advantages, mask, segments)
    torch.testing.assert_close(terms, torch.where(mask, -advantages * log_probs, 0.0))


@pytest.mark.parametrize("aggregation", ["sequence_mean", "token_mean"])
@pytest.mark.parametrize("seed", range(4))
def test_gspo_equals_the_sequence_objective(seed, aggregation):
    """Value and gradient of GSPO itself: s = exp(mean log-ratio) with its gradient, one advantage per sequence."""
    log_probs, old, advantages, mask, segments = packed(seed)
    advantages = segments.spread_out(advantages[:4], padding=torch.nan)
    terms, sums = policy_terms("gspo", log_probs, old, advantages, mask, segments)
    weights = losses.loss_weights(mask, segments, aggregation).double()
    (gradient,) = torch.autograd.grad((terms * weights).sum(), log_probs)

    expected, clipped = log_probs.new_zeros(()), 0
    for sequence in range(4):
        inside = mask & (segments.ids == sequence)
        if not inside.any():
            continue
        s = torch.exp((log_probs - old)[inside].mean())
        a = advantages[inside][0]
        value = -torch.minimum(s * a, s.clamp(0.8, 1.28) * a)
        expected = expected + value * (inside.sum() if aggregation == "token_mean" else 1)
        clipped += int(inside.sum()) if s.clamp(0.8, 1.28) * a < s * a else 0
    torch.testing.assert_close((terms * weights).sum(), expected)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, log_probs)[0])
    assert int(sums["loss/clip_fraction"]) == clipped


def test_gspo_over_two_context_parallel_parts_equals_one():
    log_probs, old, advantages, mask, segments = packed(5)
    whole, _ = policy_terms("gspo", log_probs, old, advantages, mask, segments)
    halves = [torch.arange(len(mask)) % 2 == part for part in range(2)]

    def terms_of(half, all_reduce):
        part = [x[half] for x in (log_probs, old, advantages, mask)]
        return policy_terms("gspo", *part, replace(segments.take(half), all_reduce=all_reduce))[0]

    # What the collective of each half would have seen, recorded first, then summed: two ranks in one process.
    seen = []
    for half in halves:
        terms_of(half, lambda x: seen.append(x.clone()) or x)
    assert len(seen) == 2, "one reduction of each half"
    total = torch.stack(seen).sum(0)
    for half in halves:
        torch.testing.assert_close(terms_of(half, lambda x: total), whole[half])


@settings(max_examples=40)
@given(seed=st.integers(0, 2**31))
def test_cispo_weighs_the_policy_gradient_by_the_clipped_ratio(seed):
    """Value and gradient against a loop over tokens: the clip bounds a token's weight, and no gradient is lost to it."""
    log_probs, old, advantages, mask, segments = packed(seed)
    garbage = [torch.where(mask, x, torch.nan) for x in (log_probs, old, advantages)]
    terms, sums = policy_terms("cispo", *garbage, mask, segments)
    (gradient,) = torch.autograd.grad(terms.sum(), log_probs)
    clipped = 0
    for t in range(len(mask)):
        if not mask[t]:
            assert float(terms[t].detach()) == float(gradient[t]) == 0.0
            continue
        log_prob, before, advantage = (float(x[t]) for x in (log_probs.detach(), old, advantages))
        ratio = math.exp(log_prob - before)
        weight = min(max(ratio, 0.8), 1.28)
        clipped += not 0.8 <= ratio <= 1.28
        assert float(terms[t].detach()) == pytest.approx(-weight * advantage * log_prob, rel=1e-12)
        assert float(gradient[t]) == pytest.approx(-weight * advantage, rel=1e-12)
    assert int(sums["loss/clip_fraction"]) == clipped


def test_cispo_learns_where_ppo_is_held_back():
    """Ratios 2 and 1/2 with A = +1 and -1: PPO's clip stops both gradients, CISPO bounds their weights."""
    log_probs = torch.log(torch.tensor([2.0, 0.5])).requires_grad_()
    rest = torch.zeros(2), torch.tensor([1.0, -1.0]), torch.ones(2, dtype=torch.bool), Segments.of(torch.arange(2))
    gradients = {}
    for loss in ("ppo", "cispo"):
        (gradients[loss],) = torch.autograd.grad(policy_terms(loss, log_probs, *rest)[0].sum(), log_probs)
    assert gradients["ppo"].tolist() == [0.0, 0.0]
    torch.testing.assert_close(gradients["cispo"], torch.tensor([-1.28, 0.8]))


@settings(max_examples=40)
@given(seed=st.integers(0, 2**31), taus=st.tuples(st.floats(0.2, 5.0), st.floats(0.2, 5.0)))
def test_sapo_weighs_a_token_by_its_soft_gate(seed, taus):
    """Value -4 / tau sigmoid(tau (r - 1)) A, and gradient -sech^2(tau (r - 1) / 2) r A, token by token in Python floats."""
    log_probs, old, advantages, mask, segments = packed(seed)
    advantages[0] = 0.0  # which has the other temperature, and no part in either
    inputs = losses.LossInputs(log_probs, old, advantages, mask, segments, **CLIPS, tau_pos=taus[0], tau_neg=taus[1])
    terms, sums = losses.policy_terms(losses.POLICY_LOSSES["sapo"], inputs)
    (gradient,) = torch.autograd.grad(terms.sum(), log_probs)
    for t in range(len(mask)):
        ratio, advantage = math.exp(float(log_probs[t].detach() - old[t])), float(advantages[t])
        tau, counts = taus[advantage <= 0], float(mask[t])
        value = -4 / tau / (1 + math.exp(-tau * (ratio - 1))) * advantage * counts
        slope = -ratio * advantage / math.cosh(tau * (ratio - 1) / 2) ** 2 * counts
        assert float(terms[t].detach()) == pytest.approx(value, rel=1e-11)
        assert float(gradient[t]) == pytest.approx(slope, rel=1e-9, abs=1e-300)
    assert float(sums["loss/clip_fraction"]) == 0.0


def test_sapo_lets_far_tokens_go_and_those_of_negative_advantages_sooner():
    """At r = 1 the policy gradient itself, with the defaults of the paper; far away nothing, and no overflow at e^20."""
    log_probs = torch.tensor(
        [0.0, 0.0, math.log(3.0), math.log(3.0), 30.0, -30.0], dtype=torch.float64
    ).requires_grad_()
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
    rest = (
        torch.zeros(6, dtype=torch.float64),
        advantages,
        torch.ones(6, dtype=torch.bool),
        Segments.of(torch.arange(6)),
    )
    (gradient,) = torch.autograd.grad(policy_terms("sapo", log_probs, *rest)[0].sum(), log_probs)
    weights = (-gradient * advantages).tolist()
    assert weights[:2] == pytest.approx([1.0, 1.0], rel=1e-12)
    assert weights[2:4] == pytest.approx([3 / math.cosh(1.0) ** 2, 3 / math.cosh(1.05) ** 2], rel=1e-12)
    assert weights[3] < weights[2] and weights[4] == 0.0 and 0.0 < weights[5] < 1e-12


@settings(max_examples=40)
@given(seed=st.integers(0, 2**31), side=st.sampled_from(["low", "high", "both"]))
def test_an_infinite_bound_clips_nothing_on_its_side(seed, side):
    """PPO's -r A, value and gradient, wherever the finite bound does not hold; GSPO and CISPO know it too."""
    log_probs, old, advantages, mask, segments = packed(seed)
    bounds = {f"clip_{one}": math.inf if side in (one, "both") else 0.2 for one in ("low", "high")}
    for loss in ("ppo", "gspo", "cispo"):
        inputs = losses.LossInputs(log_probs, old, advantages, mask, segments, **bounds)
        _, sums = losses.policy_terms(losses.POLICY_LOSSES[loss], inputs)
        assert side != "both" or float(sums["loss/clip_fraction"]) == 0.0
    terms = losses.ppo(losses.LossInputs(log_probs, old, advantages, mask, segments, **bounds)).terms
    (gradient,) = torch.autograd.grad(terms.sum(), log_probs)
    ratios = (log_probs.detach() - old).exp()
    held = (ratios < 0.8) & (advantages < 0) if side == "high" else (ratios > 1.2) & (advantages > 0)
    held &= side != "both"
    expected = torch.where(held, 0.0, -ratios * advantages)
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=0)
    assert terms.isfinite().all()


@settings(max_examples=40)
@given(seed=st.integers(0, 2**31), length=st.integers(1, 5000))
def test_dr_grpos_mean_has_a_constant_divisor(seed, length):
    """Sum of the terms / (sequences x length), as TRL's dr_grpo and verl's seq-mean-token-sum-norm; parts of it add up."""
    rng = np.random.default_rng(seed)
    values, mask = rng.normal(size=(5, 9)), rng.random((5, 9)) < 0.7
    mask[:, rng.integers(9)] = True
    of_trl = (values * mask).sum() / (len(mask) * length)
    of_verl = (values * mask).sum(-1).mean() / length
    ids = torch.arange(5).repeat_interleave(9)
    terms, inside = torch.tensor(values).flatten(), torch.tensor(mask).flatten()
    lengths = torch.tensor(mask.sum(1))
    total, divisor = 0.0, 0.0
    for part in torch.tensor(rng.integers(0, 3, 45)), torch.zeros(45):  # three ranks that share sequences; and one
        total = divisor = 0.0
        for rank in part.unique():
            mine = part == rank
            segments = Segments(ids[mine], 5)
            total += float((terms[mine] * losses.loss_weights(inside[mine], segments, "sequence_sum")).sum())
            divisor += float(losses.constant_total(inside[mine], segments, lengths, length))
        assert divisor == pytest.approx(5 * length, rel=1e-12)
        assert total / divisor == pytest.approx(of_trl, rel=1e-9, abs=1e-15)
        assert of_verl == pytest.approx(of_trl, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("loss", losses.POLICY_LOSSES)
def test_what_a_loss_says_of_itself_is_so(loss):
    """per_token: no token's term moves with another token's log-prob. has_ratio: terms move with the old log-probs."""
    log_probs, old, advantages, mask, segments = packed(7)
    terms, _ = policy_terms(loss, log_probs, old, advantages, mask, segments)
    nudged = log_probs.detach().clone()
    nudged[0] += 0.1
    moved = policy_terms(loss, nudged, old, advantages, mask, segments)[0] != terms
    others = torch.arange(len(mask)) != 0
    assert bool((moved & others).any()) == (not losses.POLICY_LOSSES[loss].per_token)
    from_another = policy_terms(loss, log_probs, old - 0.1, advantages, mask, segments)[0]
    assert torch.equal(from_another, terms) == (not losses.POLICY_LOSSES[loss].has_ratio)


def test_weights_give_token_mean_and_mean_of_sequence_means():
    log_probs, _, _, mask, segments = packed(6)
    values = log_probs.detach()
    tokens = losses.loss_weights(mask, segments, "token_mean")
    torch.testing.assert_close((values * tokens).sum() / mask.sum(), values[mask].mean())
    sequences = losses.loss_weights(mask, segments, "sequence_mean")
    inside = [mask & (segments.ids == s) for s in range(4)]
    means = [values[one].mean() for one in inside if one.any()]
    torch.testing.assert_close((values * sequences).sum() / len(means), torch.stack(means).mean())
    lengths = torch.tensor([2.0, 4.0, 8.0, 16.0])  # of whole sequences, of which only a part lies here
    given_lengths = losses.loss_weights(mask, segments, "sequence_mean", sequence_lengths=lengths)
    torch.testing.assert_close(given_lengths, torch.where(mask, 1 / segments.spread_out(lengths), 0.0))


@pytest.mark.parametrize("loss", losses.POLICY_LOSSES)
def test_nothing_masked_in_and_garbage_elsewhere_gives_zeros(loss):
    log_probs = torch.full((5,), torch.nan, requires_grad=True)
    garbage = torch.full((5,), torch.nan)
    mask, segments = torch.zeros(5, dtype=torch.bool), Segments.of(torch.tensor([0, 0, -1, -1, -1]))
    terms, sums = policy_terms(loss, log_probs, garbage, garbage, mask, segments)
    terms = terms * losses.loss_weights(mask, segments, "sequence_mean")
    terms.sum().backward()
    assert not terms.any() and not log_probs.grad.any()
    assert all(float(value) == 0.0 for value in sums.values())
    surrogate = losses.clipped_surrogate(log_probs, garbage, garbage, mask, **CLIPS)
    assert float(surrogate.loss.detach()) == 0.0 and float(surrogate.clip_fraction) == 0.0


def test_huge_log_ratios_stay_finite():
    log_probs = torch.tensor([0.0, -200.0], requires_grad=True)
    terms, _ = losses.token_terms(log_probs, torch.tensor([-200.0, 0.0]), torch.tensor([-1.0, -1.0]), **CLIPS)
    terms.sum().backward()
    torch.testing.assert_close(terms.detach(), torch.tensor([math.exp(20), 0.8]))
    assert log_probs.grad.isfinite().all()


def test_unknown_names_are_refused():
    log_probs, old, _, mask, segments = packed(0)
    with pytest.raises(ValueError, match="mean"):
        losses.loss_weights(mask, segments, "mean")
    with pytest.raises(ValueError, match="k4"):
        kl.estimate(log_probs, old, "k4")


def test_kl_estimators_and_their_gradients():
    """Exactly, over all tokens of a small vocabulary: expectation of value and gradient under the policy."""
    generator = torch.Generator().manual_seed(7)
    logits = torch.randn(9, generator=generator, dtype=torch.float64).requires_grad_()
    reference = (logits.detach() + 0.3 * torch.randn(9, generator=generator, dtype=torch.float64)).log_softmax(0)
    log_probs = logits.log_softmax(0)
    p = log_probs.detach().exp()
    exact = (log_probs.exp() * (log_probs - reference)).sum()
    (exact_gradient,) = torch.autograd.grad(exact, logits, retain_graph=True)
    gradients = {}
    for name in ("k1", "k2", "k3"):
        mean = (p * kl.estimate(log_probs, reference, name)).sum()
        (gradients[name],) = torch.autograd.grad(mean, logits, retain_graph=True)
        if name != "k2":
            torch.testing.assert_close(mean, exact)
    torch.testing.assert_close(gradients["k1"], exact_gradient)
    torch.testing.assert_close(gradients["k2"], exact_gradient)
    forward = (reference.exp() * (reference - logits.log_softmax(0))).sum()
    torch.testing.assert_close(gradients["k3"], torch.autograd.grad(forward, logits)[0])
    assert (kl.estimate(log_probs, reference, "k3") >= 0).all()


def test_k2_and_k1_by_hand():
    log_probs = torch.tensor([-1.0], requires_grad=True)
    reference = torch.tensor([-1.5])
    assert float(kl.estimate(log_probs, reference, "k1")) == pytest.approx(0.5)
    assert float(kl.estimate(log_probs, reference, "k2")) == pytest.approx(0.125)
    assert float(kl.estimate(log_probs, reference, "k3")) == pytest.approx(math.exp(-0.5) - 0.5)


# -- values -----------------------------------------------------------------------------------------------------------


def value_by_definition(value, old, target, clip):
    """max of the two squared errors, halved, its derivative, and whether the fenced one is the larger, in Python floats."""
    fenced = value if clip is None else min(max(value, old - clip), old + clip)
    free, held = (value - target) ** 2, (fenced - target) ** 2
    return max(free, held) / 2, (0.0 if held > free else value - target), held > free


@pytest.mark.parametrize("clip", [None, 0.2, 1.0])
def test_clipped_value_is_the_masked_mean(rng, clip):
    old, returns = torch.tensor(rng.normal(0, 2, (2, 4, 9)))
    values = (old + torch.tensor(rng.normal(0, 0.7, (4, 9)))).requires_grad_()
    mask = torch.tensor(rng.random((4, 9)) < 0.6)
    mask[1], mask[0, 0] = False, True
    old[0, 0], returns[0, 0] = 0.0, 9.0  # one that is clipped for certain: on its way to the return
    with torch.no_grad():
        values[0, 0] = 3.0
    garbage = [torch.where(mask, x, torch.nan) for x in (values, old, returns)]
    result = losses.clipped_value(*garbage, mask, clip=clip)
    (gradient,) = torch.autograd.grad(result.loss, values)
    terms, clipped = losses.value_terms(values.flatten(), old.flatten(), returns.flatten(), clip=clip)
    count, loss, cut = int(mask.sum()), 0.0, 0
    for i, j in mask.nonzero().tolist():
        numbers = (float(x[i, j]) for x in (values.detach(), old, returns))
        value, slope, held = value_by_definition(*numbers, clip)
        loss += value / count
        cut += held
        assert float(gradient[i, j]) == pytest.approx(slope / count, rel=1e-12, abs=1e-14)
        assert float(terms[9 * i + j].detach()) == pytest.approx(value, rel=1e-12, abs=1e-14)
        assert bool(clipped[9 * i + j]) == held
    assert float(result.loss.detach()) == pytest.approx(loss, rel=1e-12)
    assert float(result.clip_fraction) == pytest.approx(cut / count, rel=1e-6)
    assert bool(clipped[0]) == (clip is not None)
    assert not gradient[~mask].any()


def test_clipped_value_by_hand():
    """Old values 0, clip 0.5, returns 2: 0.3 is free; 1 is held at 0.5; -1 is beyond the fence on the far side, and free."""
    values = torch.tensor([[0.3, 1.0, -1.0]], requires_grad=True)
    result = losses.clipped_value(values, torch.zeros(1, 3), torch.full((1, 3), 2.0), torch.ones(1, 3), clip=0.5)
    result.loss.backward()
    torch.testing.assert_close(result.loss.detach(), torch.tensor((1.7**2 + 1.5**2 + 3.0**2) / 6))
    torch.testing.assert_close(values.grad, torch.tensor([[-1.7, 0.0, -3.0]]) / 3)
    assert float(result.clip_fraction) == pytest.approx(1 / 3)


def test_clipped_value_of_nothing_and_of_short_dtypes():
    for dtype in (torch.float32, torch.bfloat16):
        nan = torch.full((2, 3), torch.nan, dtype=dtype)
        values = nan.clone().requires_grad_()
        result = losses.clipped_value(values, nan, nan, torch.zeros(2, 3), clip=0.2)
        result.loss.backward()
        assert float(result.loss.detach()) == float(result.clip_fraction) == 0.0 and not values.grad.any()
        assert result.loss.dtype == torch.float32
        # 1.0078125 and its fence 1.1 are not apart by rounding to bf16: what lies inside the fence is not clipped.
        inside = torch.full((1, 1), 1.0078125, dtype=dtype)
        close = losses.clipped_value(inside, torch.ones(1, 1, dtype=dtype), inside - 1, torch.ones(1, 1), clip=0.1)
        assert float(close.loss) == 0.5 and float(close.clip_fraction) == 0.0
    for clip in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="clip = "):
            losses.value_terms(values, values, values, clip=clip)


def test_explained_variance_adds_up_and_is_its_formula(rng):
    returns = rng.normal(3, 2, (6, 20))
    mask = rng.random((6, 20)) < 0.5
    for noise in (0.0, 0.5, 4.0):
        values = returns + 7 + noise * rng.normal(size=returns.shape)  # an offset explains nothing and costs nothing
        held = [torch.tensor(np.where(mask, x, np.nan)) for x in (values, returns)]
        parts = [slice(0, 2), slice(2, 2), slice(2, 6)]
        sums = [losses.explained_variance_sums(*(x[part] for x in (*held, torch.tensor(mask)))) for part in parts]
        expected = 1 - np.var((returns - values)[mask]) / np.var(returns[mask])
        assert float(losses.explained_variance(sum(sums))) == pytest.approx(expected, rel=1e-12, abs=1e-12)
    mean = np.full_like(returns, returns[mask].mean())
    sums = losses.explained_variance_sums(*(torch.tensor(x) for x in (mean, returns, mask)))
    assert float(losses.explained_variance(sums)) == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_explained_variance_of_returns_that_do_not_vary_is_nan(dtype):
    values, everywhere = torch.arange(12, dtype=dtype), torch.ones(12)
    for returns in (torch.full((12,), 0.1, dtype=dtype), torch.zeros(12, dtype=dtype)):
        assert math.isnan(losses.explained_variance(losses.explained_variance_sums(values, returns, everywhere)))
    assert math.isnan(losses.explained_variance(losses.explained_variance_sums(values, values, torch.zeros(12))))
    assert math.isnan(losses.explained_variance(torch.zeros(5)))
    assert float(losses.explained_variance(losses.explained_variance_sums(values, values, everywhere))) == 1.0
