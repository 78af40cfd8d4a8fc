"""Trainer and servers on one, two or four GPUs: colocation, FP8, NCCL, several servers. See node.sh.

Each test says how many GPUs it needs; what one is enough for runs with `--on-cpu` too.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron_rl.metrics.logger import read_json_lines
from megatron_rl.models.precision import this_machine, trainer_recipes
from megatron_rl.servers.own_environment import find_python

REPOSITORY = Path(__file__).resolve().parents[2]
STEPS = 3
FIGURES = ("time/rollout_s", "time/train_s", "time/sync_s", "time/sleep_s", "time/wake_s", "time/step_s")
FIGURES += ("mismatch/kl", "routing/engine_agreement", "memory/peak_gb", "throughput/tokens_per_s")
SMALLER = [] if torch.cuda.is_available() else ["--batch.prompts_per_step", "8"]


def needs(gpus: int) -> pytest.MarkDecorator:
    found = torch.cuda.device_count()
    return pytest.mark.skipif(found < gpus, reason=f"needs {gpus} GPUs, found {found}")


@pytest.fixture(scope="module", autouse=True)
def kernels() -> list[str]:
    """SGLang's own attention on Hopper is a library of 1.1 GB, which is not on every machine."""
    python = find_python()  # names what is missing
    library = "lib/python*/site-packages/sgl_kernel/flash_ops*"
    without = torch.cuda.is_available() and not any(python.parents[1].glob(library))
    return ["--rollout.server.extra_args", "[--attention-backend, triton]"] if without else []


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """Its heads of 48 are of the widths that SGLang's fused kernels do not know."""
    folder = tmp_path_factory.mktemp("node") / "model"
    tool = [sys.executable, "tools/make_tiny_model.py", "--preset", "quickstart", str(folder)]
    subprocess.run(tool, cwd=REPOSITORY, check=True, timeout=120)
    return folder


@pytest.fixture
def train(kernels, tmp_path, record_property) -> Callable[..., list[dict]]:
    """train(model, overrides...): the quickstart's step in bf16 with the real engine; its log, a line a step."""

    def run(model: Path, *overrides: str, nproc: int = 1, off: float = 0.05) -> list[dict]:
        command = [sys.executable, "-m", "megatron_rl.cli", "train", "configs/quickstart.yaml"]
        command += ["--runs_dir", str(tmp_path), "--name", "run", "--steps", str(STEPS), "--nproc", str(nproc)]
        command += ["--model.path", str(model), "--precision.train", "bf16", "--precision.rollout", "bf16"]
        command += ["--rollout.routes", "true", "--optimizer.warmup_steps", "1", "--eval.prompts", "0"]
        command += ["--logging.trackers", "[]", *SMALLER, *kernels, *overrides]
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=540)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        lines = [line for line in read_json_lines(tmp_path / "run" / "metrics.jsonl") if line["step"] > 0]
        record_property("run", {key: [line.get(key) for line in lines] for key in FIGURES})
        assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
        for line in lines:
            # Checksums of both sides are compared after every push; here, that what is sampled is what is trained.
            assert line["mismatch/abs_median"] < off and line.get("routing/engine_agreement", 1.0) > 0.9
            assert line["update/skipped"] == 0
        return lines

    return run


@needs(4)
def test_layouts_over_nccl(record_property):
    """Every parallel layout against one process, and exact replay, on as many GPUs as ranks."""
    # Without it, asking for a GPU before the ranks are forked would leave them without one.
    environment = os.environ | {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    files = ["tests/trainer/test_parity.py", "tests/routing/test_replay.py"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "not rest_of_the_product", *files]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=900, env=environment)
    record_property("summary", done.stdout.strip().splitlines()[-1:])
    assert done.returncode == 0, done.stdout[-6000:]


@needs(2)
@pytest.mark.parametrize("transport", ["distributed", "tensor"])
def test_a_server_on_a_gpu_of_its_own(transport, model, train):
    train(model, "--sync.transport", transport)


@needs(4)
def test_several_servers_and_expert_parallel_ranks(model, train):
    split = ["--parallel.expert", "2", "--rollout.server.count", "2", "--sync.transport", "distributed"]
    train(model, *split, nproc=2)


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=needs(2))])
def test_colocated_servers_sleep_while_the_trainer_works(count, model, train):
    split = ["--rollout.colocate", "true", "--rollout.server.count", str(count), "--parallel.expert", str(count)]
    lines = train(model, *split, "--sync.transport", "tensor", nproc=count)
    assert all(line["time/sleep_s"] > 0 and line["time/wake_s"] > 0 for line in lines)


@pytest.mark.parametrize("precision", ["fp8_delayed", "fp8_tensorwise", "fp8_blockwise", "mxfp8"])
def test_fp8_updates(precision, cuda, tmp_path, record_property):
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


def test_an_fp8_engine_gets_its_blocks(train, tmp_path):
    """On a CPU the engine gets what blocks round to, in bf16."""
    if (this_machine().gpu or (9, 0)) < (8, 9):
        pytest.skip("needs a GPU of compute capability 8.9")
    folder = tmp_path / "model"  # block FP8 wants widths that 128 divides
    tool = [sys.executable, "tools/make_tiny_model.py", "qwen3_moe", str(folder), "--tokenizer", "numbers"]
    tool += ["--hidden", "256", "--head-dim", "64", "--expert-intermediate", "128", "--layers", "2"]
    subprocess.run(tool, cwd=REPOSITORY, check=True, timeout=120)
    train(folder, "--precision.rollout", "fp8", "--rollout.routes", "false", off=0.2)
