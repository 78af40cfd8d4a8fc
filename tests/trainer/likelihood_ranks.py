"""What each rank does in test_likelihood.py: commands, one after the other on the same processes."""

from __future__ import annotations

import contextlib
import io

from megatron_rl.cli import main
from megatron_rl.distributed import parallel

from megatron.core import parallel_state  # isort: skip (after megatron_rl, which makes it importable without a GPU)


def run_commands(commands: list[list[str]]) -> list[str]:
    """What each command printed on the first process."""
    parallel.shutdown = parallel_state.destroy_model_parallel  # the processes stay connected for the next command
    found = []
    for command in commands:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            assert main(command) == 0, printed.getvalue()
        found.append(printed.getvalue())
    return found
