"""VP2O in the trainer: the trust region, co-activation, orthogonality, and what has no experts to transform.

That transformed gradients are the same on every layout is in test_parity.py.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from ranks import run_ranks, without_ties

from megatron_rl.algorithms import stein
from megatron_rl.trainer.preview import StepPreview
from tests.trainer.layouts import make_samples

pytestmark = pytest.mark.timeout(900)  # the limits of the processes below are what ends a test

VP2O = {"enabled": True, "neighbors": 3, "inactive_neighbors": 2, "repulsion": 1e-3}

EXPERTS = 6
REPLICATED = {"parallel": {"distributed_optimizer": False}, "precision": {"train": "bf16"}}
ONE_RANK = [
    {"parallel": {"distributed_optimizer": True}},
    REPLICATED,
    {**REPLICATED, "optimizer": {"name": "sgd", "lr": 0.5}},
]
TWO_RANKS = [
    {"parallel": {"distributed_optimizer": True}, "precision": {"train": "bf16"}},
    {"parallel": {"distributed_optimizer": False}},
    {"parallel": {"expert": 2}},
]


STILL = VP2O | {"repulsion_scale": "relative", "orthogonality": 0.0}
PAIRS = torch.tensor([[0, 1], [2, 3], [4, 5]]).repeat(5, 1)
"""Routes by which each expert has one neighbor."""


@pytest.fixture(scope="module")
def model(tiny_model):
    return str(tiny_model("qwen3_moe", "--layers", "2"))


@pytest.fixture(scope="module")
def biased_model(tiny_model):
    """Its routers have biases, by which an expert can be left without tokens."""
    return str(tiny_model("gpt_oss", "--layers", "2"))


@pytest.fixture(scope="module")
def drawn(model):
    """Samples, and what the trust region finds of them, in which no two experts tie but for rounding."""

    def attempt(seed: int):
        samples = make_samples(seed, 14, 64)
        calls = {"of_the_rollout_batch": (model, samples, VP2O, ["none", "r2"])}
        return samples, run_ranks(1, "vp2o_ranks:in_turn", (calls,), timeout=200.0, refuse_ties=True)[0]

    return without_ties(attempt)


@pytest.fixture(scope="module")
def samples(drawn):
    return drawn[0]


@pytest.fixture(scope="module")
def stored():
    """Weights and gradients of the layers of some experts, and routes to them."""
    print(f"weights of seed {torch.seed()}")
    weights = {"linear_fc1": torch.randn(EXPERTS, 10, 7), "linear_fc2": torch.randn(EXPERTS, 7, 5)}
    gradients = {name: torch.randn_like(tensor) for name, tensor in weights.items()}
    return weights, gradients, torch.rand(40, EXPERTS).topk(2).indices


@pytest.fixture(scope="module")
def found(model, biased_model, drawn, samples, stored):
    """What the functions of vp2o_ranks.py give, by name: a process takes longest to start."""
    calls = {
        "preview_all": (model, samples, ONE_RANK),
        "sgd_by_definition": (model, samples, 0.9),
        "sgd_without_momentum": (model, samples, 0.0),
        "refused_and_halved": (model, samples, VP2O),
        "past_a_right_angle": (model, samples, VP2O | {"power_iterations": 32}),
        "always_refused": (model, samples, VP2O),
        "not_finite": (model, samples, VP2O | {"trust_region": 2.0}),
        "never_active": (biased_model, samples, VP2O | {"repulsion": 0.1}),
        "counted": (model, samples, VP2O),
        "orthogonality": (model, samples, VP2O),
        "outweighed": (model, samples, VP2O),
        "storage": stored,
        "shard": stored,
        "stand_still": (biased_model, samples, STILL, ONE_RANK),
        "of_a_range": (model, samples, ONE_RANK),
        "overwhelmed": (model, samples, VP2O),
        "soft": (model, samples, VP2O),
    }
    return drawn[1] | run_ranks(1, "vp2o_ranks:in_turn", (calls,), timeout=200.0)[0]


@pytest.fixture(scope="module")
def on_two_ranks(model, biased_model, samples, stored):
    calls = {
        "preview_all": (model, samples, TWO_RANKS),
        "refused_on_all": (model, samples, VP2O, TWO_RANKS),
        "stand_still": (biased_model, samples, STILL, TWO_RANKS),
        "of_a_range": (model, samples, TWO_RANKS[:2]),
        "exchanged": (*stored[:2], PAIRS),
    }
    return run_ranks(2, "vp2o_ranks:in_turn", (calls,), timeout=300.0)[0]


def test_a_step_is_previewed_to_the_bit(found, on_two_ranks):
    """With each of Megatron's optimizers, and their state over one and two processes."""
    assert found["preview_all"] == [0.0] * len(ONE_RANK)
    assert on_two_ranks["preview_all"] == [0.0] * len(TWO_RANKS)


class Marked(torch.optim.SGD):
    """Goes by a mark on a weight, as Megatron's Muon goes by those of how a weight is cut."""

    def step(self, closure=None):
        for group in self.param_groups:
            for weight in group["params"]:
                weight.data.add_(weight.grad, alpha=-group["lr"] * weight.factor)


def test_a_preview_goes_by_the_marks_of_a_weight():
    weight = torch.nn.Parameter(torch.randn(3))
    weight.factor, weight.grad = 2.0, torch.randn(3)
    parts = [SimpleNamespace(optimizer=Marked([weight], lr=0.5))]
    chained = SimpleNamespace(chained_optimizers=parts, config=SimpleNamespace(clip_grad=0.0))
    before = weight.detach().clone()
    (after,) = StepPreview(chained, 1.0).after([weight], 0.5)
    assert torch.equal(weight, before)
    parts[0].optimizer.param_groups[0]["lr"] *= 0.5
    parts[0].optimizer.step()
    assert torch.equal(after, weight) and not torch.equal(weight, before)


def test_sgd_steps_as_it_is_defined(found):
    """Three updates of each parameter in fp64, from the gradients before they are clipped; previewed and taken."""
    for name in ("sgd_by_definition", "sgd_without_momentum"):
        previewed, taken, moved = found[name]
        assert 0 < previewed < 1 and 0 < taken < 1, name
        assert moved > 100, "else this test would show nothing"


def test_all_processes_refuse_a_step(on_two_ranks):
    assert on_two_ranks["refused_on_all"] == [True] * len(TWO_RANKS)


def test_a_step_beyond_the_trust_region_is_refused_or_halved(found):
    wide, undo, halve = (found["refused_and_halved"][name] for name in ("wide", "reject", "backtrack"))
    assert 0.02 < wide["shift"] < 2 and not wide["unchanged"]
    assert wide["shift_after"] == wide["shift"]
    assert (wide["metrics"]["update/rejected"], wide["metrics"]["update/backtracks"]) == (0, 0)

    assert undo["unchanged"], "a refused step changed parameters, optimizer, scheduler or random states"
    assert undo["metrics"]["update/rejected"] == 1 and undo["metrics"]["update/skipped"] == 0
    assert undo["shift"] > 1e-4 and undo["shift_after"] == 0

    assert halve["metrics"]["update/rejected"] == 0 and halve["metrics"]["update/backtracks"] >= 1
    assert not halve["unchanged"]
    assert 0 < halve["shift_after"] <= 0.02 < halve["shift"]


def test_a_run_whose_updates_are_all_refused_ends(found):
    count, message = found["always_refused"]
    assert count == 16
    assert "vp2o.trust_region: 16 updates in a row" in message and "vp2o.on_violation: backtrack" in message


def test_a_small_turn_past_the_start_of_the_iteration_is_a_small_shift(found):
    """From the fixed start, prototypes before and after it have nothing in common; the region sees the turn itself."""
    found = found["past_a_right_angle"]
    assert found["fixed"] < 0.2 and 0.01 < found["shift"] < 0.15


def test_a_gradient_that_is_not_finite_skips_the_update(found):
    found = found["not_finite"]
    assert found["unchanged"] and found["metrics"]["update/skipped"] == 1 and found["metrics"]["update/rejected"] == 0
    assert not math.isfinite(found["metrics"]["update/grad_norm"])
    assert found["next"]["update/skipped"] == 0 and math.isfinite(found["next"]["update/grad_norm"])


def test_an_expert_that_is_never_active_stays_as_it_is(found):
    """Its neighbors' gradients are not for it, and nothing pushes it; others may be pushed from it."""
    found = found["never_active"]
    assert found["load"] == 0
    assert found["still"] and not found["pushed"] and found["pushes"]


def test_an_expert_without_a_token_stands_still(found, on_two_ranks):
    """Neither decay nor momentum moves its weights or its moments, with each of Megatron's optimizers, to the bit."""
    for one in found["stand_still"] + on_two_ranks["stand_still"]:
        assert one["load"] == 0 and one["momentum"] and one["others move"] and not one["skipped"]
        assert one["same"], "an idle expert's weights or moments have changed"


def test_a_part_of_a_parameter_can_be_put_back(found, on_two_ranks):
    """Experts that are rows of one parameter, over which the distributed optimizer's parts begin and end anywhere."""
    assert found["of_a_range"] == [True] * len(ONE_RANK)
    assert on_two_ranks["of_a_range"] == [True] * 2


def test_the_trust_region_is_over_the_tokens_and_routes_of_the_rollout_batch(found):
    for one in found["of_the_rollout_batch"]:
        assert one["found"] == pytest.approx(one["expected"], rel=1e-4) and min(one["expected"].values()) > 0.01


def test_repulsion_that_decides_where_experts_go_is_told_once(found):
    for name, limit in (("absolute", "the norm of its experts' gradients"), ("the clip", "optimizer.clip_grad")):
        shares, (said,) = found["overwhelmed"][name]
        assert (
            shares == [1.0, 1.0] and said.startswith("vp2o: the repulsion of layer 0 has a norm of") and limit in said
        )
    assert found["overwhelmed"]["relative"] == ([0.0, 0.0], [])


def test_only_what_an_expert_takes_goes_between_ranks(on_two_ranks, stored):
    """Of pairs (0, 1), (2, 3), (4, 5) on ranks of three, one crosses: each rank sends one row of the six of a layer."""
    mixed, sent = on_two_ranks["exchanged"]
    weights, gradients, _ = stored
    start = torch.randn(7, generator=torch.Generator().manual_seed(0)).expand(EXPERTS, -1)
    kernel = stein.kernel(stein.prototypes(weights["linear_fc2"].transpose(1, 2), 32, start), 1.0)
    mixing = kernel * torch.block_diag(*[torch.full((2, 2), 0.5)] * 3)
    for name, tensor in gradients.items():
        expected = torch.einsum("ij,jab->iab", mixing, tensor)
        torch.testing.assert_close(mixed[f"{name}.weight"], expected, atol=1e-5, rtol=1e-4)
    assert sent == [sum(4 * tensor[0].numel() for tensor in gradients.values())] * 2


def test_coactivation_is_of_the_whole_rollout_batch(found):
    found = found["counted"]
    torch.testing.assert_close(found["whole"], found["expected"])
    torch.testing.assert_close(found["own"], found["expected_own"])
    assert not torch.allclose(found["expected"], found["expected_own"])


def test_soft_coactivation_is_of_the_routers_distributions(found):
    for ours, expected in found["soft"]:
        torch.testing.assert_close(ours, expected, atol=1e-6, rtol=1e-4)
        assert float(expected.sum()) == pytest.approx(1.0), "shares of a token sum to 1"


@pytest.mark.parametrize("form", ["cosine", "projection"])
def test_orthogonality_is_of_the_outputs_of_each_tokens_experts(found, form):
    """Before their router weights: a router learns nothing from it, though Megatron's experts put out weighted tokens."""
    found = found["orthogonality"][form]
    assert found["logged"] == pytest.approx(found["expected"], rel=1e-4)
    for added, expected in zip(found["added"], found["expected_added"], strict=True):
        torch.testing.assert_close(added, expected, atol=1e-3 * float(expected.abs().max()), rtol=1e-3)
    assert max(float(expected.abs().max()) for expected in found["expected_added"]) > 1e-4
    torch.testing.assert_close(*found["router"], atol=1e-6, rtol=1e-4)
    one, two = found["shares"]
    assert one > 0 and two == pytest.approx(2 * one, rel=1e-4)


def test_an_orthogonality_loss_that_outweighs_the_rest_is_told_once(found):
    for form in ("cosine", "projection"):
        share, (said,) = found["outweighed"][form, 1e3]
        assert share > 1 and "the orthogonality loss has a gradient of" in said
        assert ("vp2o.orthogonality_form: cosine" in said) == (form == "projection")
    share, said = found["outweighed"]["cosine", 1e-6]
    assert share < 1 and not said


def test_the_gradients_at_the_outputs_are_compared_token_by_token():
    """What is added stands for all tokens, of which some are looked at: its own part is that of one."""
    from megatron_rl.vp2o.orthogonality import _WithGradients

    outputs = torch.randn(12, 5, requires_grad=True)
    weights = torch.rand(6, 2, requires_grad=True)
    rows, tokens = torch.tensor([[0, 1], [4, 7]]), torch.tensor([1, 3])
    of_outputs, of_weights, above = torch.randn(2, 2, 5), torch.randn(2, 2), torch.randn(12, 5)
    squares, share = torch.zeros(2), torch.tensor(3.0)
    _WithGradients.apply(outputs, weights, rows, tokens, of_outputs, of_weights, squares, share).backward(above)
    expected = [float(of_outputs.square().sum()) / 9, float(above[rows].square().sum())]
    assert squares.tolist() == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(outputs.grad[rows], above[rows] + of_outputs)
    torch.testing.assert_close(outputs.grad[[2, 3, 5, 6, 8, 9, 10, 11]], above[[2, 3, 5, 6, 8, 9, 10, 11]])
    torch.testing.assert_close(weights.grad[tokens], of_weights)


def test_the_norms_of_a_shard_are_of_what_the_process_has_reduced(found):
    counted, expected = found["shard"]
    assert counted == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("shifts", [(0.0, math.nan), (math.nan, 0.0), (0.0, math.inf)])
def test_a_shift_that_is_not_finite_is_beyond_any_region(shifts):
    from megatron_rl.config import VP2OConfig
    from megatron_rl.vp2o.trust_region import TrustRegion

    region = TrustRegion(VP2OConfig(enabled=True, trust_region=1e6), None)
    region._maximum = lambda worst: worst
    region._shifts = lambda preview, scale: dict(enumerate(shifts))
    assert region.judge(None).scale == 0


def test_every_way_of_storing_experts_gives_the_same_gradients(found, stored):
    weights, gradients, topk = stored
    together = stein.coactivation(topk, EXPERTS)
    attract = stein.neighbor_weights(stein.attraction_mask(together, 3))
    repel = stein.neighbor_weights(stein.repulsion_mask(together, 4, attract=stein.attraction_mask(together, 3)))
    output = weights["linear_fc2"].transpose(1, 2)
    start = torch.randn(7, generator=torch.Generator().manual_seed(0)).expand(EXPERTS, -1)
    p = stein.prototypes(output, 32, start)
    kernel = stein.kernel(p, 1.0)
    a, x, b, top = stein.kernel_gradient(output, p, kernel, repel, damping=0.01)
    pushed = a.unsqueeze(-1) * x.unsqueeze(-2) + b.unsqueeze(-1) * top.unsqueeze(-2)
    mixed = {name: torch.einsum("ij,jab->iab", attract * kernel, gradients[name]) for name in gradients}
    expected = {
        "linear_fc1.weight": mixed["linear_fc1"],
        "linear_fc2.weight": mixed["linear_fc2"] + 0.5 * pushed.transpose(1, 2),
    }
    assert len(found["storage"]) == 3
    for way, gradients in found["storage"].items():
        for name, tensor in expected.items():
            torch.testing.assert_close(gradients[name], tensor, atol=1e-5, rtol=1e-4, msg=f"{way}: {name}")
