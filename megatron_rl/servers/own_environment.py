"""SGLang's own environment: its Python, and what it compiles kernels with. No torch here."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from megatron_rl_plugin import installed

from megatron_rl.errors import UserError

ANSWER_S = 120.0
"""Longest wait for a Python to say which megatron-rl-sglang it has; well below a second on an idle machine."""


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


def check_plugin(python: Path) -> None:
    """Errors: UserError where SGLang's environment does not have the megatron-rl-sglang of this process."""
    command = [python, "-m", "megatron_rl_plugin.installed"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=ANSWER_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(
            f"SGLang's environment: {python} cannot be run ({error}); tools/setup.sh --force makes it anew"
        ) from None
    if problem := plugin_problem(python, done.stdout.strip() or None):
        raise UserError(problem)


def plugin_problem(python: Path, found: str | None) -> str | None:
    """The problem of the environment of `python`, in which `installed_code()` is `found`; None: it has none."""
    if found == installed.code():
        return None
    what = "lacks megatron-rl-sglang" if found is None else "has another megatron-rl-sglang than the trainer"
    return (
        f"SGLang's environment of {python} {what}: run tools/setup.sh, or"
        f" {python} -m pip install --no-deps {installed.ROOT}"
    )


def cuda_tools(python: Path) -> dict[str, str]:
    """Environment variables by which a server on a GPU finds CUDA's parts of its own environment, which nothing else names.

    Its kernels are compiled when they are first used, with ninja and, unless CUDA_HOME says otherwise, nvcc: that is of the
    same release as the CUDA headers there. A server that sleeps preloads the library of torch_memory_saver, so that it does
    not even start where the linker finds no CUDA runtime; torch, which knows its own, comes later.
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
