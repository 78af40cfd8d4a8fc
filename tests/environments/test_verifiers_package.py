"""Task sets of the real `verifiers` package, loaded and played by its worker in an environment of its own."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from megatron_rl.config import DataConfig
from megatron_rl.environments import build_task
from megatron_rl.environments.event_loop import EventLoop
from megatron_rl.environments.tools import ToolLost
from megatron_rl.environments.verifiers_package import Worker, environment_config
from megatron_rl.errors import UserError
from tests.preloaded import PYTHON_WITH_VERIFIERS

TASKS = Path(__file__).with_name("verifiers_tasks")


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
    with pytest.raises(UserError, match="wants the name of a task set"):
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
