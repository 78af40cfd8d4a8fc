"""Stage slices: some layers of real models at their real widths, 18,432 tokens a micro-batch: speed, memory, a profile."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("model", ["qwen3", "gpt_oss"])
def test_a_slice_of(model, device, tmp_path, record_property):
    out = tmp_path / "slice.json"
    command = [
        sys.executable,
        "benchmarks/slices.py",
        model,
        "--json",
        str(out),
        "--profile",
        str(tmp_path / "profile"),
    ]
    command += ["--updates", "4"] if device.type == "cuda" else ["--tiny", "--updates", "2"]
    # As `megatron-rl train` sets it for itself.
    environment = os.environ | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    options = {"capture_output": True, "text": True, "timeout": 280, "env": environment}
    done = subprocess.run(command, cwd=REPOSITORY, **options)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found = json.loads(out.read_text())
    record_property("slice", found)
    assert all(math.isfinite(value) for value in found["grad_norm"]) and found["tokens_per_s"] > 0
    assert found["skipped"] == 0
