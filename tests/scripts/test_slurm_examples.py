"""The SLURM examples: their configs are valid for the processes that they start, and wrong use is told in one line."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl.cli import main
from megatron_rl.config import job_name
from megatron_rl.config.load import key_paths, load_config
from megatron_rl.config.plan import make_plan
from megatron_rl.run.slurm import seconds_of

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPTS = sorted((REPOSITORY / "examples" / "slurm").glob("*.sbatch"))


def option(script: Path, name: str) -> str:
    return re.search(rf"^#SBATCH --{name}=(\S+)$", script.read_text(), re.MULTILINE)[1]


def test_there_is_a_script_for_each_model_and_task():
    gpt_oss = [f"gpt-oss-{size}-{task}" for size in ("120b", "20b") for task in ("gsm8k", "retool", "verifyif")]
    others = ["moonlight-16b-a3b", "olmoe-1b-7b", "qwen3-14b-dvp", "qwen3-30b-a3b-vp2o", "qwen3-30b-a3b"]
    assert [s.stem for s in SCRIPTS] == [*gpt_oss, *others]


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
        "rollout.address_folder",
        "rollout.server.count",
        "rollout.server.start_timeout_s",
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
    functions = re.findall(r"^(?:newest|finished)\(\).*?^}$", common, re.MULTILINE | re.DOTALL)
    assert len(functions) == 2
    command = ["bash", "-euo", "pipefail", "-c", "\n".join([*functions, 'finished "$1"']), "-", str(tmp_path)]
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
            ["bash", str(REPOSITORY / "examples" / "slurm" / "task.sh"), role, str(tmp_path), "config", "0", "0"],
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
if [[ $1 == requeue ]]; then # which ends the script
    echo requeued >>"$LOGGED"
    kill -KILL $PPID
fi
[[ $2 != hostnames ]] || printf 'node%s\\n' $(seq 0 $((NODES - 1)))
[[ $2 != node ]] || echo "NodeName=$3 NodeAddr=127.0.0.1 State=UP"
"""
TRAINER = """#!/usr/bin/env bash
echo "rank $RANK of $WORLD_SIZE, $LOCAL_WORLD_SIZE here: $*"
for ((i = 0; i < 1200; i++)); do # while the other steps start, on a machine however busy
    (($(wc -l <"$LOGGED") < ${STEPS:-1})) || break
    ! grep -q "${UNTIL:-nothing}" "$SAID" || break
    sleep 0.1
done
[[ -z ${MAKES:-} ]] || { mkdir -p "$(dirname "$MAKES")" && sleep 0.1 && touch "$MAKES"; }
[[ -z ${SAVES:-} ]] || mkdir -p "$SAVES"
exit ${STATUS:-0}
"""
SLEEP = """#!/usr/bin/env bash
# Here a cluster's seconds are a twentieth.
[[ $1 == *[!0-9]* ]] || set -- "$(printf '%d.%03d' $(($1 / 20)) $(($1 % 20 * 50)))"
exec /bin/sleep "$1"
"""


def submit(
    tmp_path: Path, *arguments: str, script: Path | None = None, **variables: str
) -> tuple[subprocess.CompletedProcess, list[str], str]:
    """Run a script with stand-ins for SLURM's commands and for the trainer: what it says, its steps, the trainer's log."""
    checkout, model = tmp_path / "checkout", tmp_path / "model"
    programs = {"srun": SRUN, "scontrol": SCONTROL, "sleep": SLEEP}
    files = {f"bin/{name}": text for name, text in programs.items()} | {"checkout/.venv/bin/megatron-rl": TRAINER}
    for file, text in files.items():
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    python = checkout / ".venv" / "bin" / "python"
    if not python.exists():  # the environment's, by a script: through a link it would not know its packages
        python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        python.chmod(0o755)
    for name in ("examples", "configs"):
        if not (checkout / name).exists():
            (checkout / name).symlink_to(REPOSITORY / name)
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text("{}")
    environment = {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "LOGGED": str(tmp_path / "steps"),
        "SAID": str(tmp_path / "said"),
        "MODEL": str(model),
        "SLURM_JOB_ID": "1",
        "SLURM_JOB_NAME": "job",
        "SLURM_JOB_NODELIST": "all",
        "SLURM_CPUS_ON_NODE": "32",
        "SLURM_SUBMIT_DIR": str(checkout),
        "SLURM_GPUS_ON_NODE": "8",
        "NODES": "1",
        "SERVER_RESTARTS": "0",  # there is no SGLang, so that each server's step ends at once: it is counted once
    }
    script = script or next(s for s in SCRIPTS if s.stem == "olmoe-1b-7b")
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    with open(environment["SAID"], "w") as said:
        done = subprocess.run(
            ["bash", str(script), *arguments],
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
            timeout=200,
            env=clean | environment | variables,
        )
    done.stderr = Path(environment["SAID"]).read_text()
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
    assert said.endswith(settings), "an argument of the user's comes after the script's own"


def test_more_gpus_than_the_node_has_are_refused(tmp_path):
    done, steps, _ = submit(tmp_path, TRAIN_GPUS="9")
    assert done.returncode == 1 and not steps
    assert "TRAIN_GPUS=9 of the node's 8" in done.stderr


@pytest.mark.parametrize(("nodes", "training"), [(2, 1), (3, 1), (4, 2)])
def test_half_of_several_nodes_train_and_each_server_is_a_step(tmp_path, nodes, training):
    servers = (nodes - training) * 4
    done, steps, said = submit(tmp_path, NODES=str(nodes), SERVER_GPUS="2", STEPS=str(servers + 1))
    assert done.returncode == 0, done.stdout + done.stderr
    serving = [step for step in steps if " serve " in step]
    places = {
        re.search(r"--nodes=1 .*--nodelist=(node\d) .* (\d+) (\d) --model.path", step).groups() for step in serving
    }
    assert places == {(f"node{training + i // 4}", str(i), str(i % 4)) for i in range(servers)}
    assert f"rank 0 of {training * 8}, 8 here: train " in said and f"--rollout.server.count {servers} " in said
    assert f"--rollout.address_folder {tmp_path}/checkout/logs/job-1/attempt-0 " in said and "colocate" not in said


def test_the_nodes_that_serve_may_have_another_number_of_gpus(tmp_path):
    """As component 1 of a heterogeneous job: SLURM's count is of component 0."""
    groups = {f"SLURM_JOB_NODELIST_HET_GROUP_{group}": "all" for group in (0, 1)}
    variables = {"SLURM_HET_SIZE": "2", "SERVER_NODE_GPUS": "4", "SERVER_GPUS": "2", "NODES": "1", "STEPS": "3"}
    done, steps, said = submit(tmp_path, **groups, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    serving = [step for step in steps if " serve " in step]
    assert len(serving) == 2 and all("--het-group=1 --gpus-per-node=4 " in step for step in serving)
    training = [step for step in steps if " serve " not in step]
    assert len(training) == 1 and "--het-group=0 --gpus-per-node=8 " in training[0]
    assert "rank 0 of 8, 8 here" in said and "--rollout.server.count 2 " in said


def test_a_server_of_several_nodes_is_one_step(tmp_path):
    done, steps, _ = submit(tmp_path, NODES="6", TRAIN_NODES="2", SERVER_GPUS="16", STEPS="3")
    assert done.returncode == 0, done.stdout + done.stderr
    lists = sorted(re.search(r"--nodes=2 --ntasks=2 .*--nodelist=(\S+)", s)[1] for s in steps if " serve " in s)
    assert lists == ["node2,node3", "node4,node5"]
    done, *_ = submit(tmp_path, NODES="6", TRAIN_NODES="3", SERVER_GPUS="16")
    assert "SERVER_GPUS=16 is 2 nodes a server, which do not divide the 3 that serve" in done.stderr


def test_a_server_that_ends_is_started_again_and_the_trainer_goes_on(tmp_path):
    """There is no SGLang here, so that it ends at once. The trainer ends when the one that is given up has been told of."""
    done, steps, _ = submit(tmp_path, NODES="2", SERVER_GPUS="8", STEPS="4", SERVER_RESTARTS="5")
    assert done.returncode == 0, done.stdout + done.stderr
    assert sum(" serve " in step for step in steps) >= 3 and sum(" train " in step for step in steps) == 1
    assert re.search(r"server 0 ended with status \d+ .*: started again", done.stdout)
    again = tmp_path / "again"
    again.mkdir()
    given_up = "server 0 ended 1 times in a row: not started again"
    tried = submit(again, NODES="2", SERVER_GPUS="8", STEPS="3", UNTIL=given_up)[0]
    assert given_up in tried.stderr


def test_a_failure_is_requeued_as_long_as_the_run_gets_on(tmp_path):
    checkpoints = tmp_path / "checkout" / "runs" / "olmoe-1b-7b" / "checkpoints"
    for attempt, saves in enumerate(["", "", "step_000010", "", ""]):
        variables = {"SAVES": str(checkpoints / saves)} if saves else {}
        done, steps, _ = submit(tmp_path, STATUS="3", SLURM_RESTART_COUNT=str(attempt), **variables)
        assert done.returncode != 0 and steps[-1] == "requeued", f"attempt {attempt}: {done.stdout}{done.stderr}"
        assert "the trainer ended with status 3" in done.stdout and "requeueing job 1" in done.stdout
    done, steps, _ = submit(tmp_path, STATUS="3", SLURM_RESTART_COUNT="5")
    assert done.returncode == 1 and steps[-1] != "requeued"
    assert "3 attempts in a row ended without a new checkpoint (MAX_FAILURES): not requeued" in done.stderr


def test_what_a_person_has_to_mend_is_not_requeued(tmp_path):
    done, steps, _ = submit(tmp_path, STATUS="2")
    assert done.returncode == 1 and "requeued" not in steps
    assert "the trainer ended with status 2: see" in done.stderr
    steps_made = str(tmp_path / "checkout" / "runs" / "olmoe-1b-7b" / "metrics.jsonl")  # of this attempt
    done, steps, _ = submit(tmp_path, STATUS="2", MAKES=steps_made)
    assert done.returncode != 0 and steps[-1] == "requeued", "all servers may be lost in a run that went well"


@pytest.mark.parametrize("command", ["sft", "reward", "dpo"])
def test_what_learns_from_data_has_all_nodes_and_no_servers(tmp_path, command):
    done, steps, said = submit(tmp_path, "--steps", "3", NODES="4", COMMAND=command)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(steps) == 1 and "--nodes=4 --ntasks=32" in steps[0]
    assert f"rank 0 of 32, 8 here: {command} " in said and "address" not in said


# -- megatron-rl launch slurm ------------------------------------------------------------------------------------------


def launch(capsys, *arguments: str) -> str:
    """The script that it prints, or its error."""
    capsys.readouterr()
    status = main(["launch", "slurm", *arguments, "--dry-run"])
    out, error = capsys.readouterr()
    return out if status == 0 else error


def test_blanks_in_a_name_are_no_options_of_sbatch(tiny_model, capsys):
    config = str(REPOSITORY / "configs" / "olmoe-1b-7b.yaml")
    text = launch(capsys, config, "--nodes", "4", "--model.path", str(tiny_model("olmoe")), "--name", "all/läuf 1 (ß)")
    [line] = [line for line in text.splitlines() if "job-name" in line]
    assert shlex.split(line, comments=False) == ["#SBATCH", "--job-name=all-läuf 1 (ß)"]


@pytest.mark.parametrize(
    "name",
    [
        "a #b",
        "läuf \u2028 # y",
        "it's",
        'say "x"',
        "$(id) `id`",
        "a\\b \\",
        "%x-%j {a} *",
        "; exit 1",
        "x/$HOME/!y",
        "'\"'#",
    ],
)
def test_a_script_quotes_the_names_of_runs(tiny_model, tmp_path, capsys, name):
    """Given in the file or as a flag; read as bash reads it, and its options as sbatch does: with quotes and backslashes."""
    model, path = str(tiny_model("olmoe")), tmp_path / f"{job_name(name)}.yaml"
    path.write_text(
        (REPOSITORY / "configs" / "olmoe-1b-7b.yaml").read_text() + f"runs_dir: {json.dumps(str(tmp_path / name))}\n"
    )
    lines = []
    for flags in (["--name", name], [f"--name={name}", "--data.template", f"{name}\n{{prompt}} "], []):
        text = launch(capsys, str(path), "--nodes", "4", "--model.path", model, *flags)
        script = tmp_path / "job.sbatch"
        script.write_text(text)
        done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0 and not done.stderr
        [option] = [line for line in text.split("\n") if line.startswith("#SBATCH --job-name")]
        wanted = job_name(name) if flags else "olmoe-1b-7b"
        assert shlex.split(option, comments=False) == ["#SBATCH", f"--job-name={wanted}"] and "\\" not in option
        body = text[text.index("set -euo pipefail") :].replace(text[text.index("source ") : text.index("run_job")], "")
        shown = 'run_job() { printf \'%s\\0\' "$CONFIG" "$MODEL" "$@"; }\n' + body
        said = subprocess.run(
            ["bash", "-c", shown, "job"], capture_output=True, text=True, timeout=60, check=True
        ).stdout
        found = said.split("\0")[:-1]
        runs = ["--runs_dir", str(tmp_path / name), "--model.path", model]
        assert found == [str(path), model, "--model.path", model, *flags, *runs]
        comments = [line for line in text.split("\n") if line.startswith("#")]
        lines.append([re.sub("^# .*", "#", line).partition("=")[0] for line in comments])
    assert lines[0] == lines[1] == lines[2], "no name is an option of its own"


def test_the_script_of_a_config_does_what_an_example_does(tmp_path, tiny_model, capsys):
    config, model = str(REPOSITORY / "configs" / "olmoe-1b-7b.yaml"), tiny_model("olmoe")
    arguments = [config, "--nodes", "4", "--gpus-per-node", "8", "--server-gpus", "2", "--model.path", str(model)]
    text = launch(capsys, *arguments, "--time", "2-12:00:00", "--account", "lab", "--option=--qos=high", "--steps", "7")
    for line in (
        "job-name=olmoe-1b-7b",
        "nodes=4",
        "gpus-per-node=8",
        "time=2-12:00:00",
        "signal=B:USR1@600",
        "requeue",
    ):
        assert f"#SBATCH --{line}\n" in text
    assert "#SBATCH --account=lab\n" in text and "#SBATCH --qos=high\n" in text
    script = tmp_path / "job.sbatch"
    script.write_text(text)
    checked = [str(REPOSITORY / ".venv" / "bin" / "shellcheck"), "--external-sources", str(script)]
    done = subprocess.run(checked, capture_output=True, text=True, timeout=60, cwd=REPOSITORY)
    assert done.returncode == 0, done.stdout
    done, steps, said = submit(tmp_path, "--seed", "5", script=script, NODES="4", MODEL="", STEPS="9")
    assert done.returncode == 0, done.stdout + done.stderr
    assert sum(" serve " in step for step in steps) >= 8 and "rank 0 of 16, 8 here: train " in said
    runs = f"--runs_dir {Path('runs').resolve()} --model.path {model}"
    assert f"train {config} --model.path {model} " in said and said.endswith(f"--steps 7 {runs} --seed 5")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nodes", "2", "--time", "soon"], "--time soon has none of SLURM's forms"),
        (["--nodes", "2", "--time", "10"], "leaves less time to train than --grace 600 s to save"),
        (["--nodes", "0"], "--nodes 0 --gpus-per-node 8: --nodes must be at least 1"),
        (["--nodes", "2", "--train-nodes", "2"], "--train-nodes 2 of --nodes 2 leaves no node for SGLang servers"),
        (["--nodes", "4", "--server-gpus", "3"], "--server-gpus 3 does not split the 8 GPUs of a node"),
        (["--nodes", "4", "--parallel.tensor", "3"], "parallel.tensor x pipeline x context = 3 does not divide the 16"),
        (["--nodes", "4", "--batch.samples_per_prompt", "1"], "batch.samples_per_prompt = 1 leaves no other response"),
        (["--nodes", "4", "--option=--qos=high\nid"], "option '--qos=high\\nid' contains a line break"),
        (["--nodes", "4", "--account", "lab\nid"], "contains a line break"),
        (["--nodes", "4", "--name", "a\n#SBATCH --uid=0"], "a run's name has at most 200 bytes and no control"),
        (["--nodes", "4", "--model.path", "nowhere"], "model.path = nowhere: does not exist"),
    ],
)
def test_what_would_fail_on_the_cluster_is_told_at_once(tiny_model, capsys, arguments, message):
    config = str(REPOSITORY / "configs" / "olmoe-1b-7b.yaml")
    said = launch(capsys, config, "--model.path", str(tiny_model("olmoe")), *arguments)
    assert message in said and len(said.splitlines()) == 1, said


@pytest.mark.parametrize(
    ("time", "seconds"),
    [("90", 5400), ("90:30", 5430), ("2:00:00", 7200), ("3-0", 259200), ("1-12:30", 131400), ("1-00:00:05", 86405)],
)
def test_times_are_those_of_slurm(time, seconds):
    assert seconds_of(time) == seconds
