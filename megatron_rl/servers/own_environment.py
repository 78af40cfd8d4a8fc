"""SGLang's own Python environment: the interpreter, and the tools that compile kernels. This module does not import torch."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from megatron_rl_plugin import installed

from megatron_rl.errors import UserError

ANSWER_S = 120.0
"""Seconds to wait for a Python interpreter to report its installed megatron-rl-sglang. An idle machine needs less than 1 s."""


def find_python(configured: str | None = None) -> Path:
    """Return the Python interpreter of SGLang's environment.

    configured: value of rollout.server.python; by default .venv-rollout beside the package, or else in the current folder.
    """
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


def check_plugin(python: Path) -> None:
    """Raise UserError if SGLang's environment lacks megatron-rl-sglang, or its code differs from this process's copy."""
    command = [python, "-m", "megatron_rl_plugin.installed"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=ANSWER_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(
            f"SGLang's environment: {python} cannot be run ({error}); run tools/setup.sh --force to make it again"
        ) from None
    if problem := plugin_problem(python, done.stdout.strip() or None):
        raise UserError(problem)


def plugin_problem(python: Path, found: str | None) -> str | None:
    """Return the error text if SGLang's environment has another megatron-rl-sglang than this process; else None.

    python: interpreter of the environment. found: output of `megatron_rl_plugin.installed` there; None: no output.
    """
    if found == installed.code():
        return None
    what = "lacks megatron-rl-sglang" if found is None else "has another megatron-rl-sglang than the trainer"
    return (
        f"SGLang's environment of {python} {what}: run tools/setup.sh, or"
        f" {python} -m pip install --no-deps {installed.ROOT}"
    )


def cuda_tools(python: Path) -> dict[str, str]:
    """Return environment variables by which a server on a GPU finds the CUDA tools and libraries of its own environment.

    SGLang compiles kernels at their first use, with ninja and nvcc. Unless CUDA_HOME or CUDA_PATH is set, the server uses the
    nvcc of its environment, which has the same release as the CUDA headers there. A server that can sleep preloads the library
    of torch_memory_saver. If the dynamic linker then finds no CUDA runtime, the server does not start. torch finds its own
    CUDA runtime, but is loaded later.
    """
    found = {"PATH": f"{python.parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    packages = "lib/python*/site-packages/nvidia/*"
    nvcc = next(python.parents[1].glob(f"{packages}/bin/nvcc"), None)
    if nvcc is not None and not (os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")):
        found["CUDA_HOME"] = str(nvcc.parents[1])
    runtime = next(python.parents[1].glob(f"{packages}/lib/libcudart.so.*"), None)
    if runtime is not None:
        folders = [folder for folder in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if folder]
        found["LD_LIBRARY_PATH"] = os.pathsep.join([*folders, str(runtime.parent)])
    return found
