"""What ptxas said when the CUDA kernels were built: each is there for each architecture and spills no registers."""

from __future__ import annotations

import re
import runpy
import sysconfig
from pathlib import Path

import pytest
import torch

from megatron_rl.ops import extensions

REPOSITORY = Path(__file__).resolve().parent.parent.parent
ARCHITECTURES = ("sm_80", "sm_90a")
SAMPLE = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z4goodPf' for 'sm_80'
ptxas info    : Function properties for _Z4goodPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 34 registers, used 1 barriers, 16 bytes smem, 440 bytes cmem[0]
ptxas info    : Compiling entry function '_Z3badPf' for 'sm_90a'
ptxas info    : Function properties for _Z3badPf
    48 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 16 bytes smem
"""


def spills(report: str) -> dict[tuple[str, str], int]:
    """(mangled name of a kernel, architecture) -> bytes spilled."""
    kernel = r"Compiling entry function '(\w+)' for '(\w+)'"
    numbers = r"(\d+) bytes spill stores, (\d+) bytes spill loads"
    found = re.findall(rf"{kernel}(?:(?!Compiling entry).)*?{numbers}", report, re.DOTALL)
    assert len(found) == report.count("Compiling entry function"), "a kernel without a line on spills"
    return {(name, architecture): int(stores) + int(loads) for name, architecture, stores, loads in found}


def test_spills_are_read_from_a_report():
    assert spills(SAMPLE) == {("_Z4goodPf", "sm_80"): 0, ("_Z3badPf", "sm_90a"): 20}
    with pytest.raises(AssertionError, match="without a line"):
        spills(SAMPLE.replace("0 bytes spill loads", ""))


@pytest.mark.skipif(
    not extensions.masked_log_softmax.cuda, reason="the CUDA part is not built: no nvcc of torch's version"
)
@pytest.mark.parametrize("name", sorted(path.parent.name for path in REPOSITORY.glob("csrc/*/cuda.cu")))
def test_no_kernel_spills(name):
    source = (REPOSITORY / f"csrc/{name}/kernels.cuh").read_text()
    kernels = re.findall(r"__global__ void\s+(?:__launch_bounds__\([^)]*\)\s+)?(\w+)\(", source)
    assert kernels and len(kernels) == source.count("__global__")
    report = spills((REPOSITORY / f"megatron_rl/ops/_{name}.ptxas.txt").read_text())
    for kernel in kernels:
        for architecture in ARCHITECTURES:
            variants = [v for v in report if v[1] == architecture and f"{len(kernel)}{kernel}" in v[0]]
            assert variants, f"{kernel} is not built for {architecture}: build again"
    assert not {variant: count for variant, count in report.items() if count}


def test_the_environments_own_nvcc_comes_first(tmp_path, monkeypatch):
    """It is pinned; one of CUDA_HOME or PATH may be of any release."""
    cuda = torch.version.cuda.split(".")[0]

    def nvcc(folder: Path, release: str) -> str:
        folder.mkdir(parents=True)
        (folder / "nvcc").write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}'\n")
        (folder / "nvcc").chmod(0o755)
        return str(folder / "nvcc")

    monkeypatch.setattr("setuptools.setup", lambda **_: None)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"purelib": str(tmp_path / "packages")})
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    find_nvcc = runpy.run_path(str(REPOSITORY / "setup.py"))["find_nvcc"]
    assert find_nvcc() is None
    toolkit = nvcc(tmp_path / "toolkit" / "bin", f"{cuda}.0")
    assert find_nvcc() == toolkit
    own = nvcc(tmp_path / "packages" / "nvidia" / f"cu{cuda}" / "bin", f"{cuda}.0")
    assert find_nvcc() == own
