"""A whole node: Transformer Engine, FP8, NCCL between ranks and to servers, several servers, colocation. See node.sh."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_rl.metrics.logger import read_json_lines
from megatron_rl.models.precision import this_machine, trainer_recipes

REPOSITORY = Path(__file__).resolve().parents[2]
STEPS = 3


@pytest.fixture(scope="module", autouse=True)
def node(cuda):
    from megatron.core.extensions.transformer_engine import HAVE_TE

    from megatron_rl.rollout.own_environment import find_python

    if torch.cuda.device_count() < 4:
        pytest.skip(f"needs 4 GPUs, found {torch.cuda.device_count()}")
    assert HAVE_TE, "Transformer Engine is missing: tools/setup.sh --gpu installs it"
    find_python()  # names what is missing


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("node") / "model"
    tool = [sys.executable, "tools/make_tiny_model.py", "--preset", "quickstart", str(folder)]
    subprocess.run(tool, cwd=REPOSITORY, check=True, timeout=120)
    return folder


def train(model: Path, out: Path, *overrides: str, nproc: int = 1, timeout: float = 540.0) -> list[dict]:
    """The quickstart's step in bf16 with the real engine; its log, a line a step."""
    command = [sys.executable, "-m", "megatron_rl.cli", "train", "configs/quickstart.yaml", "--runs_dir", str(out)]
    command += ["--name", "run", "--steps", str(STEPS), "--nproc", str(nproc), "--model.path", str(model)]
    command += ["--precision.train", "bf16", "--precision.rollout", "bf16", "--rollout.routes", "true"]
    command += ["--eval.prompts", "0", "--optimizer.warmup_steps", "1", "--logging.tensorboard", "false", *overrides]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    lines = [line for line in read_json_lines(out / "run" / "metrics.jsonl") if line["step"] > 0]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    for line in lines:
        # Checksums of both sides are compared after every push; here, that what is sampled is what is trained.
        assert line["mismatch/abs_median"] < 0.05 and line["routing/agreement"] > 0.9
        assert line["update/skipped"] == 0
    return lines


def figures(lines: list[dict]) -> dict:
    keys = ("time/rollout_s", "time/train_s", "time/sync_s", "time/sleep_s", "time/wake_s", "time/step_s")
    keys += ("mismatch/kl", "memory/peak_gb", "throughput/tokens_per_s")
    return {key: [line.get(key) for line in lines] for key in keys}


def test_layouts_over_nccl(record_property):
    """Every parallel layout against one process, and exact replay, on as many GPUs as ranks."""
    # Without it, asking for a GPU before the ranks are forked would leave them without one.
    environment = os.environ | {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    files = ["tests/trainer/test_parity.py", "tests/routing/test_replay.py"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=900, env=environment)
    record_property("summary", done.stdout.strip().splitlines()[-1:])
    assert done.returncode == 0, done.stdout[-6000:]


@pytest.mark.parametrize("transport", ["distributed", "tensor"])
def test_a_server_on_a_gpu_of_its_own(transport, model, tmp_path, record_property):
    lines = train(model, tmp_path, "--sync.transport", transport)
    record_property("run", figures(lines))


def test_several_servers_and_expert_parallel_ranks(model, tmp_path, record_property):
    split = ["--parallel.expert", "2", "--rollout.server.count", "2", "--sync.transport", "distributed"]
    lines = train(model, tmp_path, *split, nproc=2)
    record_property("run", figures(lines))


def test_colocated_servers_sleep_while_the_trainer_works(model, tmp_path, record_property):
    split = ["--rollout.colocate", "true", "--rollout.server.count", "2", "--sync.transport", "tensor"]
    lines = train(model, tmp_path, *split, "--parallel.expert", "2", nproc=2)
    record_property("run", figures(lines))
    assert all(line["time/sleep_s"] > 0 and line["time/wake_s"] > 0 for line in lines)


@pytest.mark.parametrize("precision", ["fp8_delayed", "fp8_tensorwise", "fp8_blockwise", "mxfp8"])
def test_fp8_updates(precision, tmp_path, record_property):
    answer = trainer_recipes(this_machine())[precision]
    if answer.state != "runs":
        pytest.skip(f"{precision} {answer.reason}")
    out = tmp_path / "slice.json"
    command = [sys.executable, "benchmarks/slices.py", "qwen3", "--precision", precision, "--json", str(out)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found = json.loads(out.read_text())
    record_property("slice", found)
    assert all(math.isfinite(value) for value in found["grad_norm"]) and found["skipped"] == 0


def test_an_fp8_engine_gets_its_blocks(model, tmp_path, record_property):
    answer = this_machine().gpu
    if answer is None or answer < (8, 9):
        pytest.skip("needs a GPU of compute capability 8.9")
    folder = tmp_path / "model"  # block FP8 wants widths that 128 divides
    tool = [sys.executable, "tools/make_tiny_model.py", "qwen3_moe", str(folder), "--tokenizer", "numbers"]
    tool += ["--hidden", "256", "--head-dim", "64", "--expert-intermediate", "128", "--layers", "2"]
    subprocess.run(tool, cwd=REPOSITORY, check=True, timeout=120)
    command = [sys.executable, "-m", "megatron_rl.cli", "train", "configs/quickstart.yaml", "--runs_dir", str(tmp_path)]
    command += ["--name", "fp8", "--steps", "2", "--model.path", str(folder), "--precision.train", "bf16"]
    command += ["--precision.rollout", "fp8", "--eval.prompts", "0", "--optimizer.warmup_steps", "1"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    record_property(
        "run", figures([line for line in read_json_lines(tmp_path / "fp8" / "metrics.jsonl") if line["step"]])
    )
