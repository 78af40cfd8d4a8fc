from __future__ import annotations

import math
from dataclasses import replace

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


@settings(max_examples=40, deadline=None)
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


@settings(max_examples=40, deadline=None)
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
