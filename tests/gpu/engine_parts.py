"""Needs of a server on a GPU machine: SGLang's own libraries load, and memory given up is free until it comes back.

    PYTHON_WITH_SGLANG tests/gpu/engine_parts.py

Prints one line of JSON. In an engine the second is done by a library that a process has to have from its start.
"""

from __future__ import annotations

import json
import subprocess
import sys

SIZE = 2**30
"""Bytes that are given up."""


def preloaded() -> dict[str, object]:
    """In the process that has the library. Errors: what SGLang's scheduler would end by."""
    import sglang.srt.managers.scheduler  # noqa: F401  (what it imports is compiled for the servers to come)
    import torch

    import sgl_kernel  # isort: skip (where it does not load, SGLang itself did)
    from torch_memory_saver import torch_memory_saver as saver

    with saver.region(tag="cache"):
        held = torch.ones(SIZE, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    free = [torch.cuda.mem_get_info()[0]]
    saver.pause("cache")
    free.append(torch.cuda.mem_get_info()[0])
    saver.resume("cache")
    free.append(torch.cuda.mem_get_info()[0])
    held.fill_(2)
    rows = torch.randn(8, 256, device="cuda", dtype=torch.bfloat16)
    normed = sgl_kernel.rmsnorm(rows, torch.ones_like(rows[0]), 1e-6).double()
    exact = rows.double() * (rows.double().square().mean(1, keepdim=True) + 1e-6).rsqrt()
    return {
        "given_up": free[1] - free[0],
        "taken_back": free[1] - free[2],
        "holds": int(held.min()) == int(held.max()) == 2,
        "norm_off": float((normed - exact).abs().max() / exact.abs().max()),
    }


def main() -> int:
    if len(sys.argv) > 1:
        print(json.dumps(preloaded()), flush=True)
        return 0
    from torch_memory_saver import configure_subprocess

    with configure_subprocess():
        return subprocess.run([sys.executable, __file__, "preloaded"]).returncode


if __name__ == "__main__":
    sys.exit(main())
