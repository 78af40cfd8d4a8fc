"""Start the trainer processes of one machine, for a run on several machines without SLURM.

    tools/start_ranks.py train CONFIG --processes G --machines N --machine-rank I --meet HOST:PORT --key-folder FOLDER \
        [--section.key VALUE ...]

Each machine calls this program with the same arguments, except for its own rank I. Rank 0 listens at HOST:PORT. All machines
see FOLDER, which holds the key with which the processes sign their messages. The first machine creates the key.

SIGTERM and SIGUSR1 tell the processes to save and stop. If one process fails, the others are stopped too.

The exit status is 0 if all processes succeeded, and 143 if the run was told to stop and can be resumed. It is 2 for an error
before the first step, which only a person can repair. It is 1 for any other failure, after which the run can be resumed.
"""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from megatron_rl.config import Config
from megatron_rl.config.load import load_config
from megatron_rl.credentials import RUN_KEY, key_of_folder
from megatron_rl.errors import UserError
from megatron_rl.metrics.logger import METRICS_FILE

MISTAKE, STOPPED = 2, 143
KILL_S = 30.0
"""Seconds from SIGTERM to SIGKILL for the processes that remain after a failure."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("train", "sft", "reward", "dpo"))
    parser.add_argument("config", metavar="CONFIG")
    parser.add_argument("--processes", type=int, default=1, metavar="G", help="number of processes per machine (1)")
    parser.add_argument("--machines", type=int, default=1, metavar="N", help="number of machines (1)")
    parser.add_argument("--machine-rank", type=int, default=0, metavar="I", help="rank of this machine, from 0 (0)")
    parser.add_argument("--meet", default="127.0.0.1:29500", metavar="HOST:PORT", help="free port of machine 0")
    parser.add_argument("--key-folder", type=Path, metavar="FOLDER", help="private folder that all machines see")
    args, overrides = parser.parse_known_args()
    os.umask(0o077)
    try:
        if args.processes < 1 or not 0 <= args.machine_rank < args.machines:
            raise UserError(
                f"--processes {args.processes} --machines {args.machines} --machine-rank {args.machine_rank}: at least one"
                " process, and ranks from 0 to --machines - 1"
            )
        if args.machines > 1 and args.key_folder is None:
            raise UserError("several --machines need --key-folder: a private folder that all of them see")
        config = load_config(args.config, overrides)
        key = key_of_folder(args.key_folder) if args.key_folder else secrets.token_hex()
    except UserError as error:
        print(f"start_ranks: error: {error}", file=sys.stderr)
        return MISTAKE
    command = [sys.executable, "-m", "megatron_rl.cli", args.command, args.config, *overrides]
    return run(config, command, environments_of(args, key))


def environments_of(args: argparse.Namespace, key: str) -> list[dict[str, str]]:
    """Return the environment of each process of this machine, as torchrun sets it."""
    host, _, port = args.meet.rpartition(":")
    shared = {
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
        "WORLD_SIZE": str(args.machines * args.processes),
        "LOCAL_WORLD_SIZE": str(args.processes),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(max(1, (os.cpu_count() or 1) // args.processes)),
        # Both sides of the group that transfers weights need the same value; this is SGLang's default.
        "NCCL_CUMEM_ENABLE": os.environ.get("NCCL_CUMEM_ENABLE", "0"),
        RUN_KEY: os.environ.get(RUN_KEY) or key,
    }
    first = args.machine_rank * args.processes
    return [os.environ | shared | {"RANK": str(first + i), "LOCAL_RANK": str(i)} for i in range(args.processes)]


def run(config: Config, command: list[str], environments: list[dict[str, str]]) -> int:
    """Run the processes to their end, and return the exit status of this program."""
    started, told = time.time(), False
    processes: list[subprocess.Popen[bytes]] = []

    def stop(*_: object) -> None:
        nonlocal told
        told = True
        _send(processes, signal.SIGUSR1)

    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, stop)
    for environment in environments:
        if not told:
            processes.append(subprocess.Popen(command, env=environment))
    kill_at = None
    while None in [process.poll() for process in processes]:  # polls every process, as any() would not
        if any(process.returncode for process in processes):
            now = time.monotonic()
            if kill_at is None:
                kill_at = now + KILL_S
                _send(processes, signal.SIGTERM)
            elif now >= kill_at:
                _send(processes, signal.SIGKILL)
        time.sleep(0.2)
    failed = [process.returncode for process in processes if process.returncode]
    if told and not complete(config):
        return STOPPED
    if not failed:
        return 0
    # Later, status 2 can mean lost servers, after which the run continues.
    metrics = config.run_dir / METRICS_FILE
    learned = metrics.exists() and metrics.stat().st_mtime >= started
    return MISTAKE if MISTAKE in failed and not learned else 1


def complete(config: Config) -> bool:
    """Return whether the run has its last checkpoint."""
    return (config.run_dir / "checkpoints" / f"step_{config.steps:06d}").is_dir()


def _send(processes: list[subprocess.Popen[bytes]], number: signal.Signals) -> None:
    for process in processes:
        if process.poll() is None:
            process.send_signal(number)


if __name__ == "__main__":
    sys.exit(main())
