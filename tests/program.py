"""The program as users start it, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys


def command(*arguments: str, timeout: float = 280) -> subprocess.CompletedProcess:
    """`megatron-rl ARGUMENTS`, with its output as text. Errors: AssertionError with the end of the output where it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "megatron_rl.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done
