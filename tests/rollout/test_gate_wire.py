"""Gates on their way from the engine's capture to a trajectory: packed, decoded, joined, cut, recorded, dropped, refused."""

from __future__ import annotations

import base64
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron_rl_plugin.gates import (
    MOST_EXPERTS,
    OVERRIDE,
    STEPS,
    capture,
    of_capturer,
    pack,
)
from megatron_rl_plugin.routes import compact

from megatron_rl.agents.conversation import Conversation
from megatron_rl.algorithms.sampling_support import SamplingSupport
from megatron_rl.config.load import build_config
from megatron_rl.data.engine_routes import EngineRoutes, check_gates, drop_stale_routes
from megatron_rl.data.trajectory import WeightSpan, load_trajectories, save_trajectories
from megatron_rl.errors import UserError
from megatron_rl.rollout.sample_journal import read_recorded
from megatron_rl.routing.table import has_route
from megatron_rl.servers.external import problems
from megatron_rl.servers.reply import Reply, parse_reply
from megatron_rl.servers.server import RolloutServer, asks_gates

SHAPE = EngineRoutes(layers=3, moe_layers=(1, 2), experts=40, topk=2, gates=True)
GATED = SimpleNamespace(with_gates=True)


def draw(rng: np.random.Generator, tokens: int, layout: EngineRoutes = SHAPE) -> tuple[torch.Tensor, torch.Tensor]:
    """[tokens, layers, topk] of different experts, and gates in (0, 1]."""
    ids = rng.permuted(np.tile(np.arange(layout.experts), (tokens, layout.layers, 1)), axis=-1)[..., : layout.topk]
    gates = 1 - rng.random((tokens, layout.layers, layout.topk), np.float32)
    return torch.from_numpy(ids.astype(np.int32)), torch.from_numpy(gates)


def encode(ids: torch.Tensor, gates: torch.Tensor | None, capturer: object = GATED) -> str:
    """As SGLang sends what it has captured."""
    captured = ids if gates is None else pack(ids.flatten(0, 1), gates.flatten(0, 1)).view(ids.shape)
    return base64.b64encode(compact(captured, capturer).numpy().tobytes()).decode()


@given(seed=st.integers(0, 2**63 - 1), experts=st.sampled_from([2, 40, 300, MOST_EXPERTS]), tokens=st.integers(0, 5))
def test_ids_come_back_and_gates_within_half_a_step(seed, experts, tokens):
    rng = np.random.default_rng(seed)
    layout = EngineRoutes(layers=3, moe_layers=(1, 2), experts=experts, topk=2, gates=True)
    ids, gates = draw(rng, tokens, layout)
    gates[rng.random(gates.shape) < 0.2] = 1.0
    gates[..., 1][rng.random(gates.shape[:2]) < 0.2] = 0.0
    found, weights = layout.decode_with_gates(encode(ids, gates), tokens)
    assert found.dtype == layout.shape.dtype and weights.dtype == np.float32
    assert (found == ids[:, 1:].numpy()).all()
    exact = gates[:, 1:].double().numpy()
    assert np.abs(weights - exact).max(initial=0) <= 0.5 / STEPS + 2**-24  # and the rounding to fp32
    assert (weights[exact == 1] == 1).all() and (weights[exact == 0] == 0).all()
    order = np.argsort(exact, None)
    assert (np.diff(weights.reshape(-1)[order]) >= 0).all()
    layout.shape.check(found, tokens)
    check_gates(weights, found)


def test_a_server_without_gates_says_so_and_what_to_do():
    ids, gates = draw(np.random.default_rng(), 4)
    for wrong in (encode(ids, None, None), encode(ids, None)):
        with pytest.raises(UserError, match="no gates: start the server through tools/serve.py"):
            SHAPE.decode_with_gates(wrong, 4)
    with pytest.raises(UserError, match="5 tokens x 3 layers"):
        SHAPE.decode_with_gates(encode(ids, gates), 5)
    with pytest.raises(UserError, match="names expert"):
        EngineRoutes(3, (1, 2), 40, 2).decode(encode(ids, gates), 4)
    with pytest.raises(UserError, match="routing.replay_gates and rollout.gates support at most 4096 experts"):
        EngineRoutes(1, (0,), 5000, 2, gates=True)


def test_bytes_without_gates_are_as_they_were():
    ids, _ = draw(np.random.default_rng(), 4)
    for capturer in (None, SimpleNamespace()):
        assert compact(ids, capturer).dtype == torch.uint8
    assert compact(ids, GATED) is ids


def test_a_conversation_joins_cuts_and_keeps_gates(tmp_path):
    rng = np.random.default_rng()
    talk, given = Conversation([1, 2, 3]), []
    for turn, version in enumerate(("old", "old", "new")):
        rows = len(talk.context) + 4 - 1 - talk.known_routes()
        ids, gates = draw(rng, rows)
        meta = {
            "output_token_logprobs": [(-1.0, 5, None)] * 4,
            "finish_reason": {"type": "stop"},
            "weight_version": version,
            "routed_experts": encode(ids, gates),
        }
        reply = parse_reply(
            {"meta_info": meta, "output_ids": [5] * 4},
            len(talk.context),
            SHAPE,
            False,
            routes_start=talk.known_routes(),
        )
        assert reply.gates is not None and reply.gates.shape == reply.routes.shape
        cut = reply.first(3)
        assert np.array_equal(cut.gates, reply.gates[:-1]) and len(cut.gates) == len(cut.routes)
        given.append(reply.gates)
        talk.add_reply(reply)
        if turn < 2:
            talk.add_observation([7, 8])
    t = talk.trajectory(SHAPE, prompt_id="", group_id=0)
    assert t.gates.shape == t.routes.shape == (len(t.tokens) - 1, 2, 2)
    assert np.array_equal(t.gates, np.concatenate([*map(np.zeros_like, given[:2]), given[2]]))
    assert np.array_equal(t.gates.any(-1).all(-1), has_route(torch.from_numpy(t.routes)).all(-1).numpy())
    save_trajectories(tmp_path / "step.npz", [t])
    [back] = load_trajectories(tmp_path / "step.npz")
    assert np.array_equal(back.gates, t.gates)
    support = SamplingSupport()
    t.support = support.sampled()
    save_trajectories(tmp_path / "step.npz", [t])
    for layout, gates in ((SHAPE, True), (EngineRoutes(3, (1, 2), 40, 2), False), (None, False)):
        [back] = read_recorded(tmp_path / "step.npz", support, layout, None)
        assert (back.gates is not None) == gates
    t.gates = None
    save_trajectories(tmp_path / "step.npz", [t])
    with pytest.raises(UserError, match="record it again with rollout.gates: true"):
        read_recorded(tmp_path / "step.npz", support, SHAPE, None)
    drop_stale_routes(back, fresh=False)
    back.routes, back.gates = given[1], given[1]
    back.weight_spans = [WeightSpan("new", 0, 4)]
    drop_stale_routes(back, fresh=True)
    assert back.gates is given[1]
    drop_stale_routes(back, fresh=False)
    assert back.routes is None and back.gates is None


def test_gates_that_do_not_belong_to_their_routes_are_refused():
    routes = SHAPE.shape.empty(3)
    for gates, message in (
        (np.zeros((2, 2, 2), np.float32), "the routes need"),
        (np.zeros((3, 2, 2), np.float64), "float64"),
        (np.full((3, 2, 2), 1.1, np.float32), "between 0 and 1"),
        (np.full((3, 2, 2), np.nan, np.float32), "between 0 and 1"),
        (np.full((3, 2, 2), 0.5, np.float32), "a token without a route has gates"),
    ):
        with pytest.raises(ValueError, match=message):
            check_gates(gates, routes)


def test_a_server_is_told_and_an_external_one_asked(tiny_model):
    model = tiny_model("qwen3_moe")
    replays = {"model": {"path": str(model)}, "routing": {"source": "r3", "replay_gates": True}}
    config, without = build_config(replays), build_config(replays | {"routing": {"source": "r3"}})
    recording = build_config({"model": {"path": str(model)}, "rollout": {"routes": True, "gates": True}})
    assert [asks_gates(one.rollout, one.routing) for one in (config, recording, without)] == [True, True, False]
    commands = [" ".join(RolloutServer.from_config(c).command()) for c in (config, recording, without)]
    assert [f'"{OVERRIDE}": true' in command for command in commands] == [True, True, False]

    from megatron_rl.models.parallel_check import read_hf_config

    for wanted, told, message in (
        (
            config,
            "{}",
            "sends no gates with its routes, and this config wants them (routing.replay_gates, rollout.gates)",
        ),
        (without, f'{{"{OVERRIDE}": true}}', "sends gates with its routes, and this config wants none"),
        (config, f'{{"{OVERRIDE}": true}}', ""),
        (without, "{}", ""),
    ):
        info = {"json_model_override_args": told, "enable_return_routed_experts": True, "dtype": "auto"}
        found = problems(
            info, {"architectures": ["Qwen3MoeForCausalLM"]}, wanted, read_hf_config(str(model)), pushes=True
        )
        assert [problem for problem in found if "gates" in problem] == found and len(found) == bool(message)
        assert not message or found[0].startswith(message)


def test_a_server_that_captures_no_routes_cannot_be_asked_for_gates():
    asked, model = SimpleNamespace(hf_config=SimpleNamespace(**{OVERRIDE: True})), torch.nn.Module()
    with pytest.raises(NotImplementedError, match="start the server with --enable-return-routed-experts"):
        of_capturer(None, model=model, model_config=asked)
    assert of_capturer(None, model=model, model_config=SimpleNamespace(hf_config=SimpleNamespace())) is None


@pytest.mark.parametrize("folded", [False, True])
def test_gates_are_captured_as_they_are_before_the_factor(folded, monkeypatch):
    """With stand-ins for SGLang's own functions, which may change ids and weights in place."""
    captured, capturer = [], SimpleNamespace(with_gates=True)
    topk, routed = ModuleType("sglang.srt.layers.moe.topk"), ModuleType("sglang.srt.state_capturer.routed_experts")
    topk.is_routed_scaling_factor_fused_in_topk = lambda config: folded
    topk.capture_routed_experts_if_allowed = lambda config, layer, ids: captured.append((layer, ids))
    routed.get_global_experts_capturer = lambda: capturer
    moe = ModuleType("sglang.srt.layers.moe")
    moe.topk = topk
    for module in (topk, routed, moe):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    ids, gates = (part[:, 0].contiguous() for part in draw(np.random.default_rng(), 5))
    weights, config = gates * 2.5 if folded else gates.clone(), SimpleNamespace(routed_scaling_factor=2.5)

    def original(topk_ids, topk_weights, *_, **__):
        topk_ids += 1
        topk_weights *= 3
        return "found"

    arguments = (original, ids.clone(), weights, config, None)
    assert capture(*arguments, layer_id=7, padded_rows_masked=True) == "found"
    [(layer, packed)] = captured
    assert layer == 7 and torch.equal(packed & MOST_EXPERTS - 1, ids)
    torch.testing.assert_close((packed.long() >> 12 & STEPS) / STEPS, gates, rtol=0, atol=1e-6)
    capturer.with_gates = False
    assert capture(*arguments, 7) == "found" and len(captured) == 1, "who does not ask for gates is left alone"


def test_a_reply_has_no_gates_by_default():
    reply = Reply(np.zeros(2, np.int32), {}, "stop", [WeightSpan("1", 0, 2)])
    assert reply.gates is None and reply.first(1).gates is None
