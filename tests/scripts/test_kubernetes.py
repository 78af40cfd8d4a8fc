"""`launch kubernetes` and `launch skypilot`: the objects are valid, and their pods' commands train, stop and resume."""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubeflow_trainer_api.models import JobsetV1alpha2JobSet

from megatron_rl.cli import main
from megatron_rl.config import Config
from megatron_rl.config.load import build_config, dump_yaml, load_config, parse_yaml
from megatron_rl.metrics.logger import read_json_lines
from megatron_rl.run.kubernetes import NAME_LENGTH, object_name
from megatron_rl.servers.server import reserve_port
from tests.preloaded import PYTHON_WITH_TRAINER

REPOSITORY = Path(__file__).resolve().parents[2]
CONFIG = str(REPOSITORY / "configs" / "olmoe-1b-7b.yaml")
MODEL = ["--model.path", "/shared/olmoe"]
KUBERNETES = ["--image", "registry/megatron_rl:1", "--pvc", "models"]
SKYPILOT = ["--accelerator", "H100", "--volume", "models"]
PROMETHEUS = "--logging.prometheus_port 9100 --logging.prometheus_address 0.0.0.0 --logging.prometheus_api_key env:KEY"


def launch(capsys, *arguments: str, config: str = CONFIG) -> list[dict[str, Any]] | str:
    """The documents that it prints, or its error."""
    capsys.readouterr()
    status = main(["launch", arguments[0], config, *arguments[1:]])
    out, error = capsys.readouterr()
    return [*yaml.safe_load_all(out)] if status == 0 else error


def kubernetes(capsys, *arguments: str, config: str = CONFIG) -> dict[str, dict[str, Any]]:
    """Objects by their kind."""
    found = launch(capsys, "kubernetes", *KUBERNETES, *MODEL, *arguments, "--dry-run", config=config)
    assert not isinstance(found, str), found
    return {one["kind"]: one for one in found}


def containers(jobset: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The container of each replicated job, by its name."""
    return {
        job["name"]: job["template"]["spec"]["template"]["spec"]["containers"][0]
        for job in jobset["spec"]["replicatedJobs"]
    }


@pytest.mark.parametrize(
    ("arguments", "pods", "gpus"),
    [
        ("--nodes 4 --server-gpus 2", {"trainer": (1, 2), "servers": (8, 1)}, (8, 2)),
        ("--nodes 1", {"trainer": (1, 1)}, (8,)),
        ("--nodes 6 --train-nodes 2 --server-gpus 16 --secret keys", {"trainer": (1, 2), "servers": (2, 2)}, (8, 8)),
        (f"--nodes 4 {PROMETHEUS}", {"trainer": (1, 2), "servers": (16, 1)}, (8, 1)),
        ("--nodes 4 --namespace rl --queue q", {"trainer": (1, 2), "servers": (16, 1)}, (8, 1)),
    ],
)
def test_a_jobset_is_valid_and_has_a_pod_for_each_node_and_server(capsys, arguments, pods, gpus):
    """The models of kubeflow-trainer-api refuse wrong types, and drop fields that a JobSet and its pods do not have."""
    found = kubernetes(capsys, *arguments.split())
    jobset = found["JobSet"]
    assert JobsetV1alpha2JobSet.from_dict(jobset).to_dict() == jobset
    jobs = {job["name"]: job for job in jobset["spec"]["replicatedJobs"]}
    specs = {name: job["template"]["spec"] for name, job in jobs.items()}
    assert {name: (job["replicas"], specs[name]["completions"]) for name, job in jobs.items()} == pods
    assert tuple(one["resources"]["limits"]["nvidia.com/gpu"] for one in containers(jobset).values()) == gpus
    config = build_config(parse_yaml(found["ConfigMap"]["data"]["config.yaml"]))
    assert config.runs_dir == "/shared/runs" and config.model.path == "/shared/olmoe"
    assert config.rollout.colocate == ("servers" not in jobs)
    if "servers" in jobs:
        assert config.rollout.server.count == pods["servers"][0]
    assert ("Service" in found) == ("prometheus" in arguments)
    for one in containers(jobset).values():
        named = {variable["name"] for variable in one["env"]} | {"JOB_COMPLETION_INDEX"}
        assert {*re.findall(r"\$\((\w+)\)", str(one))} <= named
        for probe in ("startupProbe", "livenessProbe"):  # Kubernetes puts variables into no command of a probe
            assert "$(" not in str(one.get(probe))
            assert (probe in one) == (one["command"][1] == "tools/serve.py" and pods["servers"][1] == 1)


def test_a_preempted_run_resumes_and_a_mistake_does_not(capsys):
    spec = kubernetes(capsys, "--nodes", "4", "--max-restarts", "7", "--grace", "90")["JobSet"]["spec"]
    assert spec["failurePolicy"]["maxRestarts"] == 7 and spec["successPolicy"]["targetReplicatedJobs"] == ["trainer"]
    [rule] = spec["failurePolicy"]["rules"]
    assert rule["action"] == "FailJobSet" and rule["onJobFailureReasons"] == ["PodFailurePolicy"]
    trainer, servers = (job["template"]["spec"] for job in spec["replicatedJobs"])
    assert trainer["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"] == [2] and trainer["backoffLimit"] == 0
    assert trainer["template"]["spec"]["terminationGracePeriodSeconds"] == 90
    assert servers["backoffLimit"] > 0 and servers["template"]["spec"]["restartPolicy"] == "OnFailure"


def test_the_pods_read_the_config_with_its_overrides(capsys, tmp_path):
    path = tmp_path / "own.yaml"
    path.write_text(Path(CONFIG).read_text())
    flags = ["--seed", "7", "--optimizer.lr", "1e-6", "--data.answer_key", "0809"]
    flags += ["--data.template", "a: {prompt}\n  0809 \n"]
    text = kubernetes(capsys, "--nodes", "4", *flags, config=str(path))["ConfigMap"]["data"]["config.yaml"]
    own = ["--runs_dir", "/shared/runs", "--rollout.server.count", "16", "--rollout.server.start_timeout_s", "1800"]
    found = build_config(parse_yaml(text))
    assert found == load_config(path, [*MODEL, *flags, *own])
    assert found.data.answer_key == "0809" and found.seed == 7 and found.data.template == "a: {prompt}\n  0809 \n"


def test_yaml_of_any_text_is_read_as_it_was():
    signs = [*"a09 \n:#'\"%é\\{\t|~\x07\u2028", "$(X)", "- "]
    texts = ["".join(random.choices(signs, k=random.randrange(12))) for _ in range(300)]
    values = {"texts": texts, "same": texts[:3], "number": 1e-6, "0809": "1e5", "none": None}
    text = dump_yaml(values, {"second": [texts, texts]})
    assert [*yaml.safe_load_all(text)] == [values, {"second": [texts, texts]}] and "&id" not in text
    assert parse_yaml(dump_yaml(values)) == values


def test_names_are_those_that_kubernetes_allows():
    names = [
        "olmoe-1b-7b",
        *["a/b", "a-b", "a.b", "7b", "-", "ß", "A", "a", "a-"],
        "Läuf 1",
        "a b",
        "x" * 200,
        "x" * 199 + "y",
    ]
    found = [object_name(name) for name in names]
    assert found[0] == "olmoe-1b-7b" and len({*found}) == len(names)
    for name in found:
        assert re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", name) and len(name) <= NAME_LENGTH


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("kubernetes --nodes 2 --pvc p", "launch: kubernetes needs --image"),
        ("kubernetes --nodes 2 --image i", "launch: kubernetes needs --pvc"),
        ("kubernetes --nodes 0", "--nodes 0 --gpus-per-node 8: --nodes must be at least 1"),
        ("kubernetes --nodes 2 --train-nodes 2", "--train-nodes 2 of --nodes 2 leaves no node for SGLang servers"),
        ("kubernetes --nodes 4 --server-gpus 3", "--server-gpus 3 does not split the 8 GPUs of a node"),
        ("kubernetes --nodes 4 --parallel.tensor 3", "parallel.tensor"),
        ("kubernetes --nodes 4 --account lab", "--account works only with launch slurm"),
        ("kubernetes --nodes 4 --accelerator H100", "--accelerator works only with launch skypilot"),
        ("slurm --nodes 4 --image i", "--image works only with launch kubernetes"),
        ("kubernetes --nodes 4 {k} --max-restarts -1", "--max-restarts must be at least 0"),
        ("kubernetes --nodes 4 {k} --mount-path shared", "--mount-path shared is not an absolute path"),
        ("kubernetes --nodes 4 {k} --runs_dir /tmp/runs", "runs_dir = /tmp/runs is not on the volume at /shared"),
        ("kubernetes --nodes 4 {k} --runs_dir ../runs", "runs_dir = ../runs is not on the volume at /shared"),
        (
            "kubernetes --nodes 4 {k} --model.path ./here",
            "model.path = ./here: the cluster's machines do not have this",
        ),
        ("kubernetes --nodes 4 {k} --data.path README.md", "data.path = README.md: the cluster's machines do not have"),
        ("kubernetes --nodes 4 {k} --rollout.colocate true", "rollout.colocate"),
        ("skypilot --nodes 1 --volume v", "launch: skypilot needs --accelerator"),
        ("skypilot --nodes 2 {s}", "--nodes 2: a SkyPilot task trains by RL on one node"),
        ("skypilot --nodes 1 {s} --gpus-per-node 0", "--gpus-per-node 0: a SkyPilot task needs at least 1"),
    ],
)
def test_mistakes_are_told_in_one_line_before_anything_is_submitted(capsys, monkeypatch, arguments, message):
    monkeypatch.chdir(REPOSITORY)
    words = arguments.format(k=" ".join(KUBERNETES), s=" ".join(SKYPILOT)).split()
    model = [] if "--model.path" in words else MODEL
    said = launch(capsys, *words, *model, "--dry-run")
    assert isinstance(said, str) and message in said and len(said.splitlines()) == 1, said


def test_a_secret_goes_into_no_manifest(capsys, tmp_path):
    path = tmp_path / "own.yaml"
    path.write_text(
        Path(CONFIG).read_text()
        + "agent:\n  mcp_servers: {s: {url: 'http://a', headers: {Authorization: 'Bearer x1'}}}\n"
    )
    said = launch(capsys, "kubernetes", "--nodes", "4", *KUBERNETES, *MODEL, "--dry-run", config=str(path))
    assert (
        isinstance(said, str)
        and "contains a password or key in plain text; write env:NAME" in said
        and "x1" not in said
    )


def test_kubectl_gets_what_the_dry_run_prints(capsys, tmp_path, monkeypatch):
    words = ["kubernetes", "--nodes", "4", *KUBERNETES, *MODEL]
    monkeypatch.setenv("PATH", str(tmp_path))
    said = launch(capsys, *words)
    assert isinstance(said, str) and "kubectl is not installed here" in said and len(said.splitlines()) == 1
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(
        f"#!/bin/bash\n[[ $* == 'apply -f -' ]] && while read -r line; do echo \"# $line\"; done > {tmp_path}/got\n"
    )
    kubectl.chmod(0o700)
    assert main(["launch", words[0], CONFIG, *words[1:]]) == 0
    assert "kubectl logs -f -l jobset.sigs.k8s.io/jobset-name=olmoe-1b-7b" in capsys.readouterr().out
    assert "# kind: JobSet" in (tmp_path / "got").read_text()
    kubectl.write_text("#!/bin/bash\necho 'no matches for kind\n\"JobSet\"' >&2\nexit 1\n")
    said = launch(capsys, *words)
    assert isinstance(said, str) and 'kubectl apply: no matches for kind "JobSet"' in said


def test_a_skypilot_task_starts_the_ranks(capsys, tmp_path):
    [task] = launch(capsys, "skypilot", "--nodes", "1", *SKYPILOT, *MODEL, "--dry-run")
    assert task["resources"] == {"accelerators": "H100:8"} and task["volumes"] == {"/shared": "models"}
    config = build_config(parse_yaml(task["envs"]["MEGATRON_RL_CONFIG"]))
    assert config.rollout.colocate and config.runs_dir == "/shared/runs"
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    python.chmod(0o700)
    environment = task["envs"] | {
        "SKYPILOT_NODE_RANK": "1",
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
        "PATH": os.environ["PATH"],
    }
    script = task["run"].replace("/tmp/megatron_rl.yaml", str(tmp_path / "read.yaml"))
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    words = done.stdout.splitlines()
    assert words[:2] == ["tools/start_ranks.py", "train"]
    assert " ".join(words[-4:]) == "--machine-rank 1 --meet 10.0.0.1:29500"
    assert build_config(parse_yaml((tmp_path / "read.yaml").read_text())) == config
    said = launch(capsys, "skypilot", "--nodes", "1", *SKYPILOT, *MODEL)
    assert isinstance(said, str) and "skypilot only writes the task" in said


# -- tools/start_ranks.py ----------------------------------------------------------------------------------------------


RANK = """import os, pathlib, signal, sys, time
told = []
signal.signal(signal.SIGUSR1, lambda *_: told.append(1))
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
here = pathlib.Path(sys.argv[1])
(here / "written").with_suffix("." + os.environ["RANK"]).write_text(" ".join(map(os.environ.get, names)))
(here / "written").with_suffix("." + os.environ["RANK"]).rename(here / os.environ["RANK"])
while not all((here / rank).exists() for rank in "23"): time.sleep(0.05)
{}
"""
"""A process in the place of the trainer's, which goes on when both have written."""


@pytest.fixture
def start_ranks(monkeypatch):
    monkeypatch.syspath_prepend(str(REPOSITORY / "tools"))
    import start_ranks

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    yield start_ranks
    for number, handler in before.items():
        signal.signal(number, handler)


TOLD = """if os.environ["LOCAL_RANK"] == "1": os.kill(os.getppid(), signal.SIGTERM)
while not told: time.sleep(0.05)"""


@pytest.mark.parametrize(
    ("program", "status"),
    [
        ("", 0),
        ("sys.exit(3)", 1),
        ("sys.exit(2)", 2),  # before the first step: a mistake
        ("(here / 'run').mkdir(exist_ok=True); (here / 'run/metrics.jsonl').write_text(''); sys.exit(2)", 1),
        ("sys.exit(2) if os.environ['LOCAL_RANK'] == '1' else time.sleep(600)", 2),  # the others are ended
        (TOLD, 143),
        (f"(here / 'run/checkpoints/step_000005').mkdir(parents=True, exist_ok=True)\n{TOLD}", 0),
    ],
)
def test_the_exit_status_says_what_the_next_attempt_may_expect(start_ranks, tmp_path, program, status):
    args = argparse.Namespace(machines=2, machine_rank=1, processes=2, meet="host.name:29500")
    config = Config(steps=5, runs_dir=str(tmp_path))
    command = [sys.executable, "-c", RANK.format(program), str(tmp_path)]
    assert start_ranks.run(config, command, start_ranks.environments_of(args, "key")) == status
    for local in range(2):
        assert (tmp_path / str(2 + local)).read_text() == f"{2 + local} {local} 4 2 host.name 29500"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--machines 2", "several --machines need --key-folder"),
        ("--machines 2 --machine-rank 2 --key-folder k", "ranks from 0 to --machines - 1"),
        ("--processes 0", "at least one process"),
        ("--stepps 3", "unknown key 'stepps'"),
    ],
)
def test_wrong_words_are_one_line(start_ranks, monkeypatch, capsys, tmp_path, arguments, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["start_ranks.py", "train", CONFIG, *arguments.split()])
    umask = os.umask(0)
    try:
        assert start_ranks.main() == 2
    finally:
        os.umask(umask)
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1


# -- pods as processes of this machine ---------------------------------------------------------------------------------


class Pods:
    """The trainer's pods of a JobSet, as processes of this machine that see the folder `shared` as the volume."""

    def __init__(self, found: dict[str, dict[str, Any]], shared: Path, attempt: int) -> None:
        jobset, name = found["JobSet"], found["JobSet"]["metadata"]["name"]
        config = shared / "config.yaml"
        config.write_text(found["ConfigMap"]["data"]["config.yaml"].replace("/shared", str(shared)))
        self.logs, self._processes = [], []
        [job] = jobset["spec"]["replicatedJobs"]
        with reserve_port("") as reserved:
            meet = f"127.0.0.1:{reserved.getsockname()[1]}"
        for index in range(job["template"]["spec"]["completions"]):
            known = {"JOB_COMPLETION_INDEX": str(index), "ATTEMPT": str(attempt)}
            words = []
            for word in containers(jobset)["trainer"]["command"]:
                word = re.sub(r"\$\((\w+)\)", lambda found, known=known: known[found[1]], word)
                word = word.replace(f"{name}-trainer-0-0.{name}:29500", meet).replace("/shared", str(shared))
                words.append(word.replace("/etc/megatron_rl/config.yaml", str(config)))
            assert words[0] == "python"
            self.logs.append(shared / f"pod-{attempt}-{index}.log")
            with self.logs[-1].open("w") as log:
                process = subprocess.Popen(
                    [PYTHON_WITH_TRAINER, *words[1:]], cwd=REPOSITORY, stdout=log, stderr=subprocess.STDOUT
                )
            self._processes.append(process)

    def remove(self, index: int) -> None:
        self._processes[index].send_signal(signal.SIGTERM)

    def wait(self) -> list[int]:
        try:
            return [process.wait(240) for process in self._processes]
        finally:
            for process in self._processes:
                process.kill()

    def said(self) -> str:
        return "\n".join(log.read_text()[-2000:] for log in self.logs)


@pytest.mark.long  # each process imports the trainer: 70 seconds
def test_two_pods_train_save_when_one_is_removed_and_resume(capsys, tmp_path, tiny_model):
    model = tiny_model("qwen3_moe", "--layers", "2", "--tokenizer", "numbers")
    (tmp_path / "model").symlink_to(model)
    path = tmp_path / "own.yaml"
    values = {
        "name": "sft",
        "steps": 30,
        "data": {"task": "number_sorting"},
        "batch": {"prompts_per_step": 4, "tokens_per_micro_batch": 128},
        "precision": {"train": "fp32", "rollout": "fp32"},
        "rollout": {"max_new_tokens": 8, "context_length": 28},
        "eval": {"prompts": 0},
        "logging": {"trackers": []},
    }
    path.write_text(yaml.safe_dump(values))
    flags = ["--for", "sft", "--nodes", "2", "--gpus-per-node", "0", "--model.path", "/shared/model"]
    found = kubernetes(capsys, *flags, config=str(path))
    metrics = tmp_path / "runs" / "sft" / "metrics.jsonl"
    pods = Pods(found, tmp_path, 0)
    deadline = time.monotonic() + 200
    while len(read_json_lines(metrics)) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    pods.remove(1)
    assert pods.wait() == [0, 143], pods.said()
    before = read_json_lines(metrics)
    assert 2 <= len(before) < 30, pods.said()
    pods = Pods(found, tmp_path, 1)
    assert pods.wait() == [0, 0], pods.said()
    after = read_json_lines(metrics)
    assert [line["step"] for line in after] == [*range(1, 31)] and after[: len(before)] == before
    assert "step_000030" in {one.name for one in (metrics.parent / "checkpoints").iterdir()}
