"""Replayed gates: their value is the engine's to the bit, their gradient that of the trainer's own, for every router."""

from __future__ import annotations

import pytest
import torch
from ranks import end_layout, fresh_seed, run_ranks

from megatron_rl.models.parallel_check import read_hf_config

FAMILIES = ("qwen3_moe", "olmoe", "mixtral", "gpt_oss", "deepseek_v3")
"""Softmax over the chosen experts (twice), before the choice, over a router with a bias; sigmoid, groups and a factor."""


def replayed(models: list[str], seed: int) -> list[dict[str, torch.Tensor]]:
    """What the first router of each model makes of random logits [T, E], ids and gates [T, k], and the gradient of a random
    sum of its weights. The last tokens have ids alone. Runs in a process of its own."""
    from replays import make_config, make_trainer

    from megatron_rl.models.router import routers
    from megatron_rl.routing.passes import RoutePass
    from megatron_rl.routing.replay import ReplayGates
    from megatron_rl.routing.table import RouteShape, RouteTable, route_dtype

    found = []
    for model in models:
        trainer = make_trainer(make_config(model, {}, "r3"))
        layer, router = next(routers(trainer.chunks))
        draw, experts = torch.Generator().manual_seed(seed), router.num_experts
        logits = (3 * torch.randn(40, experts, generator=draw)).requires_grad_()
        ids = torch.rand(40, experts, generator=draw).argsort(1)[:, : router.topk]
        gates = torch.rand(40, router.topk, generator=draw)
        gates[30:] = 0
        factors = torch.randn(40, experts, generator=draw)
        table = RouteTable(
            RouteShape((layer,), experts, router.topk),
            torch.ones(40, dtype=torch.bool),
            torch.arange(0),
            engine=ids[:, None].to(route_dtype(experts)),
            gates=gates[:, None],
        )
        with router.router_replay.during(RoutePass([ReplayGates(table, "r3")])):
            weights, chosen = router.routing(logits[:, None])
        (weights * factors).sum().backward()
        values = {"logits": logits.detach(), "ids": ids, "gates": gates, "factors": factors}
        found.append(values | {"weights": weights.detach(), "chosen": chosen, "gradient": logits.grad})
        end_layout()
    return found


def own_weights(family: str, config, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """[T, k] weights of given experts, by each family's own formula, times its scaling factor."""
    if family == "gpt_oss":
        return logits.gather(1, ids).softmax(-1)
    if family == "deepseek_v3":
        scores = logits.sigmoid().gather(1, ids)
        return config.routed_scaling_factor * scores / scores.sum(-1, keepdim=True)
    scores = logits.softmax(-1).gather(1, ids)
    return scores / scores.sum(-1, keepdim=True) if family == "mixtral" or config.norm_topk_prob else scores


@pytest.fixture(scope="module")
def found(tiny_model):
    seed = fresh_seed()
    models = [str(tiny_model(family, "--layers", "2")) for family in FAMILIES]
    [results] = run_ranks(1, f"{__name__}:replayed", (models, seed))
    return {family: (read_hf_config(m), r) for family, m, r in zip(FAMILIES, models, results, strict=True)}


@pytest.mark.parametrize("family", FAMILIES)
def test_values_are_the_engines_and_gradients_the_trainers(family, found):
    config, r = found[family]
    scale = config.routed_scaling_factor if family == "deepseek_v3" else 1.0
    assert scale != 1.0 or family != "deepseek_v3"
    weights = r["weights"].gather(1, r["ids"])
    assert torch.equal(weights[:30], r["gates"][:30] * scale)
    assert torch.equal(r["chosen"], torch.zeros_like(r["chosen"]).scatter(1, r["ids"], True))
    assert torch.equal(r["weights"] * ~r["chosen"], torch.zeros_like(r["weights"]))
    logits = r["logits"].double().requires_grad_()
    own = own_weights(family, config, logits, r["ids"])
    torch.testing.assert_close(weights[30:].double(), own[30:].detach(), rtol=1e-5, atol=1e-7)
    (own * r["factors"].double().gather(1, r["ids"])).sum().backward()
    torch.testing.assert_close(r["gradient"].double(), logits.grad, rtol=1e-5, atol=1e-6)
    assert logits.grad.abs().max() > 0.01
