"""Several trainer processes on this machine: with `--nproc N`, the command runs itself again under torchrun.

This module does not import torch before it starts torchrun.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
from contextlib import suppress
from types import FrameType

import psutil

from megatron_rl.credentials import RUN_KEY
from megatron_rl.servers.orphans import own_folder


def needs_torchrun(nproc: int) -> bool:
    """Return True if torchrun must start processes: --nproc asks for several, and torchrun did not start this one (no RANK)."""
    return nproc > 1 and "RANK" not in os.environ


def _pass_on(number: int, _: FrameType | None) -> None:
    """Forward a signal to the processes of --nproc, which save and exit. torchrun itself would kill them after 30 s."""
    started = psutil.Process().children()
    if not started:
        sys.exit(128 + number)
    for process in started:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def torchrun(nproc: int, arguments: list[str], failing: int | None = None) -> int:
    """Run this command in `nproc` processes, each with its share of the CPU cores, and wait until they end.

    failing: exit status that is passed on if the first process to fail ends with it. Returns 2 after any other failure.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as run

    at = next(i for i, argument in enumerate(arguments) if argument.partition("=")[0] == "--nproc")
    # torchrun's parser would read our --nproc as an abbreviation of its own option.
    arguments = arguments[:at] + arguments[at + (1 if "=" in arguments[at] else 2) :]
    os.environ.setdefault(RUN_KEY, secrets.token_hex())
    # torchrun's own store would listen on all addresses; rank 0's store listens only on this machine.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or nproc) // nproc)))
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, _pass_on)
    try:
        # The rendezvous, whose data torchrun unpickles, uses a private folder instead of a port.
        with own_folder() as own:
            run(
                [
                    "--nnodes=1",
                    "--rdzv-backend=c10d",
                    "--rdzv-conf=store_type=file",
                    f"--rdzv-endpoint={own['TMPDIR']}/rendezvous",
                    f"--rdzv-id={secrets.token_hex(8)}",
                    "--local-addr=127.0.0.1",
                    "--signals-to-handle=SIGINT,SIGHUP,SIGQUIT",
                    f"--nproc-per-node={nproc}",
                    "--no-python",
                    sys.executable,
                    "-m",
                    "megatron_rl.cli",
                    *arguments,
                ]
            )
    except (
        BaseException
    ) as error:  # ChildFailedError would print torchrun's report, but the ranks have already printed the error
        if type(error).__name__ == "SignalException":
            raise KeyboardInterrupt from None
        if type(error).__name__ not in ("ChildFailedError", "SystemExit"):
            raise
        passed_on = isinstance(error, ChildFailedError) and error.get_first_failure()[1].exitcode == failing
        return failing if failing is not None and passed_on else 2
    return 0
