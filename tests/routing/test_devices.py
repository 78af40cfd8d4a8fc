"""Routers on a GPU, without one: torch's fake tensors know their device and refuse to be looked at.

An operation that mixes devices is an error here as it is there, and one whose result the host needs (a value read, rows
chosen by a mask) is one too: in a router it would stall every layer of every micro-batch.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from megatron_rl.models.router import ReplayRouter
from megatron_rl.routing.metrics import route_sums
from megatron_rl.routing.predictor import RoutePredictor
from megatron_rl.routing.replay import FROM_ENGINE, PREDICTING, Features, LayerStats, RoutePass, RouteTable

TOKENS, HIDDEN, EXPERTS, TOPK = 12, 16, 8, 2


class Router:
    """What a pass asks of a ReplayRouter of DeepSeek-V3's kind."""

    score_function, topk = "sigmoid", TOPK
    config = SimpleNamespace(moe_router_pre_softmax=False, moe_router_num_groups=2, moe_router_group_topk=1)
    choice, gates, _top = ReplayRouter.choice, ReplayRouter.gates, ReplayRouter._top

    def __init__(self, predictor: RoutePredictor) -> None:
        self.predictor = predictor
        self.expert_bias = torch.zeros(EXPERTS, device=predictor.weight.device)


def forward(route_pass: RoutePass, router: Router) -> None:
    for layer in route_pass.table.moe_layers:
        hidden, logits = (torch.randn(TOKENS, width, device="cuda") for width in (HIDDEN, EXPERTS))
        chosen = route_pass.choose(layer, router.choice(route_pass.see_logits(layer, hidden, logits, router)))
        assert chosen.device.type == "cuda" and chosen.shape == (TOKENS, TOPK)


@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("source", PREDICTING)
def test_router_inputs_are_kept_for_an_update_that_learns(source, learns):
    """And for no other: they are most of what is kept. Of layer 3 the engine has sent the logits alone."""
    with FakeTensorMode(), torch.no_grad():
        kept = {3: Features(None, torch.zeros(5, EXPERTS), None)} if source == "pr3" else {}
        table = RouteTable((1, 3), torch.ones(TOKENS, dtype=torch.bool), torch.arange(5), features=kept)
        table = table.to(torch.device("cuda"))
        with torch.device("cuda"):
            router = Router(RoutePredictor(HIDDEN, EXPERTS).requires_grad_(False))
        forward(RoutePass(table, source, EXPERTS, "log_probs", "kl" if learns else None), router)
        for features in table.features.values():
            assert (features.hidden is not None) == learns and features.bias.shape == (5, EXPERTS)
        update = RoutePass(table, source, EXPERTS, "update")
        forward(update, router)
        assert update.stats[1].cached == update.stats[3].cached == 5, (
            "what they tell of routers is measured all the same"
        )


@pytest.mark.parametrize("loss", ["kl", "delta"])
@pytest.mark.parametrize("source", ["none", "r2", "r3", "pr2", "pr3"])
def test_passes_stay_on_the_device_and_never_wait_for_it(source, loss, monkeypatch):
    # A backward pass would want the driver of the device; what it does is the reverse of the forward pass.
    monkeypatch.setattr(torch.autograd, "grad", lambda loss, weight: (torch.zeros_like(weight) * loss.detach(),))
    with FakeTensorMode():
        engine = torch.zeros(TOKENS, 2, TOPK, dtype=torch.uint8) if source in FROM_ENGINE else None
        features = Features(torch.zeros(5, HIDDEN, dtype=torch.bfloat16), torch.zeros(5, EXPERTS), None)
        kept = {3: features} if source == "pr3" else {}  # the other layer's are the trainer's own
        table = RouteTable((1, 3), torch.ones(TOKENS, dtype=torch.bool), torch.arange(5), engine, features=kept)
        table.counted_rows = torch.arange(TOKENS)
        table = table.to(torch.device("cuda"))
        with torch.device("cuda"):
            router = Router(RoutePredictor(HIDDEN, EXPERTS).requires_grad_(False))
        with torch.no_grad():
            learn = loss if source in PREDICTING else None
            forward(RoutePass(table, source, EXPERTS, "log_probs", learn), router)
        update = RoutePass(table, source, EXPERTS, "update", learn, count_pairs=True, probe={}, probe_tokens=3)
        forward(update, router)
        assert update.stats[1].deviations.device.type == "cuda" and update.stats[1].cached == 5
        assert table.coactivation[1].device.type == "cuda" and update.probe[1].shape == (3, HIDDEN)
        assert set(update.gradients) == ({1, 3} if learn else set())
        # The sums of an update are read in one go, all of them.
        read = []
        monkeypatch.setattr(FakeTensor, "tolist", lambda sums: read.append(sums) or [0.0] * len(sums))
        sums = route_sums([update])
        assert len(read) == 1 and read[0].device.type == "cuda"
        # `cached` of two layers was on the host; the loads of their experts are one array each.
        assert len(sums) == len(read[0]) + 2 - 2 * (EXPERTS - 1)


def test_sums_without_a_tensor_are_sums():
    assert route_sums([None]) == {}
    table = RouteTable((0,), torch.ones(1, dtype=torch.bool), torch.arange(1))
    stats = {0: LayerStats(cached=3, kl=torch.tensor(0.5), staleness=torch.tensor(0.25))}
    passes = [RoutePass(table, "none", EXPERTS, "update", stats=stats) for _ in range(2)]
    assert route_sums(passes) == {"routing/0/cached": 6.0, "routing/0/kl": 1.0, "routing/0/staleness": 0.5}
