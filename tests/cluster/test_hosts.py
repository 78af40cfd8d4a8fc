"""Hosts in network namespaces: links that are cut for a while and for good, and a server's host that is lost and comes back."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron_rl.metrics.logger import METRICS_FILE, read_json_lines
from tests.cluster.hosts import Hosts

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 300
CUT_S = 6.0
TIMEOUT_S = 20.0
"""Of collectives."""


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Hosts(3) as found:
        yield found


@pytest.fixture
def config(tmp_path, tiny_model) -> Path:
    path = tmp_path / "config.yaml"
    tree = {
        "name": "hosts",
        "steps": 5000,
        "runs_dir": str(tmp_path / "runs"),
        "model": {"path": str(tiny_model("qwen3_moe", "--layers", "2", "--tokenizer", "numbers"))},
        "data": {"task": "number_sorting"},
        "batch": {"prompts_per_step": 8, "samples_per_prompt": 4, "updates_per_step": 1, "tokens_per_micro_batch": 512},
        "algorithm": {"entropy_coefficient": 0.01},
        "precision": {"train": "fp32", "rollout": "fp32"},
        "parallel": {"timeout_s": TIMEOUT_S},
        "rollout": {
            "max_new_tokens": 8,
            "context_length": 32,
            "server": {"threads": 1, "max_total_tokens": 2048, "start_timeout_s": WAIT_S},
        },
        "sync": {"timeout_s": TIMEOUT_S - 5},
        "eval": {"prompts": 0},
        "logging": {"trackers": [], "progress": False},
    }
    path.write_text(json.dumps(tree))
    return path


class Job:
    """A training run whose rank i is on hosts[i]."""

    def __init__(self, hosts: Hosts, config: Path, places: list[int], *options: str) -> None:
        folder = config.parent
        self.logs = [folder / f"rank{rank}.log" for rank in range(len(places))]
        self.metrics = folder / "runs" / "hosts" / METRICS_FILE
        self.processes = [
            hosts.start(
                place,
                [sys.executable, "-m", "megatron_rl.cli", "train", str(config), *options],
                self.logs[rank],
                RANK=str(rank),
                LOCAL_RANK="0",
                WORLD_SIZE=str(len(places)),
                LOCAL_WORLD_SIZE="1",
                MASTER_ADDR=hosts.address(places[0]),
                MASTER_PORT="29544",
            )
            for rank, place in enumerate(places)
        ]

    @property
    def rows(self) -> list[dict]:
        return read_json_lines(self.metrics) if self.metrics.exists() else []

    def said(self, rank: int = 0) -> str:
        return self.logs[rank].read_text()

    def wait_for(self, true: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while not true():
            for rank, process in enumerate(self.processes):
                assert process.poll() is None, f"rank {rank} ended before: {what}\n{self.said(rank)[-3000:]}"
            assert time.monotonic() < deadline, f"not within {WAIT_S} s: {what}\n{self.said()[-2000:]}"
            time.sleep(0.1)

    def more_steps(self, count: int, what: str) -> None:
        goal = len(self.rows) + count
        self.wait_for(lambda: len(self.rows) >= goal, what)

    def finish(self) -> None:
        self.processes[0].send_signal(signal.SIGTERM)
        statuses = [process.wait(WAIT_S) for process in self.processes]
        assert statuses == [0] * len(statuses), self.said()[-3000:]
        rows = self.rows
        assert [row["step"] for row in rows] == list(range(1, len(rows) + 1)), "every step once"


def serve(hosts: Hosts, host: int, config: Path) -> subprocess.Popen[bytes]:
    folder = config.parent / "addresses"
    folder.mkdir(exist_ok=True)
    place = ("--host", hosts.address(host), "--address-file", str(folder / f"{host}.address"))
    command = [sys.executable, str(ROOT / "tools" / "serve.py"), str(config), *place]
    return hosts.start(host, command, config.parent / f"server{host}.log")


@pytest.mark.timeout(900)
def test_a_link_between_ranks(hosts, config):
    """Cut for a while: they go on. For good: each process ends within the time limit, with a line that says why."""
    serve(hosts, 3, config)
    job = Job(hosts, config, [1, 2], "--rollout.address_folder", str(config.parent / "addresses"))
    job.more_steps(3, "steps on two hosts")
    hosts.cut(2)
    time.sleep(CUT_S)
    hosts.join(2)
    job.more_steps(3, "steps behind a cut of a few seconds")
    hosts.cut(2)
    start = time.monotonic()
    statuses = [process.wait(WAIT_S) for process in job.processes]
    took = time.monotonic() - start
    assert all(status not in (0, None) for status in statuses)
    for rank in (0, 1):
        [error] = [line for line in job.said(rank).splitlines() if line.startswith("megatron-rl: error")]
        assert f"rank {rank} on " in error and "at most parallel.timeout_s" in error
        # The processes meet on the first host: from the other one nobody can be asked who is there.
        assert f"contact with {'rank 1' if rank == 0 else hosts.address(1)}" in error
        assert "Traceback" not in job.said(rank), job.said(rank)[-4000:]
    assert took < 2 * TIMEOUT_S + 20, f"{took:.0f} s"
    rows = job.rows
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))


@pytest.mark.timeout(900)
def test_a_servers_host_is_lost_and_comes_back(hosts, config):
    """One that is out of reach for a while is waited for; one that is lost is left out, and taken in again when it is back."""
    for host in (2, 3):
        serve(hosts, host, config)
    addresses = ("--rollout.address_folder", str(config.parent / "addresses"), "--rollout.server.count", "2")
    looks = ("--rollout.health_check_interval_s", "2", "--rollout.health_check_timeout_s", "10")
    job = Job(hosts, config, [1], *addresses, *looks)
    job.more_steps(3, "steps with two servers")
    hosts.cut(3)
    time.sleep(CUT_S)
    hosts.join(3)
    job.more_steps(3, "steps behind a cut of a few seconds")
    assert job.rows[-1]["rollout/restarts"] == 0, "none was left out"
    hosts.cut(3)
    hosts.end(3)
    gone = f"http://{hosts.address(3)}"
    job.wait_for(lambda: "continuing with 1 server\n" in job.said(), "the lost one is left out")
    assert gone in job.said()
    job.more_steps(3, "steps with the other server")
    hosts.join(3)
    serve(hosts, 3, config)
    job.wait_for(
        lambda: " has joined, and gets the weights before its first request" in job.said(), "the one that is back"
    )
    job.more_steps(3, "steps with both, whose checksums are compared in each push")
    job.finish()
    assert all(row["rollout/stale"] == 0 for row in job.rows)
