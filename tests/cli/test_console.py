"""What reaches the console: errors of any rank, once, and that bf16 is slow here."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

import pytest

from megatron_rl.cli import main
from megatron_rl.config import PrecisionConfig
from megatron_rl.models.precision import Machine, has_bf16_instructions, slow_bf16
from tests.preloaded import PYTHON_WITH_TRAINER

COMMAND = [PYTHON_WITH_TRAINER, "-m", "megatron_rl.cli"]


def errors_of(ranks: dict[int, str], environment: dict[str, str], folder) -> list[str]:
    """Lines that processes of these ranks write when each is given the config file named."""
    processes = []
    for rank, config in ranks.items():
        own = {"RANK": str(rank), "WORLD_SIZE": "4"}
        if "TORCHELASTIC_ERROR_FILE" in environment:
            own["TORCHELASTIC_ERROR_FILE"] = environment["TORCHELASTIC_ERROR_FILE"].format(rank)
        command = [*COMMAND, "plan", str(folder / config)]
        environment_of = os.environ | environment | own
        processes.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment_of))
    outs = [process.communicate(timeout=120)[1] for process in processes]
    assert all(process.returncode == 2 for process in processes)
    return [line for out in outs for line in out.splitlines()]


def test_an_error_of_another_rank_is_said_and_what_all_have_is_said_once(tmp_path):
    torchrun = {"TORCHELASTIC_ERROR_FILE": str(tmp_path / "run" / "attempt_0") + "/{}/error.json"}
    [line] = errors_of({2: "a.yaml"}, torchrun, tmp_path)
    assert line.startswith("megatron-rl: error (rank 2): ") and "a.yaml" in line
    [line] = errors_of(dict.fromkeys(range(4), "b.yaml"), torchrun, tmp_path)
    assert "b.yaml" in line
    both = errors_of({1: "c.yaml", 3: "d.yaml"}, torchrun, tmp_path)
    assert sorted(line.split(":")[1] for line in both) == [" error (rank 1)", " error (rank 3)"]


def test_a_slurm_job_says_it_once_on_each_machine(tmp_path):
    job = {"SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0", "TMPDIR": str(tmp_path)}
    assert len(errors_of(dict.fromkeys(range(3), "a.yaml"), job, tmp_path)) == 1
    requeued = job | {"SLURM_RESTART_COUNT": "1"}
    assert len(errors_of({0: "a.yaml"}, requeued, tmp_path)) == 1


@pytest.mark.slow
def test_a_conversion_that_cannot_be_spread_says_so(tiny_model, tmp_path):
    """All three processes find it, and torchrun ends the others as soon as one has ended."""
    model = tiny_model("qwen3_moe", "--layers", "2")
    command = [*COMMAND, "convert", str(model), str(tmp_path / "out"), "--nproc", "3", "--pipeline", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    said = [line for line in done.stderr.splitlines() if line.startswith("megatron-rl: error")]
    assert done.returncode == 2 and len(said) == 1 and "pipeline = 3" in said[0]


RANK = """
import os, time
from megatron_rl import cli
cli._dispatch = lambda *_: (print(os.getpid(), flush=True), time.sleep(300))
cli.main(["doctor"])
"""
LAUNCHER = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"


@pytest.mark.parametrize("launched", [True, False])
def test_processes_end_with_torchrun_that_is_killed(launched):
    """And go on without whoever else has started them."""
    own = {"TORCHELASTIC_RUN_ID": "x"} if launched else {}
    command = [sys.executable, "-c", LAUNCHER, RANK]
    launcher = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | own)
    assert launcher.stdout is not None
    rank = int(launcher.stdout.readline())
    death = os.pidfd_open(rank)
    try:
        launcher.kill()
        launcher.wait(60)
        assert bool(select.select([death], [], [], 60 if launched else 0.5)[0]) == launched
    finally:
        signal.pidfd_send_signal(death, signal.SIGKILL) if not launched else None
        os.close(death)
        launcher.stdout.close()


def test_slow_bf16_is_said():
    assert has_bf16_instructions("flags\t\t: fpu avx512_bf16 amx_tile\n")
    assert has_bf16_instructions("Features\t: fp asimd bf16\n")
    assert has_bf16_instructions(""), "what cannot be read is given credit"
    assert not has_bf16_instructions("flags\t\t: fpu avx avx2 avx512f\nvmx flags\t: ept\n")
    slow = Machine(None, None, None, None, fast_bf16=False)
    line = slow_bf16(PrecisionConfig(train="bf16", rollout="fp32"), slow)
    assert line.endswith("; set precision.train: fp32")
    line = slow_bf16(PrecisionConfig(train="bf16", rollout="bf16"), slow)
    assert line.endswith("; set precision.train: fp32 and precision.rollout: fp32")
    assert slow_bf16(PrecisionConfig(train="bf16", rollout="fp32"), slow, trains=False) is None
    assert slow_bf16(PrecisionConfig(train="fp32", rollout="fp32"), slow) is None
    assert slow_bf16(PrecisionConfig(), Machine((9, 0), None, None, None)) is None


def test_a_single_process_says_its_error(capsys):
    assert main(["plan", "/nowhere.yaml"]) == 2
    assert capsys.readouterr().err.startswith("megatron-rl: error: ")


def test_an_environment_from_before_sglangs_package_names_the_command(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "megatron_rl_plugin", None)  # as where it is not installed
    assert main(["keys"]) == 2
    assert capsys.readouterr().err.startswith(
        "megatron-rl: error: megatron-rl-sglang is not installed: run tools/setup.sh, or"
    )
