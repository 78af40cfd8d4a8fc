"""Experts that are given up, against a loop over tokens; gates as they come out of the plugin and go into a batch."""

from __future__ import annotations

import math

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.data.packing import Layout, pack
from megatron_rl.data.sequence import Sequence
from megatron_rl.routing.passes import RoutePass
from megatron_rl.routing.replay import ReplayGates, ReplayLikely, give_up
from megatron_rl.routing.table import RouteShape, RouteTable, route_dtype

SEEDS = st.integers(0, 2**63 - 1)


def draw(generator: torch.Generator, tokens: int, experts: int, k: int) -> torch.Tensor:
    """[tokens, k] different experts."""
    return torch.rand(tokens, experts, generator=generator).argsort(1)[:, :k]


class Likeliest:
    """A router that chooses by its logits alone."""

    predictor, score_function = None, "softmax"

    def __init__(self, k: int):
        self.k = k

    def choice(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.topk(self.k, sorted=False).indices


@given(seed=SEEDS, k=st.integers(1, 6), more=st.integers(0, 20), below=st.floats(0.01, 1.0))
def test_what_is_given_up_is_what_the_router_likes_least(seed, k, more, below):
    generator = torch.Generator().manual_seed(seed)
    experts = k + more
    log_probs = (4 * torch.randn(12, experts, generator=generator, dtype=torch.float64)).log_softmax(-1)
    routes = draw(generator, 12, experts, k)
    own = log_probs.topk(k).indices[:, torch.randperm(k, generator=generator)]
    found, lost = give_up(routes, own, log_probs, below)
    tokens = (routes.tolist(), own.tolist(), log_probs, found.tolist(), lost.tolist())
    for replayed, chosen, p, ids, gone in zip(*tokens, strict=True):
        weakest = min(float(p[e]) for e in chosen)
        keep = [e for e in replayed if float(p[e]) >= weakest + math.log(below)]
        free = iter(sorted((e for e in chosen if e not in keep), key=lambda e: -float(p[e])))
        assert gone == [e not in keep for e in replayed]
        assert ids == [e if e in keep else next(free) for e in replayed]
        assert len(set(ids)) == k
    assert not give_up(own, own, log_probs, below)[1].any(), "the router's own choice is never given up"


@given(seed=SEEDS)
def test_a_token_that_gives_up_an_expert_has_the_routers_own_weights(seed):
    """And one without a route, or without gates; the share of experts given up counts neither."""
    generator = torch.Generator().manual_seed(seed)
    tokens, experts, k, below = 30, 8, 2, 0.5
    shape = RouteShape((5,), experts, k)
    ids = draw(generator, tokens, experts, k)
    routes = ids.to(route_dtype(experts))
    routes[:4] = 255
    gates = torch.rand(tokens, k, generator=generator)
    gates[:8] = 0
    counted = torch.rand(tokens, generator=generator) < 0.7
    table = RouteTable(shape, counted, torch.arange(0), engine=routes[:, None], gates=gates[:, None])
    logits = torch.randn(tokens, experts, generator=generator)
    own = Likeliest(k).choice(logits)
    observer = ReplayLikely(ReplayGates(table, "r3"), below, update=1)
    route_pass = RoutePass([observer])
    for moved in (logits, -logits):  # layers that are recomputed do not decide again
        route_pass.see_logits(5, torch.zeros(tokens, 1), moved, Likeliest(k))
        chosen = route_pass.choose(5, own)
        weights = torch.zeros(tokens, experts).scatter(1, chosen, torch.rand(tokens, k, generator=generator))
        weighed = route_pass.weigh(5, chosen, weights, 2.5)
        expected, lost = give_up(ids, own, logits.log_softmax(-1), below)
        whole = ~lost.any(1) & (torch.arange(tokens) >= 8)
        assert torch.equal(chosen[4:], expected[4:]) and torch.equal(chosen[:4], own[:4])
        assert torch.equal(weighed.gather(1, chosen)[whole], gates[whole] * 2.5)
        assert torch.equal(weighed[~whole], weights[~whole])
    share = observer.metrics()["routing/layer_05/given_up"]
    those = counted & (torch.arange(tokens) >= 4)
    assert [float(part) for part in share.parts] == [float(lost[those].sum()), float(k * those.sum())]


@given(seed=SEEDS, context=st.sampled_from([1, 2]), tensor=st.sampled_from([1, 2]))
def test_gates_lie_where_their_routes_do(seed, context, tensor):
    """In packed batches of every context-parallel and sequence-parallel rank; 0 without a route."""
    rng = np.random.default_rng(seed)
    shape = RouteShape((0, 2), 9, 2)
    samples = []
    for number in range(4):
        sample = Sequence.demonstration([1, 2, 3], rng.integers(1, 50, int(rng.integers(1, 9))).tolist())
        if number != 1:
            sample.routes = rng.permuted(np.tile(np.arange(9), (sample.inputs, 2, 1)), axis=-1)[..., :2].astype(
                np.uint8
            )
            sample.routes[0] = 255
        if number > 1:  # a function of the ids, by which they are found again
            sample.gates = np.where(sample.routes == 255, 0, sample.routes / 10 + 0.05).astype(np.float32)
        samples.append(sample)
    seen = 0
    for context_rank in range(context):
        for tensor_rank in range(tensor):
            layout = Layout(
                context=context, context_rank=context_rank, tensor=tensor, tensor_rank=tensor_rank, routes=shape
            )
            batch = pack(samples, [2, 0, 1, 3], layout)
            assert batch.routes is not None
            engine, gates = batch.routes.engine, batch.routes.gates
            assert engine is not None and gates is not None
            known = (gates > 0).all(-1).all(-1)
            torch.testing.assert_close(gates[known], engine[known].float() / 10 + 0.05)
            assert not gates[~known].any()
            seen += int(known.sum())
    assert seen == sum(sample.inputs - 1 for sample in samples[2:])
    assert pack(samples[:2], [0, 1], Layout(routes=shape)).routes.gates is None


def test_the_routers_own_weights_stay_without_gates():
    table = RouteTable(RouteShape((0,), 4, 1), torch.ones(2, dtype=torch.bool), torch.arange(0))
    weights = torch.rand(2, 4)
    assert RoutePass([ReplayGates(table, "r3")]).weigh(0, torch.zeros(2, 1, dtype=torch.int64), weights, 1.0) is weights
