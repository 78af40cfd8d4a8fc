"""Runs of the program as the stages of tests/gpu see them: figures, and the ends of the logs where one fails."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch

from megatron_rl.checks.preflight import check_config
from megatron_rl.config.load import load_config
from megatron_rl.models.precision import Machine
from megatron_rl.servers.server import RolloutServer

REPOSITORY = Path(__file__).resolve().parents[2]
GPU_TESTS = REPOSITORY / "tests" / "gpu"
sys.path.insert(0, str(GPU_TESTS))

from programs import TAIL_CHARACTERS, RunFailed, Running, figures, overrides, tail  # noqa: E402


def test_a_run_that_fails_says_what_the_logs_said(tmp_path):
    """Its own log and its servers', each by name; metrics that it had logged are told in any case."""
    folder = tmp_path / "one"
    folder.mkdir()
    (folder / "sglang.log").write_text("noise\n" * 1000 + "RuntimeError: out of memory\n")
    (folder / "metrics.jsonl").write_text('{"step": 0, "eval/score": 0.5}\n{"step": 1, "reward/mean": 0.25}\n')
    told = []
    run = Running("plan", folder, "configs/quickstart.yaml", {"batch.samples_per_prompt": 0})
    with pytest.raises(RunFailed) as error:
        run.finish(60, told.append)
    message = str(error.value)
    assert message.startswith("megatron-rl plan of one ended with status 2, ") and "1 steps logged" in message
    server, own = message.index("== end of sglang.log:"), message.index("== end of one-plan.log:")
    assert "RuntimeError: out of memory" in message[server:own] and "batch.samples_per_prompt" in message[own:]
    assert len(message) < 2 * TAIL_CHARACTERS + 200
    assert [line["step"] for line in told[0]] == [0, 1]
    with pytest.raises(RunFailed, match=r"ended with status 2 too early"):
        run.wait_for(lambda: False, 60)


def test_a_run_that_takes_too_long_is_ended(tmp_path):
    run = Running("plan", tmp_path / "one", "configs/quickstart.yaml")
    with pytest.raises(RunFailed, match=r"was not done after 0 s.*\n== end of one-plan.log"):
        run.finish(0.0)
    assert run._process.returncode == -9


def test_figures_by_name_and_by_beginning():
    lines = [{"step": 0, "eval/score": 0.123456789}, {"step": 1, "time/a_s": 2, "time/b_s": 3.0, "x": None}]
    assert figures(lines, ("eval/score", "time/*", "absent")) == {
        "eval/score": [0.123457, None],
        "time/a_s": [None, 2],
        "time/b_s": [None, 3.0],
        "absent": [None, None],
    }
    values = {"a.b": True, "c": "x", "d": ["--y", "z"], "e": None}
    assert overrides(values) == ["--a.b", "true", "--c", "x", "--d", '["--y", "z"]', "--e", "null"]


def test_the_end_of_a_log_begins_with_a_line(tmp_path):
    log = tmp_path / "log"
    log.write_text("first line\nsecond\nthird\n")
    assert tail(log, 100) == "first line\nsecond\nthird" and tail(log, 10) == "third"
    assert tail(tmp_path / "none") == "(No such file or directory)"


def test_the_runs_of_stage_engine_are_valid_on_a_gpu(monkeypatch, tmp_path):
    """Their configs as they are there, and the commands of their servers."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    spec = importlib.util.spec_from_file_location("engine_on_a_gpu", GPU_TESTS / "test_9_engine.py")
    assert spec and spec.loader
    engine = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(engine)
    monkeypatch.undo()
    runs = engine.runs_of(tmp_path / "models", tmp_path / "engine")
    assert engine.GPU and {*engine.BESIDE} < {*runs}
    machine = Machine(gpu=(9, 0), transformer_engine=None, modelopt=None, cuda="13.0")
    for name, (config, values) in (runs | {"served": (engine.QUICKSTART, engine.served(tmp_path / "models"))}).items():
        found = load_config(REPOSITORY / config, overrides(values))
        check_config(found, "train", 1)
        server = RolloutServer.from_config(found, devices=["0"], sleeps=found.rollout.colocate)
        command = server.command(machine)
        assert "triton" in command and "--enable-return-routed-experts" in command, name
        assert ("--enable-memory-saver" in command) == found.rollout.colocate
        server.__exit__()


def test_a_result_says_the_commit_where_there_is_no_git(tmp_path, monkeypatch):
    """Neither its folder nor the program need be on a machine that a checkout was carried to."""
    spec = importlib.util.spec_from_file_location("gpu_conftest", GPU_TESTS / "conftest.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if head := module.said("git", "rev-parse", "HEAD"):
        assert re.fullmatch(f"{head}(-dirty)?", module.commit())
    monkeypatch.setattr(module, "REPOSITORY", tmp_path)
    assert module.commit() is None
    (tmp_path / "gpu-bundle").mkdir()
    (tmp_path / "gpu-bundle" / "COMMIT").write_text("0" * 40 + "\n")
    assert module.commit() == "0" * 40
    monkeypatch.setenv("PATH", str(tmp_path))
    assert module.commit() == "0" * 40
    assert module.machine()["commit"] == "0" * 40
