"""Every family served on the CPU: its log-probs are transformers', and the route predictors that are pushed route."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megatron_rl.algorithms.sampling_support import SamplingSupport
from megatron_rl.config import SyncConfig
from megatron_rl.data.engine_routes import EngineRoutes
from megatron_rl.models.parallel_check import read_hf_config
from megatron_rl.models.shape import engine_features, engine_routes
from megatron_rl.servers.server import RolloutServer
from megatron_rl.sync.weight_sync import WeightSync
from tests.ranks import nearly_ties
from tests.rollout.conftest import CPU_SERVER, Question, assert_agree, client_of, collect
from tests.rollout.routers import PredictedReference, Weights, agreement, plant


def prefill(server: RolloutServer, sequences: list[list[int]], layout: EngineRoutes):
    """Per sequence of n tokens: log-probs [n - 1] and routes [n, moe_layers, topk]."""

    async def ask():
        async with client_of(server) as client:
            return await client.call(sequences, {"max_new_tokens": 1}, routes=layout, prompt_log_probs=True)

    return [(reply.prompt_log_probs, reply.routes) for reply in asyncio.run(ask())]


@pytest.fixture(
    scope="module",
    params=[("olmoe", "distributed"), ("deepseek_v3", "tensor"), ("gpt_oss", "disk")],
    ids=lambda p: p[0],
)
def served(request, tiny_model, tmp_path_factory) -> SimpleNamespace:
    """What a server of the family gives with predictors of zero, and after others were pushed by that transport."""
    family, transport = request.param
    folder, logs = tiny_model(family), tmp_path_factory.mktemp(family)
    layout = engine_routes(read_hf_config(folder))
    seed = int(np.random.SeedSequence().entropy % 2**31)
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    sequences = [rng.integers(3, 512, int(rng.integers(20, 60))).tolist() for _ in range(12)]
    planted = plant(folder, seed=seed)
    with RolloutServer(
        folder,
        CPU_SERVER,
        dtype="fp32",
        context_length=128,
        routes=True,
        log_path=logs / "sglang.log",
        predictor=True,
    ) as server:
        before = prefill(server, sequences, layout)
        prompts = [Question(str(i), sequence[:20]) for i, sequence in enumerate(sequences[:6])]
        options = {"samples_per_prompt": 2, "max_new_tokens": 16, "routes": layout}
        decoded, _ = collect(client_of(server), prompts, SamplingSupport(), **options)
        config = SyncConfig(transport=transport, timeout_s=60.0)
        with WeightSync(config, [server.address], key=server.key, rollout_dtype="fp32", folder=logs / "sync") as sync:
            sync.push(iter((load_file(folder / "model.safetensors") | planted).items()), version="planted")
        after = prefill(server, sequences, layout)
    zero: Weights = {name: 0 * weight for name, weight in planted.items()}
    return SimpleNamespace(
        folder=folder,
        layout=layout,
        sequences=sequences,
        zero=zero,
        planted=planted,
        before=before,
        decoded=decoded,
        after=after,
    )


def test_what_a_family_samples_is_what_transformers_says(served):
    """Prefill and decode: sinks, windows, MLA, biases, shared experts."""
    reference = PredictedReference(served.folder, served.zero)
    views = [reference(t.tokens) for t in served.decoded]
    for t in served.decoded:
        assert t.routes.shape == (len(t.tokens) - 1, len(served.layout.moe_layers), served.layout.topk)
    responses = [v.log_probs[t.prompt_length - 1 :] for v, t in zip(views, served.decoded, strict=True)]
    tied = [nearly_ties(reference.model, t.tokens) for t in served.decoded]
    assert_agree(responses, [t["rollout_log_probs"] for t in served.decoded], median=1e-5, largest=1e-4, tied=tied)
    # Of a thousand rows and more; near ties turn one in 3e5, and a few of the token's later layers with it.
    routes = np.concatenate([t.routes for t in served.decoded])
    assert agreement(routes, np.concatenate([v.routes[:-1] for v in views])) >= 0.99
    assert len(np.unique(routes)) > 2


def test_a_pushed_predictor_routes_as_the_reference_does(served):
    for found, predictors in ((served.before, served.zero), (served.after, served.planted)):
        reference = PredictedReference(served.folder, predictors)
        views = [reference(sequence) for sequence in served.sequences]
        same = agreement(np.concatenate([routes for _, routes in found]), np.concatenate([v.routes for v in views]))
        differences = np.abs(np.concatenate([lp for lp, _ in found]) - np.concatenate([v.log_probs for v in views]))
        print(f"{same:.2%} of sets equal, median |dlogp| {np.median(differences):.1e}")
        # Near ties turn one row in 3e5, and a few behind it; what is left differs by rounding, the last bit of -6 being 5e-7.
        assert same >= 0.99 and np.median(differences) <= 1e-5
    after, before = (np.concatenate([routes for _, routes in found]) for found in (served.after, served.before))
    assert agreement(after, before) < 0.8, "the planted predictor is too small to show anything"


def test_a_prediction_below_the_resolution_of_bf16_routes(tiny_model, tmp_path):
    """The engine's routes against the top-k of its own exported logits and the prediction, which a bf16 sum would lose."""
    folder = tiny_model("gpt_oss", "--dtype", "bfloat16")
    config = read_hf_config(folder)
    layout, features = engine_routes(config), engine_features(config, torch.bfloat16)
    planted = list(plant(folder, seed=1, scale=2e-4).items())
    with RolloutServer(
        folder,
        CPU_SERVER,
        context_length=128,
        routes=True,
        log_path=tmp_path / "sglang.log",
        predictor=True,
        feature_stride=1,
    ) as server:
        config = SyncConfig(transport="tensor", timeout_s=60.0)
        with WeightSync(config, [server.address], key=server.key, rollout_dtype="bf16") as sync:
            weights = load_file(folder / "model.safetensors") | dict(planted)
            sync.push(iter(weights.items()), version="planted")
        prompts = [Question(str(i), [3 + i, 4, 5]) for i in range(40)]
        options = {"samples_per_prompt": 1, "max_new_tokens": 100, "routes": layout, "features": features}
        found, _ = collect(client_of(server), prompts, SamplingSupport(), **options)
    followed, lost = [], []
    for t in found:
        rows = t.features.positions.long() + t.prompt_length - 1
        routes = torch.from_numpy(t.routes).long()[rows].sort(-1).values
        for layer, (_, predictor) in enumerate(planted):
            z = t.features.logits[:, layer].double()
            predicted = z + t.features.hidden[:, layer].double() @ predictor.double().T
            wanted, rounded = (
                logits.topk(layout.topk).indices.sort(-1).values for logits in (predicted, predicted.bfloat16())
            )
            assert z.equal(z.bfloat16().double()), "the router's own logits are not bf16: nothing would be lost"
            followed.append((routes[:, layer] == wanted).all(-1))
            lost.append((rounded != wanted).any(-1))
    followed, lost = torch.cat(followed), torch.cat(lost)
    print(f"{followed.double().mean():.2%} of {len(lost)} sets are those predicted; in bf16 {lost.sum()} would not be")
    assert lost.sum() >= 3 and followed[lost].all() and followed.double().mean() > 0.999
