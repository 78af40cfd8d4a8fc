"""The scripts of examples/slurm on a real SLURM: jobs that end, are told to end, are pushed aside, and lose a node."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron_rl.data.trajectory import file_of, load_trajectories
from megatron_rl.metrics.logger import METRICS_FILE, read_json_lines
from tests.cluster.slurm import Slurm

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted((ROOT / "examples" / "slurm").glob("*.sbatch"))
STEPS, EVERY = 60, 10
"""Steps of a run, and how often it saves."""
END_S = 300.0


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda s: s.stem)
def test_slurm_takes_every_script(slurm, script):
    done = slurm.run("sbatch", "--test-only", "--partition=big", str(script))
    assert done.returncode == 0 and "to start at" in done.stderr, done.stderr


class Job:
    """A run of a tiny model as a job: one node trains, one serves."""

    def __init__(self, slurm: Slurm, folder: Path, model: Path, name: str) -> None:
        self.slurm, self.folder, self.name = slurm, folder, name
        config = {
            "name": name,
            "steps": STEPS,
            "runs_dir": str(folder / "runs"),
            "model": {"path": str(model)},
            "data": {"task": "number_sorting"},
            "batch": {"prompts_per_step": 8, "samples_per_prompt": 4, "updates_per_step": 1},
            "precision": {"train": "fp32", "rollout": "fp32"},
            "rollout": {
                "record": True,
                "max_new_tokens": 8,
                "context_length": 32,
                "server": {"threads": 1, "max_total_tokens": 2048},
            },
            "checkpoint": {"every": EVERY, "keep": 2},
            "eval": {"prompts": 0},
            "logging": {"trackers": []},
        }
        self.config = folder / f"{name}.yaml"
        self.config.write_text(json.dumps(config))
        self.run = folder / "runs" / name
        self.number = 0

    def submit(self, *options: str, minutes: int = 30, **variables: str) -> None:
        """By `megatron-rl launch slurm`. variables: of common.sh."""
        options = ("--nodes", "2", "--gpus-per-node", "0", "--time", str(minutes), "--grace", "30", *options)
        log = f"--option=--output={self.folder}/%x-%j.log"
        done = subprocess.run(
            [sys.executable, "-m", "megatron_rl.cli", "launch", "slurm", str(self.config), *options, log],
            capture_output=True,
            text=True,
            timeout=120,
            env=self.slurm.environment | {"RUN_ROOT": str(self.folder)} | variables,
        )
        assert done.returncode == 0, done.stderr
        self.number = int(done.stdout.split()[1])

    @property
    def log(self) -> str:
        """What the batch script says."""
        path = self.folder / f"{self.name}-{self.number}.log"
        return path.read_text() if path.exists() else ""

    @property
    def steps(self) -> list[int]:
        metrics = self.run / METRICS_FILE
        return [row["step"] for row in read_json_lines(metrics)] if metrics.exists() else []

    def wait_steps(self, count: int) -> None:
        self.slurm.wait(lambda: len(self.steps) >= count, f"{count} steps; {self.log}", END_S)

    def wait_end(self) -> None:
        try:
            state = self.slurm.wait_end(self.number, END_S)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log}") from None
        assert state == "COMPLETED", self.log

    def prompts(self) -> list[list[str]]:
        """Of each step, in order."""
        return [[t.prompt_id for t in load_trajectories(file_of(self.run / "rollouts", s, 0))] for s in range(STEPS)]

    def tokens(self) -> list[list[list[int]]]:
        return [
            [t.tokens.tolist() for t in load_trajectories(file_of(self.run / "rollouts", s, 0))] for s in range(STEPS)
        ]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("jobs")


@pytest.fixture
def job(slurm, place, tiny_model, request):
    name = request.node.name.removeprefix("test_")
    found = Job(slurm, place, tiny_model("qwen3_moe", "--layers", "2", "--tokenizer", "numbers"), name)
    yield found
    if found.number:
        slurm.run("scancel", "--full", str(found.number))
        slurm.wait(lambda: set(slurm.states().values()) == {"idle"}, "all nodes are idle again", 120)


@pytest.fixture(scope="module")
def undisturbed(slurm, place, tiny_model) -> Job:
    found = Job(slurm, place, tiny_model("qwen3_moe", "--layers", "2", "--tokenizer", "numbers"), "undisturbed")
    found.submit()
    found.wait_end()
    assert slurm.job(found.number)["Restarts"] == "0"
    return found


def assert_same_run(job: Job, undisturbed: Job) -> None:
    """Every step once, of the same prompts; and of the same responses, but where rounding turns one."""
    assert job.steps == list(range(1, STEPS + 1))
    assert all(row["rollout/stale"] == 0 for row in read_json_lines(job.run / METRICS_FILE))
    assert job.prompts() == undisturbed.prompts()
    pairs = [(a, b) for x, y in zip(job.tokens(), undisturbed.tokens(), strict=True) for a, b in zip(x, y, strict=True)]
    assert np.mean([a == b for a, b in pairs]) > 0.9


def test_a_job_runs_to_its_last_step(undisturbed):
    assert undisturbed.steps == list(range(1, STEPS + 1)) and "done: " in undisturbed.log


def test_told_before_the_time_limit(slurm, job, undisturbed):
    """SLURM sends USR1 to the script, here by hand: the trainer saves, the job comes back and goes on."""
    job.submit()
    job.wait_steps(14)
    slurm.ask("scancel", "--signal=USR1", "--batch", str(job.number))
    job.wait_end()
    assert slurm.job(job.number)["Restarts"] == "1", job.log
    assert "told to end" in job.log and "resumed at step" in (attempt_log(job, 1)).read_text()
    saved = int(attempt_log(job, 1).read_text().split("resumed at step ")[1].split()[0])
    assert saved % EVERY or saved > 14, "saved when it was told, and not before"
    assert_same_run(job, undisturbed)


def test_requeued_by_hand(slurm, job, undisturbed):
    """scontrol requeue kills what runs, after a signal: the next attempt goes on from a checkpoint."""
    job.submit()
    job.wait_steps(14)
    slurm.ask("scontrol", "requeue", str(job.number))
    job.wait_end()
    assert_same_run(job, undisturbed)


def test_pushed_aside_by_a_higher_partition(slurm, job, undisturbed, place):
    job.submit()
    job.wait_steps(14)
    urgent = place / "urgent.sh"
    urgent.write_text("#!/bin/bash\n#SBATCH --nodes=2 --exclusive --partition=urgent\nsleep 2\n")
    other = slurm.submit(urgent, options=[f"--output={place}/urgent.log"])
    slurm.wait(lambda: slurm.state(other) == "COMPLETED", f"the urgent job ends; {job.log}", 180)
    job.wait_end()
    assert int(slurm.job(job.number)["Restarts"]) >= 1
    assert_same_run(job, undisturbed)


def test_a_node_is_lost_and_comes_back(slurm, job, undisturbed):
    """SLURM notices, and the job waits for the node."""
    job.submit()
    job.wait_steps(14)
    slurm.lose_node("n2")
    slurm.wait(lambda: slurm.state(job.number) == "PENDING", "the job is requeued", 120)
    slurm.start_node("n2")
    job.wait_end()
    assert int(slurm.job(job.number)["Restarts"]) >= 1
    assert_same_run(job, undisturbed)


def test_a_server_that_dies_is_another_one_and_the_job_goes_on(slurm, job):
    job.submit()
    job.wait_steps(5)
    slurm.kill_processes("n2", "sglang")
    slurm.wait(lambda: "server 0 ended with status" in job.log, "its step ends", 60)
    job.wait_end()
    assert job.steps == list(range(1, STEPS + 1)) and slurm.job(job.number)["Restarts"] == "0"
    assert "started again" in job.log and read_json_lines(job.run / METRICS_FILE)[-1]["rollout/restarts"] >= 1


def test_a_node_that_is_gone_for_a_moment(slurm, job):
    """SLURM does not notice, and srun waits for ever for the step that was there."""
    job.submit(SERVER_SILENCE_S="10")
    job.wait_steps(25)  # the script has seen the server by then
    slurm.lose_node("n2")
    slurm.start_node("n2")
    slurm.wait(lambda: "server 0 gives no sign of life: its step is ended" in job.log, f"it is noticed; {job.log}", 90)
    job.wait_end()
    assert job.steps == list(range(1, STEPS + 1)) and slurm.job(job.number)["Restarts"] == "0"


def attempt_log(job: Job, attempt: int) -> Path:
    return job.folder / "logs" / f"{job.name}-{job.number}" / f"attempt-{attempt}" / "trainer-0.log"
