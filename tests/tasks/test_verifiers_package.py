"""Task sets of the real `verifiers` package, loaded and played by its worker in an environment of its own."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socket import create_server

import pytest

from megatron_rl.config import DataConfig
from megatron_rl.credentials import RUN_KEY
from megatron_rl.errors import UserError
from megatron_rl.event_loop import EventLoop
from megatron_rl.tasks import build_task
from megatron_rl.tasks.verifiers_package import WORKER as WORKER_FILE
from megatron_rl.tasks.verifiers_package import Worker, _environment, environment_config
from megatron_rl.tools.tool import ToolLost
from tests.preloaded import PYTHON_WITH_VERIFIERS

TASKS = Path(__file__).with_name("verifiers_tasks")


def test_a_worker_does_not_know_the_secret_of_the_runs_processes(monkeypatch):
    """An episode's program could sign what they unpickle."""
    monkeypatch.setenv(RUN_KEY, "secret")
    monkeypatch.setenv("OF_A_JUDGE", "kept")
    found = _environment(Path("/x/bin"))
    assert RUN_KEY not in found and found["OF_A_JUDGE"] == "kept" and found["PATH"].startswith("/x/bin:")


@pytest.mark.slow
def test_prompts_of_a_task_set(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(TASKS))
    task = build_task(DataConfig(task="verifiers:letters", options={"limit": 30, "python": PYTHON_WITH_VERIFIERS}))
    prompts = [*task.prompts("train"), *task.prompts("eval")]
    assert sorted(p.metadata["task"] for p in prompts) == list(range(30))
    [third] = [p for p in prompts if p.prompt_id == "verifiers:letters:3"]
    assert third.text == "word 3"
    assert third.messages == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "word 3"}]
    with pytest.raises(UserError, match=r"verifiers:absent: ModuleNotFoundError: taskset 'absent' not found"):
        build_task(DataConfig(task="verifiers:absent", options={"python": PYTHON_WITH_VERIFIERS}))


def test_bad_configs_are_named(tmp_path):
    with pytest.raises(UserError, match="needs the name of a task set"):
        build_task(DataConfig(task="verifiers"))
    with pytest.raises(UserError, match=r"there is no .*nowhere; tools/setup.sh --verifiers makes"):
        build_task(DataConfig(task="verifiers:letters", options={"python": str(tmp_path / "nowhere")}))
    with pytest.raises(UserError, match=r"No module named 'verifiers.v1'|No module named 'verifiers'"):
        build_task(DataConfig(task="verifiers:letters", options={"python": sys.executable}))


def test_what_is_given_is_kept():
    plain = environment_config("letters", {"taskset": {"task": {"x": 1}}})
    assert plain["taskset"] == {"task": {"x": 1}, "id": "letters"} and plain["agent"]["harness"] == {"id": "null"}
    assert environment_config("a", {"agent": {"max_turns": 2}})["agent"] == {"max_turns": 2}
    assert "agent" not in environment_config("a", {"id": "best-of-n"})


@pytest.mark.slow
def test_a_worker_that_cannot_start_says_so():
    with pytest.raises(ToolLost, match="the worker of verifiers has ended"):
        asyncio.run(Worker([sys.executable, "-c", "raise SystemExit(1)"]).play({"task": 0}))


WORKER = """
import json, os, sys
folder = sys.argv[1]
print(json.dumps({"id": None}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    with open(f"{folder}/heard", "a") as heard:
        print(sorted(request), file=heard)
    if request.get("task") == 1:
        print(json.dumps({"id": request["id"], "reward": 0.5}), flush=True)
open(f"{folder}/ended", "w").close()
"""
"""In the place of the worker: it answers episode 1, and keeps what it hears."""


def test_a_worker_learns_what_is_given_up_and_may_end_by_itself(tmp_path):
    worker = Worker([sys.executable, "-c", WORKER, str(tmp_path)])
    loop = EventLoop()

    async def work():
        assert await worker.play({"task": 1}) == 0.5
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(worker.play({"task": 2}), 0.5)
        assert await worker.play({"task": 1}) == 0.5

    loop.run(work())
    loop.close()
    assert (tmp_path / "heard").read_text().splitlines() == [*["['id', 'task']"] * 2, "['id']", "['id', 'task']"]
    assert (tmp_path / "ended").exists(), "it has seen the end of its input, and could clean up"


class Policy(BaseHTTPRequestHandler):
    """Says aab, in a stream."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        chunk = {"id": "a", "object": "chat.completion.chunk", "created": 0, "model": "policy"}
        said = [({"role": "assistant", "content": "aab"}, None), ({}, "stop")]
        choices = [{"index": 0, "delta": delta, "finish_reason": reason} for delta, reason in said]
        lines = [json.dumps({**chunk, "choices": [choice]}) for choice in choices]
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        self.wfile.write("".join(f"data: {line}\n\n" for line in [*lines, "[DONE]"]).encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def policy() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Policy)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    server.shutdown()
    server.server_close()


def play_all(lines: list[str], tmp_path: Path, policy: str, monkeypatch, **settings: bool) -> dict[str, float | str]:
    """The outcome of each task of tests/tasks/verifiers_tasks/hostile.py, all played at once by one worker."""
    (tmp_path / "tasks").write_text("\n".join(lines))
    monkeypatch.setenv("HOSTILE_TASKS", str(tmp_path / "tasks"))
    monkeypatch.setenv("PYTHONPATH", str(TASKS))
    config = json.dumps(environment_config("hostile", {}))
    worker = Worker([PYTHON_WITH_VERIFIERS, "-P", str(WORKER_FILE), "serve", "100", config, json.dumps(settings)])
    loop = EventLoop()

    async def one(task: int) -> float | str:
        try:
            return await worker.play({"task": task, "base_url": policy, "model": "policy"})
        except ToolLost as error:
            return str(error)

    async def everything() -> list[float | str]:
        return await asyncio.gather(*(one(task) for task in range(len(lines))))

    try:
        return dict(zip([line.split()[0] for line in lines], loop.run(everything()), strict=True))
    finally:
        loop.close()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("network", [False, True])
def test_an_episode_can_do_no_harm_and_is_forgotten(network, tmp_path, policy, monkeypatch):
    """A part 10 would count the episodes that its process has seen before."""
    with create_server(("127.0.0.1", 0)) as other:
        lines = [
            f"write {tmp_path}/canary",
            f"connect {other.getsockname()[1]}",
            "processes x",
            "root x",
        ]
        found = play_all([*lines, "own x", "end x"], tmp_path, policy, monkeypatch, isolated=True, network=network)
    ended = found.pop("end")
    assert ended == "its process has ended with status 3; see its messages above"
    assert found == {"write": 0.0, "connect": float(network), "processes": 0.0, "root": 0.0, "own": 1.0}
    assert not (tmp_path / "canary").exists()


def test_settings_are_checked():
    for key in ("isolated", "network"):
        with pytest.raises(UserError, match=f"config: data.options.{key} = 'no' is neither true nor false"):
            build_task(DataConfig(task="verifiers:letters", options={key: "no", "python": sys.executable}))
