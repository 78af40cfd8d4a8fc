"""Stage start: what was built runs here, and a trainer process and an engine's can begin."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_rl.errors import UserError
from megatron_rl.servers.own_environment import cuda_tools, find_python


def test_the_kernels_were_built_for_this_gpu(cuda):
    from megatron_rl.ops.extensions import masked_log_softmax, sink_attention

    assert masked_log_softmax.cuda and sink_attention.cuda, "built without nvcc: the CPU part alone"


def test_the_cpu_platform_stays_away(cuda):
    import megatron_rl.train  # noqa: F401  (imports Megatron)
    from megatron_rl.platform import activate

    import megatron.core.parallel_state as module  # isort: skip

    assert "GPU" not in activate()
    assert "_megatron_rl_platform_" not in vars(module)


def test_doctor_finds_no_error(cuda, record_property):
    done = subprocess.run(
        [sys.executable, "-m", "megatron_rl.cli", "doctor", "--json"], capture_output=True, text=True, timeout=300
    )
    findings = {finding["part"]: finding for finding in json.loads(done.stdout)}
    here = f"{Path.cwd()}/"  # results are kept, and the paths of a machine are its own
    record_property("doctor", {part: f"{f['state']}: {f['found']}".replace(here, "") for part, f in findings.items()})
    # A bare machine has no SGLang: it is not what this stage is about.
    assert [part for part, f in findings.items() if f["state"] == "error" and part != "SGLang"] == []


def test_an_engine_finds_its_libraries_and_gives_its_memory_back(cuda, record_property):
    """In the environment of a server on a GPU, and with the library that one preloads to sleep."""
    try:
        python = find_python()
    except UserError as error:
        pytest.skip(str(error))
    command = [python, Path(__file__).with_name("engine_parts.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=os.environ | cuda_tools(python))
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    record_property("engine", found)
    # Nobody else is on the GPU in this stage. Two roundings to bf16, each 2^-9 of a number.
    assert found["given_up"] > 0.9 * 2**30 and found["taken_back"] > 0.9 * 2**30
    assert found["holds"] and found["norm_off"] < 2**-7


def test_a_group_of_one_over_nccl(device):
    """As a run starts it: torch.distributed, Megatron's parallel state, a collective on the device and one on the host."""
    from megatron_rl.config import ParallelConfig
    from megatron_rl.distributed import parallel

    ranks = parallel.initialize(ParallelConfig(), seed=0)
    try:
        assert ranks.device.type == device.type
        tensor = torch.arange(5.0, device=device)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
        assert ranks.gather("here") == ["here"] and ranks.maximum(3) == 3
    finally:
        parallel.shutdown()
