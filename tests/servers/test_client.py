"""What the client makes of replies and of servers that do not answer; no engine is needed for it."""

from __future__ import annotations

import asyncio
import base64
import socket

import numpy as np
import pytest
import torch
from megatron_rl_plugin.routes import compact
from transformers import PreTrainedConfig

from megatron_rl.config import ServerConfig
from megatron_rl.data.engine_routes import EngineFeatures, EngineRoutes, drop_stale_routes, sampled_by
from megatron_rl.data.trajectory import Trajectory, WeightSpan, load_trajectories, save_trajectories
from megatron_rl.errors import UserError
from megatron_rl.models.shape import engine_routes
from megatron_rl.servers.client import EngineLost, SGLangClient
from megatron_rl.servers.reply import parse_reply
from megatron_rl.servers.server import RolloutServer, reserve_port
from tools.make_tiny_model import FAMILIES, Sizes

rng = np.random.default_rng()


def encode(table: np.ndarray) -> str:
    return base64.b64encode(table.astype(np.int32).tobytes()).decode()


def hf_config(family: str, **sizes: int) -> PreTrainedConfig:
    config = FAMILIES[family](Sizes(**sizes))
    config.architectures = [type(config).__name__.removesuffix("Config") + "ForCausalLM"]
    return config


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("qwen3_moe", EngineRoutes(4, (0, 1, 2, 3), 8, 2)),
        ("olmoe", EngineRoutes(4, (0, 1, 2, 3), 8, 2)),
        ("mixtral", EngineRoutes(4, (0, 1, 2, 3), 8, 2)),
        ("gpt_oss", EngineRoutes(4, (0, 1, 2, 3), 8, 2)),
        ("deepseek_v3", EngineRoutes(4, (1, 2, 3), 8, 2)),
    ],
)
def test_layout_of_each_family(family, expected):
    assert engine_routes(hf_config(family)) == expected


def test_layout_of_mixed_dense_and_sparse_layers():
    """transformers: layer i of a Qwen-MoE is sparse where i is not in mlp_only_layers and (i + 1) % step == 0."""
    config = hf_config("qwen3_moe", layers=8)
    config.update({"decoder_sparse_step": 2, "mlp_only_layers": [3]})
    layout = engine_routes(config)
    assert layout.moe_layers == (1, 5, 7)


def test_a_dense_model_has_no_routes():
    with pytest.raises(UserError, match="Qwen3ForCausalLM is dense: rollout.routes needs a MoE model"):
        engine_routes(hf_config("qwen3"))


def some_routes(experts: int, shape: tuple[int, int, int]) -> np.ndarray:
    """[tokens, layers, topk]: different experts in each row."""
    return rng.random((*shape[:2], experts)).argsort(-1)[..., : shape[2]]


@pytest.mark.parametrize(("experts", "dtype"), [(8, np.uint8), (255, np.uint8), (256, np.int16)])
def test_routes_survive_the_wire(experts, dtype):
    layout = EngineRoutes(layers=3, moe_layers=(1, 2), experts=experts, topk=2)
    table = some_routes(experts, (11, 3, 2))
    decoded = layout.decode(encode(table), 11)
    assert decoded.dtype == dtype
    assert (decoded == table[:, 1:]).all()


@pytest.mark.parametrize(
    ("experts", "wire", "dtype"),
    [(8, torch.uint8, np.uint8), (256, torch.uint8, np.int16), (300, torch.int16, np.int16)],
)
def test_routes_of_the_plugin_are_smaller_and_the_same(experts, wire, dtype):
    layout = EngineRoutes(layers=3, moe_layers=(1, 2), experts=experts, topk=2)
    table = some_routes(experts, (11, 3, 2))
    table[0, 1] = 0, experts - 1
    sent = compact(torch.from_numpy(table.astype(np.int32)))
    assert sent.dtype == wire
    decoded = layout.decode(base64.b64encode(sent.numpy().tobytes()).decode(), 11)
    assert decoded.dtype == dtype and (decoded == table[:, 1:]).all() and decoded.flags.writeable


def test_the_plugin_hides_nothing():
    table = torch.tensor([[[3, -1]]], dtype=torch.int32)
    assert compact(table) is table and compact(table[:0]).shape == (0, 1, 2)


@pytest.mark.parametrize("damage", [lambda s: s[:-4], lambda s: s[:-3], lambda s: s[:20] + "*" + s[21:], lambda s: ""])
def test_damaged_routes_are_refused(damage):
    layout = EngineRoutes(layers=3, moe_layers=(0, 1, 2), experts=8, topk=2)
    encoded = encode(some_routes(8, (11, 3, 2)))
    with pytest.raises(UserError, match="routed_experts.*cut off"):
        layout.decode(damage(encoded), 11)


@pytest.mark.parametrize("bad", [-1, 8])
def test_an_expert_that_does_not_exist_is_refused(bad):
    layout = EngineRoutes(layers=1, moe_layers=(0,), experts=8, topk=2)
    table = some_routes(8, (5, 1, 2))
    table[3, 0, 1] = bad
    with pytest.raises(UserError, match=f"expert {bad}"):
        layout.decode(encode(table), 5)


@pytest.mark.parametrize("sent", [(11, 2, 2), (11, 4, 2), (11, 3, 3), (11, 3, 1), (10, 3, 2), (12, 3, 2)])
def test_routes_of_another_shape_are_refused(sent):
    """Wrong layers, wrong topk, a row less (which is also a start that is off by one), a row more."""
    layout = EngineRoutes(layers=3, moe_layers=(1, 2), experts=8, topk=2)
    with pytest.raises(UserError, match="11 tokens x 3 layers x 2 experts"):
        layout.decode(encode(some_routes(8, sent)), 11)


def test_an_expert_twice_in_a_row_is_refused():
    """A row that the engine never wrote is all zeros, for one."""
    layout = EngineRoutes(layers=2, moe_layers=(1,), experts=8, topk=2)
    table = some_routes(8, (5, 2, 2))
    table[:, 0] = 0  # a dense layer
    layout.decode(encode(table), 5)
    table[2, 1] = 6
    with pytest.raises(UserError, match="an expert twice"):
        layout.decode(encode(table), 5)


FEATURES = EngineFeatures(moe_layers=3, hidden=4, experts=5, dtype=torch.bfloat16)


def encode_features(hidden: torch.Tensor, logits: torch.Tensor) -> str:
    return base64.b64encode(hidden.view(torch.uint8).numpy().tobytes() + logits.numpy().tobytes()).decode()


def some_features(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(count, 3, 4).bfloat16(), torch.randn(count, 3, 5)


def test_features_survive_the_wire():
    hidden, logits = some_features(2)
    one, two = (encode_features(hidden[i], logits[i]) for i in range(2))
    decoded = FEATURES.decode([one, None, None, two, None])
    assert decoded.positions.tolist() == [0, 3] and decoded.positions.dtype == torch.int32
    assert decoded.hidden.equal(hidden) and decoded.logits.equal(logits)
    none = FEATURES.decode([None])
    assert none.hidden.shape == (0, 3, 4) and none.logits.shape == (0, 3, 5)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda s: s[:-4], "81 bytes a token.* are 84"),
        (lambda s: s + s, "168 bytes a token.* are 84"),
        (lambda s: s[:-3], "not base64"),
        (lambda s: "*" + s[1:], "not base64"),
    ],
)
def test_damaged_features_are_refused(damage, message):
    hidden, logits = some_features(1)
    meta = {"router_features": [damage(encode_features(hidden[0], logits[0])), None]}
    with pytest.raises(UserError, match=message):
        parse_reply(reply(**meta), 3, None, False, features=FEATURES)


@pytest.mark.parametrize("entries", [None, [None], 7, "ab"])
def test_missing_features_name_what_the_server_needs(entries):
    with pytest.raises(UserError, match="for a response of 2.*route predictors and a feature stride"):
        parse_reply(reply(router_features=entries), 3, None, False, features=FEATURES)


def test_features_need_predictors(tmp_path):
    with pytest.raises(UserError, match="feature_stride needs predictor"):
        RolloutServer(tmp_path, ServerConfig(), feature_stride=4)


def trajectory(**fields) -> Trajectory:
    known = {"tokens": np.arange(5, dtype=np.int32), "fields": labels(2)}
    return Trajectory(prompt_id="prompt", group_id=0, prompt_length=3, **known | fields)


def labels(count: int) -> dict[str, np.ndarray]:
    """What the engine says of this many."""
    return {"loss_mask": np.ones(count, bool), "rollout_log_probs": np.zeros(count, np.float32)}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_features_survive_the_disk(dtype, tmp_path):
    hidden, logits = some_features(2)
    features = FEATURES.decode([encode_features(hidden[0], logits[0]), encode_features(hidden[1], logits[1])])
    features.hidden = features.hidden.to(dtype)
    save_trajectories(tmp_path / "step.npz", [trajectory(features=features, weights="a1b2"), trajectory()])
    kept, without = load_trajectories(tmp_path / "step.npz")
    assert without.features is None and kept.features.hidden.dtype == dtype
    assert (kept.weights, without.weights) == ("a1b2", "")
    for key, value in vars(features).items():
        assert getattr(kept.features, key).equal(value)


def test_kept_sets_survive_the_disk(tmp_path):
    """Also those of a response without tokens, which are none."""
    sets = [np.array([3, 9], np.int32), np.array([4], np.int32)]
    empty = {"tokens": np.arange(3, dtype=np.int32), "fields": labels(0)}
    save_trajectories(tmp_path / "step.npz", [trajectory(kept=sets), trajectory(kept=[], **empty), trajectory()])
    found = [t.kept for t in load_trajectories(tmp_path / "step.npz")]
    assert [ids.tolist() for ids in found[0]] == [[3, 9], [4]] and found[1:] == [[], None]


@pytest.mark.parametrize(
    ("spans", "kept"),
    [
        ([("7", 0, 2)], True),
        ([("6", 0, 1), ("7", 1, 2)], True),  # the rows of the first token are of version 7 too
        ([("7", 0, 1), ("8", 1, 2)], False),
        ([("8", 0, 2)], False),
        ([], False),
        ([("7", 0, 0)], False),
    ],
)
def test_routes_of_other_weights_are_dropped(spans, kept):
    hidden, logits = some_features(2)
    features = FEATURES.decode([encode_features(hidden[0], logits[0]), encode_features(hidden[1], logits[1])])
    table = some_routes(8, (4, 3, 2))
    one = trajectory(routes=table, features=features, weight_spans=[WeightSpan(*span) for span in spans])
    drop_stale_routes(one, fresh=sampled_by(one, "7"))
    if kept:  # features stay those of the weights that sampled
        assert one.routes is table and one.features.positions.tolist() == [0, 1][spans[-1][1] :]
    else:
        assert one.routes is None and one.features is None


def test_nothing_to_drop():
    drop_stale_routes(without := trajectory(), fresh=False)
    assert without.routes is None


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
    assert parsed.tokens.tolist() == [4, 9] and parsed.fields["rollout_log_probs"].tolist() == [-0.5, -1.25]
    assert [(s.version, s.start, s.end) for s in parsed.weight_spans] == [("7", 0, 1), ("8", 1, 2)]


def spans(*borders) -> list[dict]:
    return [{"version": str(i), "start": start, "end": end} for i, (start, end) in enumerate(borders)]


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ({"output_token_logprobs": None}, "output_token_logprobs"),
        ({"output_token_logprobs": [[-0.5, 4, None]]}, "2 tokens but 1 log-probs"),
        ({"output_token_logprobs": 7}, "output_token_logprobs"),
        ({"output_token_logprobs": [["-0.5"], ["-1"]]}, "output_token_logprobs: a list of numbers"),
        ({"output_token_logprobs": [[None], [-1.0]]}, "output_token_logprobs: a list of numbers"),
        ({"output_token_logprobs": [[-0.5], [float("nan")]]}, "has nan as log-prob of token 1 of a response"),
        ({"output_token_logprobs": [[float("-inf")], [-1.0]]}, "has -inf as log-prob of token 0"),
        ({"output_token_logprobs": [[-1e300], [-1.0]]}, "has -inf as log-prob of token 0"),
        ({"output_token_logprobs": [[-0.5], [0.01]]}, "has 0.01 as log-prob of token 1"),
        ({"finish_reason": {"type": "abort", "status_code": 400, "message": "too long"}}, "prompt of 3.*too long"),
        ({"finish_reason": None}, "finish_reason"),
        ({"finish_reason": "done"}, "finish_reason .done."),
        ({"finish_reason": ["stop"]}, "finish_reason"),
        ({"finish_reason": {"type": None}}, "finish_reason None"),
        ({"weight_versions": spans((0, 1), (0, 2))}, "do not follow each other from 0 to 2"),
        ({"weight_versions": spans((0, 1))}, "do not follow"),
        ({"weight_versions": spans((0, 3))}, "do not follow"),
        ({"weight_versions": spans((1, 2))}, "do not follow"),
        ({"weight_versions": spans((0, 2), (2, 2))}, "do not follow"),
        ({"weight_versions": spans((0, 3), (3, 2))}, "do not follow"),
        ({"weight_versions": spans((0, 2**70))}, "weight_versions: a list of whole numbers"),
        ({"weight_versions": spans((0, "2"))}, "weight_versions: a list of whole numbers"),
        ({"weight_versions": {"0": 2}}, "not what release"),
    ],
)
def test_malformed_replies_are_refused(meta, message):
    one = reply()
    one["meta_info"] |= meta
    with pytest.raises(UserError, match=message) as error:
        parse_reply(one, 3, None, False)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("one", [None, 7, [], "text", {}, {"output_ids": [4, 9]}, reply() | {"meta_info": [1]}])
def test_replies_of_another_form_are_refused(one):
    with pytest.raises(UserError, match=r"not what release 0\.5\.23 sends"):
        parse_reply(one, 3, None, False)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([4, 2**40], f"token {2**40} in a response, outside the model's vocabulary of 10"),
        ([4, 10], "token 10 in a response"),
        ([-1, 9], "token -1 in a response"),
        ([4, 2**70], "output_ids: a list of whole numbers"),
        ([4.0, 9.5], "output_ids: a list of whole numbers"),
        (["4", "9"], "output_ids: a list of whole numbers"),
        ([4, None], "output_ids: a list of whole numbers"),
        ([[4], [9]], "output_ids: a list of whole numbers"),
        (None, "output_ids: a list of whole numbers"),
        ([], r"has 0 tokens \(finish_reason: length\), but 1 to 2 were requested"),
        ([4, 9, 9], "has 3 tokens .* but 1 to 2 were"),
    ],
)
def test_tokens_that_no_such_request_gives_are_refused(ids, message):
    one = reply(weight_versions=None, output_token_logprobs=[[-1.0, 0, None]] * len(ids or []))
    with pytest.raises(UserError, match=message):
        parse_reply(one | {"output_ids": ids}, 3, None, False, max_new_tokens=2, vocabulary=10)


def test_a_request_for_no_tokens_gets_none():
    """The prompt alone is read; and the last bit of a log-prob of 0 is rounding."""
    one = reply(weight_versions=None, output_token_logprobs=[], input_token_logprobs=[[None], [-2.0], [1e-7]])
    parsed = parse_reply(one | {"output_ids": []}, 3, None, True, max_new_tokens=0)
    assert len(parsed.tokens) == 0 and np.allclose(parsed.prompt_log_probs, [-2.0, 0.0], atol=1e-6)


@pytest.mark.parametrize(
    "entries", [None, 7, [[None], "x"], [[None], [None]], [[None], [float("inf")]], [[None], [1.0]]]
)
def test_malformed_log_probs_of_a_prompt_are_refused(entries):
    with pytest.raises(UserError, match=r"input_token_logprobs|not what release|of a prompt"):
        parse_reply(reply(input_token_logprobs=entries), 3, None, True)


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        ([[4], [3, 8]], "token 1 of a response is not among the kept tokens"),
        ([[9], [4]], "token 0 of a response is not among"),
        ([[4]], "2 tokens but 1 sets"),
        ([[4], [9, 10]], "token 10 in the kept tokens"),
        ([[4], [9, -1]], "token -1 in the kept tokens"),
        ([[4], [9, 2**40]], "in the kept tokens"),
        ([[4], ["9"]], "output_token_sampling_mask"),
        ([[4], "9"], "output_token_sampling_mask"),
        ([4, 9], "not what release"),
        (None, "output_token_sampling_mask"),
    ],
)
def test_kept_sets_without_their_token_are_refused(sets, message):
    one = reply(output_token_sampling_logprobs=[-0.5, -1.0], output_token_sampling_mask=sets)
    with pytest.raises(UserError, match=message):
        parse_reply(one, 3, None, False, kept=True, vocabulary=10)


def test_kept_sets_are_cut_at_their_tokens():
    one = reply(output_token_sampling_logprobs=[-0.5, 0.0], output_token_sampling_mask=[[3, 4, 8], [9]])
    kept = parse_reply(one, 3, None, False, kept=True, vocabulary=10).kept
    assert [(ids.tolist(), ids.dtype) for ids in kept] == [([3, 4, 8], np.int32), ([9], np.int32)]


@pytest.mark.parametrize(
    ("ids", "values", "message"),
    [
        ([1, 2, 3, 10], [-1.0] * 4, "token 10 in the likeliest tokens"),
        ([1, 2, 3, -1], [-1.0] * 4, "token -1 in the likeliest tokens"),
        ([1, 2, 3, 4], [-1.0, np.nan, -1.0, -1.0], "has nan as log-prob of token 1 of the likeliest"),
        ([1, 2, 3, 4], [-1.0, -1.0, 0.5, -1.0], "has 0.5 as log-prob of token 2 of the likeliest"),
        ([1, 2, 3], [-1.0] * 3, "no 2 log-probs for each of 2 tokens"),
        ([1, 2, 3, -7], [-1.0, -1.0, -1.0, -3.4e38], None),  # SGLang has no id where a probability is 0
    ],
)
def test_likeliest_tokens_that_are_none_are_refused(ids, values, message):
    def packed(numbers, dtype):
        return base64.b64encode(np.asarray(numbers, dtype).tobytes()).decode()

    meta = {
        "output_top_logprobs_idx_flat_b64": packed(ids, "<i4"),
        "output_top_logprobs_val_flat_b64": packed(values, "<f4"),
    }
    if message is None:
        top = parse_reply(reply(**meta), 3, None, False, top_log_probs=2, vocabulary=10).top
        assert top.token_ids.tolist() == [[1, 2], [3, -1]] and top.log_probs[1].tolist() == [-1.0, 0.0]
        return
    with pytest.raises(UserError, match=message):
        parse_reply(reply(**meta), 3, None, False, top_log_probs=2, vocabulary=10)


@pytest.mark.parametrize("encoded", [7, [1], {"a": 1}, "é", "AAAA"])
def test_routes_that_are_no_text_of_a_table_are_refused(encoded):
    with pytest.raises(UserError, match="routed_experts"):
        parse_reply(reply(routed_experts=encoded), 3, EngineRoutes(1, (0,), 8, 2), False)


def test_missing_routes_name_the_flag():
    with pytest.raises(UserError, match="--enable-return-routed-experts"):
        parse_reply(reply(), 3, EngineRoutes(1, (0,), 8, 2), False)


async def generate(client: SGLangClient):
    async with client:
        return await client.call([[1, 2, 3]], {"max_new_tokens": 1})


@pytest.fixture
def nobodys_address():
    with reserve_port() as reserved:
        yield f"127.0.0.1:{reserved.getsockname()[1]}"


def test_an_unreachable_address_is_named(nobodys_address):
    client = SGLangClient([nobodys_address], retries=1, timeout_s=5)
    with pytest.raises(EngineLost, match=f"2 attempts failed.*{nobodys_address}"):
        asyncio.run(generate(client))
    assert client.retried == 1


def test_a_server_that_never_answers_times_out():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = SGLangClient([f"127.0.0.1:{silent.getsockname()[1]}"], retries=0, timeout_s=0.5)
        with pytest.raises(EngineLost, match=r"did not answer within 0\.5 s"):
            asyncio.run(generate(client))


def test_a_dead_child_is_not_asked_again(nobodys_address):
    client = SGLangClient([nobodys_address], retries=50, lost=lambda: True)
    with pytest.raises(EngineLost, match="died"):
        asyncio.run(generate(client))
    assert client.retried == 0


def test_no_address_is_an_error():
    with pytest.raises(UserError, match=r"rollout\.addresses"):
        SGLangClient([])
