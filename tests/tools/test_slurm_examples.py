"""The SLURM examples: their configs are valid for the processes that they start, and wrong use is told in one line."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from megatron_rl.config import key_paths, load_config
from megatron_rl.plan import make_plan

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPTS = sorted((REPOSITORY / "examples" / "slurm").glob("*.sbatch"))


def option(script: Path, name: str) -> str:
    return re.search(rf"^#SBATCH --{name}=(\S+)$", script.read_text(), re.MULTILINE)[1]


def test_there_is_a_script_for_each_of_the_four_models():
    assert [s.stem for s in SCRIPTS] == ["gpt-oss-20b", "moonlight-16b-a3b", "olmoe-1b-7b", "qwen3-30b-a3b"]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda s: s.stem)
def test_config_fits_the_nodes_that_are_asked_for(script):
    config = load_config(REPOSITORY / "configs" / f"{script.stem}.yaml")
    assert f"configs/{script.stem}.yaml" in script.read_text()
    assert config.name == option(script, "job-name") == script.stem
    gpus = int(option(script, "gpus-per-node"))
    plan = make_plan(config.batch, config.parallel, int(option(script, "nodes")) // 2 * gpus)
    assert plan.trajectories_per_update >= plan.data_parallel
    server_gpus = int(re.search(r"SERVER_GPUS:=(\d+)", script.read_text())[1])
    assert gpus % server_gpus == 0
    rollout = config.rollout
    assert (
        rollout.max_new_tokens < rollout.context_length <= config.batch.tokens_per_micro_batch * config.parallel.context
    )


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda s: s.stem)
def test_the_run_survives_its_time_limit(script):
    config = load_config(REPOSITORY / "configs" / f"{script.stem}.yaml")
    text = script.read_text()
    assert "#SBATCH --requeue" in text and re.search(r"^#SBATCH --signal=B:USR1@\d+$", text, re.MULTILINE)
    assert config.checkpoint.every > 0


def test_keys_on_the_scripts_command_lines_exist():
    text = (REPOSITORY / "examples" / "slurm" / "common.sh").read_text()
    used = set(re.findall(r"--([a-z_]+(?:\.[a-z_]+)+|runs_dir)\b", text)) - {"section.key"}
    assert used == {
        "model.path",
        "runs_dir",
        "rollout.server.tensor",
        "data.path",
        "data.eval_path",
        "rollout.addresses",
    }
    assert used <= set(key_paths())


def run(script: Path, **environment: str) -> subprocess.CompletedProcess:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "MODEL"))}
    return subprocess.run(
        ["bash", str(script)], capture_output=True, text=True, timeout=60, env=clean | environment, cwd=REPOSITORY
    )


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({}, "submit this with sbatch"),
        ({"SLURM_JOB_ID": "1"}, "set MODEL to the Hugging Face folder"),
        ({"SLURM_JOB_ID": "1", "MODEL": "m", "SLURM_SUBMIT_DIR": "elsewhere"}, "submit this from the checkout's root"),
        ({"SLURM_JOB_ID": "1", "MODEL": "nowhere"}, "MODEL=nowhere has no config.json"),
    ],
)
def test_wrong_use_is_told_at_once(tmp_path, environment, message):
    if "SLURM_SUBMIT_DIR" not in environment:
        (tmp_path / "examples").symlink_to(REPOSITORY / "examples")
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "megatron-rl").write_text("")
    (tmp_path / ".venv" / "bin" / "megatron-rl").chmod(0o755)
    done = run(SCRIPTS[0], **{"SLURM_SUBMIT_DIR": str(tmp_path), **environment})
    assert done.returncode != 0 and message in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and len(done.stderr.strip().splitlines()) <= 2


@pytest.mark.parametrize(
    ("log", "status"),
    [
        (None, 1),
        ('{"step": 2}\n', 1),
        ('{"step": 2}\n{"step": 3, "rewa', 1),  # killed while it wrote
        ('{"step": 2}\n{"step": 3}\n', 0),
    ],
)
def test_a_run_whose_log_has_its_last_step_is_finished(log, status, tmp_path):
    """Any other is requeued when SLURM ends the job."""
    (tmp_path / "config.yaml").write_text("steps: 3\n")
    if log is not None:
        (tmp_path / "metrics.jsonl").write_text(log)
    common = (REPOSITORY / "examples" / "slurm" / "common.sh").read_text()
    [function] = re.findall(r"^finished\(\).*?^}$", common, re.MULTILINE | re.DOTALL)
    command = ["bash", "-c", f'{function}\nfinished "$1"', "-", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=REPOSITORY)
    assert (done.returncode, done.stderr) == (status, "")


@pytest.mark.parametrize("given", [None, "1"])
def test_server_and_trainer_have_the_same_nccl_setting(tmp_path, given):
    """Each role of task.sh, with programs in the place of SLURM's and the trainer's that print their environment."""
    programs = {
        "scontrol": "echo NodeAddr=127.0.0.1",
        "python": "echo $NCCL_CUMEM_ENABLE",
        "megatron-rl": "echo $NCCL_CUMEM_ENABLE",
    }
    for name, line in programs.items():
        program = tmp_path / ".venv" / "bin" / name
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(f"#!/bin/sh\n{line}\n")
        program.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name != "NCCL_CUMEM_ENABLE"}
    environment |= {"PATH": f"{tmp_path / '.venv' / 'bin'}:{os.environ['PATH']}", "GLOO_SOCKET_IFNAME": "lo"}
    environment |= {"SLURMD_NODENAME": "n", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "1"}
    environment |= {"NCCL_CUMEM_ENABLE": given} if given else {}
    said = [
        subprocess.run(
            ["bash", str(REPOSITORY / "examples" / "slurm" / "task.sh"), role, str(tmp_path), "config"],
            capture_output=True,
            text=True,
            timeout=60,
            env=environment,
            cwd=tmp_path,
            check=True,
        ).stdout
        for role in ("serve", "train")
    ]
    assert said == [f"{given or 0}\n"] * 2
