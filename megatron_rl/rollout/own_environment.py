"""SGLang's own environment: its Python, and what it compiles kernels with. No torch here."""

from __future__ import annotations

import os
from pathlib import Path

from megatron_rl.errors import UserError


def find_python(configured: str | None = None) -> Path:
    """Python of SGLang's environment: the configured one, else .venv-rollout beside the package or in the cwd."""
    if configured:
        if not os.access(configured, os.X_OK):
            raise UserError(f"config: rollout.server.python = '{configured}' is not an executable file")
        return Path(configured)
    places = [Path(__file__).parents[2], Path.cwd()]
    for place in places:
        python = place / ".venv-rollout" / "bin" / "python"
        if os.access(python, os.X_OK):
            return python
    raise UserError(
        "no environment of SGLang found (.venv-rollout beside the package or in the current folder):"
        " run tools/setup.sh, or set rollout.server.python, or list running servers in rollout.addresses"
    )


def compilers(python: Path) -> dict[str, str]:
    """Environment variables by which a server on a GPU finds what its kernels are compiled with when they are first used.

    Those are ninja and, unless CUDA_HOME says otherwise, nvcc, both of SGLang's own environment: nvcc is of the same
    release as its CUDA headers there, and nothing else puts that environment on PATH.
    """
    found = {"PATH": f"{python.parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    nvcc = next(python.parents[1].glob("lib/python*/site-packages/nvidia/*/bin/nvcc"), None)
    if nvcc is not None and not (os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")):
        found["CUDA_HOME"] = str(nvcc.parents[1])
    return found
