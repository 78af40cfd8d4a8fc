"""Helpers for ahead.py and simulate.py: a trainer and a server with one core each, like two groups of GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
TRAINER, SERVER = 0, 1


def call(core: int, *arguments: str, log: Path) -> subprocess.Popen:
    """Run a Python script of this repository on one core."""
    command = ["taskset", "--cpu-list", str(core), sys.executable, *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with open(log, "ab") as out:
        return subprocess.Popen(
            command, cwd=REPOSITORY, env=environment, stdout=out, stderr=out, start_new_session=True
        )


def finish(process: subprocess.Popen, what: str, log: Path, timeout: float) -> None:
    try:
        if process.wait(timeout):
            raise SystemExit(f"benchmarks: {what} failed; see {log}")
    finally:
        process.kill()
        process.wait(30)


def train_beside_server(config: str, options: list[str], addresses: Path, log: Path, timeout: float) -> None:
    """Run `megatron-rl train` with one server, which is started before and ended after the run. options: of the run.

    Errors: SystemExit that names the log.
    """
    addresses.mkdir()
    common = [*options, "--rollout.address_folder", str(addresses), "--rollout.server.threads", "1"]
    serve = [str(REPOSITORY / "tools" / "serve.py"), config, *common, "--host", "127.0.0.1"]
    server = call(SERVER, *serve, "--address-file", str(addresses / "a.address"), log=log)
    try:
        finish(call(TRAINER, "-m", "megatron_rl.cli", "train", config, *common, log=log), log.stem, log, timeout)
    finally:
        server.terminate()
        server.wait(30)
