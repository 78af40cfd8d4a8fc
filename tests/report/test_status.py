"""`megatron-rl status`: what a run's folder says, while it runs and afterwards."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl.cli import main
from megatron_rl.metrics.logger import METRICS_FILE
from megatron_rl.report.status import clock, status_of

STEPS = 40


def run_folder(tmp_path: Path, *, done: int, checkpoints: tuple[str, ...]) -> Path:
    folder = tmp_path / "runs" / "group" / "one"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.yaml").write_text(f"name: group/one\nsteps: {STEPS}\n")
    rows = [{"step": 0, "eval/score": 0.25}]
    for step in range(1, done + 1):
        times = {"time/rollout_s": 6.0, "time/train_s": 3.0, "time/other_s": 1.0, "time/step_s": 10.0}
        rows.append({"step": step, "reward/mean": step / 100, "eval/score": None, **times})
    (folder / METRICS_FILE).write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in checkpoints:
        (folder / "checkpoints" / name).mkdir()
    return folder


def test_a_run_that_stopped_and_one_that_is_finished(tmp_path):
    done = random.randrange(5, 30)
    folder = run_folder(tmp_path, done=done, checkpoints=("step_000005", "step_000040.tmp"))
    found = status_of(folder)
    assert (found.state, found.step, found.steps, found.left_s) == ("stopped", done, STEPS, None)
    assert found.checkpoints == ["step_000005"] and found.unfinished == ["step_000040.tmp"]
    assert found.metrics == {"reward/mean": done / 100, "eval/score": 0.25}
    assert found.times == pytest.approx({"rollout": 0.6, "train": 0.3, "other": 0.1})
    assert found.seconds_per_step == 10.0 and 0 <= found.idle_s < 600
    (folder / "checkpoints" / "step_000040").mkdir()
    assert status_of(folder).state == "finished"


@pytest.mark.parametrize("name", ["[/red]", "a [bold", "**", "a\\0b", "[a-"])
def test_a_folder_of_somebody_else_is_shown_as_it_is(name, tmp_path, capsys):
    (tmp_path / "config.yaml").write_text(f'name: "{name}"\nsteps: 1e400\n')
    (tmp_path / METRICS_FILE).write_text(f'{{"step": 1, "reward/mean": {10**400}, "time/step_s": 1e308}}\n')
    (tmp_path / "writer.lock").write_bytes(b"process [/x] \xff\xfe: x")
    assert main(["status", str(tmp_path)]) == 0
    assert "process [/x] " in capsys.readouterr().out
    assert main(["status", "--json", str(tmp_path)]) == 0


@pytest.mark.parametrize("content", [b"a: &a [*a]", b"a: 2020-13-45", b"[" * 50_000, b"\xff", b"a: [", b"a: 'b"])
def test_a_config_that_cannot_be_read_is_one_line(content, tmp_path, capsys):
    (tmp_path / "config.yaml").write_bytes(content)
    assert main(["status", str(tmp_path)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert f"{tmp_path / 'config.yaml'}: not YAML: " in line


def test_a_run_that_runs(tmp_path, capsys):
    """Another process has the folder."""
    folder = run_folder(tmp_path, done=30, checkpoints=())
    attempt = tmp_path / "logs" / "group-one-17" / "attempt-0"
    attempt.mkdir(parents=True)
    (folder / "sglang.log").touch()
    hold = (
        "import sys; from pathlib import Path; from megatron_rl.run.run_lock import lock;"
        f"file = lock(Path({str(folder)!r})); print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", hold]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        found = status_of(folder)
        assert main(["status", str(folder), "--json"]) == 0
        assert main(["status", str(folder)]) == 0
        process.stdin.close()
    assert found.state == "running" and found.writer.startswith(f"process {process.pid} on ")
    assert found.left_s == 100.0 and found.logs == [str(folder / "sglang.log"), f"{attempt}/"]
    printed = capsys.readouterr().out
    parsed, end = json.JSONDecoder().raw_decode(printed)
    assert parsed[0]["state"] == "running" and parsed[0]["step"] == 30
    text = printed[end:]
    assert "30 of 40, 10 s a step" in text and "0:01:40" in text and "rollout 60%" in text
    assert status_of(folder).state == "stopped"


def test_what_is_no_run_is_one_line(tmp_path, capsys):
    assert main(["status", str(tmp_path)]) == 2
    assert f"{tmp_path} holds no run" in capsys.readouterr().err
    assert clock(3725.4) == "1:02:05"
