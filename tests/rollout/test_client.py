"""What the client makes of replies and of servers that do not answer; no engine is needed for it."""

from __future__ import annotations

import asyncio
import base64
import socket

import numpy as np
import pytest

from megatron_rl.errors import UserError
from megatron_rl.rollout.client import EngineLost, SGLangClient, parse_reply
from megatron_rl.rollout.routes import RouteLayout
from megatron_rl.rollout.server import free_port
from tools.make_tiny_model import FAMILIES, Sizes

rng = np.random.default_rng()


def encode(table: np.ndarray) -> str:
    return base64.b64encode(table.astype(np.int32).tobytes()).decode()


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("qwen3_moe", RouteLayout(4, (0, 1, 2, 3), 8, 2)),
        ("olmoe", RouteLayout(4, (0, 1, 2, 3), 8, 2)),
        ("mixtral", RouteLayout(4, (0, 1, 2, 3), 8, 2)),
        ("gpt_oss", RouteLayout(4, (0, 1, 2, 3), 8, 2)),
        ("deepseek_v3", RouteLayout(4, (1, 2, 3), 8, 2)),
    ],
)
def test_layout_of_each_family(family, expected):
    assert RouteLayout.from_config(FAMILIES[family](Sizes()).to_dict()) == expected


def test_layout_of_mixed_dense_and_sparse_layers():
    """transformers: layer i of a Qwen-MoE is sparse where i is not in mlp_only_layers and (i + 1) % step == 0."""
    config = {"num_hidden_layers": 8, "num_experts": 16, "num_experts_per_tok": 4}
    layout = RouteLayout.from_config(config | {"decoder_sparse_step": 2, "mlp_only_layers": [3]})
    assert layout.moe_layers == (1, 5, 7)


def test_layout_of_a_dense_model_names_what_is_missing():
    with pytest.raises(UserError, match="n_routed_experts, num_local_experts, num_experts"):
        RouteLayout.from_config({"num_hidden_layers": 2})


@pytest.mark.parametrize(("experts", "dtype"), [(8, np.uint8), (255, np.uint8), (256, np.int16)])
def test_routes_survive_the_wire(experts, dtype):
    layout = RouteLayout(layers=3, moe_layers=(1, 2), experts=experts, topk=2)
    table = rng.integers(0, experts, (11, 3, 2))
    decoded = layout.decode(encode(table), 11)
    assert decoded.dtype == dtype
    assert (decoded == table[:, 1:]).all()


@pytest.mark.parametrize("damage", [lambda s: s[:-4], lambda s: s[:-3], lambda s: s[:20] + "*" + s[21:], lambda s: ""])
def test_damaged_routes_are_refused(damage):
    layout = RouteLayout(layers=3, moe_layers=(0, 1, 2), experts=8, topk=2)
    encoded = encode(rng.integers(0, 8, (11, 3, 2)))
    with pytest.raises(UserError, match="routed_experts.*cut off"):
        layout.decode(damage(encoded), 11)


@pytest.mark.parametrize("bad", [-1, 8])
def test_an_expert_that_does_not_exist_is_refused(bad):
    layout = RouteLayout(layers=1, moe_layers=(0,), experts=8, topk=2)
    table = rng.integers(0, 8, (5, 1, 2))
    table[3, 0, 1] = bad
    with pytest.raises(UserError, match=f"expert {bad}"):
        layout.decode(encode(table), 5)


def reply(**meta) -> dict:
    """A reply in SGLang's form: two tokens after a prompt of three, from two versions of the weights."""
    spans = [{"version": "7", "start": 0, "end": 1}, {"version": "8", "start": 1, "end": 2}]
    known = {
        "finish_reason": {"type": "length", "length": 2},
        "weight_version": "8",
        "weight_versions": spans,
        "output_token_logprobs": [[-0.5, 4, None], [-1.25, 9, None]],
    }
    return {"output_ids": [4, 9], "meta_info": {k: v for k, v in (known | meta).items() if v is not None}}


def test_reply_of_mixed_weight_versions():
    parsed = parse_reply(reply(), 3, None, False)
    assert parsed.tokens.tolist() == [4, 9] and parsed.log_probs.tolist() == [-0.5, -1.25]
    assert [(s.version, s.start, s.end) for s in parsed.weight_spans] == [("7", 0, 1), ("8", 1, 2)]


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ({"output_token_logprobs": None}, "output_token_logprobs"),
        ({"output_token_logprobs": [[-0.5, 4, None]]}, "2 tokens but 1 log-probs"),
        ({"finish_reason": {"type": "abort", "status_code": 400, "message": "too long"}}, "prompt of 3.*too long"),
    ],
)
def test_malformed_replies_are_refused(meta, message):
    with pytest.raises(UserError, match=message):
        parse_reply(reply(**meta), 3, None, False)


def test_missing_routes_name_the_flag():
    with pytest.raises(UserError, match="--enable-return-routed-experts"):
        parse_reply(reply(), 3, RouteLayout(1, (0,), 8, 2), False)


async def generate(client: SGLangClient):
    async with client:
        assert not await client.ready()
        return await client.generate([[1, 2, 3]], {"max_new_tokens": 1})


def test_an_unreachable_address_is_named():
    address = f"127.0.0.1:{free_port()}"
    client = SGLangClient([address], retries=1, timeout_s=5)
    with pytest.raises(EngineLost, match=f"2 attempts failed.*{address}"):
        asyncio.run(generate(client))
    assert client.stats.retries == 1


def test_a_server_that_never_answers_times_out():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = SGLangClient([f"127.0.0.1:{silent.getsockname()[1]}"], retries=0, timeout_s=0.5)
        with pytest.raises(EngineLost, match=r"did not answer within 0\.5 s"):
            asyncio.run(generate(client))


def test_a_dead_child_is_not_asked_again():
    client = SGLangClient([f"127.0.0.1:{free_port()}"], retries=50, lost=lambda: True)
    with pytest.raises(EngineLost, match="died"):
        asyncio.run(generate(client))
    assert client.stats.retries == 0


def test_no_address_is_an_error():
    with pytest.raises(UserError, match=r"rollout\.addresses"):
        SGLangClient([])
