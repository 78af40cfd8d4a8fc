"""What travels to a machine with a GPU and no network, and the script that runs there."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.preloaded import PYTHON_WITH_TRAINER

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def bundle():
    spec = importlib.util.spec_from_file_location("bundle", REPOSITORY / "tests" / "gpu" / "bundle.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pieces_hold_everything_once_and_no_more_than_their_limit(bundle):
    sizes = {f"w{i}": 1 + int.from_bytes(os.urandom(2)) % 60 for i in range(50)}
    found = bundle.pieces(sizes, 64)
    assert sorted(name for names in found for name in names) == sorted(sizes)
    totals = [sum(sizes[name] for name in names) for names in found]
    assert max(totals) <= 64
    # First fit: no two pieces would fit into one.
    assert all(a + b > 64 for i, a in enumerate(totals) for b in totals[i + 1 :])


def test_a_wheel_larger_than_a_piece_is_named(bundle):
    with pytest.raises(ValueError, match=r"big\.whl has 70 MiB, more than the 64"):
        bundle.pieces({"big.whl": 70 << 20}, 64 << 20)


def test_torch_and_its_cuda_packages_stay_at_home(bundle):
    names = {line.partition("==")[0] for line in bundle.wanted([REPOSITORY / name for name in bundle.LISTS])}
    assert {"megatron-core", "megatron-bridge", "transformers", "nvidia-modelopt", "pytest"} <= names
    assert not [n for n in names if n in ("torch", "triton") or n.startswith(("cuda-", "nvidia-cu", "nvidia-nccl"))]
    assert not [n for n in names if n.startswith(("transformer-engine", "sglang"))]


def test_an_unknown_stage_is_refused_with_the_list():
    done = subprocess.run([REPOSITORY / "tests/gpu/run.sh", "kernel"], capture_output=True, text=True, timeout=20)
    assert done.returncode == 2
    assert "no stage 'kernel'" in done.stderr and "start | kernels | models" in done.stderr


@pytest.mark.timeout(900)
def test_what_runs_on_a_gpu_still_runs(tmp_path):
    """The stages' own code, by one family on this CPU: everywhere else these tests are skipped, and would rot unseen."""
    references = tmp_path / "references"
    options = {"cwd": REPOSITORY, "capture_output": True, "text": True, "timeout": 440}
    made = subprocess.run(
        [PYTHON_WITH_TRAINER, "tests/gpu/references.py", str(references), "--family", "olmoe"], **options
    )
    assert made.returncode == 0, made.stderr[-3000:]
    stages = [f"tests/gpu/test_{name}.py" for name in ("1_start", "2_kernels", "3_models", "7_invariance")]
    chosen = "nccl or (test_2 and sink and gpt_oss) or (test_3 and (olmoe or kept)) or (test_7 and (logits or gpt_oss))"
    command = [PYTHON_WITH_TRAINER, "-m", "pytest", "-q", "-p", "no:cacheprovider", *stages, "-k", chosen]
    done = subprocess.run([*command, "--on-cpu", "--references", str(references)], **options)
    assert done.returncode == 0, done.stdout[-3000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= 20, done.stdout[-3000:]
