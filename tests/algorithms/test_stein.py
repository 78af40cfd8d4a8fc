"""VP2O's formulas against decompositions, finite differences, brute force, and what SVGD theory says of two modes."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from megatron_rl.algorithms import stein


@pytest.fixture(autouse=True)
def fresh():
    seed = torch.seed()
    print(f"seed {seed}")


def layer(experts: int = 6, d_in: int = 9, d_out: int = 7, gap: float = 1.3, dtype=torch.float64) -> torch.Tensor:
    """[N, D_in, D_out] whose largest singular value is `gap` times the next: then powers converge."""
    u, s, v = torch.linalg.svd(torch.randn(experts, d_in, d_out, dtype=torch.float64), full_matrices=False)
    s[:, 0] = gap * s[:, 1]
    return (u * s.unsqueeze(-2) @ v).to(dtype)


def same_start(weights: torch.Tensor) -> torch.Tensor:
    return torch.randn(weights.shape[-1], dtype=weights.dtype).expand(len(weights), -1)


def routes(tokens: int = 50, experts: int = 6, topk: int = 3) -> torch.Tensor:
    return torch.rand(tokens, experts).topk(topk).indices


# -- who meets whom ---------------------------------------------------------------------------------------------------


def test_coactivation_counts_pairs():
    topk = routes()
    expected = torch.zeros(6, 6)
    for token in topk.tolist():
        for i in token:
            for j in token:
                expected[i, j] += 1 / 50
    torch.testing.assert_close(stein.coactivation(topk, 6), expected)
    torch.testing.assert_close(stein.coactivation(topk.to(torch.uint8), 6), expected)
    assert stein.coactivation(topk, 6).trace() == pytest.approx(3)
    assert not stein.coactivation(topk[:0], 6).any()


def test_tokens_that_do_not_count():
    topk, counted = routes(), torch.rand(50) < 0.5
    expected = stein.coactivation(topk[counted], 6) * int(counted.sum())
    torch.testing.assert_close(stein.coactivation_counts(topk, 6, counted), expected)


def test_an_id_that_is_no_expert_is_refused():
    with pytest.raises(ValueError, match="from 0 to 6; there are 6"):
        stein.coactivation(torch.tensor([[0, 6]]), 6)


def test_masks():
    together = torch.tensor(
        [
            [0.6, 0.3, 0.1, 0.0, 0.2],
            [0.3, 0.5, 0.2, 0.0, 0.0],
            [0.1, 0.2, 0.3, 0.0, 0.0],
            [0.0] * 5,
            [0.2, 0, 0, 0, 0.2],
        ]
    )
    attract = stein.attraction_mask(together, 2).int().tolist()
    assert attract == [[1, 1, 0, 0, 0], [1, 1, 0, 0, 0], [0, 1, 1, 0, 0], [0] * 5, [1, 0, 0, 0, 1]]
    assert stein.attraction_mask(together, 1).int().tolist() == torch.diag(torch.tensor([1, 1, 1, 0, 1])).tolist()
    above = stein.attraction_mask(together, 1, above=0.2).int().tolist()
    assert above == [[1, 1, 0, 0, 1], [1, 1, 1, 0, 0], [0, 1, 1, 0, 0], [0] * 5, [1, 0, 0, 0, 1]]
    repel = stein.repulsion_mask(together, 2).int().tolist()
    assert repel == [[0, 0, 1, 1, 0], [0, 0, 0, 1, 1], [0, 0, 0, 1, 1], [0] * 5, [0, 1, 1, 0, 0]]
    below = stein.repulsion_mask(together, 0, below=0.1).int().tolist()
    assert below == [[0, 0, 1, 1, 0], [0, 0, 0, 1, 1], [1, 0, 0, 1, 1], [0] * 5, [0, 1, 1, 1, 0]]


def test_equal_scores_are_spread_over_the_experts():
    together = torch.eye(8) / 8  # no two experts ever meet
    assert stein.repulsion_mask(together, 3).sum(0).tolist() == [3] * 8


def test_no_pair_attracts_and_repels():
    """Whatever is equal: of few tokens many counts are."""
    for _ in range(20):
        together = stein.coactivation(routes(tokens=12, experts=8, topk=2), 8)
        attract = stein.attraction_mask(together, 4)
        repel = stein.repulsion_mask(together, 4, attract=attract)
        assert not (attract & repel).any()
        active = together.diagonal() > 0
        assert (repel.sum(-1)[active] == 4).all(), "the inactive_neighbors are among the others"
    above, below = stein.attraction_mask(together, 1, 0.1), stein.repulsion_mask(together, 4, attract=together >= 0.1)
    assert not (above & below).any()


def test_neighbor_weights():
    mask = torch.tensor([[1, 1, 0], [0, 0, 0], [1, 1, 1]], dtype=torch.bool)
    expected = torch.tensor([[0.5, 0.5, 0], [0, 0, 0], [1 / 3] * 3])
    torch.testing.assert_close(stein.neighbor_weights(mask), expected)


# -- prototypes and kernel --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(6, 9, 7), (3, 4, 12), (1, 5, 5), (4, 1, 3)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_prototypes_are_the_top_right_singular_vectors(shape, dtype):
    weights = layer(*shape, dtype=dtype) if shape[1] > 1 else torch.randn(shape, dtype=dtype)
    initial, top = same_start(weights), torch.linalg.svd(weights.double(), full_matrices=False).Vh[:, 0]
    while (top * initial.double()).sum(-1).abs().min() < 1e-2:  # rounding would say on which side it starts
        initial = same_start(weights)
    found = stein.prototypes(weights, 200, initial)
    sign = (top * initial.double()).sum(-1, keepdim=True).sign()  # of its own it has none
    torch.testing.assert_close(found.double(), top * sign, atol=1e-5, rtol=0)
    torch.testing.assert_close(found.norm(dim=-1), torch.ones(shape[0], dtype=dtype))


def test_each_step_is_one_power_iteration():
    weights = torch.randn(4, 5, 6, dtype=torch.float64)
    p = initial = torch.randn(4, 6, dtype=torch.float64)
    for _ in range(3):
        p = torch.stack([w.T @ w @ v for w, v in zip(weights, p, strict=True)])
        p = p / p.norm(dim=-1, keepdim=True)
    torch.testing.assert_close(stein.prototypes(weights, 3, initial), p)
    torch.testing.assert_close(stein.prototypes(weights, 0, initial), initial / initial.norm(dim=-1, keepdim=True))


def test_an_expert_without_weights_keeps_its_direction():
    weights = layer()
    weights[2] = 0
    initial = same_start(weights)
    found = stein.prototypes(weights, 5, initial)
    torch.testing.assert_close(found[2], initial[2] / initial[2].norm())
    assert found.isfinite().all()


def test_kernel():
    p = torch.nn.functional.normalize(torch.randn(6, 7), dim=-1)
    found = stein.kernel(p, 0.25)
    torch.testing.assert_close(found, p @ p.T / 0.25)
    assert found.diagonal().tolist() == [4.0] * 6


def converged(weights: torch.Tensor, initial: torch.Tensor) -> torch.Tensor:
    return stein.prototypes(weights, 400, initial)


def dense_gradient(weights: torch.Tensor, p: torch.Tensor, kernel: torch.Tensor, repel: torch.Tensor) -> torch.Tensor:
    nothing = torch.zeros_like(weights)
    return stein.transform(nothing, weights, p, kernel, torch.zeros_like(repel), repel, 1.0)


def test_the_kernels_gradient_equals_finite_differences():
    weights, temperature = layer(experts=4, d_in=5, d_out=6), 0.7
    initial, repel = same_start(weights), torch.rand(4, 4, dtype=torch.float64)
    p = converged(weights, initial)
    found = dense_gradient(weights, p, stein.kernel(p, temperature), repel)
    step = 1e-5
    for i in range(4):
        for place in torch.cartesian_prod(torch.arange(5), torch.arange(6)).tolist():
            moved = []
            for sign in (1, -1):
                changed = weights.clone()
                changed[(i, *place)] += sign * step
                q = converged(changed, initial)[i]
                moved.append((repel[i] * (p @ q) / temperature).sum() - repel[i, i] * (p[i] @ q) / temperature)
            expected = (moved[0] - moved[1]) / (2 * step)
            assert found[(i, *place)] == pytest.approx(float(expected), abs=1e-7)


def test_the_kernels_gradient_is_what_the_power_iteration_differentiates_to():
    weights = layer(gap=1.5).requires_grad_()
    initial, repel = same_start(weights).detach(), torch.rand(6, 6, dtype=torch.float64)
    p = converged(weights, initial)
    energy = (repel * (p @ p.detach().T)).sum()
    (expected,) = torch.autograd.grad(energy, weights)
    found = dense_gradient(weights.detach(), p.detach(), stein.kernel(p.detach(), 1.0), repel)
    torch.testing.assert_close(found, expected, atol=1e-7, rtol=1e-6)


def test_parallel_prototypes_do_not_push_each_other():
    """What lies across p of such a row is rounding, and nothing may be made of it."""
    for _ in range(50):
        apart = 10 ** (-10 - 8 * torch.rand(1, dtype=torch.float64))  # down to less than rounding
        around = torch.nn.functional.normalize(torch.randn(5, dtype=torch.float64), dim=0)
        # Two rows differ by less than 20 apart: a normal number in 5 dimensions has a length of below 10.
        rows = around + apart * torch.randn(16, 5, dtype=torch.float64)
        weights = (0.2 + torch.rand(16, 1, 1, dtype=torch.float64)) * torch.nn.functional.normalize(rows).unsqueeze(1)
        p, repel = stein.prototypes(weights, 1, torch.rand(16, 5, dtype=torch.float64)), torch.ones(16, 16).double()
        _, x, _, _ = stein.kernel_gradient(weights, p, stein.kernel(p, 1.0), repel)
        largest = 16 * 20 * apart / 0.2**2  # of sixteen neighbors, over the smallest eigenvalue
        assert x.norm(dim=-1).max() < largest + 1e-12


def test_damping_bounds_the_gradient_where_the_top_is_double():
    weights = layer(gap=1 + 1e-9)
    p, repel = converged(weights, same_start(weights)), torch.ones(6, 6, dtype=torch.float64)
    _, x, _, _ = stein.kernel_gradient(weights, p, stein.kernel(p, 1.0), repel, damping=0.1)
    top = torch.linalg.svdvals(weights)[:, :1].square()
    assert (x.norm(dim=-1) <= repel.sum(-1) / (0.1 * top[:, 0]) * 1.01).all()


def test_damping_bounds_the_gradient_where_prototypes_have_not_converged():
    """Matrices without a gap, as many power iterations and as much damping as in training: no expert's push explodes."""
    weights = torch.randn(48, 160, 320)
    p = stein.prototypes(weights, 32, same_start(weights))
    share = torch.einsum("nio,no->ni", weights, p).square().sum(-1) / torch.linalg.svdvals(weights)[:, 0].square()
    assert share.min() < 0.99, "all of them have converged, which tests nothing"
    repel = stein.neighbor_weights(~torch.eye(48, dtype=torch.bool))
    a, x, b, _ = stein.kernel_gradient(weights, p, stein.kernel(p, 1.0), repel, damping=0.01, iterations=32)
    assert (x.norm(dim=-1) <= 1.01 / (0.01 * a.square().sum(-1))).all()
    norms = (a.square().sum(-1) * x.square().sum(-1) + b.square().sum(-1)).sqrt()
    assert norms.max() < 30 * norms.median()


def test_a_step_of_pure_repulsion_lowers_the_mean_kernel_over_its_pairs():
    for _ in range(5):
        weights = layer()
        together = stein.coactivation(routes(), 6)
        pairs = stein.repulsion_mask(together, 0, below=float(together.median()))
        initial, repel = same_start(weights), stein.neighbor_weights(pairs.double())
        p = converged(weights, initial)
        gradient = dense_gradient(weights, p, stein.kernel(p, 1.0), repel)
        after = stein.kernel(converged(weights - 1e-3 * gradient, initial), 1.0)
        assert after[pairs].mean() < stein.kernel(p, 1.0)[pairs].mean()


# -- the update -------------------------------------------------------------------------------------------------------


def test_the_transform_is_equation_10():
    weights, grads = layer(), torch.randn(6, 9, 7, dtype=torch.float64)
    attract, repel = torch.rand(2, 6, 6, dtype=torch.float64)
    p = converged(weights, same_start(weights))
    kernel = stein.kernel(p, 0.4)
    found = stein.transform(grads, weights, p, kernel, attract, repel, 0.3)
    expected = 0.3 * dense_gradient(weights, p, kernel, repel)
    for i in range(6):
        for j in range(6):
            expected[i] += attract[i, j] * (p[i] @ p[j]) / 0.4 * grads[j]
    torch.testing.assert_close(found, expected)


def test_attraction_by_a_mean_does_not_scale_with_the_temperature():
    """Rows sum to 1, whatever T0 is; a pair of negative kernel is left out; by the kernel they sum to anything."""
    weights, grads = layer(), torch.randn(6, 9, 7, dtype=torch.float64)
    p = stein.prototypes(weights, 40, same_start(weights))
    alpha = stein.neighbor_weights(stein.attraction_mask(stein.coactivation(routes(), 6), 3)).double()
    none = torch.zeros(6, 6, dtype=torch.float64)
    for temperature in (0.05, 1.0, 7.0):
        kernel = stein.kernel(p, temperature)
        expected = torch.zeros_like(grads)
        for i in range(6):
            positive = {j: max(0.0, float(p[i] @ p[j])) for j in range(6) if alpha[i, j] > 0}
            for j, share in positive.items():
                expected[i] += share / sum(positive.values()) * grads[j]
        found = stein.transform(grads, weights, p, kernel, alpha, none, 0.0, "mean")
        torch.testing.assert_close(found, expected)
        mixing = stein.mixing(alpha, kernel, "mean")
        torch.testing.assert_close(mixing.sum(-1), torch.ones(6, dtype=torch.float64))
        assert (mixing >= 0).all() and mixing[kernel < 0].eq(0).all()
        torch.testing.assert_close(stein.mixing(alpha, kernel), alpha * kernel)
    assert not stein.mixing(none, kernel, "mean").any(), "of no expert there is no mean"
    alone = stein.mixing(torch.eye(6), stein.kernel(p.float(), 0.3), "mean")
    assert torch.equal(alone, torch.eye(6)), "a mean of one is that one, to the bit"


def test_soft_coactivation_is_of_shares():
    shares, counted = torch.rand(50, 6).softmax(-1), torch.rand(50) < 0.5
    expected = torch.zeros(6, 6, dtype=torch.float64)
    for token in counted.nonzero()[:, 0].tolist():
        expected += torch.outer(shares[token].double(), shares[token].double())
    torch.testing.assert_close(stein.coactivation_sums(shares, counted).double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("experts", [2, 3, 4, 5, 8, 12, 16, 20, 64, 256])
def test_by_default_most_pairs_are_left_alone(experts):
    neighbors, inactive = stein.neighborhood(experts)
    assert 1 <= neighbors <= 4 and 1 <= inactive <= 4
    assert neighbors + inactive < experts or experts == 2, "two experts can but repel each other"
    assert neighbors >= 2 or experts < 4
    assert stein.neighborhood(experts, 3, 1) == (3, 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_identity_attraction_without_repulsion_changes_no_bit(dtype):
    weights, grads = torch.randn(2, 6, 9, 7, dtype=torch.float64).to(dtype)
    p = stein.prototypes(weights, 3, torch.randn(6, 7))
    found = stein.transform(grads, weights, p, stein.kernel(p, 1.0), torch.eye(6), torch.zeros(6, 6), 0.0)
    assert torch.equal(found, grads)
    assert found.dtype == dtype


def test_what_is_not_finite_stays_with_those_that_take_it():
    """A neighbor's NaN is the mean's; who has no neighbors does not see it (0 * NaN is no 0)."""
    weights, grads = torch.randn(2, 4, 5, 6)
    grads[0, 1, 1] = math.nan
    attract = torch.tensor([[1.0, 0, 0, 0], [0.5, 0.5, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]])
    p = stein.prototypes(weights, 3, torch.randn(4, 6))
    found = stein.transform(grads, weights, p, stein.kernel(p, 1.0), attract, torch.zeros(4, 4), 0.0)
    assert [bool(g.isnan().any()) for g in found] == [True, True, False, False]
    assert torch.equal(found[2:], grads[2:])


# -- beside the update ------------------------------------------------------------------------------------------------


def test_orthogonality_loss():
    outputs = torch.randn(5, 3, 8, dtype=torch.float64)
    expected = sum(
        float((x[j] @ x[k] / (x[k] @ x[k] + 1e-6)) ** 2) for x in outputs for j in range(3) for k in range(3) if j != k
    )
    assert float(stein.orthogonality_loss(outputs)) == pytest.approx(expected)
    orthogonal = torch.linalg.qr(torch.randn(5, 8, 3, dtype=torch.float64)).Q.transpose(1, 2)
    assert float(stein.orthogonality_loss(orthogonal)) == pytest.approx(0, abs=1e-20)
    assert float(stein.orthogonality_loss(outputs[:, :1])) == 0
    assert float(stein.orthogonality_loss(torch.zeros(2, 3, 4))) == 0
    torch.autograd.gradcheck(stein.orthogonality_loss, outputs.requires_grad_())


def test_orthogonality_loss_by_cosines():
    outputs = torch.randn(5, 3, 8, dtype=torch.float64)
    unit = torch.nn.functional.normalize(outputs, dim=-1)
    expected = sum(float((x[j] @ x[k]) ** 2) for x in unit for j in range(3) for k in range(3) if j != k) / 6
    loss = partial(stein.orthogonality_loss, form="cosine")
    assert float(loss(outputs)) == pytest.approx(expected, rel=1e-4)
    lengths = torch.rand(5, 3, 1, dtype=torch.float64) * 1e3 + 1
    assert float(loss(outputs * lengths)) == pytest.approx(expected, rel=1e-4)
    alike = outputs[:, :1].expand(5, 8, 8)
    assert float(loss(alike)) == pytest.approx(5, rel=1e-4)  # 1 a token, however many experts
    assert float(loss(outputs[:, :1])) == 0
    assert float(loss(torch.zeros(2, 3, 4))) == 0
    torch.autograd.gradcheck(loss, outputs.requires_grad_())


@pytest.mark.parametrize("form", ["cosine", "projection"])
def test_descending_the_orthogonality_loss_turns_outputs_apart(form):
    # Of length 1, so that the curvature, some 24 a pair, is far from 2 / step; in fp64, in which the descent is no rounding.
    outputs = torch.randn(1, 1, 8, dtype=torch.float64) + 0.5 * torch.randn(4, 3, 8, dtype=torch.float64)
    outputs = torch.nn.functional.normalize(outputs, dim=-1).requires_grad_()
    before = stein.orthogonality_loss(outputs, form)
    (gradient,) = torch.autograd.grad(before, outputs)
    assert stein.orthogonality_loss(outputs - 1e-3 * gradient, form) < before


def test_barycenter_shift():
    gates, before = torch.rand(2, 9, 6, dtype=torch.float64)
    p, anchor = torch.nn.functional.normalize(torch.randn(2, 6, 7, dtype=torch.float64), dim=-1)
    distances = [
        (sum(gates[x, i] * p[i] for i in range(6)) - sum(before[x, i] * anchor[i] for i in range(6))).norm()
        for x in range(9)
    ]
    expected = sum(map(float, distances)) / 9
    assert float(stein.barycenter_shift(gates, p, before, anchor)) == pytest.approx(expected)
    assert float(stein.barycenter_shift(gates, p, gates, p)) == 0
    assert float(stein.barycenter_shift(gates[:0], p, before[:0], anchor)) == 0


# -- what theory says -------------------------------------------------------------------------------------------------

MODES = torch.eye(2, dtype=torch.float64)
SIGMA = 0.4


def ascend(repulsion: float | None, particles: int = 16, steps: int = 1500) -> torch.Tensor:
    """Particles W_i `[1, 2]` on an equal mixture of two Gaussians, started around the first; None: plain ascent."""
    weights = (MODES[0] + 0.1 * torch.randn(particles, 2, dtype=torch.float64)).unsqueeze(1)
    start = MODES.sum(0).expand(particles, 2)  # the axis of symmetry
    everyone = stein.neighbor_weights(torch.ones(particles, particles, dtype=torch.float64))
    for _ in range(steps):
        x = weights.squeeze(1)
        share = (-(x.unsqueeze(1) - MODES).square().sum(-1) / (2 * SIGMA**2)).softmax(-1)
        loss_gradient = -((share @ MODES - x) / SIGMA**2).unsqueeze(1)
        if repulsion is not None:
            p = stein.prototypes(weights, 1, start)
            loss_gradient = stein.transform(
                loss_gradient, weights, p, stein.kernel(p, 1.0), everyone, everyone, repulsion
            )
        weights = weights - 0.02 * loss_gradient
    return weights.squeeze(1)


def nearer_the_first(x: torch.Tensor) -> float:
    apart = (x.unsqueeze(1) - MODES).norm(dim=-1)
    return float((apart[:, 0] < apart[:, 1]).double().mean())


def test_particles_cover_both_modes_where_plain_ascent_collapses_onto_one():
    """SVGD is blind to which of two symmetric modes a particle started at: at its fixed points moments of the particles
    are those of the target (Liu and Wang, "SVGD as moment matching", 2018), here equal along both modes."""
    plain = ascend(None)
    assert nearer_the_first(plain) == 1.0
    assert plain.mean(0).tolist() == pytest.approx([1.0, 0.0], abs=0.05)
    for _ in range(3):
        covered = ascend(1.0)
        assert 0.2 < nearer_the_first(covered) < 0.8  # 1,500 draws: 0.375 to 0.6875
        asymmetry = float(covered.mean(0) @ torch.tensor([1.0, -1.0], dtype=torch.float64))
        assert abs(asymmetry) < 0.6  # 1 where it collapses; their standard deviation was 0.095
