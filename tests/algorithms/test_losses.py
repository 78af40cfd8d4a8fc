from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.algorithms import kl, losses

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
    return log_probs, old, advantages, mask, ids


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


@pytest.mark.parametrize("loss", ["ppo", "gspo", "reinforce"])
def test_on_policy_all_losses_have_the_policy_gradient(loss):
    log_probs, _, advantages, mask, ids = packed(1)
    log_probs = log_probs.detach().float().requires_grad_()
    terms, sums = losses.policy_terms(loss, log_probs, log_probs.detach(), advantages.float(), mask, ids, **CLIPS)
    (gradient,) = torch.autograd.grad(terms.sum(), log_probs)
    assert torch.equal(gradient, torch.where(mask, -advantages.float(), 0.0))
    assert float(sums["loss/ratio"]) == float(mask.sum())
    assert float(sums["loss/old_kl"]) == float(sums["loss/clip_fraction"]) == 0.0


def test_reinforce_ignores_old_log_probs():
    log_probs, old, advantages, mask, ids = packed(2)
    terms, _ = losses.policy_terms("reinforce", log_probs, old, advantages, mask, ids, **CLIPS)
    torch.testing.assert_close(terms, torch.where(mask, -advantages * log_probs, 0.0))


@pytest.mark.parametrize("aggregation", ["sequence_mean", "token_mean"])
@pytest.mark.parametrize("seed", range(4))
def test_gspo_equals_the_sequence_objective(seed, aggregation):
    """Value and gradient of GSPO itself: s = exp(mean log-ratio) with its gradient, one advantage per sequence."""
    log_probs, old, advantages, mask, ids = packed(seed)
    advantages = torch.where(ids >= 0, advantages[:4][ids.clamp(min=0)], torch.nan)
    terms, sums = losses.policy_terms("gspo", log_probs, old, advantages, mask, ids, **CLIPS)
    weights = losses.loss_weights(mask, ids, aggregation).double()
    (gradient,) = torch.autograd.grad((terms * weights).sum(), log_probs)

    expected, clipped = log_probs.new_zeros(()), 0
    for sequence in range(4):
        inside = mask & (ids == sequence)
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
    log_probs, old, advantages, mask, ids = packed(5)
    whole, _ = losses.policy_terms("gspo", log_probs, old, advantages, mask, ids, **CLIPS)
    halves = [torch.arange(len(ids)) % 2 == part for part in range(2)]
    # What the collective of each half would have seen, recorded first, then summed: two ranks in one process.
    seen = []
    for half in halves:
        part = [x[half] for x in (log_probs, old, advantages, mask, ids)]
        losses.policy_terms("gspo", *part, **CLIPS, num_sequences=4, all_reduce=lambda x: seen.append(x.clone()) or x)
    total = torch.stack(seen).sum(0)
    for half in halves:
        part = [x[half] for x in (log_probs, old, advantages, mask, ids)]
        terms, _ = losses.policy_terms("gspo", *part, **CLIPS, num_sequences=4, all_reduce=lambda x: total)
        torch.testing.assert_close(terms, whole[half])
    with pytest.raises(ValueError, match="num_sequences"):
        losses.policy_terms("gspo", *part, **CLIPS, all_reduce=lambda x: x)


def test_weights_give_token_mean_and_mean_of_sequence_means():
    log_probs, _, _, mask, ids = packed(6)
    values = log_probs.detach()
    tokens = losses.loss_weights(mask, ids, "token_mean")
    torch.testing.assert_close((values * tokens).sum() / mask.sum(), values[mask].mean())
    sequences = losses.loss_weights(mask, ids, "sequence_mean")
    means = [values[mask & (ids == s)].mean() for s in range(4) if (mask & (ids == s)).any()]
    torch.testing.assert_close((values * sequences).sum() / len(means), torch.stack(means).mean())
    lengths = torch.tensor([2.0, 4.0, 8.0, 16.0])  # of whole sequences, of which only a part lies here
    given_lengths = losses.loss_weights(mask, ids, "sequence_mean", sequence_lengths=lengths)
    torch.testing.assert_close(given_lengths, torch.where(mask, 1 / lengths[ids.clamp(min=0)], 0.0))


@pytest.mark.parametrize("loss", ["ppo", "gspo", "reinforce"])
def test_nothing_masked_in_and_garbage_elsewhere_gives_zeros(loss):
    log_probs = torch.full((5,), torch.nan, requires_grad=True)
    garbage = torch.full((5,), torch.nan)
    mask, ids = torch.zeros(5, dtype=torch.bool), torch.tensor([0, 0, -1, -1, -1])
    terms, sums = losses.policy_terms(loss, log_probs, garbage, garbage, mask, ids, **CLIPS)
    terms = terms * losses.loss_weights(mask, ids, "sequence_mean")
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
    log_probs, old, advantages, mask, ids = packed(0)
    with pytest.raises(ValueError, match="ppo2"):
        losses.policy_terms("ppo2", log_probs, old, advantages, mask, ids, **CLIPS)
    with pytest.raises(ValueError, match="mean"):
        losses.loss_weights(mask, ids, "mean")
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
