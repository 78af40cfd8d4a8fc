"""Servers that others have started are asked for what they are: what a run needs and they lack is one line."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from safetensors.torch import load_file

from megatron_rl.config import Config, SyncConfig
from megatron_rl.config.load import build_config
from megatron_rl.distributed import parallel
from megatron_rl.errors import UserError
from megatron_rl.models.parallel_check import read_hf_config
from megatron_rl.rollout.engine import Engine
from megatron_rl.run.run import Run
from megatron_rl.servers.external import check_servers, problems, release, server_of, workers_of
from megatron_rl.servers.reply import Reply
from megatron_rl.servers.server import RolloutServer
from megatron_rl.sync.engines import FROM_FOLDER, RELEASED, version_of
from megatron_rl.sync.transport import WeightSyncError
from megatron_rl.sync.weight_sync import WeightSync
from tests.http_server import HttpServer
from tests.rollout.conftest import client_of, key_reference

FITTING = {
    "precision": {"train": "fp32", "rollout": "fp32"},
    "pruning": {"enabled": True},
    "rollout": {"context_length": 512, "max_new_tokens": 8, "routes": True},
    "eval": {"prompts": 0},
}
"""What the server of this folder's tests can do."""


def label(server: RolloutServer, version: str) -> None:
    """Give its weights another version's name."""
    url, body = f"{server.address}/update_weight_version", {"new_version": version}
    httpx.post(url, json=body, headers=server.headers, timeout=60).raise_for_status()


def pushing(server: RolloutServer) -> WeightSync:
    return WeightSync(SyncConfig(transport="tensor"), [server.address], rollout_dtype="fp32", key=server.key)


def ask(server: RolloutServer, run: str) -> Reply:
    """A response, as a run gets it that has pushed its steps 0 and 7."""

    async def answer() -> list[Reply]:
        async with client_of(server, run=run, versions={"0", "7"}) as client:
            return await client.call([[5, 6, 7]], {"max_new_tokens": 4})

    [reply] = asyncio.run(answer())
    return reply


def config_of(model: Path, address: str, changes: dict) -> Config:
    values = {section: {**FITTING.get(section, {}), **changes.get(section, {})} for section in {*FITTING, *changes}}
    values["rollout"]["addresses"] = [address]
    return build_config({"model": {"path": str(model)}, **values})


WRONG = {
    "weights in other precision": ({"precision": {"rollout": "bf16"}}, "runs with --dtype float32, and .* is bf16"),
    "fp32 head": (
        {"precision": {"fp32_lm_head": True}},
        "runs without --enable-fp32-lm-head, and precision.fp32_lm_head is true",
    ),
    "a longer context": (
        {"rollout": {"context_length": 8192}, "batch": {"tokens_per_micro_batch": 16384}},
        r"has room for 4096 tokens \(--context-length\), and rollout.context_length is 8192",
    ),
    "a longer context than its cache": (
        {"rollout": {"context_length": 40000}},
        r"has room for 32768 tokens \(--max-total-tokens\), and rollout.context_length is 40000",
    ),
    "router features": (
        {"routing": {"source": "pr3", "features": "engine"}},
        "router features with a stride of 0, and this config wants 1",
    ),
    "larger sets": (
        {"pruning": {"enabled": False}, "rollout": {"sampling": {"top_p": 0.9, "top_k": 4096}}},
        "runs with --sampling-mask-max-tokens 100, and rollout.sampling.top_k = 4096 keeps more",
        {"sampling_mask_max_tokens": 100},
    ),
    "no routes": ({}, "runs without --enable-return-routed-experts", {"enable_return_routed_experts": False}),
    "no processor": (
        {},
        "runs without --enable-custom-logit-processor, which pruning.enabled and rollout.sampling.tail_floor need",
        {"enable_custom_logit_processor": False},
    ),
    "speculation": (
        {"pruning": {"enabled": False}},
        "runs with --speculative-algorithm EAGLE, which bypasses the record of routes",
        {"speculative_algorithm": "EAGLE"},
    ),
    "gpt-oss's own runner": (
        {},
        "runs with --moe-runner-backend triton_kernel, which captures no routes",
        {"device": "cuda", "attention_backend": "triton", "moe_runner_backend": "triton_kernel"},
    ),
    "Hopper's own attention": (
        {},
        "runs with --attention-backend fa3, which does not compute in fp32: use triton",
        {"device": "cuda", "attention_backend": "fa3"},
    ),
    "seeds under top-p": (
        {"rollout": {"sampling": {"top_k": 64}}, "pruning": {"enabled": False}},
        "runs with --sampling-backend flashinfer, which takes no seeds",
        {"sampling_backend": "flashinfer"},
    ),
    "decode alone": (
        {},
        "runs with --attention-backend fa3 and triton, which does not compute in fp32",
        {"device": "cuda", "attention_backend": "triton", "decode_attention_backend": "fa3"},
    ),
    "pipeline stages": ({}, "runs with --pp-size or --dp-size above 1", {"pp_size": 2}),
}


@pytest.fixture(scope="module")
def said(server) -> tuple[dict, dict]:
    """The real server's own description, as before any push."""
    info, model = server_of(server.address, server.key)
    return info, model | {"weight_version": FROM_FOLDER}


@pytest.mark.parametrize("case", WRONG)
def test_one_line_for_what_is_wrong(case, server, reference, said):
    """Against the real server's answer; what no server without a GPU can be is changed in it."""
    changes, message, *otherwise = WRONG[case]
    hf_config = read_hf_config(reference.folder)
    config = config_of(reference.folder, server.address, changes)
    assert problems(*said, config_of(reference.folder, server.address, {}), hf_config, pushes=True) == []
    found = problems(said[0] | (otherwise[0] if otherwise else {}), said[1], config, hf_config, pushes=True)
    assert any(re.search(message, line) for line in found), found
    if not otherwise:
        with pytest.raises(
            UserError, match=rf"rollout.addresses: {server.address} .*{message}.*tools/serve.py"
        ) as error:
            check_servers(config.rollout.addresses, config, hf_config, pushes=True, key=server.key)
        assert "\n" not in str(error.value)


def test_speculation_is_no_matter_where_nothing_is_recorded_or_pruned(server, reference, said):
    config = config_of(reference.folder, server.address, {"pruning": {"enabled": False}, "rollout": {"routes": False}})
    info = said[0] | {"speculative_algorithm": "EAGLE"}
    assert problems(info, said[1], config, read_hf_config(reference.folder), pushes=True) == []


def test_who_asks_and_does_not_push_takes_the_servers_weights(server, reference, said, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text((reference.folder / "config.json").read_text())
    hf_config = read_hf_config(reference.folder)
    config = config_of(other, server.address, {})
    assert problems(*said, config, hf_config, pushes=True) == []
    [found] = problems(*said, config, hf_config, pushes=False)
    assert found == f"answers with the weights of {reference.folder}: set model.path to it"
    config = config_of(reference.folder, server.address, {})
    assert problems(*said, config, hf_config, pushes=False) == []
    [found] = problems(said[0] | {"load_format": "dummy"}, said[1], config, hf_config, pushes=False)
    assert found.startswith("has random weights (--load-format dummy)")


def test_another_model_is_named(server, tiny_model, said):
    model = tiny_model("olmoe")
    found = problems(*said, config_of(model, server.address, {}), read_hf_config(model), pushes=True)
    assert "serves Qwen3MoeForCausalLM, and model.path is OlmoeForCausalLM" in found


def test_a_run_is_refused_when_it_joins(server, reference, tmp_path):
    """Before anything is pushed or asked; with what fits it goes on."""
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"prompt": "a", "answer": "b"}) + "\n")
    changes = {"data": {"task": "file", "path": str(data), "verifier": "exact"}}
    changes["rollout"] = {"api_key": key_reference(server)}
    fits = replace(config_of(reference.folder, server.address, changes), runs_dir=str(tmp_path), name="asks")
    wrong = replace(fits, precision=replace(fits.precision, fp32_lm_head=True))
    label(server, FROM_FOLDER)  # other tests push to it
    try:
        with Run(fits, kind="sample") as run, Engine(run) as engine:
            engine.join()
        refused = pytest.raises(UserError, match=f"{server.address} runs without --enable-fp32-lm-head")
        with Run(wrong, kind="sample") as run, Engine(run) as engine, refused:
            engine.join()
    finally:
        parallel.shutdown()


OWNERS = {
    FROM_FOLDER: (True, True),
    RELEASED: (True, False),
    "a label": (True, False),
    version_of("mine", 3): (True, False),
    version_of("others", 3): (False, False),
    version_of("mine.too", 3): (False, False),
}


@pytest.mark.parametrize("version", OWNERS)
def test_whose_weights_a_server_has(version, server, reference, said):
    """Versions, whether the run `mine` may push to such a server, and whether one that only asks takes its answers."""
    config, hf_config = config_of(reference.folder, server.address, {}), read_hf_config(reference.folder)
    model = said[1] | {"weight_version": version}
    for pushes, expected in zip((True, False), OWNERS[version], strict=True):
        found = problems(said[0], model, config, hf_config, pushes=pushes, run="mine")
        assert [f"'{version}'" in line for line in found] == [True] * (not expected)


def test_a_server_that_another_run_pushes_to(server, reference):
    """Refused before it is paused; released by that run alone, it is anybody's."""
    weights = load_file(reference.folder / "model.safetensors")
    with pushing(server) as sync:
        sync.push(iter(weights.items()), version=version_of("theirs", 7))
    with pushing(server) as sync, pytest.raises(WeightSyncError, match="another run pushes to .*theirs.7"):
        sync.push(iter(weights.items()), version=version_of("mine", 0))
    with pytest.raises(UserError, match="of another run"):
        ask(server, run="mine")
    assert {s.version for s in ask(server, run="theirs").weight_spans} == {"7"}
    release([server.address], "mine", server.key)
    assert server_of(server.address, server.key)[1]["weight_version"] == version_of("theirs", 7)
    release([server.address], "theirs", server.key)
    with pushing(server) as sync:
        sync.push(iter(weights.items()), version=version_of("mine", 0))
    assert {s.version for s in ask(server, run="mine").weight_spans} == {"0"}
    label(server, RELEASED)


def test_nobody_at_the_address(reference):
    config = config_of(reference.folder, "127.0.0.1:9", {})
    with pytest.raises(UserError, match=r"127.0.0.1:9/server_info does not answer .*is the server up\?"):
        check_servers(config.rollout.addresses, config, read_hf_config(reference.folder), pushes=True)


ANSWERS = {
    "a router": (
        [{"url": "http://a:1", "worker_type": "regular"}, {"url": "b:2"}],
        ["http://a:1", "http://b:2"],
    ),
    "a router without workers": ([], []),
    "something else": (3, None),
}


@pytest.fixture
def answering(tmp_path):
    """answering(workers) -> address whose /workers says that."""
    server = HttpServer(lambda port: [sys.executable, "-m", "http.server", str(port), "--directory", str(tmp_path)])

    def answer(workers) -> str:
        (tmp_path / "workers").write_text(json.dumps({"workers": workers}))
        return server.url

    yield answer
    server.close()


@pytest.mark.parametrize("case", ANSWERS)
def test_what_a_router_says_of_its_servers(case, answering):
    workers, expected = ANSWERS[case]
    assert workers_of(answering(workers)) == expected


def test_a_router_to_parts_of_servers(answering):
    address = answering([{"url": "http://a:1", "worker_type": kind} for kind in ("prefill", "decode")])
    with pytest.raises(UserError, match=rf"{address} routes to decode and prefill servers.*--pd-disaggregation"):
        workers_of(address)


def test_a_server_is_no_router(server):
    """The real one, and an address at which nobody is."""
    assert workers_of(server.address, key=server.key) is None
    assert workers_of("127.0.0.1:9") is None
