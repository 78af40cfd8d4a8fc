"""Run a function on several real processes over gloo and collect what it returns, for tests of parallel layouts."""

from __future__ import annotations

import faulthandler
import importlib
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def run_ranks(world_size: int, function: str, args: tuple = (), timeout: float = 240.0) -> list[Any]:
    """Call `function` ("module:name", tests/ being importable) with `args` on each rank; returns the results by rank.

    Errors: AssertionError with the tail of the failed rank's output; the others are ended. TimeoutError likewise.
    """
    with tempfile.TemporaryDirectory() as folder:
        call = Path(folder) / "call.pkl"
        call.write_bytes(pickle.dumps((function, args, timeout)))
        environment = os.environ | {
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([*sys.path, str(REPOSITORY)]),
        }
        processes, outputs = [], []
        for rank in range(world_size):
            output = open(Path(folder) / f"{rank}.log", "w+")  # noqa: SIM115 (closed below)
            outputs.append(output)
            command = [sys.executable, __file__, str(call), str(Path(folder) / f"{rank}.out")]
            env = environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            processes.append(subprocess.Popen(command, env=env, stdout=output, stderr=subprocess.STDOUT))
        try:
            deadline = time.monotonic() + timeout
            while any(p.poll() is None for p in processes):
                failed = [r for r, p in enumerate(processes) if p.poll() not in (None, 0)]
                if failed or time.monotonic() > deadline:
                    break
                time.sleep(0.05)
            failed = [r for r, p in enumerate(processes) if p.poll() not in (None, 0)]
            late = [r for r, p in enumerate(processes) if p.poll() is None]
        finally:
            for p in processes:
                p.kill()
                p.wait(30)
        tails = []
        for output in outputs:
            output.seek(0)
            tails.append(output.read()[-9000:])
            output.close()
        if failed:
            raise AssertionError(f"rank {failed[0]} of {world_size} failed in {function}:\n{tails[failed[0]]}")
        if late:
            raise TimeoutError(f"ranks {late} of {world_size} took over {timeout} s in {function}:\n{tails[late[0]]}")
        return [pickle.loads((Path(folder) / f"{rank}.out").read_bytes()) for rank in range(world_size)]


def _main() -> None:
    function, args, timeout = pickle.loads(Path(sys.argv[1]).read_bytes())
    faulthandler.dump_traceback_later(0.9 * timeout)  # says where a rank hangs, before it is killed
    module, _, name = function.partition(":")
    result = getattr(importlib.import_module(module), name)(*args)
    Path(sys.argv[2]).write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    _main()
