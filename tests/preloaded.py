"""The processes that have imported what others are forked from: the trainer, for ranks, programs and pytest's workers; and
packages alone, for who looks at how the trainer is imported."""

from __future__ import annotations

import atexit
import os
import sys
import types
from pathlib import Path

from tests.zygote import Zygote

_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).resolve().parent.parent)}

# Megatron takes ten seconds to import, and modelopt, which the Bridge asks of every module, seven. A pool of threads would not
# survive the fork.
TRAINER = Zygote(
    "trainer",
    ("megatron_rl.train", "modelopt.torch", "tests.forked_servers:install"),
    environment=_ENVIRONMENT,
)
PACKAGES = Zygote("packages", ("transformers.modeling_utils", "torch._dynamo"), environment=_ENVIRONMENT)
"""It knows nothing of Megatron."""


def execute(files: list[int], code: str) -> None:
    """In a fork: be what `python -c CODE` would be. files: its input, output and errors."""
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    sys.argv = ["-c"]
    try:
        exec(compile(code, "<string>", "exec"), main.__dict__)
    finally:
        atexit._run_exitfuncs()
