"""The operators' tests on a build of the CPU kernels with AddressSanitizer and UndefinedBehaviorSanitizer."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OPERATORS = ("masked_log_softmax", "sink_attention", "batch_invariant")
FLAGS = "-fsanitize=address,undefined -fno-sanitize-recover=undefined"


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    """Folder of a copy of the package whose extensions are instrumented."""
    folder = tmp_path_factory.mktemp("sanitized")
    environment = os.environ | {"CFLAGS": FLAGS, "LDFLAGS": FLAGS, "CUDA_HOME": str(folder / "none"), "MAX_JOBS": "2"}
    places = ["--build-lib", str(folder / "lib"), "--build-temp", str(folder / "temp")]
    command = [sys.executable, "setup.py", "-q", "build", *places]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    for library in (folder / "lib").rglob("*.so"):
        assert b"__asan_report_load" in library.read_bytes(), f"{library} is not instrumented"
    # The tests import their own helpers. With all of ROOT on the path they could import its package, which is not instrumented.
    (folder / "lib" / "tests").symlink_to(ROOT / "tests")
    return folder


def runtime(library: str) -> str:
    return subprocess.run(
        ["g++", f"-print-file-name={library}"], capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.mark.timeout(1900)
@pytest.mark.parametrize("isa", ["default", "avx2", "avx512"])
def test_operators(build, isa):
    """ATEN_CPU_CAPABILITY is torch's own choice of instruction set, which the kernels follow."""
    if isa != "default" and isa not in Path("/proc/cpuinfo").read_text():
        pytest.skip(f"this processor has no {isa}")
    assert shutil.which("g++")
    environment = os.environ | {
        "ATEN_CPU_CAPABILITY": isa,
        "ASAN_OPTIONS": "detect_leaks=0",  # Python's own
        "LD_PRELOAD": f"{runtime('libasan.so')}:{runtime('libstdc++.so.6')}",
        "OMP_NUM_THREADS": "2",
        "PYTHONPATH": str(build / "lib"),
    }
    files = [str(ROOT / "tests" / "ops" / f"test_{name}.py") for name in OPERATORS]
    options = ["-q", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT)]
    chosen = ["-k", "not finite_differences and not two_ranks"]  # the first is about plain torch
    command = [sys.executable, "-m", "pytest", *options, *files, *chosen]
    # In the build's folder: Python puts the current one first on its path.
    done = subprocess.run(command, cwd=build / "lib", env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0 and " passed" in done.stdout, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
