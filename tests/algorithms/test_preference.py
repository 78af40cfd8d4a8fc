"""Losses on preferences against loops over pairs, responses and rankings in 40 digits, gradients by differences in them."""

from __future__ import annotations

import itertools
import math

import mpmath
import numpy as np
import pytest
import torch
from mpmath import mp

from megatron_rl.algorithms import preference
from megatron_rl.metrics.preference_metrics import label_metrics
from megatron_rl.metrics.reduce import figures

mp.dps = 40
EXACT = {"rtol": 1e-12, "atol": 1e-12}
"""fp64: below a hundred roundings of numbers of at most 100, and slopes of at most 100, of 1.1e-16 each."""


def sigmoid(x):
    return 1 / (1 + mpmath.exp(-x))


def agrees(function, oracle, *arrays, rtol=1e-12, atol=1e-12):
    """Value and gradients of function(tensors) in fp64, against oracle(lists of mpf)."""
    tensors = [torch.tensor(a, dtype=torch.float64, requires_grad=True) for a in arrays]
    loss = function(*tensors)
    exact = [[mp.mpf(float(x)) for x in a] for a in arrays]
    assert float(loss.detach()) == pytest.approx(float(oracle(*exact)), rel=rtol, abs=atol)
    gradients = torch.autograd.grad(loss, tensors, allow_unused=True)
    for which, (row, gradient) in enumerate(zip(exact, gradients, strict=True)):
        for i, at in enumerate(row):
            rows = [list(r) for r in exact]

            def moved(x, rows=rows, which=which, i=i):
                rows[which][i] = x
                return oracle(*rows)

            slope = 0.0 if gradient is None else float(gradient[i])
            assert slope == pytest.approx(float(mpmath.diff(moved, at)), rel=rtol, abs=atol)


# -- DPO --------------------------------------------------------------------------------------------------------------


def dpo_by_definition(kind, beta, smoothing, chosen, rejected, chosen_lengths=None, rejected_lengths=None):
    """Mean over pairs of one log-ratio each of the chosen and the rejected."""
    total = mp.mpf(0)
    for i, (plus, minus) in enumerate(zip(chosen, rejected, strict=True)):
        if chosen_lengths is not None:
            plus, minus = plus / int(chosen_lengths[i]), minus / int(rejected_lengths[i])
        d = plus - minus
        true, false = mpmath.log(sigmoid(beta * d)), mpmath.log(sigmoid(-beta * d))
        total += {
            "sigmoid": lambda t=true, f=false: -(1 - smoothing) * t - smoothing * f,
            "robust": lambda t=true, f=false: (-(1 - smoothing) * t + smoothing * f) / (1 - 2 * smoothing),
            "ipo": lambda d=d: (d - 1 / (2 * beta)) ** 2,
            "hinge": lambda d=d: max(mp.mpf(0), 1 - beta * d),
        }[kind]()
    return total / len(chosen)


KINDS = [("sigmoid", 0.0), ("sigmoid", 0.2), ("robust", 0.0), ("robust", 0.3), ("ipo", 0.0), ("hinge", 0.0)]


@pytest.mark.parametrize("by_length", [False, True])
@pytest.mark.parametrize("pairs", [1, 5])
@pytest.mark.parametrize(("kind", "smoothing"), KINDS)
def test_dpo_is_its_formula(rng, kind, smoothing, pairs, by_length):
    beta = float(rng.uniform(0.05, 2.0))
    policy = rng.normal(-20, 10, (2, pairs))
    reference = policy + rng.normal(0, 4, (2, pairs))
    lengths = rng.integers(1, 30, (2, pairs)) if by_length else (None, None)
    options = {"beta": beta, "kind": kind, "label_smoothing": smoothing}
    if by_length:
        options |= {f"{side}_lengths": torch.tensor(n) for side, n in zip(("chosen", "rejected"), lengths, strict=True)}
    fixed = [torch.tensor(r) for r in reference]

    def ours(chosen, rejected):
        return preference.dpo(chosen, rejected, *fixed, **options).loss

    def oracle(chosen, rejected):
        ratios = [
            [p - mp.mpf(float(r)) for p, r in zip(side, other, strict=True)]
            for side, other in zip((chosen, rejected), reference, strict=True)
        ]
        return dpo_by_definition(kind, mp.mpf(beta), mp.mpf(smoothing), *ratios, *lengths)

    agrees(ours, oracle, *policy)
    found = preference.dpo(*(torch.tensor(p, requires_grad=True) for p in policy), *fixed, **options)
    for side, (got, p, r, n) in enumerate(
        zip((found.chosen_rewards, found.rejected_rewards), policy, reference, lengths, strict=True)
    ):
        expected = [beta * (p[i] - r[i]) / (n[i] if by_length else 1) for i in range(pairs)]
        np.testing.assert_allclose(got.numpy(), expected, **EXACT, err_msg=str(side))
        assert not got.requires_grad


@pytest.mark.parametrize(("kind", "smoothing"), KINDS)
def test_dpo_where_policy_and_reference_agree(rng, kind, smoothing):
    """log 2, also smoothed and robust; 1 / (4 beta^2); 1: known without any of the code. A gradient is there from the start."""
    for dtype, bound in ((torch.float64, 1e-15), (torch.float32, 1e-6)):
        log_probs = [torch.tensor(rng.normal(-300, 50, 8), dtype=dtype, requires_grad=True) for _ in range(2)]
        same = [x.detach().clone() for x in log_probs]
        found = preference.dpo(*log_probs, *same, beta=0.5, kind=kind, label_smoothing=smoothing)
        expected = {"ipo": 1.0, "hinge": 1.0}.get(kind, math.log(2))
        assert float(found.loss.detach()) == pytest.approx(expected, rel=bound)
        assert not found.chosen_rewards.any() and not found.rejected_rewards.any()
        chosen, rejected = torch.autograd.grad(found.loss, log_probs)
        smoother = 1 - 2 * smoothing
        slope = {"ipo": -2.0, "hinge": -0.5, "robust": -0.25 / smoother, "sigmoid": -0.25 * smoother}[kind]
        torch.testing.assert_close(chosen, torch.full_like(chosen, slope / 8), rtol=1e-6, atol=0)
        assert torch.equal(rejected, -chosen)


def test_robust_dpo_is_unbiased_under_flipped_labels(rng):
    """Its expectation over flips with probability e is the loss without smoothing on the true labels; conservative's is not."""
    policy, reference = rng.normal(-20, 5, (2, 2, 6))
    true = [torch.tensor(x) for x in (*policy, *reference)]
    flipped = [true[1], true[0], true[3], true[2]]
    for e in (0.1, 0.4):

        def expected(kind, e=e):
            right, wrong = (preference.dpo(*x, beta=0.3, kind=kind, label_smoothing=e).loss for x in (true, flipped))
            return float((1 - e) * right + e * wrong)

        clean = float(preference.dpo(*true, beta=0.3).loss)
        assert expected("robust") == pytest.approx(clean, rel=1e-12)
        # Conservative's expectation has 2 e (1 - e) of both labels' losses in the wrong place, which differ by beta d.
        difference = float((true[0] - true[1] - true[2] + true[3]).mean())
        assert expected("sigmoid") == pytest.approx(clean + 2 * e * (1 - e) * 0.3 * difference, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "smoothing"), KINDS)
def test_dpo_of_extreme_log_ratios_and_short_dtypes(rng, kind, smoothing, dtype):
    """Log-ratios of up to 1e4 either way are finite, with gradients, and as in 40 digits, from inputs as they are rounded."""
    policy = torch.tensor([[0.0, -1e4, -3.0, -1e4], [-1e4, 0.0, -1e4, -3.0]]) + torch.tensor(rng.normal(0, 1, (2, 4)))
    policy = policy.to(dtype).requires_grad_()
    reference = torch.full((2, 4), -2.0, dtype=dtype)
    found = preference.dpo(*policy, *reference, beta=1.0, kind=kind, label_smoothing=smoothing)
    (gradient,) = torch.autograd.grad(found.loss, policy)
    ratios = [[mp.mpf(float(x)) + 2 for x in side] for side in policy.detach()]
    exact = float(dpo_by_definition(kind, mp.mpf(1), mp.mpf(smoothing), *ratios))
    assert found.loss.dtype == torch.float32
    # A dozen roundings of 6e-8 in terms that are all of one sign, robust's aside, which e = 0.3 makes 2.5 times as large.
    assert float(found.loss.detach()) == pytest.approx(exact, rel=5e-6)
    assert gradient.isfinite().all() and gradient.any()


def test_empty_lists_of_pairs_give_zeros():
    nothing = torch.zeros(0, requires_grad=True)
    for kind in ("sigmoid", "ipo", "hinge", "robust"):
        found = preference.dpo(nothing, nothing, nothing, nothing, beta=0.1, kind=kind)
        (gradient,) = torch.autograd.grad(found.loss, nothing)
        assert float(found.loss.detach()) == 0.0 and gradient.shape == (0,) == found.chosen_rewards.shape
    empty_ids = torch.zeros(0, dtype=torch.long)
    losses = [
        preference.kto(nothing, nothing, empty_ids.bool(), beta=0.1, baseline=0.0).loss,
        preference.kto_baseline(nothing, nothing),
        preference.bradley_terry(nothing, nothing, center=1.0),
        preference.hinge(nothing, nothing, margin=1.0),
        preference.squared_gap(nothing, nothing, gap=1.0),
        preference.plackett_luce(nothing, empty_ids, empty_ids),
    ]
    assert [float(loss.detach()) for loss in losses] == [0.0] * 6
    assert [len(x) for x in preference.pairs(empty_ids, empty_ids)] == [0, 0, 0]
    assert not preference.pair_calibration(nothing, nothing).any()


def test_a_response_without_tokens_divides_by_one():
    zero, one = torch.zeros(1), torch.ones(1)
    found = preference.dpo(
        zero, -one, zero, zero, beta=1.0, chosen_lengths=zero.long(), rejected_lengths=2 * one.long()
    )
    assert float(found.loss) == pytest.approx(math.log1p(math.exp(-0.5)), rel=1e-6)


def test_dpo_refuses_what_it_cannot_do():
    x = torch.zeros(2)
    for wrong, message in (
        ({"beta": 0.0}, "beta = 0"),
        ({"beta": 1.0, "kind": "nll"}, "kind 'nll'"),
        ({"beta": 1.0, "label_smoothing": 0.5}, "label_smoothing = 0.5"),
        ({"beta": 1.0, "kind": "ipo", "label_smoothing": 0.1}, "kind 'ipo' has none"),
        ({"beta": 1.0, "chosen_lengths": x}, "give both or neither"),
        ({"beta": 1.0, "chosen_lengths": x, "rejected_lengths": x[:1]}, "rejected_lengths must share"),
    ):
        with pytest.raises(ValueError, match=message):
            preference.dpo(x, x, x, x, **wrong)
    with pytest.raises(ValueError, match=r"must share one shape \[N\]"):
        preference.dpo(x, x, x, x[:1], beta=1.0)


# -- KTO --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("responses", [1, 7])
@pytest.mark.parametrize("kind", ["mixed", "all", "none"])
def test_kto_is_its_formula(rng, responses, kind):
    beta, z, good, bad = (float(x) for x in rng.uniform(0.1, 2.0, 4))
    desirable = {
        "mixed": rng.random(responses) < 0.5,
        "all": np.full(responses, True),
        "none": np.full(responses, False),
    }[kind]
    policy = rng.normal(-20, 5, responses)
    reference = policy + rng.normal(0, 3, responses)
    options = {"beta": beta, "desirable_weight": good, "undesirable_weight": bad}

    def oracle(policy):
        total = mp.mpf(0)
        for p, r, wanted in zip(policy, reference, desirable, strict=True):
            ratio = p - mp.mpf(float(r))
            value = good * sigmoid(beta * (ratio - z)) if wanted else bad * sigmoid(beta * (z - ratio))
            total += (good if wanted else bad) - value  # lambda_y - v(x, y)
        return total / responses

    # The baseline is the policy's own here: no gradient may flow through it.
    other = torch.tensor([z], dtype=torch.float64, requires_grad=True)
    rest = torch.tensor(reference), torch.tensor(desirable)
    agrees(lambda p: preference.kto(p, *rest, baseline=other[0], **options).loss, oracle, policy)
    loss = preference.kto(torch.tensor(policy), *rest, baseline=other[0], **options)
    assert not loss.loss.requires_grad
    np.testing.assert_allclose(loss.rewards.numpy(), beta * (policy - reference), **EXACT)


def test_kto_is_half_where_nothing_is_known_and_survives_extremes():
    same = torch.tensor([-5.0, -7.0])
    loss = preference.kto(same, same, torch.tensor([True, False]), beta=0.1, baseline=0.0).loss
    assert float(loss) == 0.5
    policy = torch.tensor([1e4, -1e4, 1e4, -1e4], requires_grad=True)
    desirable = torch.tensor([True, True, False, False])
    weights = {"desirable_weight": 3.0, "undesirable_weight": 5.0}
    found = preference.kto(policy, torch.zeros(4), desirable, beta=1.0, baseline=2.0, **weights)
    found.loss.backward()
    assert float(found.loss.detach()) == (0 + 3 + 5 + 0) / 4
    assert policy.grad.isfinite().all()


def test_kto_baseline_is_the_mean_and_never_below_zero():
    policy, reference = torch.tensor([-1.0, -2.0, -6.0], requires_grad=True), torch.tensor([-4.0, -3.0, -5.0])
    assert float(preference.kto_baseline(policy, reference)) == 1.0
    assert float(preference.kto_baseline(reference, policy.detach())) == 0.0
    assert not preference.kto_baseline(policy, reference).requires_grad
    short = preference.kto_baseline(policy.detach().bfloat16(), reference.bfloat16())
    assert short.dtype == torch.float32 and float(short) == 1.0


def test_kto_refuses_what_it_cannot_do():
    x, yes = torch.zeros(2), torch.ones(2, dtype=torch.bool)
    for name in ("beta", "desirable_weight", "undesirable_weight"):
        with pytest.raises(ValueError, match=f"{name} = -1"):
            preference.kto(x, x, yes, baseline=0.0, **{"beta": 1.0, name: -1.0})
    with pytest.raises(ValueError, match="policy, reference and desirable must share"):
        preference.kto(x, x, yes[:1], beta=1.0, baseline=0.0)


# -- scores -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("target", ["none", "one", "each"])
@pytest.mark.parametrize("pairs", [1, 6])
def test_losses_on_scores_are_their_formulas(rng, pairs, target, weighted):
    chosen, rejected = rng.normal(0, 3, (2, pairs))
    each = rng.uniform(0.1, 2.0, pairs) if target == "each" else np.full(pairs, 0.7 if target == "one" else 0.0)
    argument = {"none": 0.0, "one": 0.7, "each": torch.tensor(each)}[target]
    weights = rng.uniform(0.1, 2.0, pairs) if weighted else np.ones(pairs)
    given_weights = {"weights": torch.tensor(weights)} if weighted else {}
    center = float(rng.uniform(0.01, 1.0))

    def mean(term):
        def oracle(chosen, rejected):
            rows = zip(chosen, rejected, each, weights, strict=True)
            return sum(w * term(c, r, mp.mpf(float(m))) for c, r, m, w in rows) / mp.fsum(map(float, weights))

        return oracle

    margin = None if target == "none" else argument
    for ours, term in (
        (
            lambda c, r: preference.bradley_terry(c, r, margin=margin, **given_weights),
            lambda c, r, m: -mpmath.log(sigmoid(c - r - m)),
        ),
        (
            lambda c, r: preference.bradley_terry(c, r, margin=margin, center=center, **given_weights),
            lambda c, r, m: -mpmath.log(sigmoid(c - r - m)) + center * (c + r) ** 2,
        ),
        (
            lambda c, r: preference.hinge(c, r, margin=argument, **given_weights),
            lambda c, r, m: max(mp.mpf(0), m - (c - r)),
        ),
        (
            lambda c, r: preference.squared_gap(c, r, gap=argument, **given_weights),
            lambda c, r, m: (c - r - m) ** 2,
        ),
    ):
        agrees(ours, mean(term), chosen, rejected)


def test_scores_far_apart_equal_and_of_short_dtypes():
    for dtype in (torch.float32, torch.bfloat16):
        chosen = torch.tensor([9984.0, -9984.0, 2.0], dtype=dtype, requires_grad=True)  # bf16 has 9984
        rejected = torch.tensor([-9984.0, 9984.0, 2.0], dtype=dtype)
        loss = preference.bradley_terry(chosen, rejected)
        loss.backward()
        assert loss.dtype == torch.float32
        assert float(loss.detach()) == pytest.approx((0 + 2 * 9984 + math.log(2)) / 3, rel=1e-6)
        torch.testing.assert_close(chosen.grad.float(), torch.tensor([0.0, -1 / 3, -1 / 6]), rtol=4e-3, atol=0)
        assert float(preference.hinge(chosen.detach(), rejected, margin=1.0)) == pytest.approx((0 + 19969 + 1) / 3)
        assert float(preference.squared_gap(chosen.detach()[2:], rejected[2:], gap=0.5)) == 0.25


def test_scores_of_other_shapes_are_refused():
    x = torch.zeros(3)
    with pytest.raises(ValueError, match="chosen and rejected must share"):
        preference.bradley_terry(x, x[:2])
    with pytest.raises(ValueError, match="rejected and margin must share"):
        preference.bradley_terry(x, x, margin=x[:2])
    with pytest.raises(ValueError, match="rejected, weights and gap must share"):
        preference.squared_gap(x, x, gap=x[:2], weights=x)


def groups_of(rng, ties: bool, sizes=(1, 2, 3, 5)):
    """Scores, ids and ranks of groups in random order; with ties ranks repeat. Ranks are no consecutive numbers."""
    ids = np.repeat(rng.permutation(1000)[: len(sizes)] - 300, sizes)
    ranks = np.concatenate([rng.integers(0, max(2, n // 2), n) if ties else rng.permutation(n) for n in sizes]) * 3 + 1
    order = rng.permutation(len(ids))
    return rng.normal(0, 2, len(ids)), ids[order], ranks[order]


def ranking_by_definition(scores, ids, ranks, top=None):
    """Draw after draw: each is chosen from all that are not better; over the groups in turn."""
    total, groups = mp.mpf(0), sorted(set(ids.tolist()))
    for group in groups:
        members = [i for i in range(len(ids)) if ids[i] == group]
        for i in members:
            place = sum(ranks[j] < ranks[i] for j in members)
            if top is None or place < top:
                pool = mp.fsum(mpmath.exp(scores[j]) for j in members if ranks[j] >= ranks[i])
                total -= mpmath.log(mpmath.exp(scores[i]) / pool)
    return total / len(groups)


@pytest.mark.parametrize("top", [None, 1, 2])
@pytest.mark.parametrize("ties", [False, True])
def test_plackett_luce_is_its_formula(rng, ties, top):
    scores, ids, ranks = groups_of(rng, ties)
    rest = torch.tensor(ids), torch.tensor(ranks)
    agrees(
        lambda s: preference.plackett_luce(s, *rest, top=top),
        lambda s: ranking_by_definition(s, ids, ranks, top),
        scores,
    )


def test_plackett_luce_is_a_distribution_over_rankings(rng):
    """Without ties the probabilities of all 24 rankings of four add up to 1; those by the first place too."""
    scores, ids = torch.tensor(rng.normal(0, 2, 4)), torch.zeros(4, dtype=torch.long)
    rankings = [torch.tensor(ranks) for ranks in itertools.permutations(range(4))]
    whole = sum(math.exp(-float(preference.plackett_luce(scores, ids, ranks))) for ranks in rankings)
    assert whole == pytest.approx(1.0, rel=1e-12)
    firsts = [preference.plackett_luce(scores, ids, (torch.arange(4) != best).long() * 5, top=1) for best in range(4)]
    np.testing.assert_allclose(np.exp([-float(x) for x in firsts]), scores.softmax(0).numpy(), rtol=1e-12)


def test_plackett_luce_of_two_is_bradley_terry(rng):
    chosen, rejected = torch.tensor(rng.normal(0, 3, (2, 5)))
    ids = torch.arange(5).repeat(2)
    ranks = torch.tensor([0] * 5 + [1] * 5)
    both = torch.cat([chosen, rejected])
    expected = preference.bradley_terry(chosen, rejected)
    for top in (None, 1, 2):
        torch.testing.assert_close(
            preference.plackett_luce(both, ids, ranks, top=top), expected, rtol=1e-12, atol=1e-14
        )


def test_plackett_luce_of_ties_singles_and_extremes():
    ids = torch.zeros(3, dtype=torch.long)
    tied = torch.tensor([1.0, 1.0, 1.0], requires_grad=True)
    loss = preference.plackett_luce(tied, ids, torch.full((3,), 4))
    loss.backward()
    assert float(loss.detach()) == pytest.approx(3 * math.log(3), rel=1e-6)
    torch.testing.assert_close(tied.grad, torch.zeros(3), rtol=0, atol=1e-6)  # equal scores are all that it asks for
    assert float(preference.plackett_luce(torch.tensor([3.0]), ids[:1], ids[:1])) == 0.0
    for dtype in (torch.float32, torch.bfloat16):
        scores = torch.tensor([-9984.0, 0.0, 9984.0], dtype=dtype, requires_grad=True)
        loss = preference.plackett_luce(scores, ids, torch.tensor([0, 1, 2]))
        loss.backward()
        assert float(loss.detach()) == 3 * 9984.0  # 2 x 9984 for the first place, 9984 for the second
        assert scores.grad.tolist() == [-1.0, -1.0, 2.0]
    with pytest.raises(ValueError, match="top = 0"):
        preference.plackett_luce(tied, ids, ids, top=0)
    with pytest.raises(ValueError, match="scores, group_ids and ranks must share"):
        preference.plackett_luce(tied, ids[:2], ids)


def test_pairs_are_all_of_a_group_and_groups_count_once(rng):
    for ties in (False, True):
        _, ids, ranks = groups_of(rng, ties, sizes=(1, 2, 3, 4, 6))
        better, worse, weights = (x.tolist() for x in preference.pairs(torch.tensor(ids), torch.tensor(ranks)))
        every = range(len(ids))
        expected = [(i, j) for i in every for j in every if ids[i] == ids[j] and ranks[i] < ranks[j]]
        assert sorted(zip(better, worse, strict=True)) == expected
        for i, weight in zip(better, weights, strict=True):
            assert weight == pytest.approx(1 / sum(ids[a] == ids[i] for a, _ in expected), rel=1e-7)
        assert sum(weights) == pytest.approx(len({ids[a] for a, _ in expected}), rel=1e-6)


def test_weighted_pairs_are_the_mean_over_groups_of_their_means(rng):
    scores, ids, ranks = groups_of(rng, ties=False, sizes=(2, 3, 6))
    scores = torch.tensor(scores)
    better, worse, weights = preference.pairs(torch.tensor(ids), torch.tensor(ranks))
    ours = preference.bradley_terry(scores[better], scores[worse], weights=weights)
    of_groups = []
    for group in np.unique(ids):
        inside = torch.tensor(ids)[better] == group
        of_groups.append(float(preference.bradley_terry(scores[better[inside]], scores[worse[inside]])))
    assert float(ours) == pytest.approx(np.mean(of_groups), rel=1e-6)  # weights are fp32


# -- calibration ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bins", [1, 7, 10])
def test_calibration_is_the_loop_over_bins_and_adds_up(rng, bins):
    chosen, rejected = rng.normal(0, 2, (2, 200))
    rejected[:5] = chosen[:5]  # neither right nor wrong
    parts = [slice(0, 1), slice(1, 77), slice(77, 77), slice(77, 200)]
    pair = torch.tensor(chosen), torch.tensor(rejected)
    sums = sum(preference.pair_calibration(*(x[part] for x in pair), bins=bins) for part in parts)
    expected = np.zeros((3, bins))
    for c, r in zip(chosen, rejected, strict=True):
        p = 1 / (1 + math.exp(r - c))
        confidence = max(p, 1 - p)
        place = min(int((confidence - 0.5) / (0.5 / bins)), bins - 1)
        expected[:, place] += 1, confidence, 0.5 if c == r else float(c > r)
    np.testing.assert_allclose(sums.numpy(), expected, rtol=1e-12)
    gaps = [
        n / 200 * abs(confidence / n - right / n) for n, confidence, right in expected.T if n
    ]  # each bin's share times its gap
    assert float(preference.calibration_error(sums)) == pytest.approx(sum(gaps), rel=1e-10)


def test_calibration_of_judges_that_are_known():
    """One that is right as often as it says has no error; one that is sure and wrong has 1; the sure and right one 0."""
    gap = math.log(3.0)  # confidence 3/4
    honest = torch.tensor([[gap, gap, gap, 0.0], [0.0, 0.0, 0.0, gap]], dtype=torch.float64)
    honest = preference.pair_calibration(*honest)
    assert float(preference.calibration_error(honest)) == pytest.approx(0.0, abs=1e-12)
    sure = torch.full((5,), 1e4), torch.full((5,), -1e4)
    assert float(preference.calibration_error(preference.pair_calibration(*sure))) == 0.0
    assert float(preference.calibration_error(preference.pair_calibration(*sure[::-1]))) == 1.0
    equal = preference.pair_calibration(torch.ones(4).bfloat16(), torch.ones(4).bfloat16(), bins=3)
    assert equal[:, 0].tolist() == [4.0, 2.0, 2.0]
    short = torch.tensor([2.015625, 0.005]).bfloat16()  # their difference has more digits than bf16
    (confidence,) = preference.pair_calibration(short[:1], short[1:], bins=1)[1].tolist()
    assert confidence == pytest.approx(1 / (1 + math.exp(float(short[1]) - float(short[0]))), rel=1e-12)
    assert math.isnan(float(preference.calibration_error(torch.zeros(3, 10))))
    with pytest.raises(ValueError, match="bins = 0"):
        preference.pair_calibration(*sure, bins=0)


# -- labels -----------------------------------------------------------------------------------------------------------


def test_the_area_under_the_curve_is_the_loop_over_pairs(rng):
    """In fp64, with ties; a half for who knows nothing, whatever the share of positives."""
    for size, positives in ((1, 1), (40, 7), (150, 140)):
        scores = torch.tensor(rng.integers(-3, 4, size + positives) / 2)  # many are equal
        better, worse = scores[:positives], scores[positives:]
        expected = np.mean([(b > w) + 0.5 * (b == w) for b in better.tolist() for w in worse.tolist()])
        assert float(preference.area_under_curve(better, worse)) == pytest.approx(expected, rel=1e-14)
        both = preference.area_under_curve(better, worse) + preference.area_under_curve(worse, better)
        assert float(both) == pytest.approx(1, abs=1e-14)
    nothing = torch.zeros(9)
    assert float(preference.area_under_curve(nothing[:2], nothing[2:])) == 0.5
    fresh = torch.tensor(rng.normal(size=12)).float()
    moved = preference.area_under_curve(3 * fresh[:5].double() - 1, 3 * fresh[5:].double() - 1)  # order alone counts
    assert moved == preference.area_under_curve(fresh[:5], fresh[5:])
    assert float(preference.area_under_curve(torch.tensor([torch.inf]), torch.tensor([-torch.inf, torch.inf]))) == 0.75
    for missing in (nothing[:0], torch.tensor([torch.nan])):
        assert preference.area_under_curve(missing, nothing).isnan()
        assert preference.area_under_curve(nothing, missing).isnan()


def test_calibration_of_labels_is_the_loop_over_bins_and_adds_up(rng):
    scores, labels = rng.normal(0, 3, 300), rng.random(300).round(1)
    scores[:3] = 0, 1e3, -1e3
    parts = [slice(0, 1), slice(1, 120), slice(120, 120), slice(120, 300)]
    sums = sum(preference.label_calibration(torch.tensor(scores[p]), torch.tensor(labels[p])) for p in parts)
    probabilities = 1 / (1 + np.exp(-np.clip(scores, -700, 700)))
    expected = 0.0
    for low in range(10):
        inside = (probabilities * 10).astype(int).clip(max=9) == low
        if inside.any():
            expected += inside.mean() * abs(probabilities[inside].mean() - labels[inside].mean())
    assert float(preference.calibration_error(sums)) == pytest.approx(expected, rel=1e-10)
    sure = torch.full((4,), 50.0)
    assert float(preference.calibration_error(preference.label_calibration(sure, torch.ones(4)))) < 1e-20
    assert float(preference.calibration_error(preference.label_calibration(sure, torch.zeros(4)))) == 1.0
    even = preference.label_calibration(torch.zeros(4), torch.tensor([0.0, 1.0, 0.0, 1.0]), bins=3)
    assert float(preference.calibration_error(even)) == 0.0 and even[0].tolist() == [0, 4, 0]
    with pytest.raises(ValueError, match="bins = 0"):
        preference.label_calibration(sure, sure, bins=0)
    with pytest.raises(ValueError, match="scores and labels"):
        preference.label_calibration(sure, torch.ones(3))


def test_metrics_of_labels():
    """Who has learned nothing is right half of the time, whatever the labels are."""
    for labels in (torch.zeros(5), torch.ones(5), torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0])):
        found = figures(label_metrics(torch.zeros(5, requires_grad=True), labels.double()))
        assert found["preference/accuracy"] == 0.5
        assert found["preference/positives"] == pytest.approx(float(labels.mean()))
        assert found["preference/calibration_error"] == pytest.approx(abs(0.5 - float(labels.mean())))
        assert found.get("preference/auc") == (0.5 if 0 < labels.mean() < 1 else None)
    scores = torch.tensor([2.0, -1.0, 0.5, -3.0, 0.0, 1.0])
    labels = torch.tensor([1.0, 0.6, 0.2, 0.0, 1.0, 0.5])  # right, wrong, wrong, right, half, half
    found = figures(label_metrics(scores, labels))
    assert found["preference/accuracy"] == pytest.approx(3 / 6) and found["preference/positives"] == 3.5 / 6
    # 2, -1 and 0 against 0.5 and -3: the first is above both, the others above one.
    assert found["preference/auc"] == pytest.approx(4 / 6)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.37])
def test_bradley_terry_of_conservative_labels(rng, smoothing):
    """Value and gradient by the cross entropy to 1 - e; least where the chosen one is as likely as its label is right."""
    chosen, rejected, margin = (torch.tensor(rng.normal(0, 3, 30), requires_grad=True) for _ in range(3))
    weights = torch.tensor(rng.random(30))
    given = {"margin": margin.detach(), "weights": weights}
    ours = preference.bradley_terry(chosen, rejected, label_smoothing=smoothing, **given)
    x = [c - r - m for c, r, m in zip(chosen.tolist(), rejected.tolist(), margin.tolist(), strict=True)]
    probabilities = [1 / (1 + math.exp(-v)) for v in x]
    terms = [-(1 - smoothing) * math.log(p) - smoothing * math.log(1 - p) for p in probabilities]
    assert ours.item() == pytest.approx(float(np.average(terms, weights=weights.numpy())), rel=1e-9)
    of_chosen, of_rejected = torch.autograd.grad(ours, (chosen, rejected))
    expected = (torch.tensor(probabilities, dtype=torch.float64) - (1 - smoothing)) * weights / weights.sum()
    torch.testing.assert_close(of_chosen, expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(of_rejected, -expected, rtol=1e-9, atol=1e-12)
    plain = preference.dpo(chosen, rejected, rejected * 0, rejected * 0, beta=1.0, label_smoothing=smoothing)
    unweighted = preference.bradley_terry(chosen, rejected, label_smoothing=smoothing)
    assert plain.loss.item() == pytest.approx(unweighted.item(), rel=1e-12)


def test_bradley_terry_refuses_labels_that_are_wrong_as_often_as_right():
    for wrong in (0.5, -0.1, 1.0):
        with pytest.raises(ValueError, match="label_smoothing"):
            preference.bradley_terry(torch.ones(2), torch.zeros(2), label_smoothing=wrong)
