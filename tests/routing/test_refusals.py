"""Sources of routes that cannot work with the rest of a config are refused before anything starts."""

from __future__ import annotations

from typing import get_args, get_type_hints

import pytest
import torch
from ranks import run_ranks

from megatron_rl.config import RoutingConfig
from megatron_rl.config.load import build_config
from megatron_rl.errors import UserError
from megatron_rl.routing.passes import RouteSelector
from megatron_rl.routing.predictor import PredictorLoss
from megatron_rl.routing.replay import RouteSource

REFUSED = {
    "dense": ("qwen3", {"routing": {"source": "r2"}}, "Qwen3ForCausalLM is a dense model; set it to none"),
    "fused router": (
        "qwen3_moe",
        {"routing": {"source": "r2"}, "model": {"moe_router_fusion": True}},
        "the fused router would ignore the routes",
    ),
    "one update": ("qwen3_moe", {"routing": {"source": "pr2"}}, "batch.updates_per_step = 1 makes only one update"),
    "features": (
        "qwen3_moe",
        {"routing": {"source": "r3", "features": "engine"}},
        "features = engine does nothing with routing.source = r3; set routing.source: pr3",
    ),
    "gates of no engine": (
        "qwen3_moe",
        {"routing": {"replay_gates": True, "source": "r2"}, "batch": {"updates_per_step": 2}},
        "routing.replay_gates = true does nothing with routing.source = r2; set routing.source: r3",
    ),
    "gates in free routing": (
        "qwen3_moe",
        {"routing": {"replay_gates": True}},
        "replay_gates = true does nothing with routing.source = none",
    ),
    "nothing to give up": (
        "qwen3_moe",
        {"routing": {"give_up_below": 0.5, "source": "pr3"}, "batch": {"updates_per_step": 2}},
        "routing.give_up_below = 0.5 does nothing with routing.source = pr3; set routing.source: r3",
    ),
    "gates without routes": (
        "qwen3_moe",
        {"rollout": {"gates": True}},
        "needs routes, which nothing asks for: set rollout.routes: true",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_source_that_cannot_work_is_refused(case, tiny_model, monkeypatch):
    from megatron_rl.checks.preflight import preflight

    family, changes, message = REFUSED[case]
    monkeypatch.setenv("WORLD_SIZE", "1")
    model = {"path": str(tiny_model(family)), **changes.get("model", {})}
    config = build_config({**changes, "model": model})
    with pytest.raises(UserError, match=message):
        preflight(config, "train")
    preflight(config, "sample")  # an evaluation replays nothing


def test_the_choices_of_the_config_are_those_of_the_code():
    """The config imports no torch, and the routing code no config."""
    fields = get_type_hints(RoutingConfig)
    assert get_args(fields["source"]) == get_args(RouteSource)
    assert get_args(fields["predictor_loss"]) == get_args(PredictorLoss)


def test_a_near_miss_names_the_choice():
    with pytest.raises(UserError, match="did you mean 'pr3'"):
        build_config({"routing": {"source": "ppr3"}})
    with pytest.raises(UserError, match="did you mean 'routing.predictor_decay'"):
        build_config({"routing": {"predictor_deacy": 0.1}})
    with pytest.raises(UserError, match="routing.give_up_below"):
        build_config({"routing": {"give_up_below": 1.5}})


def test_a_router_that_does_not_ask_is_an_error():
    """The last line of defense: Megatron's fused branch never looks at what is to be replayed."""
    selector = RouteSelector()
    selector.layer_number = 3
    with (
        pytest.raises(RuntimeError, match="router of layer 2: chose its experts without looking"),
        selector.during(object()),
    ):
        pass
    with selector.during(None):
        pass
    assert selector.route_pass is None


def freely(model: str) -> tuple[list, list]:
    """Log-probs of Megatron's own router and of ours without a pass. Runs in a process of its own."""
    from learning import make_config, make_samples, make_trainer, read_hf_config, shape_of

    trainer = make_trainer(make_config(model, {}, "none"))
    batches = trainer.pack(make_samples(5, 4, 64, shape_of(read_hf_config(model))))
    with_pass = trainer.compute_log_probs(batches)
    without = trainer.compute_log_probs(batches, trainer.chunks)  # as the reference's: routers are told nothing
    return tuple([of_batch.tolist() for of_batch in found] for found in (with_pass, without))


@pytest.mark.slow
def test_measuring_changes_no_bit(tiny_model):
    [(with_pass, without)] = run_ranks(1, f"{__name__}:freely", (str(tiny_model("deepseek_v3")),))
    assert torch.equal(
        torch.tensor([p for part in with_pass for p in part]), torch.tensor([p for part in without for p in part])
    )
