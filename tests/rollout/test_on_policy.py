"""A run that claims to be on-policy, with a server of somebody else: an honest step passes, and each way not to be is named."""

from __future__ import annotations

import json
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import pytest
from safetensors.torch import load_file

from megatron_rl.config import SyncConfig
from megatron_rl.config.load import build_config
from megatron_rl.data.trajectory import Trajectory
from megatron_rl.distributed import parallel
from megatron_rl.errors import UserError
from megatron_rl.metrics.reduce import figures
from megatron_rl.rollout.engine import Engine
from megatron_rl.run.run import Run
from megatron_rl.servers.server import RolloutServer
from megatron_rl.sync.engines import version_of
from megatron_rl.sync.weight_sync import WeightSync
from tests.rollout.conftest import key_reference


@dataclass
class Claimant:
    """A run with its engine, whose server others can reach too."""

    run: Run
    engine: Engine
    server: RolloutServer
    folder: Path
    """Of the weights that the server began with."""

    def collect(self, step: int) -> list[Trajectory]:
        return self.engine.collect(self.run.stream.next(4), step=step)

    def push_others(self, version: str, factor: float = 1.0, wait: Callable[[], None] = lambda: None) -> None:
        """A push beside the run's, under its id, of the server's first weights times a factor; wait: once it may begin."""
        weights = {name: tensor * factor for name, tensor in load_file(self.folder / "model.safetensors").items()}
        with WeightSync(
            SyncConfig(transport="tensor"), [self.server.address], key=self.server.key, rollout_dtype="fp32"
        ) as sync:
            sync.connect()
            wait()
            sync.push(iter(weights.items()), version_of(self.run.id, version))

    def label(self, version: str) -> None:
        """Give the server's weights another version's name."""
        address = f"{self.server.address}/update_weight_version"
        httpx.post(address, json={"new_version": version}, headers=self.server.headers, timeout=60).raise_for_status()

    def running(self) -> int:
        """Requests that the server computes at the moment."""
        loads = httpx.get(f"{self.server.address}/v1/loads", headers=self.server.headers, timeout=60).json()["loads"]
        return sum(load["num_running_reqs"] for load in loads)


@pytest.fixture(scope="module")
def claimant(server, reference, tmp_path_factory) -> Iterator[Claimant]:
    folder = tmp_path_factory.mktemp("claims")
    rows = [{"prompt": "".join(random.choices("abcdefgh ", k=12)), "answer": "b"} for _ in range(64)]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = build_config(
        {
            "runs_dir": str(folder),
            "model": {"path": str(reference.folder)},
            "data": {"task": "file", "path": str(folder / "data.jsonl"), "verifier": "exact"},
            "batch": {"prompts_per_step": 4, "samples_per_prompt": 2, "tokens_per_micro_batch": 4096},
            "algorithm": {"on_policy": True},
            "precision": {"train": "fp32", "rollout": "fp32"},
            "rollout": {
                "addresses": [server.address],
                "api_key": key_reference(server),
                "context_length": 1024,
                "max_new_tokens": 8,
            },
            "sync": {"transport": "tensor"},
            "eval": {"prompts": 0},
            "logging": {"trackers": []},
        }
    )
    try:
        with Run(config, kind="train") as run, Engine(run) as engine:
            run.build()
            engine.join()
            claimant = Claimant(run, engine, server, reference.folder)
            yield claimant
            claimant.push_others("default")  # as other tests of the folder expect it
            run._saved_at = run.step
    finally:
        parallel.shutdown()


def refusal(claimant: Claimant, step: int) -> str:
    with pytest.raises(UserError) as error:
        claimant.collect(step)
    assert "\n" not in str(error.value) and str(error.value).startswith(f"algorithm.on_policy: step {step + 1}: ")
    return str(error.value)


def test_an_honest_step_passes(claimant):
    claimant.engine.push(claimant.run.trainer, version=3)
    for _ in range(2):
        trajectories = claimant.collect(3)
        assert len(trajectories) == 8 and {s.version for t in trajectories for s in t.weight_spans} == {"3"}
        assert figures(claimant.engine.metrics())["rollout/stale"] == 0.0


def test_a_server_that_missed_a_push_is_named(claimant):
    """Or was restarted: it says that it has other weights than those that were pushed."""
    claimant.engine.push(claimant.run.trainer, version=4)
    claimant.label("default")
    said = refusal(claimant, 4)
    assert "8 responses are not from version '4' (last push): the response to prompt '" in said
    assert re.search(r"has tokens 0 to \d from 'default'", said)
    pushed = version_of(claimant.run.id, 4)
    assert f"version '{pushed}' was pushed last, and {claimant.server.address} has 'default'" in said
    assert figures(claimant.engine.metrics())["rollout/stale"] == 1.0
    claimant.engine.push(claimant.run.trainer, version=4)
    claimant.collect(4)


def test_a_push_of_somebody_else_is_named(claimant):
    """Under the very version that this run has pushed, so that the weights alone tell."""
    claimant.engine.push(claimant.run.trainer, version=5)
    claimant.push_others("5", factor=1.001)
    said = refusal(claimant, 5)
    assert "responses are not of" not in said
    pushed = version_of(claimant.run.id, 5)
    assert f"checksums differ after the push of version {pushed} to {claimant.server.address}: " in said
    claimant.engine.push(claimant.run.trainer, version=5)
    claimant.collect(5)


def test_responses_of_two_versions_are_named(claimant, monkeypatch):
    """Somebody pushes in the middle of the rollout: single responses have tokens of both."""
    engine = claimant.engine
    engine.push(claimant.run.trainer, version=6)
    longer = replace(engine.config, rollout=replace(engine.config.rollout, max_new_tokens=950))
    monkeypatch.setattr(engine, "config", longer)

    ready = threading.Event()

    def until_it_answers() -> None:
        """The eight requests come in two calls of four: all are there when more than four run, or when one has ended."""
        ready.set()
        now = most = 0
        while most <= now <= 4:
            most = now
            time.sleep(0.02)
            now = claimant.running()
        time.sleep(0.1)  # for some tokens

    pushing = threading.Thread(target=claimant.push_others, args=("theirs",), kwargs={"wait": until_it_answers})
    pushing.start()
    assert ready.wait(60)
    said = refusal(claimant, 6)
    pushing.join(60)
    assert re.search(r"the response to prompt '\S+' has tokens [1-9]\d* to \d+ from 'theirs'", said)
    assert f"and {claimant.server.address} has '{version_of(engine.run.id, 'theirs')}'" in said
    stale = figures(engine.metrics())["rollout/stale"]
    assert 0 < stale <= 1
