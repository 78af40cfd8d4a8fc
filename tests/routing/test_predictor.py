"""Predictor losses, distributions and agreement against fp64 formulas on fresh random inputs; Table 3; gradients."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_rl.config import OptimizerConfig, RoutingConfig
from megatron_rl.hooks.predictors import Predictors
from megatron_rl.routing import RoutePredictor, cache_cost, predictive_loss, topk_agreement
from megatron_rl.routing.predictor import delta_loss, relative_horizon
from megatron_rl.routing.table import (
    RouteShape,
    RouteTable,
    deviation_counts,
    deviations,
    route_kl,
    routing_log_probs,
    total_variation,
)
from megatron_rl.trainer.hooks import UpdateContext


def draw(tokens: int = 37, experts: int = 11) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return tuple(torch.randn(tokens, experts, dtype=torch.float64) * scale for scale in (3.0, 3.0, 1.0))


def test_predictive_loss_is_the_kl_of_the_paper():
    current, recorded, bias = draw()
    expected = 0.0
    for z, z_old, b in zip(current, recorded, bias, strict=True):
        p, q = z.exp() / z.exp().sum(), (z_old + b).exp() / (z_old + b).exp().sum()
        expected += sum(float(p[e] * (p[e] / q[e]).log()) for e in range(len(p))) / len(current)
    assert float(predictive_loss(current, recorded, bias)) == pytest.approx(expected, rel=1e-12)
    assert float(predictive_loss(recorded, recorded, torch.zeros_like(bias))) == pytest.approx(0.0, abs=1e-12)


def test_sigmoid_scores_are_weighted_as_the_model_weights_them():
    current, recorded, bias = draw()
    p = current.sigmoid() / current.sigmoid().sum(-1, keepdim=True)
    q = (recorded + bias).sigmoid() / (recorded + bias).sigmoid().sum(-1, keepdim=True)
    torch.testing.assert_close(routing_log_probs(current, "sigmoid").exp(), p, rtol=1e-12, atol=0)
    loss = predictive_loss(current, recorded, bias, score_function="sigmoid")
    torch.testing.assert_close(loss, (p * (p / q).log()).sum(-1).mean(), rtol=1e-10, atol=0)
    with pytest.raises(ValueError, match="score_function = 'sqrtsoftplus'"):
        routing_log_probs(current, "sqrtsoftplus")


def test_delta_loss_is_blind_to_what_the_scores_do_not_see():
    """Softmax does not see a shift of all logits, sigmoid scores do."""
    current, recorded, bias = draw()
    delta = current - recorded
    error = (bias - bias.mean(-1, keepdim=True)) - (delta - delta.mean(-1, keepdim=True))
    torch.testing.assert_close(delta_loss(current, recorded, bias), error.square().sum(-1).mean())
    torch.testing.assert_close(delta_loss(current + 5.0, recorded, bias - 2.0), delta_loss(current, recorded, bias))
    assert float(delta_loss(current, recorded, current - recorded + 1.0)) == pytest.approx(0.0, abs=1e-20)
    error = (bias - delta).square().sum(-1).mean()
    torch.testing.assert_close(delta_loss(current, recorded, bias, score_function="sigmoid"), error)


@pytest.mark.parametrize("loss", [predictive_loss, delta_loss])
def test_gradients_reach_the_predictor_alone(loss):
    hidden, router, old_router = (torch.randn(*shape, requires_grad=True) for shape in ((23, 8), (5, 8), (5, 8)))
    predictor = RoutePredictor(8, 5)
    current, recorded = hidden @ router.T, hidden @ old_router.T
    loss(current, recorded, predictor(hidden.detach())).backward()
    assert predictor.weight.grad.abs().max() > 1e-4
    assert hidden.grad is None and router.grad is None and old_router.grad is None
    bias = torch.randn(23, 5, dtype=torch.float64, requires_grad=True)
    arguments = (current.detach().double(), recorded.detach().double())
    assert torch.autograd.gradcheck(lambda b: loss(*arguments, b), bias)


def test_a_predictor_starts_at_zero_and_computes_in_fp32():
    predictor = RoutePredictor(16, 6)
    hidden = torch.randn(9, 16).bfloat16()
    assert predictor(hidden).shape == (9, 6) and predictor(hidden).dtype == torch.float32
    assert not predictor(hidden).any() and predictor.weight.dtype == torch.float32
    assert [name for name, _ in predictor.named_parameters()] == ["weight"]
    predictor.weight.data.normal_()
    expected = hidden.double() @ predictor.weight.double().T
    torch.testing.assert_close(predictor(hidden).double(), expected, rtol=1e-5, atol=1e-5)


def test_horizons_are_proportional_to_the_updates_before_and_one_on_average():
    for updates in range(2, 33):
        horizons = [relative_horizon(update, updates) for update in range(updates)]
        assert horizons[0] == 0.0 and sum(horizons) / updates == pytest.approx(1.0, rel=1e-14)
        assert np.allclose(np.diff(horizons), horizons[1], rtol=1e-13)


def test_as_shipped_predictors_reach_the_mean_horizon_of_sixteen_updates():
    shipped = RoutingConfig()
    assert shipped.predictor_lr_multiplier / shipped.predictor_decay >= (16 - 1) / 2


@pytest.mark.parametrize("update", range(4))
@pytest.mark.parametrize("form", ["constant", "scaled"])
def test_what_is_recorded_and_learned_in_each_update(form, update):
    """In fp64, from the formulas: z_old + c W h, and the gradient c (softmax(z_old + c W h) - softmax(z))^T h.

    The first mini-batch of a scaled horizon is recorded bit for bit as without a predictor.
    """
    tokens, hidden, experts, updates = 19, 7, 6, 4
    h, weight, old, new = (
        torch.randn(*shape, dtype=torch.float64)
        for shape in ((tokens, hidden), (experts, hidden), (tokens, experts), (tokens, experts))
    )
    router = SimpleNamespace(
        predictor=RoutePredictor(hidden, experts).double().requires_grad_(False),
        score_function="softmax",
        choice=lambda logits: logits.topk(2).indices,
    )
    router.predictor.weight.copy_(weight)
    config = RoutingConfig(source="pr2", predictor_horizon=form)
    predictors = Predictors(config, OptimizerConfig(), updates)
    predictors.weights = {1: router.predictor.weight}
    every = torch.ones(tokens, dtype=torch.bool)
    table = RouteTable(RouteShape((1,), experts, 2), every, cached=torch.arange(tokens))

    [recorder] = predictors.observers(table, "log_probs", UpdateContext(update))
    recorded = recorder.see_logits(1, h, old, router)
    c = 1.0 if form == "constant" else update / 1.5
    torch.testing.assert_close(recorded, old + c * h @ weight.T, rtol=1e-12, atol=1e-12)
    if c == 0.0:
        assert torch.equal(recorded, old)
    learners = predictors.observers(table, "update", UpdateContext(update))
    assert len(learners) == (update > 0) and (table.features[1].hidden is not None) == (update > 0)
    for learner in learners:
        learner.see_logits(1, h, new, router)
        expected = c * ((old + c * h @ weight.T).softmax(-1) - new.softmax(-1)).T @ h
        torch.testing.assert_close(predictors._gradients[1], expected, rtol=1e-9, atol=1e-9)


def test_shapes_that_do_not_belong_together_are_named():
    with pytest.raises(ValueError, match=r"\(3, 4\).*\(3, 5\)"):
        predictive_loss(torch.zeros(3, 4), torch.zeros(3, 5), torch.zeros(3, 4))
    with pytest.raises(ValueError, match=r"\(3, 2\) and \(3, 4\)"):
        topk_agreement(torch.zeros(3, 2), torch.zeros(3, 4))


def test_agreement_of_sets_whatever_their_order_and_dtype():
    k, experts = 4, 9
    a, b = (torch.stack([torch.randperm(experts)[:k] for _ in range(50)]) for _ in range(2))
    common = torch.tensor([len(set(x.tolist()) & set(y.tolist())) for x, y in zip(a, b, strict=True)])
    assert deviations(a, b).tolist() == (k - common).tolist()
    assert float(topk_agreement(a, b)) == pytest.approx(float(common.double().mean()) / k)
    counted = torch.rand(50) < 0.7
    expected = [int((common[counted] == k - j).sum()) for j in range(k + 1)]
    assert deviation_counts(a, b, counted).tolist() == expected
    shuffled = torch.stack([row[torch.randperm(k)] for row in a])
    assert float(topk_agreement(a.to(torch.uint8), shuffled)) == 1.0


def test_kl_and_total_variation_keep_pinsker():
    """TV <= sqrt(KL / 2): the inequality behind Proposition B.1."""
    for scale, function in itertools.product((0.1, 1.0, 5.0), ("softmax", "sigmoid")):
        current, recorded = (torch.randn(200, 8, dtype=torch.float64) * scale for _ in range(2))
        kl = route_kl(current, recorded, function)
        tv = total_variation(*(routing_log_probs(z, function) for z in (current, recorded)))
        assert (tv <= (kl / 2).sqrt() + 1e-12).all() and (kl >= -1e-12).all() and (tv <= 1).all()
        p, q = (routing_log_probs(z, function).exp() for z in (current, recorded))
        torch.testing.assert_close(tv, torch.maximum(p - q, torch.zeros_like(p)).sum(-1))


def test_support_regret_of_lemma_b2():
    """With margin m of the current top-k and KL < m^2 / 2 / 4 the predicted experts are the current ones."""
    current = torch.randn(4000, 6, dtype=torch.float64) * 2
    predicted = current + 0.05 * torch.randn_like(current)
    p = routing_log_probs(current).exp()
    ordered = p.sort(-1, descending=True).values
    margin = ordered[:, 1] - ordered[:, 2]
    kl = route_kl(current, predicted)
    safe = (kl / 2).sqrt() * 2 < margin
    chosen, own = (z.topk(2, -1).indices for z in (predicted, current))
    assert int(safe.sum()) > 100 and not deviations(chosen[safe], own[safe]).any()
    assert deviations(chosen, own).any(), "no draw near a tie: the lemma was not put to the test"


def test_table_3():
    """Qwen3-30B-A3B, Moonlight, OLMoE: MB of indices, MB of features, millions of FLOPs."""
    published = {
        (48, 2048, 128, 8, 16384, 2048): (25.2, 453, 25.2),
        (26, 2048, 64, 6, 1024, 1024): (0.64, 116, 6.82),
        (16, 2048, 64, 8, 1024, 1024): (0.52, 71.3, 4.19),
    }
    for arguments, figures in published.items():
        for ours, theirs in zip(cache_cost(*arguments), figures, strict=True):
            assert ours / 1e6 == pytest.approx(theirs, rel=0.01)
    assert cache_cost(48, 2048, 128, 8, 16384, 2048, index_bytes=1).index_bytes == 25_165_824 // 4
    for bad, name in (
        ((0, 8, 4, 2, 9, 9), "layers = 0"),
        ((1, 8, 4, 5, 9, 9), "topk = 5"),
        ((1, 8, 4, 2, 9, 10), "10 of 9"),
    ):
        with pytest.raises(ValueError, match=name):
            cache_cost(*bad)
