"""Routers on a GPU, without one: torch's fake tensors know their device and refuse to be looked at.

An operation that mixes devices is an error here as it is there, and one whose result the host needs (a value read, rows
chosen by a mask) is one too: in a router it would stall every layer of every micro-batch.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from megatron_rl.config import FROM_ENGINE, PREDICTING, OptimizerConfig, RoutingConfig, VP2OConfig
from megatron_rl.hooks.predictors import Predictors
from megatron_rl.hooks.routing_replay import RoutingReplay
from megatron_rl.metrics.reduce import on_host
from megatron_rl.models.router import ReplayRouter
from megatron_rl.routing.passes import RouteObserver, RoutePass
from megatron_rl.routing.predict import PredictorGradients
from megatron_rl.routing.predictor import RoutePredictor
from megatron_rl.routing.table import Features, RouteShape, RouteTable
from megatron_rl.trainer.hooks import Stage, UpdateContext, UpdateHook
from megatron_rl.vp2o.expert_groups import Coactivation
from megatron_rl.vp2o.transform import Stein
from megatron_rl.vp2o.trust_region import Probe

TOKENS, HIDDEN, EXPERTS, TOPK = 12, 16, 8, 2
SHAPE = RouteShape((1, 3), EXPERTS, TOPK)


class Router:
    """What a pass asks of a ReplayRouter of DeepSeek-V3's kind."""

    score_function, topk = "sigmoid", TOPK
    config = SimpleNamespace(moe_router_pre_softmax=False, moe_router_num_groups=2, moe_router_group_topk=1)
    choice, gates, _top = ReplayRouter.choice, ReplayRouter.gates, ReplayRouter._top

    def __init__(self, predictor: RoutePredictor) -> None:
        self.predictor = predictor
        self.expert_bias = torch.zeros(EXPERTS, device=predictor.weight.device)


def hooks_of(source: str, router: Router, loss: str = "kl") -> list[UpdateHook]:
    """As `update_hooks` has them, of a model whose layers have this router."""
    found: list[UpdateHook] = [RoutingReplay(source)]
    if source in PREDICTING:
        found.append(predictors := Predictors(RoutingConfig(source=source, predictor_loss=loss), OptimizerConfig(), 2))
        predictors.weights = dict.fromkeys(SHAPE.moe_layers, router.predictor.weight)
    return [*found, Stein(VP2OConfig(enabled=True, orthogonality=0.0))]


def forward(hooks: list[UpdateHook], table: RouteTable, router: Router, stage: Stage, *others: RouteObserver, update=0):
    """One pass of a micro-batch; returns what observed it."""
    batch, place = SimpleNamespace(routes=table, without_route=0), UpdateContext(update)
    for hook in hooks:
        hook.before_forward([batch], stage, place)
    observers = [*(one for hook in hooks for one in hook.observers(table, stage, place)), *others]
    route_pass = RoutePass(observers)
    for layer in SHAPE.moe_layers:
        hidden, logits = (torch.randn(TOKENS, width, device="cuda") for width in (HIDDEN, EXPERTS))
        chosen = route_pass.choose(layer, router.choice(route_pass.see_logits(layer, hidden, logits, router)))
        assert chosen.device.type == "cuda" and chosen.shape == (TOKENS, TOPK)
    return observers


def packed(cached: int, **options) -> RouteTable:
    table = RouteTable(SHAPE, torch.ones(TOKENS, dtype=torch.bool), torch.arange(cached), **options)
    table.counted_rows = torch.arange(TOKENS)
    return table.to(torch.device("cuda"))


@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("source", PREDICTING)
def test_router_inputs_are_kept_for_an_update_that_learns(source, learns, monkeypatch):
    """And for no other: they are most of what is kept. Beside logits of the engine (layer 3) belong none."""
    monkeypatch.setattr(torch.autograd, "grad", lambda loss, weight: (torch.zeros_like(weight) * loss.detach(),))
    with FakeTensorMode(), torch.no_grad():
        kept = {3: Features(None, torch.zeros(5, EXPERTS), None)} if source == "pr3" else {}
        table = packed(5, features=kept)
        with torch.device("cuda"):
            router = Router(RoutePredictor(HIDDEN, EXPERTS).requires_grad_(False))
        hooks = hooks_of(source, router)
        forward(hooks, table, router, "log_probs", update=int(learns))
        for layer, features in table.features.items():
            assert (features.hidden is not None) == (learns and layer not in kept)
            assert features.bias.shape == (5, EXPERTS)
        observers = forward(hooks, table, router, "update", update=int(learns))
        learned = [{*one.sums} for one in observers if isinstance(one, PredictorGradients)]
        assert learned == ([{1, 3} - kept.keys()] if learns else [])
        tokens = {name: metric.parts[1] for one in observers for name, metric in one.metrics().items() if "/kl" in name}
        assert tokens["routing/layer_01/kl"] == tokens["routing/layer_03/kl"] == 5, (
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
        table = packed(5, engine=engine, features=kept)
        with torch.device("cuda"):
            router = Router(RoutePredictor(HIDDEN, EXPERTS).requires_grad_(False))
        hooks = hooks_of(source, router, loss)
        with torch.no_grad():
            forward(hooks, table, router, "log_probs", update=1)
        probe = Probe(table, 3)
        observers = forward(hooks, table, router, "update", probe, update=1)
        assert table.left(Coactivation)[1].device.type == "cuda" and probe.found.hidden[1].shape == (3, HIDDEN)
        learned = [one.sums for one in observers if isinstance(one, PredictorGradients)]
        assert [set(sums) for sums in learned] == ([{1, 3}] if source in PREDICTING else [])
        # What an update measured is read in one go, all of it.
        read = []
        monkeypatch.setattr(FakeTensor, "tolist", lambda sums: read.append(sums) or [0.0] * len(sums))
        metrics = [one.metrics() for one in observers]
        parts = {id(p): p for one in metrics for m in one.values() for p in m.parts if torch.is_tensor(p)}
        assert all(part.device.type == "cuda" for part in parts.values())
        names = {name for one in metrics for name in one}
        assert {
            f"routing/layer_0{n}/{name}" for n in (1, 3) for name in ("agreement", "kl", "entropy", "load_max")
        } <= names
        moved = on_host(metrics)
        assert (
            len(read) == 1 and read[0].device.type == "cuda" and len(read[0]) == sum(p.numel() for p in parts.values())
        )
        assert not any(torch.is_tensor(part) for one in moved for metric in one.values() for part in metric.parts)
