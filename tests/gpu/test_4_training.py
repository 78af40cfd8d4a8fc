"""Stage training: the quickstart's steps from recorded rollouts, against the CPU's own; weights handed to another process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from megatron_rl_plugin.fingerprint import fingerprint
from safetensors.torch import load_file

from megatron_rl.metrics.logger import read_json_lines
from megatron_rl.sync.tensor import TensorTransport
from megatron_rl.sync.transport import Bucket

REPOSITORY = Path(__file__).resolve().parents[2]
STEPS = 6


@pytest.fixture(scope="module")
def recorded(references) -> Path:
    folder = references / "training"
    if not (folder / "metrics.jsonl").is_file():
        pytest.skip("no recorded rollouts: python tests/gpu/references.py makes them where SGLang is installed")
    return folder


def train(recorded: Path, out: Path, *overrides: str) -> list[dict]:
    """`megatron-rl train` on the record, in a process of its own; its log, a line a step."""
    command = [sys.executable, "-m", "megatron_rl.cli", "train", "configs/quickstart.yaml", "--runs_dir", str(out)]
    command += ["--name", "run", "--steps", str(STEPS), "--model.path", str(recorded / "model"), "--eval.prompts", "0"]
    command += ["--rollout.load", str(recorded / "rollouts"), "--rollout.routes", "true"]
    command += ["--optimizer.warmup_steps", "1", "--logging.trackers", "[]", *overrides]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return [line for line in read_json_lines(out / "run" / "metrics.jsonl") if line["step"] > 0]


def figures(lines: list[dict]) -> dict:
    keys = (
        "loss/policy",
        "entropy",
        "mismatch/kl",
        "update/grad_norm",
        "time/log_probs_s",
        "time/train_s",
        "time/step_s",
    )
    keys += ("throughput/tokens_per_s", "memory/peak_gb", "memory/reserved_gb", "throughput/mfu")
    return {key: [line.get(key) for line in lines] for key in keys}


def test_fp32_is_the_cpus_run(recorded, tmp_path, record_property):
    lines = train(recorded, tmp_path)
    record_property("run", figures(lines))
    theirs = [line for line in read_json_lines(recorded / "metrics.jsonl") if line["step"] > 0]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    for line, right in zip(lines, theirs, strict=True):
        assert line["reward/mean"] == right["reward/mean"] and line["tokens"] == right["tokens"]
        # Rounding moves the weights of one step to the next: Adam divides by gradients that may be next to nothing.
        near = 1e-4 if line["step"] == 1 else 2e-2
        for key in ("entropy", "update/grad_norm", "mismatch/abs_median"):
            assert line[key] == pytest.approx(right[key], rel=near, abs=1e-5), f"step {line['step']}: {key}"
    first = lines[0]
    assert first["mismatch/abs_median"] < 1e-5 and first["mismatch/kl"] < 1e-6  # the engine's were fp32 too
    assert first["routing/agreement"] is None or first["routing/agreement"] > 0.999


def test_bf16_trains(recorded, cuda, tmp_path, record_property):
    lines = train(recorded, tmp_path, "--precision.train", "bf16")
    record_property("run", figures(lines))
    assert all(line["update/skipped"] == 0 and line["update/grad_norm"] > 0 for line in lines)
    assert lines[0]["mismatch/abs_median"] < 0.05


def test_a_stopped_run_goes_on(recorded, tmp_path):
    """Half of the steps, then the rest from the checkpoint: the log is whole."""
    train(recorded, tmp_path, "--steps", "3", "--optimizer.decay_steps", str(STEPS))
    lines = train(recorded, tmp_path, "--optimizer.decay_steps", str(STEPS))
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))


_RECEIVER = """
import base64, pickle, sys
import torch
from megatron_rl_plugin.fingerprint import fingerprint
torch.cuda.init()
found = pickle.loads(base64.b64decode(sys.stdin.read()))
data = found["flattened_tensor"]
for entry in found["metadata"]:
    tensor = data[entry.start_idx : entry.end_idx].view(entry.dtype).view(entry.shape)
    print(entry.name, fingerprint(tensor))
"""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_another_process_maps_the_bucket(dtype, cuda, recorded):
    """The transport `tensor` by CUDA IPC: what a second process reads of the bucket has the fingerprints that it should."""
    weights = load_file(next((recorded / "model").glob("*.safetensors")))
    buffer = torch.empty(sum(t.numel() for t in weights.values()) * dtype.itemsize, dtype=torch.uint8, device=cuda)
    bucket = Bucket(buffer)
    for name, tensor in weights.items():
        bucket.add(name, tensor.to(cuda), dtype)
    torch.cuda.synchronize()
    payload = TensorTransport._dump_cuda(None, bucket, 0)
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, "-c", _RECEIVER], input=payload, capture_output=True, text=True, timeout=120, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = dict(line.split() for line in done.stdout.splitlines())
    assert found == {name: str(fingerprint(tensor.to(dtype))) for name, tensor in weights.items()}
