"""Several child servers, and servers that share the trainer's GPUs: who has which, whose turn it is, what dies in between."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file

from megatron_rl.config import Config, ServerConfig
from megatron_rl.config.load import build_config
from megatron_rl.distributed import parallel
from megatron_rl.errors import UserError
from megatron_rl.metrics.reduce import figures
from megatron_rl.rollout import colocation
from megatron_rl.rollout.engine import Engine
from megatron_rl.run.run import Run
from megatron_rl.servers.local import place, place_here, visible_names
from megatron_rl.servers.server import RolloutServer
from megatron_rl.sync.engines import as_own
from megatron_rl.trainer.trainer import Trainer

VERBOSE = ["--log-level-http", "info"]
"""The server's own record of requests, in its log."""


def rollout(**keys):
    return build_config({"rollout": keys}).rollout


@pytest.mark.parametrize(
    ("keys", "trainers", "gpus", "expected"),
    [
        ({}, 1, 0, [range(0)]),  # no GPU
        ({"server": {"count": 3}}, 2, 0, [range(0)] * 3),
        ({"colocate": True}, 2, 0, [range(0)]),
        ({}, 4, 8, [range(4, 5), range(5, 6), range(6, 7), range(7, 8)]),  # behind the trainer's
        ({"server": {"tensor": 2}}, 4, 8, [range(4, 6), range(6, 8)]),
        ({"server": {"tensor": 2, "count": 1}}, 4, 8, [range(4, 6)]),
        ({"server": {"tensor": 2}}, 1, 4, [range(1, 3)]),  # one GPU is left over
        ({"colocate": True}, 1, 1, [range(1)]),
        ({"colocate": True, "server": {"tensor": 4}}, 8, 8, [range(4), range(4, 8)]),
        ({"colocate": True, "server": {"tensor": 2, "count": 1}}, 3, 8, [range(2)]),
        ({"colocate": True, "server": {"tensor": 4}}, 0, 8, [range(4), range(4, 8)]),  # nothing is trained
        ({}, 0, 2, [range(1), range(1, 2)]),
    ],
)
def test_gpus_of_the_servers(keys, trainers, gpus, expected):
    assert place(rollout(**keys), trainers=trainers, gpus=gpus) == expected


@pytest.mark.parametrize(
    ("keys", "trainers", "gpus", "figures"),
    [
        (
            {},
            1,
            1,
            r"1 x rollout.server.tensor = 1 is 1 .* this machine's 1 the trainer's 1 .* leave 0; .*colocate: true",
        ),
        ({"server": {"count": 3, "tensor": 2}}, 4, 8, r"3 x rollout.server.tensor = 2 is 6 .* leave 4"),
        (
            {"colocate": True, "server": {"tensor": 4}},
            2,
            8,
            r"the trainer's 2 process.*1 x rollout.server.tensor = 4 is 4",
        ),
        ({"colocate": True, "server": {"tensor": 2}}, 3, 8, r"tensor = 2 does not divide the GPUs of the trainer's 3"),
        ({"colocate": True}, 4, 2, r"4 processes need a GPU each, and this machine has 2; start 2"),
    ],
)
def test_too_few_gpus_are_refused_with_the_figures(keys, trainers, gpus, figures):
    with pytest.raises(UserError, match=figures) as error:
        place(rollout(**keys), trainers=trainers, gpus=gpus)
    assert "\n" not in str(error.value)


def test_servers_of_the_trainer_serve_one_machine(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    with pytest.raises(UserError, match=r"rollout\.addresses is empty.*of its 16 processes 8 run here"):
        place_here(build_config({}).rollout, trains=True)


def test_gpus_keep_the_names_that_they_have(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_names(range(2, 4)) == ["2", "3"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5, GPU-8a,7")
    assert visible_names(range(1, 3)) == ["5", "GPU-8a"]


def test_a_server_has_its_share_and_a_memory_saver(tmp_path):
    config = build_config({"model": {"path": str(tmp_path)}, "sync": {"refresh": {"when": "drift"}}})
    server = RolloutServer.from_config(config, devices=["2", "3"], sleeps=True)
    assert server.environment()["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert {"--enable-memory-saver", "--enable-weights-cpu-backup"} <= set(server.command())
    plain = RolloutServer.from_config(config)
    assert not {"--enable-memory-saver", "--enable-weights-cpu-backup"} & set(plain.command())


@pytest.fixture(scope="module")
def model(tiny_model) -> Path:
    return tiny_model("qwen3_moe", "--layers", "2", "--tokenizer", "numbers")


def config_of(model: Path, runs: Path, **rollout) -> Config:
    server = {
        "threads": 1,
        "max_total_tokens": 2048,
        "memory_fraction": 0.2,
        "start_timeout_s": 540,
        "extra_args": VERBOSE,
    }
    return build_config(
        {
            "runs_dir": str(runs),
            "model": {"path": str(model)},
            "data": {"task": "number_sorting"},
            "batch": {"prompts_per_step": 4, "samples_per_prompt": 2, "tokens_per_micro_batch": 128},
            "eval": {"prompts": 0},
            "precision": {"train": "fp32", "rollout": "fp32"},
            "rollout": {"context_length": 96, "max_new_tokens": 8, "server": server | {"count": 2}} | rollout,
            "sync": {"transport": "tensor", "timeout_s": 60.0},
            "checkpoint": {"every": 1},
            "logging": {"trackers": []},
        }
    )


class Exporter:
    """A trainer of given weights."""

    def __init__(self, weights: dict[str, torch.Tensor]):
        self.weights = weights

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.weights.items())

    def weights_pushed(self) -> None:
        pass


def versions(engine: Engine) -> list[str]:
    """The steps of the weights that the servers have."""
    asked = [(server, f"{server.address}/model_info") for server in engine._children.servers]
    served = [httpx.get(url, headers=server.headers, timeout=30).json()["weight_version"] for server, url in asked]
    return [as_own(version, engine.run.id) for version in served]


def test_a_server_of_several_is_restarted_alone(model, tmp_path):
    config = config_of(model, tmp_path, max_new_tokens=40)
    try:
        with Run(config, kind="sample") as run, Engine(run) as engine:
            first, second = engine._children.servers
            engine.join()
            prompts = run.stream.next(4)
            weights = Exporter(load_file(model / "model.safetensors"))

            second_life = second._process.pid
            second._process.kill()  # with it the whole of this server
            second._process.wait(20)
            assert len(engine.ask(prompts, run.support, samples=2, seed="")) == 8, "the other one answers"
            assert figures(engine.metrics())["rollout/restarts"] == 0
            engine.push(weights, version=1)
            assert figures(engine.metrics())["rollout/restarts"] == 1 and second._process.pid != second_life
            assert versions(engine) == ["1", "1"]
            before = [count(server, "/generate") for server in (first, second)]
            engine.ask(prompts, run.support, samples=64, seed="")  # several calls
            assert all(count(s, "/generate") > n for s, n in zip((first, second), before, strict=True)), (
                "spread over both"
            )
            assert [server.log_path.name for server in (first, second)] == ["sglang-0.log", "sglang-1.log"]
            assert first._log_start == 0 < second._log_start, "the first was not restarted"

            for server in (first, second):
                server._process.kill()
                server._process.wait(20)
            engine._pusher._trainer = None  # as for `megatron-rl eval`
            assert len(engine.ask(prompts, run.support, samples=2, seed="")) == 8
            assert figures(engine.metrics())["rollout/restarts"] == 3 and versions(engine) == ["default", "default"]
        assert not any(server.alive() for server in (first, second))
    finally:
        parallel.shutdown()


def requests(server: RolloutServer) -> list[str]:
    """Paths of the POSTs that a server has answered, in order, by its own log."""
    return re.findall(r'"POST (/\S+) HTTP/1.1" 200', server.log_path.read_text())


def count(server: RolloutServer, path: str) -> int:
    return requests(server).count(path)


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    """What is asked of trainer and servers, in order. A trainer that takes the GPU checks that nobody else has it."""
    calls: list[str] = []
    servers: set[RolloutServer] = set()

    def record(owner: type, verb: str) -> None:
        original = getattr(owner, verb)

        def call(self, *args, **options):
            if isinstance(self, RolloutServer):
                servers.add(self)
            elif verb == "wake" and not options:
                assert all(server.asleep == {"kv_cache", "weights"} for server in servers)
            elif verb == "wake":
                assert all("kv_cache" in server.asleep for server in servers)
            calls.append(" ".join([owner.__name__, verb, *args, *options]))
            return original(self, *args, **options)

        monkeypatch.setattr(owner, verb, call)

    for owner, verb in ((Trainer, "sleep"), (Trainer, "wake"), (RolloutServer, "sleep"), (RolloutServer, "wake")):
        record(owner, verb)
    return calls


PUSH = [
    *("Trainer sleep keep_weights", "RolloutServer sleep kv_cache", "RolloutServer wake weights"),
    *("Trainer wake weights_only", "Trainer sleep keep_weights", "RolloutServer wake kv_cache"),
]


def test_trainer_and_servers_take_turns(model, tmp_path, calls, monkeypatch):
    """Each has the GPUs when the other has left them; dead servers come back with the weights."""
    config = config_of(model, tmp_path, colocate=True)

    def used() -> float:
        """Sleeping servers, in the place of a GPU's memory."""
        assert "Trainer wake" not in calls
        return float(calls.count("RolloutServer sleep"))

    monkeypatch.setattr(colocation, "used_gb", used)

    def seen() -> list[str]:
        """Since the last time, what all servers do at once counted once."""
        once = [a for a, b in pairwise([*calls, ""]) if a != b]
        calls.clear()
        return once

    try:
        with Run(config, kind="train") as run:
            with Engine(run) as engine:
                first, second = engine._children.servers
                assert seen() == ["RolloutServer sleep"], "before the trainer is built"
                assert not first.ready() and not second.ready()
                trainer = run.build()
                engine.join()
                clock = run.clock()
                engine.push(trainer, version=0)
                assert seen() == PUSH
                prompts = run.stream.next(4)
                trajectories = engine.collect(prompts, step=0)
                assert seen() == ["RolloutServer sleep", "Trainer wake"]
                measured = figures(engine.metrics())
                assert (measured["memory/awake_gb"], measured["memory/asleep_gb"]) == (0, 2), (
                    "before and after they slept"
                )
                assert 0 < measured["sync/push_s"] < clock.times()["time/step_s"]
                assert {span.version for t in trajectories for span in t.weight_spans} == {"0"}
                assert engine.client.versions == {"0"}, "a server that is started anew answers with those of its folder"
                engine.sleep()
                assert not seen(), "it sleeps already"

                with torch.no_grad():
                    for parameter in trainer.chunks[0].parameters():
                        parameter.mul_(1.01)
                second._process.kill()  # asleep
                second._process.wait(20)
                engine.push(trainer, version=1)
                assert figures(engine.metrics())["rollout/restarts"] == 1 and versions(engine) == ["1", "1"]
                assert seen()[0] == "Trainer sleep", "a server that starts measures the memory"
                replies = [generate(server) for server in (first, second)]
                assert all(reply["meta_info"]["cached_tokens"] == 0 for reply in replies)
                assert replies[0]["output_ids"] == replies[1]["output_ids"]

                engine.sleep()
                seen()
                assert len(engine.ask(prompts, run.support, samples=2, seed="")) == 8, (
                    "weights that sleep are lost: pushed again"
                )
                assert seen() == PUSH and versions(engine) == ["1", "1"]
                run.checkpoint(prepare=engine.sleep)
                assert seen() == ["RolloutServer sleep", "Trainer wake"], "a checkpoint needs all of the trainer"
                with clock("rollout"):
                    engine.wake()
                with clock("checkpoint"):
                    run.checkpoint(prepare=engine.sleep)
                times = clock.times()
                assert times["time/sleep_s"] > 0 < times["time/wake_s"]
                assert sum(times.values()) == pytest.approx(2 * times["time/step_s"], rel=1e-3), (
                    "no second counts twice"
                )
            order = [path for path in requests(first) if path != "/generate"]
            release, resume = "/release_memory_occupation", "/resume_memory_occupation"
            assert order.count(release) == order.count(resume) / 2 + 1, (
                "weights and cache come back one after the other"
            )
            for before, after in pairwise(order):
                assert after != release or before == "/pause_generation"
                assert after != "/continue_generation" or before == resume, "nothing goes on before the cache is there"
    finally:
        parallel.shutdown()


def generate(server: RolloutServer) -> dict:
    body = {"input_ids": [5, 6, 7, 8], "sampling_params": {"max_new_tokens": 8, "temperature": 0.0, "ignore_eos": True}}
    return (
        httpx.post(f"{server.address}/generate", headers=server.headers, json=body, timeout=60)
        .raise_for_status()
        .json()
    )


def test_a_sleeping_server_has_no_memory_and_no_answers(model, tmp_path):
    """The stand-in for the memory saver drops what a GPU's drops; with a backup, weights come back as they were."""
    config = ServerConfig(threads=1, max_total_tokens=2048, memory_fraction=0.2, start_timeout_s=540)
    options = {"dtype": "fp32", "context_length": 64, "log_path": tmp_path / "sglang.log", "sleeps": True}
    with RolloutServer(model, config, keeps_weights=True, **options) as server:
        answer = generate(server)["output_ids"]
        server.sleep()
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.address}/generate", headers=server.headers, json={"input_ids": [5]}, timeout=1)
        assert server.alive()
        server.wake("weights")
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.address}/generate", headers=server.headers, json={"input_ids": [5]}, timeout=1)
        server.wake()
        assert generate(server)["output_ids"] == answer

        server.sleep("weights")
        httpx.post(f"{server.address}/continue_generation", headers=server.headers, json={}, timeout=30)
        with pytest.raises(httpx.HTTPError):  # who computes with memory that is not there dies
            generate(server)
        assert server.dead(60)
        server.sleep()  # has nothing to give up
        with pytest.raises(UserError, match=r"resume_memory_occupation.*sglang\.log"):
            server.wake()
