"""The folder of a run: one writer, a notice of changed keys, and one line for a place that cannot be used."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl.cli import main
from megatron_rl.config import Config
from megatron_rl.config.load import build_config, changed_keys, to_yaml
from megatron_rl.distributed import parallel
from megatron_rl.errors import UserError
from megatron_rl.run.run import Run
from megatron_rl.run.run_lock import lock

HOLDER = """
import os, subprocess, sys, time
from pathlib import Path
from megatron_rl.run.run_lock import lock
held = lock(Path(sys.argv[1]))
child = os.fork()  # as workers are: it must not keep the lock when its parent is killed
if child:
    print(child, flush=True)
time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path):
    """A process that writes the folder, and a child of it."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    child = int(process.stdout.readline())
    yield process
    process.kill()
    process.wait()
    os.kill(child, signal.SIGKILL)


def test_a_folder_has_one_writer_and_kill_9_frees_it(holder, tmp_path):
    with pytest.raises(
        UserError, match=rf"another process writes to it \(process {holder.pid} on .*choose another --name"
    ):
        lock(tmp_path)
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with lock(tmp_path):
        assert f"process {os.getpid()} on" in (tmp_path / "writer.lock").read_text()


def config_of(model: Path, runs: Path, **changes) -> Config:
    tree = {
        "name": "one",
        "steps": 4,
        "runs_dir": str(runs),
        "model": {"path": str(model)},
        "data": {"task": "number_sorting"},
        "batch": {"prompts_per_step": 4, "samples_per_prompt": 4, "updates_per_step": 1, "tokens_per_micro_batch": 96},
        "precision": {"train": "fp32", "rollout": "fp32"},
        "rollout": {"load": str(runs), "context_length": 32, "max_new_tokens": 8},
        "eval": {"prompts": 0},
        "logging": {"trackers": []},
    }
    return build_config(tree | changes)


@pytest.fixture
def model(tiny_model) -> Path:
    return tiny_model("qwen3_moe", "--layers", "2", "--tokenizer", "numbers")


@pytest.fixture
def alone():
    """Each run of a test ends with its parallel state, also one that fails."""
    yield
    parallel.shutdown()


def test_a_resumed_run_names_the_keys_that_differ(model, tmp_path, capsys, alone):
    config = config_of(model, tmp_path, optimizer={"lr": 1e-3})
    (tmp_path / "one" / "checkpoints" / "step_000003").mkdir(parents=True)
    with Run(config, kind="train"):
        pass
    out = capsys.readouterr().out
    assert "resumed at step 3" in out and "differ" not in out
    with Run(config_of(model, tmp_path, optimizer={"lr": 2e-3}, steps=9), kind="train"):
        pass
    assert (
        "config keys that changed since the run's last start: optimizer.lr: 0.001 -> 0.002" in capsys.readouterr().out
    )


def test_a_folder_of_before_becomes_its_owners_alone(model, tmp_path, alone):
    folder = tmp_path / "one"
    folder.mkdir(mode=0o755)
    with Run(config_of(model, tmp_path), kind="sample"):
        assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("before", [None, b"", b"\xff\xfe", b"\0" * 16, b"0123456789abcdef\n"])
def test_a_run_has_one_id(before, model, tmp_path, alone):
    """Also one of a release without ids, and one whose file a power cut has damaged."""
    file = tmp_path / "one" / "run_id"
    (file.parent / "checkpoints" / "step_000003").mkdir(parents=True)
    if before is not None:
        file.write_bytes(before)
    with Run(config_of(model, tmp_path), kind="train") as run:
        assert re.fullmatch("[0-9a-f]{16}", run.id) and file.read_text().strip() == run.id
        assert not before or len(before) != 17 or run.id == "0123456789abcdef"


def test_a_key_that_is_not_there_is_told_before_a_server_starts(model, tmp_path, monkeypatch, capsys, alone):
    monkeypatch.delenv("NOT_SET_HERE", raising=False)
    wrong = {
        "rewards.models.helpful.api_key": {
            "rewards": {"models": {"helpful": {"address": "x:1", "api_key": "env:NOT_SET_HERE"}}}
        },
        "distillation.api_key": {
            "distillation": {"address": "x:1", "api_key": "env:NOT_SET_HERE", "placement": "advantage"}
        },
    }
    for key, section in wrong.items():
        with pytest.raises(UserError, match=f"config: {key}: the environment variable NOT_SET_HERE is not set"):
            Run(config_of(model, tmp_path, **section), kind="train")


def test_an_error_is_one_line_without_passwords(monkeypatch, capsys):
    def fail(*_):
        raise UserError("http://user:hunter2@host:1: 400, message:\n  Expected HTTP/\n    ^")

    monkeypatch.setattr("megatron_rl.cli._dispatch", fail)
    assert main(["doctor"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "http://<hidden>@host:1" in line and "hunter2" not in line


def test_the_program_leaves_the_umask_of_its_caller(tmp_path):
    before = os.umask(0o022)
    try:
        for arguments in (["train", str(tmp_path / "none.yaml")], ["convert", str(tmp_path), str(tmp_path / "out")]):
            assert main(arguments) == 2
            assert os.umask(0o022) == 0o022
    finally:
        os.umask(before)


def test_ctrl_c_says_what_is_saved(model, tmp_path, capsys, alone):
    with pytest.raises(KeyboardInterrupt), Run(config_of(model, tmp_path), kind="train") as run:
        raise KeyboardInterrupt
    assert "interrupted in step 1: there is no checkpoint, and the same command starts again" in capsys.readouterr().out
    parallel.shutdown()  # an interrupted process ends here
    (tmp_path / "one" / "checkpoints" / "step_000003").mkdir(parents=True)
    with pytest.raises(KeyboardInterrupt), Run(config_of(model, tmp_path), kind="train") as run:
        run.step += 2
        raise KeyboardInterrupt
    out = capsys.readouterr().out
    assert (
        "interrupted in step 6: the newest checkpoint is of step 3; later steps are lost. The same command resumes"
        in out
    )


def test_changed_keys(tmp_path):
    file = tmp_path / "config.yaml"
    before = config_of(
        tmp_path, tmp_path, optimizer={"lr": 1e-3}, data={"task": "number_sorting", "options": {"size": 3}}
    )
    now = to_yaml(config_of(tmp_path, tmp_path, seed=7, eval={"prompts": 0, "every": 2}))
    assert changed_keys(file, now) == [], "no file yet"
    file.write_text(to_yaml(before).replace("samples_per_prompt:", "samples_of_a_prompt:"))
    found = changed_keys(file, now)
    assert "seed: 0 -> 7" in found and "eval.every: 0 -> 2" in found
    assert "batch.samples_per_prompt: absent -> 4" in found and "batch.samples_of_a_prompt: 4 -> absent" in found
    assert any(line.startswith("optimizer.lr: 0.001 -> ") for line in found)
    file.write_text("{broken")
    assert changed_keys(file, now) == []


@pytest.mark.parametrize("kind", ["proc", "file"])
def test_an_unusable_folder_is_one_line(kind, model, tmp_path, capsys, alone):
    (tmp_path / "file").write_text("")
    runs = {"proc": "/proc/foo", "file": str(tmp_path / "file")}[kind]
    config = tmp_path / "config.yaml"
    config.write_text(to_yaml(config_of(model, tmp_path)))
    assert main(["train", str(config), "--runs_dir", runs]) == 2
    [line] = capsys.readouterr().err.strip().splitlines()
    assert line.startswith(f"megatron-rl: error: run folder {runs}/one: ") and "set runs_dir" in line


def test_a_context_in_which_nothing_fits_starts_no_server(model, tmp_path, capsys, alone):
    config = tmp_path / "config.yaml"
    config.write_text(to_yaml(config_of(model, tmp_path, rollout={"context_length": 9, "max_new_tokens": 8})))
    assert main(["train", str(config)]) == 2
    [line] = capsys.readouterr().err.strip().splitlines()
    assert "none of the " in line and "in rollout.context_length 9: raise rollout.context_length" in line
    assert not (tmp_path / "one" / "sglang.log").exists()


def test_an_evaluation_without_held_out_prompts_is_refused(model, tmp_path, capsys, alone):
    config = tmp_path / "config.yaml"
    config.write_text(to_yaml(config_of(model, tmp_path, rollout={"context_length": 32, "max_new_tokens": 8})))
    assert main(["eval", str(config)]) == 2
    [line] = capsys.readouterr().err.strip().splitlines()
    assert "no held-out prompts" in line and not (tmp_path / "one" / "sglang.log").exists()


def test_the_best_checkpoint_stays_beside_the_newest(model, tmp_path, capsys, alone):
    config = config_of(model, tmp_path, checkpoint={"every": 1, "keep": 1, "keep_best": 1})
    with Run(config, kind="train") as run:
        run.build()
        for step, score in ((1, 0.2), (2, 0.9), (3, 0.4), (4, None)):
            run.step = step
            if score is not None:
                run.scores[step] = score
            run.save()
    kept = sorted(path.name for path in (tmp_path / "one" / "checkpoints").iterdir())
    assert kept == ["step_000002", "step_000004"]
    assert "best checkpoint: step 2, eval/score 0.9" in capsys.readouterr().out
    with Run(config, kind="train") as run:
        run.build()
        assert run.step == 4 and run.scores == {1: 0.2, 2: 0.9, 3: 0.4}
