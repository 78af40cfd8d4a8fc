"""Servers that others start come and go while a run goes on: real servers by tools/serve.py, killed with kill -9."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path

import httpx
import pytest

from megatron_rl.credentials import bearer
from megatron_rl.metrics.logger import METRICS_FILE, read_json_lines
from megatron_rl.servers.orphans import PREFIX
from megatron_rl.servers.own_environment import find_python
from megatron_rl.servers.server import reserve_port
from megatron_rl.sync.engines import RELEASED
from tests import intruder
from tests.forked_servers import SERVE, serve, supervisors_of
from tests.http_server import HttpServer
from tests.intruder import below, ports_of
from tests.program import Program
from tests.ranks import fork
from tests.zygote import Process

TIMEOUT_S = 240
INTRUDER = Path(intruder.__file__)


class Servers:
    """Servers of a config, each with its own file in `addresses`, forked."""

    def __init__(self, config: Path, folder: Path) -> None:
        self.config, self.folder, self.addresses = config, folder, folder / "addresses"
        self._processes: dict[str, subprocess.Popen | Process] = {}

    def start(self, name: str, as_users_do: bool = False) -> None:
        place = ("--host", "127.0.0.1", "--address-file", str(self.addresses / f"{name}.address"))
        arguments, log = (str(self.config), *place), self.folder / f"{name}.log"
        if not as_users_do:
            self._processes[name] = fork(serve, str(log), *arguments)
            return
        with open(log, "ab") as output:
            self._processes[name] = subprocess.Popen(
                [sys.executable, str(SERVE), *arguments],
                stdout=output,
                stderr=output,
                start_new_session=True,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )

    def kill(self, name: str) -> None:
        """As when its host is lost: what it wrote stays."""
        process = self._processes.pop(name)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        wait_for_end(process)

    def end(self) -> None:
        """In order, as SLURM does; what is still there after half a minute is killed."""
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGTERM)
        for process in self._processes.values():
            wait_for_end(process)
        self.close()

    def address(self, name: str) -> str:
        return (self.addresses / f"{name}.address").read_text().strip()

    @property
    def names(self) -> list[str]:
        return [*self._processes]

    def pid(self, name: str) -> int:
        return self._processes[name].pid

    @property
    def key(self) -> str:
        return (self.addresses / "server.key").read_text().strip()

    @property
    def headers(self) -> dict[str, str]:
        return bearer(self.key)

    def close(self) -> None:
        for name in list(self._processes):
            self.kill(name)


def wait_for_end(process: subprocess.Popen | Process, timeout_s: float = 30) -> None:
    if isinstance(process, subprocess.Popen):
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout_s)
    else:
        process.join(timeout_s)


def wait_for(true: Callable[[], object], what: str, program: Program | None = None) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not true():
        assert program is None or program.poll() is None, f"the run ended before: {what}"
        assert time.monotonic() < deadline, f"not within {TIMEOUT_S} s: {what}"
        time.sleep(0.1)


@pytest.fixture
def config(tmp_path, tiny_model) -> Path:
    path = tmp_path / "config.yaml"
    tree = {
        "name": "fleet",
        "steps": 2000,
        "runs_dir": str(tmp_path / "runs"),
        "model": {"path": str(tiny_model("qwen3_moe", "--layers", "2", "--tokenizer", "numbers"))},
        "data": {"task": "number_sorting"},
        "batch": {"prompts_per_step": 8, "samples_per_prompt": 4, "updates_per_step": 1, "tokens_per_micro_batch": 512},
        "precision": {"train": "fp32", "rollout": "fp32"},
        "rollout": {
            "address_folder": str(tmp_path / "addresses"),
            "health_check_interval_s": 1,
            "max_new_tokens": 8,
            "context_length": 32,
            "server": {"threads": 1, "max_total_tokens": 2048, "count": 2, "start_timeout_s": TIMEOUT_S},
        },
        "eval": {"prompts": 0},
        "logging": {"trackers": [], "progress": False},
    }
    path.write_text(json.dumps(tree))
    return path


@pytest.fixture
def servers(config, tmp_path) -> Iterator[Servers]:
    found = Servers(config, tmp_path)
    yield found
    found.close()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("as_users_do", [False, True])
def test_a_run_outlives_its_servers(config, servers, tmp_path, as_users_do):
    """One of two dies, a third one comes, all die, and one comes back: no step is lost, and no old weight is sampled from."""
    log, metrics = tmp_path / "log", tmp_path / "runs" / "fleet" / METRICS_FILE

    def steps() -> int:
        return len(read_json_lines(metrics)) if metrics.exists() else 0

    def more_steps(count: int, what: str) -> None:
        goal = steps() + count
        wait_for(lambda: steps() >= goal, what, program)

    servers.start("first", as_users_do)
    servers.start("second")
    wait_for(lambda: (servers.addresses / "first.address").exists(), "the address of the first")
    wait_for(lambda: answers(f"{servers.address('first')}/ready"), "the first to be ready")
    # As a trainer that is killed in a push leaves it.
    pause = f"{servers.address('first')}/pause_generation"
    httpx.post(pause, json={"mode": "retract"}, headers=servers.headers, timeout=30).raise_for_status()
    assert not answers(f"{servers.address('first')}/ready")
    with Program("train", str(config), log=log) as program:
        more_steps(3, "steps with two servers")
        look_for_open_doors(servers, program, tmp_path)
        gone = servers.address("first")
        servers.kill("first")
        wait_for(
            lambda: f"{gone} does not answer any more: continuing with 1 server\n" in log.read_text(),
            "left out",
            program,
        )
        more_steps(3, "steps with the other server")
        servers.start("third")
        wait_for(
            lambda: " has joined, and gets the weights before its first request" in log.read_text(), "taken in", program
        )
        assert servers.address("third") in log.read_text()
        more_steps(3, "steps with the new server")
        before = steps()
        for name in ("second", "third"):
            servers.kill(name)
        servers.start("fourth")
        wait_for(lambda: steps() >= before + 4, "steps when all are lost and one came", program)
        os.kill(program.pid, signal.SIGTERM)
        program.finish(TIMEOUT_S)
    rows = read_json_lines(metrics)
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1)), "every step once"
    assert all(row["rollout/stale"] == 0 for row in rows)
    changes = [row["rollout/restarts"] for row in rows]
    assert changes == sorted(changes) and changes[-1] >= 4, "one went, one came, two went, one came"
    assert [count for count, _ in groupby(row["rollout/servers"] for row in rows)] == [2, 1, 2, 1]
    served = httpx.get(f"{servers.address('fourth')}/model_info", headers=servers.headers, timeout=30).json()
    assert served["weight_version"] == RELEASED, "it had the run's weights, and another run may have it now"
    fourth = servers._processes["fourth"]
    servers.end()
    assert isinstance(fourth, Process) and fourth.exitcode in range(256), "told to end, it does so by itself"
    assert "SIGTERM received" in (tmp_path / "fourth.log").read_text()


@pytest.fixture
def router() -> Iterator[str]:
    """The address of a router without workers."""
    with reserve_port() as metrics:
        more = ["--host", "127.0.0.1", "--prometheus-port", str(metrics.getsockname()[1])]
        command = [str(find_python()), "-m", "sglang_router.launch_router", *more]
        server = HttpServer(lambda port: [*command, "--port", str(port)])
        yield server.url
        server.close()


def look_for_open_doors(servers: Servers, program: Program, folder: Path) -> None:
    """Another user of this machine gets nothing from a running job: no answer, no file, no memory, no key."""

    def processes_of_the_job() -> list[int]:
        starters = [servers.pid(name) for name in servers.names]
        starters += [supervisor for pid in starters for supervisor in supervisors_of(pid)]
        return [*dict.fromkeys(process for pid in (program.pid, *starters) for process in below(pid))]

    def seen() -> set[str]:
        return {f"http://{address}:{port}" for address, port in ports_of(processes_of_the_job())}

    # The kernel's lists of children and of sockets have gaps where they change while they are read.
    wait_for(lambda: {servers.address(name) for name in servers.names} <= seen(), "the servers' ports", program)
    processes = processes_of_the_job()
    lines = [Path(f"/proc/{p}/cmdline").read_bytes().decode(errors="replace") for p in processes]
    assert len(lines) >= 4 and not any(servers.key in line for line in lines)
    ports = ports_of(processes)
    addresses = [f"http://127.0.0.1:{port}" for _, port in ports]
    assert {address for address, _ in ports} == {"127.0.0.1"}, ports
    if os.geteuid():
        return
    folders = [folder / "runs", servers.addresses, *Path(tempfile.gettempdir()).glob(f"{PREFIX}*")]
    job = {"addresses": addresses, "folders": [*map(str, folders)], "processes": processes}
    as_nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "/usr/bin/python3", "-I", "-c"]
    command, given = [*as_nobody, INTRUDER.read_text()], json.dumps(job)
    found = subprocess.run(command, input=given, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    assert not found.stdout, found.stdout
    assert folders[0].is_dir() and folders[1].is_dir()
    assert not open_to_others(folders), "the folder above may be open to others"


def open_to_others(folders: list[Path]) -> list[str]:
    """Files and folders that another user may use, without links. Servers of other tests remove theirs meanwhile."""
    found = []
    for folder in folders:
        for here, _, files in os.walk(folder):
            for path in (here, *(os.path.join(here, name) for name in files)):
                with contextlib.suppress(FileNotFoundError):
                    mode = os.lstat(path).st_mode
                    if mode & 0o077 and not stat.S_ISLNK(mode):
                        found.append(path)
    return found


@pytest.mark.timeout(900)
def test_servers_behind_a_router(config, servers, router, tmp_path):
    """The trainer talks to each; one that dies is left out, and one that the router is told of later is taken in."""
    log, metrics = tmp_path / "log", tmp_path / "runs" / "fleet" / METRICS_FILE

    def steps() -> int:
        return len(read_json_lines(metrics)) if metrics.exists() else 0

    def add(name: str) -> None:
        servers.start(name)
        wait_for(lambda: (servers.addresses / f"{name}.address").exists(), f"the address of {name}")
        wait_for(lambda: answers(f"{servers.address(name)}/ready"), f"{name} to be ready")
        worker = {"url": servers.address(name), "api_key": servers.key}
        httpx.post(f"{router}/workers", json=worker, timeout=30).raise_for_status()
        wait_for(lambda: servers.address(name) in httpx.get(f"{router}/workers", timeout=30).text, "the router")

    wait_for(lambda: answers(f"{router}/workers"), "the router to be ready")
    add("first")
    options = ("--rollout.address_folder", "null", "--rollout.addresses", f"[{router}]")
    options += ("--rollout.api_key", f"file:{servers.addresses / 'server.key'}")
    with Program("train", str(config), *options, log=log) as program:
        wait_for(lambda: steps() >= 2, "steps with one server", program)
        add("second")
        wait_for(lambda: f"{servers.address('second')} is here" in log.read_text(), "taken in", program)
        goal = steps() + 2  # a death while the group is made is for tests/sync/test_join.py
        wait_for(lambda: steps() >= goal, "steps with two servers", program)
        gone = servers.address("first")
        servers.kill("first")
        wait_for(lambda: f"{gone} does not answer any more" in log.read_text(), "left out", program)
        goal = steps() + 2
        wait_for(lambda: steps() >= goal, "steps with the other server", program)
        os.kill(program.pid, signal.SIGTERM)
        program.finish(TIMEOUT_S)
    rows = read_json_lines(metrics)
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1)), "every step once"
    assert all(row["rollout/stale"] == 0 for row in rows)
    assert [count for count, _ in groupby(row["rollout/servers"] for row in rows)] == [1, 2, 1]


def answers(address: str) -> bool:
    try:
        return httpx.get(address, timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def test_none_in_the_folder_is_one_line(config, tmp_path):
    log = tmp_path / "log"
    with Program("train", str(config), "--rollout.server.start_timeout_s", "3", log=log) as program:
        assert program.wait(TIMEOUT_S) == 2
    said = log.read_text()
    [line] = [line for line in said.splitlines() if "error:" in line]
    assert (
        f"no server of rollout.address_folder {tmp_path / 'addresses'} (which names none) answered within 3 s" in line
    )
    assert "rollout.server.start_timeout_s" in line and "Traceback" not in said
