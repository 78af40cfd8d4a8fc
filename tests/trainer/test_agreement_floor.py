"""An engine whose routes or log-probs are not of this model stops the run before anything is learned; a healthy one never."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from ranks import run_ranks

from megatron_rl.errors import UserError
from megatron_rl.hooks.guards import AgreementFloor, check_agreement
from megatron_rl.metrics.reduce import Metrics, derived, figures, mean
from megatron_rl.routing.measure import share_of_experts
from megatron_rl.routing.passes import layer_name
from megatron_rl.trainer.hooks import UpdateContext
from megatron_rl.trainer.objective import CLOSE


def update_from_engines(model: str, floors: list[float | None], seed: int) -> list[dict]:
    """One update each from what several engines say of the same samples: (error or None, whether weights moved)."""
    from trainer.layouts import make_config, make_samples, make_trainer, score

    from megatron_rl.trainer.objective import Policy

    one_update = {"batch": {"updates_per_step": 1}}
    config = make_config(model, {"routing": {"source": "r3"}, "precision": {"train": "bf16"}, **one_update})
    trainer = make_trainer(config)
    samples = make_samples(seed, 8, trainer.model.hf_config.vocab_size)
    shape = trainer.layout.routes
    batches = trainer.pack(samples)
    score(trainer, batches)
    healthy: list = [None] * len(samples)
    for batch in batches:
        recorded = torch.stack([batch.routes.recorded[layer] for layer in shape.moe_layers], 1).numpy()
        for row, index in enumerate(batch.samples):
            start = int(batch.cu_seqlens[row])
            count = samples[index].inputs
            old = batch["old_log_probs"][start : start + count].float().numpy()
            healthy[index] = recorded[start : start + count], old

    def said_by(engine: str) -> list:
        said = []
        for sample, (routes, old) in zip(samples, healthy, strict=True):
            log_probs = old[sample.prompt_length - 1 :].copy()
            log_probs[~sample["loss_mask"]] = 0.0
            if engine == "stale rows":  # of the tokens that had these places in the capture buffer before
                routes = np.roll(routes[::-1], 1, 0)
            if engine == "one layer's rows":
                routes = routes.copy()
                routes[:, -1] = np.roll(routes[::-1, -1], 1, 0)
            if engine == "log-probs of nothing":
                log_probs = np.random.default_rng(seed).normal(-3, 2, len(log_probs)).astype(np.float32)
            if engine == "rounding":
                log_probs = log_probs + np.random.default_rng(seed).normal(0, 0.05, len(log_probs)).astype(np.float32)
            fields = {**sample.fields, "rollout_log_probs": log_probs}
            said.append(replace(sample, routes=np.ascontiguousarray(routes), fields=fields))
        return said

    parameters = [p for chunk in trainer.chunks for p in chunk.parameters()]
    first = [p.detach().clone() for p in parameters]
    found = []
    own = trainer.hooks
    for floor in floors:
        trainer.hooks = [*own, AgreementFloor(floor)] if floor else own
        for hook in trainer.hooks[len(own) :]:
            hook.attach(trainer)
        for engine in ("rounding", "stale rows", "one layer's rows", "log-probs of nothing"):
            packed = trainer.pack(said_by(engine))
            error, done = "", None
            try:
                done = trainer.update(packed, Policy(config))
            except UserError as raised:
                error = str(raised)
            of_update = figures(done.metrics) if done else {}
            layers = {layer: layer_name(layer, "engine_agreement") for layer in shape.moe_layers}
            shares = {layer: of_update[name] for layer, name in layers.items() if done}
            close = of_update.get(CLOSE)
            moved = not all(map(torch.equal, parameters, first))
            for parameter, before in zip(parameters, first, strict=True):
                parameter.data.copy_(before)
            found.append(
                {"engine": engine, "floor": floor, "error": error, "moved": moved, "shares": shares, "close": close}
            )
    return found


def test_garbage_stops_the_run_before_an_update(tiny_model):
    model = str(tiny_model("qwen3_moe", "--layers", "2", "--experts", "16", "--vocab", "300"))
    seed = torch.seed() % 2**31
    print(f"seed {seed}")
    [found] = run_ranks(1, "trainer.test_agreement_floor:update_from_engines", (model, [0.5, None], seed))
    for case in found:
        print(case)
        garbage = case["engine"] != "rounding"
        stops = garbage and case["floor"] is not None
        assert bool(case["error"]) == stops and case["moved"] != stops, case
        if stops:
            named = (
                "log-probs within"
                if case["engine"] == "log-probs of nothing"
                else "experts that SGLang reports in layer"
            )
            assert named in case["error"] and "\n" not in case["error"]
            assert "rollout.agreement_floor = 0.5" in case["error"]
        if not garbage:
            assert min(case["shares"].values()) > 0.9 and case["close"] == 1.0
    # What the floor lies between.
    loose = {case["engine"]: case for case in found if case["floor"] is None}
    assert max(loose["stale rows"]["shares"].values()) < 0.4
    assert loose["log-probs of nothing"]["close"] < 0.4


def measured(close: float, counts: dict[int, list[int]], tokens: int = 100) -> Metrics:
    found = {CLOSE: mean(close * tokens, tokens)}
    return found | {
        layer_name(n, "engine_agreement"): derived(share_of_experts, np.array(of)) for n, of in counts.items()
    }


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        (measured(0.99, {1: [90, 10, 0], 3: [10, 40, 50]}), r"only 30% of the experts that SGLang reports in layer 3"),
        (measured(0.31, {1: [90, 10, 0]}), "only 31% of the tokens have log-probs within a factor of two"),
        (measured(0.99, {1: [90, 10, 0]}), None),
        (measured(0.99, {1: [0, 0, 31], 2: [0, 0, 0]}), None),  # too few tokens with a route; a layer of none
        (measured(0.0, {}, tokens=31), None),
        ({}, None),  # demonstrations
    ],
)
def test_the_floor(metrics, message):
    if message:
        with pytest.raises(UserError, match=message):
            check_agreement(metrics, range(4), 0.5)
    else:
        check_agreement(metrics, range(4), 0.5)


@pytest.mark.parametrize("bypass", [False, True])
def test_updates_that_find_the_policy_moved_are_not_judged(bypass):
    """With bypass, whose log-probs are those of the policy as it is; others are of before the first update."""
    layout, correction = SimpleNamespace(routes=None), SimpleNamespace(bypass=bypass)
    floor = AgreementFloor(0.5)
    floor.attach(SimpleNamespace(layout=layout, config=SimpleNamespace(correction=correction)))
    for update in (0, 1, 2, 0):
        floor.before_forward([], "update", UpdateContext(update))
        if update and bypass:
            floor.check(measured(0.31, {}))
        else:
            with pytest.raises(UserError, match="only 31% of the tokens"):
                floor.check(measured(0.31, {}))
