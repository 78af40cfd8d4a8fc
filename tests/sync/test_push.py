"""Pushes to a real SGLang server: its log-probs are those of the pushed weights, and nothing wrong goes unnoticed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import httpx
import pytest
import torch
from push_on_ranks import BUCKET_MB, Weights, random_weights
from ranks import run_ranks
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from megatron_rl.config import ServerConfig, SyncConfig
from megatron_rl.config.load import build_config
from megatron_rl.distributed import parallel
from megatron_rl.metrics.reduce import figures
from megatron_rl.rollout.engine import Engine
from megatron_rl.run.run import Run
from megatron_rl.servers.server import RolloutServer
from megatron_rl.sync.transport import Bucket, WeightSyncError
from megatron_rl.sync.transports import TRANSPORTS
from megatron_rl.sync.weight_sync import WeightSync
from tests.waiting import gone, wait_for

OWN_TRANSPORT = f"{Path(__file__).with_name('own_transport.py')}:Files"
PROMPT = list(range(5, 29))


@pytest.fixture(scope="module")
def model(tiny_model) -> Path:
    return tiny_model("qwen3_moe", "--layers", "2", "--experts", "4", "--vocab", "300")


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory) -> Iterator[RolloutServer]:
    with RolloutServer(
        model,
        ServerConfig(threads=1, max_total_tokens=2048, memory_fraction=0.2),
        dtype="fp32",
        context_length=512,
        log_path=tmp_path_factory.mktemp("server") / "sglang.log",
    ) as running:
        yield running


@pytest.fixture
def connect(server: RolloutServer, tmp_path: Path) -> Iterator[Callable[..., WeightSync]]:
    """connect(transport, ...) -> WeightSync to the server, closed at the end of the test."""
    made: list[WeightSync] = []

    def make(transport: str = "distributed", *, rollout_dtype: str = "fp32", **settings) -> WeightSync:
        config = SyncConfig(**{"transport": transport, "bucket_mb": BUCKET_MB, "timeout_s": 60.0} | settings)
        made.append(
            WeightSync(config, [server.address], key=server.key, rollout_dtype=rollout_dtype, folder=tmp_path / "sync")
        )
        return made[-1]

    yield make
    for sync in made:
        sync.close()


def reference_log_probs(model: Path, weights: Weights, tokens: list[int], folder: Path) -> torch.Tensor:
    """[len(tokens) - 1] log-probs of tokens[1:] by transformers."""
    folder.mkdir()
    (folder / "config.json").write_text((model / "config.json").read_text())
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = reference(torch.tensor([tokens])).logits[0]
    return logits.log_softmax(-1)[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


def generate(server: RolloutServer, max_new_tokens: int, **fields) -> dict:
    body = {
        "input_ids": PROMPT,
        "sampling_params": {"max_new_tokens": max_new_tokens, "temperature": 1.0, "ignore_eos": True},
        "return_logprob": True,
    }
    return (
        httpx.post(f"{server.address}/generate", headers=server.headers, json=body | fields, timeout=120)
        .raise_for_status()
        .json()
    )


def tamper(sync: WeightSync, change: Callable[[Bucket], None]) -> None:
    """Change buckets after the trainer has filled and hashed them, as a broken wire would."""
    sync.connect()
    send = sync._transport.send

    def send_changed(bucket: Bucket, version: str | None) -> None:
        change(bucket)
        send(bucket, version)

    sync._transport.send = send_changed


def bytes_of(bucket: Bucket, name: str) -> torch.Tensor | None:
    return next((bucket.buffer[entry.start : entry.end] for entry in bucket.entries if entry.name == name), None)


@pytest.mark.parametrize("transport", [*TRANSPORTS, pytest.param(OWN_TRANSPORT, id="own")])
def test_the_engine_serves_what_was_pushed(model, server, connect, transport, tmp_path):
    seed = random.randrange(2**31)
    sync = connect(transport)
    generate(server, 1)  # leaves the prompt in the prefix cache
    for push in range(2):
        weights = random_weights(model, seed=seed + push)
        stats = sync.push(iter(weights.items()), version=f"{seed}-{push}")
        assert stats.bytes == sum(4 * tensor.numel() for tensor in weights.values())
        assert stats.tensors == len(weights)
        assert stats.buckets > 2

        reply = generate(server, 8)["meta_info"]
        assert reply["weight_version"] == f"{seed}-{push}"
        assert reply["cached_tokens"] == 0, "a prefix of the old weights was used"
        log_probs, ids = zip(*[(entry[0], entry[1]) for entry in reply["output_token_logprobs"]], strict=True)
        expected = reference_log_probs(model, weights, PROMPT + list(ids), tmp_path / str(push))[len(PROMPT) - 1 :]
        # Log-probs of -6 have a last bit of 5e-7. The median: where two experts nearly tie, one token may differ by more.
        assert (torch.tensor(log_probs) - expected).abs().median() < 1e-4


class HostReads(TorchDispatchMode):
    """Counts what waits for a device to read one number."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_no_more_than_one_wait_for_fingerprints_a_bucket(model, connect):
    sync = connect("tensor")
    weights = random_weights(model, 13)
    sync.connect()
    with HostReads() as reads:
        stats = sync.push(iter(weights.items()), version="counted")
    assert stats.tensors > 2 * stats.buckets
    assert reads.count <= stats.buckets


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_next_bucket_is_filled_while_the_engine_loads(model, connect, transport):
    """The first bucket's send returns when the second is being filled, not before; and no bucket that is sent is written to."""
    sync = connect(transport)
    weights = random_weights(model, 14)
    sync.connect()
    send, allocate, events = sync._transport.send, sync._transport.allocate, []
    sending_first, filling_second = threading.Event(), threading.Event()
    buffers: list[int] = []
    seconds: list[str | None] = []

    def exported() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights.items():
            events.append(("exported", name))
            yield name, tensor

    def allocated(nbytes: int) -> torch.Tensor:
        buffers.append(nbytes)
        if len(buffers) == 2:
            assert sending_first.wait(30)
            filling_second.set()
        return allocate(nbytes)

    def watched(bucket: Bucket, version: str | None) -> None:
        index = 1 + sum(kind == "sent" for kind, _ in events)
        seconds.append(bucket.entries[1].name if len(bucket.entries) > 1 else None)
        sending_first.set()
        send(bucket, version)
        assert index > 1 or filling_second.wait(30), "nothing was filled while the first bucket was sent"
        time.sleep(0.05)  # a buffer that was filled too early would be filled now
        events.append(("sent", index))

    sync._transport.send, sync._transport.allocate = watched, allocated
    stats = sync.push(iter(exported()), version=f"overlapped {transport}")
    assert len(seconds) == stats.buckets
    # A bucket's first tensor is taken before its buffer is asked for, the second afterwards.
    later = [(index, name) for index, name in enumerate(seconds, 1) if index > 2 and name]
    assert len(later) > 2
    for index, name in later:
        assert events.index(("sent", index - 2)) < events.index(("exported", name))


def test_a_bucket_that_fails_on_the_way_ends_the_push(model, connect):
    """The error of a send in its thread is the push's, and no bucket follows it."""
    sync = connect("tensor")
    weights = random_weights(model, 15)
    sync.connect()
    send, sent = sync._transport.send, []

    def failing(bucket: Bucket, version: str | None) -> None:
        sent.append(len(sent) + 1)
        if len(sent) == 2:
            raise WeightSyncError("the second bucket is lost")
        send(bucket, version)

    sync._transport.send = failing
    with pytest.raises(WeightSyncError, match="the second bucket is lost"):
        sync.push(iter(weights.items()), version="lost")
    assert sent == [1, 2]
    sync.push(iter(weights.items()), version="found")


def ask_for_400(server) -> tuple[threading.Thread, list[dict]]:
    """A request under way, and what it has been answered so far."""
    started, replies = threading.Event(), []

    def ask() -> None:
        body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}, "stream": True}
        with httpx.stream(
            "POST", f"{server.address}/generate", json=body, headers=server.headers, timeout=120
        ) as stream:
            for line in stream.iter_lines():
                if line.startswith("data: {"):
                    replies.append(json.loads(line.removeprefix("data: ")))
                    started.set()

    request = threading.Thread(target=ask)
    request.start()
    assert started.wait(60)
    return request, replies


def versions_of(reply: dict) -> list[str]:
    spans = reply["meta_info"]["weight_versions"]
    assert spans[-1]["end"] == 400
    return [span["version"] for span in spans]


def test_requests_in_flight_go_on_under_the_new_weights(model, server, connect):
    sync = connect()
    sync.push(iter(random_weights(model, 1).items()), version="before")
    request, replies = ask_for_400(server)
    sync.push(iter(random_weights(model, 2).items()), version="after")
    request.join(120)
    assert versions_of(replies[-1]) == ["before", "after"]


@pytest.mark.parametrize("again", [True, False], ids=["pushed again", "given up"])
def test_requests_in_flight_get_no_token_of_weights_that_nobody_has(model, server, connect, again):
    """They wait for the next push; where none comes, for the end of the connection, after which they are others' matter."""

    def flip(bucket: Bucket) -> None:
        bucket.buffer[0] ^= 1

    sync = connect()
    sync.push(iter(random_weights(model, 1).items()), version="before")
    request, replies = ask_for_400(server)
    tamper(sync, flip)
    with pytest.raises(WeightSyncError, match="checksums differ"):
        sync.push(iter(random_weights(model, 3).items()), version="flipped")
    time.sleep(1)  # in which it would go on
    if again:
        sync.push(iter(random_weights(model, 2).items()), version="after")
    else:
        sync.close()
    request.join(120)
    assert versions_of(replies[-1]) == ["before", "after" if again else "flipped"]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_one_flipped_bit_is_named(model, connect, transport):
    name = "model.layers.1.self_attn.o_proj.weight"

    def flip(bucket: Bucket) -> None:
        if (data := bytes_of(bucket, name)) is not None:
            data[1001] ^= 1

    sync = connect(transport)
    tamper(sync, flip)
    weights = random_weights(model, 3)
    with pytest.raises(WeightSyncError, match=f"checksums differ .*: {name}$"):
        sync.push(iter(weights.items()), version="flipped")
    sync.push(iter(weights.items()), version="whole")  # the next push connects again and is clean


def exchange_experts(bucket: Bucket) -> None:
    for layer in range(2):
        a, b = (bytes_of(bucket, f"model.layers.{layer}.mlp.experts.{e}.down_proj.weight") for e in (0, 1))
        if a is not None and b is not None:
            a[:], b[:] = b.clone(), a.clone()


def transpose_square(bucket: Bucket) -> None:
    data = bytes_of(bucket, "model.layers.0.self_attn.o_proj.weight")
    if data is not None:
        square = data.view(torch.float32).view(64, 64)
        square[:] = square.T.clone()


def drop_last(bucket: Bucket) -> None:
    if any("layers.1.self_attn" in entry.name for entry in bucket.entries):
        bucket.entries[:] = [entry for entry in bucket.entries if "layers.1.self_attn.q_norm" not in entry.name]


def zero_tail(bucket: Bucket) -> None:
    bucket.buffer[bucket.used * 9 // 10 : bucket.used] = 0


@pytest.mark.parametrize(
    ("seed", "change", "named"),
    [
        (40, exchange_experts, r"experts.w2_weight \(from model.layers.\d.mlp.experts.\*.down_proj.weight\)"),
        (41, transpose_square, r"layers.0.self_attn.o_proj.weight"),
        (42, drop_last, r"layers.1.self_attn.q_norm.weight"),
        (43, zero_tail, r"layers.*;.*layers"),
    ],
)
def test_what_a_broken_wire_can_do(model, connect, seed, change, named):
    sync = connect("tensor", bucket_mb=0.3)
    tamper(sync, change)
    with pytest.raises(WeightSyncError, match=named) as error:
        sync.push(iter(random_weights(model, seed).items()), version="broken")
    assert "\n" not in str(error.value)


def test_a_tensor_that_the_server_does_not_know(model, connect):
    sync = connect()
    weights = random_weights(model, 5)
    wrong = weights | {"model.layers.9.mlp.gate.weight": torch.zeros(4, 64)}
    with pytest.raises(WeightSyncError, match="no place for 'model.layers.9.mlp.gate.weight'"):
        sync.push(iter(wrong.items()), version="unknown")
    sync.push(iter(weights.items()), version="known")


def test_a_tensor_that_was_forgotten(model, connect):
    weights = random_weights(model, 6)
    del weights["model.norm.weight"]
    with pytest.raises(WeightSyncError, match=r"model.norm.weight \(nothing was pushed for it\)"):
        connect().push(iter(weights.items()), version="partial")


def test_a_server_of_another_precision(model, connect):
    with pytest.raises(WeightSyncError, match="serves float32 weights, but precision.rollout is bfloat16"):
        connect(rollout_dtype="bf16").connect()


def test_refused_bucket_does_not_hang(model, server, connect):
    """The server refuses a bucket (no session is open) while the trainer already broadcasts."""
    sync = connect()
    sync.connect()
    sync._transport.begin = lambda: None
    with pytest.raises(WeightSyncError, match="must run between begin_weight_update"):
        sync.push(iter(random_weights(model, 7).items()), version="refused")
    sync.push(iter(random_weights(model, 7).items()), version="accepted")


def test_all_ranks_learn_how_it_went(model, server):
    first, second = run_ranks(2, "push_on_ranks:push", (server.address, server.key, str(model)), timeout=120)
    assert first == second
    assert "no place for 'oddity'" in first[1]


def test_a_server_that_forgot_the_last_push(model, server, connect):
    """As after a restart that the trainer did not see: another version, and the process group is gone."""
    sync = connect()
    weights = random_weights(model, 10)
    sync.push(iter(weights.items()), version="mine")
    post = partial(httpx.post, headers=server.headers, timeout=30)
    post(
        f"{server.address}/destroy_weights_update_group", json={"group_name": sync._transport._name}
    ).raise_for_status()
    post(f"{server.address}/update_weight_version", json={"new_version": "default"}).raise_for_status()
    sync.push(iter(weights.items()), version="mine again")
    assert generate(server, 1)["meta_info"]["weight_version"] == "mine again"


@pytest.mark.parametrize("killed", [0, 1])
def test_the_step_goes_on_when_a_server_is_killed_in_a_push(model, tmp_path, killed):
    """kill -9 of one of two, between two buckets of Engine.push: a new one, and the same weights again for both."""
    weights = random_weights(model, 11)
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "a", "answer": "b"}\n')
    config = build_config(
        {
            "name": "pushed",
            "runs_dir": str(tmp_path),
            "model": {"path": str(model)},
            "data": {"task": "file", "path": str(data), "verifier": "exact"},
            "eval": {"prompts": 0},
            "precision": {"train": "fp32", "rollout": "fp32"},
            "rollout": {
                "context_length": 512,
                "max_new_tokens": 8,
                "server": {"threads": 1, "max_total_tokens": 2048, "count": 2},
            },
            "sync": {"bucket_mb": BUCKET_MB, "timeout_s": 60.0},
        }
    )
    exports, told = [], []

    class Exporter:
        """A trainer of given weights, whose first export ends the server half-way."""

        def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
            exports.append(0)
            for index, item in enumerate(weights.items()):
                if len(exports) == 1 and index == len(weights) // 2:
                    kill_scheduler(engine._children.servers[killed])
                yield item

        def weights_pushed(self) -> None:
            told.append(len(exports))

    try:
        with Run(config, kind="sample") as run, Engine(run) as engine:
            engine.join()
            engine.push(Exporter(), version=3)
            assert figures(engine.metrics())["rollout/restarts"] == 1 and len(exports) == 2
            assert told == [2], "a trainer is told once, of the push that the engine has got"
            for server in engine._children.servers:
                assert generate(server, 1)["meta_info"]["weight_version"] == "3"
    finally:
        parallel.shutdown()


def test_a_server_that_came_back_as_another_one(model, server, connect):
    """Another version, and another dtype than it had: one line, not a wall of tensor errors."""
    sync = connect("tensor")
    weights = random_weights(model, 12)
    sync.push(iter(weights.items()), version="first")
    httpx.post(
        f"{server.address}/update_weight_version", json={"new_version": "default"}, headers=server.headers, timeout=30
    ).raise_for_status()
    sync._parameters = [{name: replace(p, dtype=torch.bfloat16) for name, p in sync._parameters[0].items()}]
    with pytest.raises(WeightSyncError, match="was replaced by one of another model, dtype or parallelism$"):
        sync.push(iter(weights.items()), version="second")
    sync.push(iter(weights.items()), version="third")


def kill_scheduler(server: RolloutServer) -> None:
    """kill -9 of every process of the server."""
    pids = [server._process.pid]
    for pid in pids:
        children = subprocess.run(["ps", "--ppid", str(pid), "-o", "pid="], capture_output=True, text=True, timeout=10)
        pids += [int(child) for child in children.stdout.split()]
    for pid in pids[1:]:  # the first is the supervisor
        os.kill(pid, signal.SIGKILL)
    for pid in pids[1:]:
        wait_for(
            lambda pid=pid: gone(pid) or Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        )
    time.sleep(0.5)  # the sender's connections have noticed it, so that its next broadcast fails at once
