"""What each rank does in test_likelihood.py: commands, one after the other on the same processes."""

from __future__ import annotations

import contextlib
import io

import torch.distributed as dist

from megatron_rl.cli import main


def run_commands(commands: list[list[str]]) -> list[str]:
    """What each command printed on the first process."""
    found = []
    for command in commands:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            assert main(command) == 0, printed.getvalue()
        assert not dist.is_initialized()
        found.append(printed.getvalue())
    return found
