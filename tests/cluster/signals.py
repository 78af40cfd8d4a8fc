"""Runs of a tiny model that are ended by random signals at random moments, and what is left of them.

    python -m tests.cluster.signals --runs 50 --json docs/results/signals.json

Each run has one or two processes and a server of its own, and is sent one to four of SIGINT, SIGTERM and SIGKILL from its start
on, to one of its processes or to all. It then ends by itself. No process of it, port, shared memory or temporary folder is left
half a minute later, or the next start removes it, which is counted; all runs share a folder, so each goes on from the last one.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import uuid
from pathlib import Path

import psutil

from megatron_rl.metrics.logger import METRICS_FILE, read_json_lines
from megatron_rl.servers import orphans
from tests.cluster.chaos import LIMIT_S, MARK, config_of
from tests.preloaded import TRAINER
from tests.program import Program
from tools.make_tiny_model import Sizes, make_tiny_model

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
LATEST_S = 30.0
"""A run is sent its first signal within this time: imports and loading take some seconds of it, steps the rest."""
LEFT_S = 30.0
"""Longest wait, when its processes have ended, for what they started."""


def ours(folder: Path) -> list[psutil.Process]:
    """Processes that runs in the folder have started, themselves included."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid in (os.getpid(), TRAINER.pid) or process.status() == psutil.STATUS_ZOMBIE:
                continue
            if process.environ().get(MARK) == str(folder):
                found.append(process)
    return found


def left_behind(folder: Path, ports: set[int], shared: set[Path]) -> list[str]:
    """Things that are still there of runs in the folder that had these ports and this shared memory."""
    connections = psutil.net_connections("tcp")
    listening = {c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN}
    found = [f"process {' '.join(process.cmdline())[:80]}" for process in ours(folder)]
    found += [f"port {port}" for port in ports & listening]
    found += [f"shared memory {file}" for file in shared if file.exists()]
    return found + [f"folder {path}" for path in (folder / "tmp").glob(f"{orphans.PREFIX}*")]


def one(folder: Path, draw: random.Random, log: Path) -> tuple[str, list[str]]:
    """A run and its signals. Returns what was sent, and what was left half a minute after its end."""
    ranks = draw.choice((1, 2))
    program = Program("train", str(folder / "config.yaml"), "--parallel.tensor", str(ranks), log=log, ranks=ranks)
    ports, shared, sent = set[int](), set[Path](), []
    try:
        until = time.monotonic() + draw.uniform(0, LATEST_S)
        while time.monotonic() < until and program.poll() is None:
            time.sleep(0.2)
        processes = {process.pid for process in ours(folder)}
        connections = psutil.net_connections("tcp")
        ports = {c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN and c.pid in processes}
        shared = orphans.mapped(processes)
        for _ in range(draw.randint(1, 4)):
            number, victims = draw.choice(SIGNALS), draw.choice((program._processes, [draw.choice(program._processes)]))
            for process in victims:
                if process.exitcode is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process.pid, number)
            sent.append(f"{number.name} to {len(victims)} of {ranks}")
            time.sleep(draw.uniform(0, 1.5))
        deadline = time.monotonic() + LIMIT_S
        while any(process.exitcode is None for process in program._processes):
            assert time.monotonic() < deadline, f"it goes on after {', '.join(sent)}; see {log}"
            time.sleep(0.1)
    finally:
        program.kill()
    deadline = time.monotonic() + LEFT_S
    while (found := left_behind(folder, ports, shared)) and time.monotonic() < deadline:
        time.sleep(0.5)
    return ", ".join(sent), found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--seed", type=int, default=uuid.uuid4().int % 2**31)
    parser.add_argument("--json", type=Path, help="where the figures go")
    args = parser.parse_args()
    folder, draw = Path(tempfile.mkdtemp(prefix="signals-")), random.Random(args.seed)
    (folder / "tmp").mkdir()
    os.environ |= {MARK: str(folder), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TMPDIR": str(folder / "tmp")}
    tempfile.tempdir = str(folder / "tmp")
    print(f"seed {args.seed}, folder {folder}", flush=True)
    model = make_tiny_model("qwen3_moe", folder / "model", sizes=Sizes(layers=2), tokenizer="numbers")
    config = config_of(folder, model)
    config["rollout"]["address_folder"] = None
    config["sync"]["timeout_s"], config["parallel"]["timeout_s"] = 20, 30
    (folder / "config.yaml").write_text(json.dumps(config))
    start, log = time.monotonic(), folder / "log"
    swept, kinds = collections.Counter[str](), collections.Counter[str]()
    before: list[str] = []
    for number in range(args.runs):
        sent, found = one(folder, draw, log)
        kinds.update(word for word in sent.replace(",", "").split() if word.startswith("SIG"))
        still = [what for what in found if what in before]
        assert not still, f"the next start has not removed {still}"
        swept.update(what.split()[0] for what in found)
        assert not any(what.startswith(("process", "port")) for what in found), f"after {sent}: {found}"
        before = found
        steps = len(read_json_lines(folder / "runs" / "chaos" / METRICS_FILE)) if number else 0
        print(f"{time.strftime('%H:%M:%S')} {number + 1}: {sent}; steps {steps}; left {found}", flush=True)
    rows = [row for row in read_json_lines(folder / "runs" / "chaos" / METRICS_FILE) if row["step"]]
    assert [row["step"] for row in rows] == [*range(1, len(rows) + 1)], "each step once"
    figures = {
        "seed": args.seed,
        "runs": args.runs,
        "signals": dict(sorted(kinds.items())),
        "steps": len(rows),
        "processes_or_ports_left": 0,
        "removed_by_the_next_start": dict(swept),
        "seconds": round(time.monotonic() - start),
    }
    print(json.dumps(figures, indent=2))
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
