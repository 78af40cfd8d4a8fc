"""The SLURM examples: their configs are valid for the processes that they start, and wrong use is told in one line."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from megatron_rl.config_file import key_paths, load_config
from megatron_rl.launch.plan import make_plan

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPTS = sorted((REPOSITORY / "examples" / "slurm").glob("*.sbatch"))


def option(script: Path, name: str) -> str:
    return re.search(rf"^#SBATCH --{name}=(\S+)$", script.read_text(), re.MULTILINE)[1]


def test_there_is_a_script_for_each_model_and_task():
    gpt_oss = [f"gpt-oss-{size}-{task}" for size in ("120b", "20b") for task in ("gsm8k", "retool", "verifyif")]
    assert [s.stem for s in SCRIPTS] == [*gpt_oss, "moonlight-16b-a3b", "olmoe-1b-7b", "qwen3-30b-a3b"]


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
        "rollout.colocate",
        "sync.transport",
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
    ("checkpoints", "status"),
    [
        ([], 1),
        (["step_000002"], 1),
        (["step_000002", "step_000003.tmp"], 1),  # killed while it saved
        (["step_000002", "step_000003"], 0),
    ],
)
def test_a_run_whose_last_step_is_saved_is_finished(checkpoints, status, tmp_path):
    """Any other is requeued when SLURM ends the job, also where the last step is in the log."""
    (tmp_path / "config.yaml").write_text("steps: 3\n")
    (tmp_path / "metrics.jsonl").write_text('{"step": 2}\n{"step": 3}\n')
    for name in checkpoints:
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
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


SRUN = """#!/usr/bin/env bash
# Notes what would run where, and how the process at the head of the step would see it.
printf '%s\\n' "$*" >>"$LOGGED"
while [[ $1 == --* ]]; do
    [[ $1 != --ntasks=* ]] || export SLURM_NTASKS=${1#*=}
    [[ $1 != --nodes=* ]] || export SLURM_STEP_NUM_NODES=${1#*=}
    shift
done
SLURM_PROCID=0 SLURM_LOCALID=0 SLURMD_NODENAME=node0 GLOO_SOCKET_IFNAME=lo "$@"
"""
SCONTROL = """#!/usr/bin/env bash
[[ $2 != hostnames ]] || printf 'node%s\\n' $(seq 0 $((NODES - 1)))
[[ $2 != node ]] || echo "NodeName=$3 NodeAddr=127.0.0.1 State=UP"
"""
TRAINER = """#!/usr/bin/env bash
echo "rank $RANK of $WORLD_SIZE, $LOCAL_WORLD_SIZE here: $*"
"""


def submit(tmp_path: Path, *arguments: str, **variables: str) -> tuple[subprocess.CompletedProcess, list[str], str]:
    """Run a script with stand-ins for SLURM's commands and for the trainer: what it says, its steps, the trainer's log."""
    checkout, model = tmp_path / "checkout", tmp_path / "model"
    for file, text in (("bin/srun", SRUN), ("bin/scontrol", SCONTROL), ("checkout/.venv/bin/megatron-rl", TRAINER)):
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    for name in ("examples", "configs"):
        (checkout / name).symlink_to(REPOSITORY / name)
    model.mkdir()
    (model / "config.json").write_text("{}")
    environment = {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "LOGGED": str(tmp_path / "steps"),
        "MODEL": str(model),
        "SLURM_JOB_ID": "1",
        "SLURM_JOB_NAME": "job",
        "SLURM_JOB_NODELIST": "all",
        "SLURM_CPUS_ON_NODE": "32",
        "SLURM_SUBMIT_DIR": str(checkout),
        "SLURM_GPUS_ON_NODE": "8",
        "NODES": "1",
    }
    script = next(s for s in SCRIPTS if s.stem == "olmoe-1b-7b")
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    done = subprocess.run(
        ["bash", str(script), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env=clean | environment | variables,
    )
    steps, log = tmp_path / "steps", checkout / "logs" / "job-1" / "attempt-0" / "trainer-%t.log"
    said = re.search(r"rank .*", done.stdout)  # the stand-in of srun writes to no log
    assert not log.exists()
    return done, steps.read_text().splitlines() if steps.exists() else [], said[0] if said else ""


@pytest.mark.parametrize(
    ("variables", "processes", "settings"),
    [
        ({}, 8, "--rollout.server.tensor 1 --rollout.colocate true --sync.transport tensor --steps 3"),
        ({"TRAIN_GPUS": "4", "SERVER_GPUS": "2"}, 4, "--rollout.server.tensor 2 --sync.transport tensor --steps 3"),
    ],
)
def test_on_one_node_the_trainer_starts_its_servers(tmp_path, variables, processes, settings):
    done, steps, said = submit(tmp_path, "--steps", "3", **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(steps) == 1 and f"--nodes=1 --ntasks={processes} --ntasks-per-node={processes}" in steps[0]
    assert said.startswith(f"rank 0 of {processes}, {processes} here: train ")
    assert f"{settings} --rollout.addresses []" in said, "an argument of the user's comes after the script's own"


def test_more_gpus_than_the_node_has_are_refused(tmp_path):
    done, steps, _ = submit(tmp_path, TRAIN_GPUS="9")
    assert done.returncode == 1 and not steps
    assert "TRAIN_GPUS=9 of the node's 8" in done.stderr


@pytest.mark.parametrize(("nodes", "training"), [(2, 1), (3, 1), (4, 2), (8, 4)])
def test_half_of_several_nodes_train(tmp_path, nodes, training):
    done, steps, _ = submit(tmp_path, NODES=str(nodes))
    assert done.returncode == 1 and "server 0 ended before it was ready" in done.stderr, "there is no SGLang here"
    assert f"--nodes={nodes - training} " in steps[0] and " serve " in steps[0]
    assert "rollout.colocate" not in steps[0]
