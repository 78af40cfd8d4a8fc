"""Seconds until many conversations have the results of their first and their second call of the Python tool.

    python benchmarks/sandbox.py --json docs/results/sandbox.json

All calls start at once, in a process that holds the given amount of memory, because a trainer holds many GB. The floor of the
first calls is the time to start Python equally often without a container. The results are medians over rounds in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import mmap
import os
import statistics
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megatron_rl.config import AgentConfig
from megatron_rl.sandbox.bubblewrap import PYTHON
from megatron_rl.tools.toolbox import Toolbox

CODE = "print(6 * 7)"


async def calls(box: Toolbox, conversations: list[dict]) -> float:
    """Return the seconds of one call in each conversation."""
    begun = time.perf_counter()
    results = await asyncio.gather(*(box.call("python", {"code": CODE}, sessions) for sessions in conversations))
    assert set(results) == {"42"}
    return time.perf_counter() - begun


async def round_of(box: Toolbox, count: int) -> dict[str, float]:
    conversations: list[dict] = [{} for _ in range(count)]
    found = {"first": await calls(box, conversations), "second": await calls(box, conversations)}
    for sessions in conversations:
        await box.end(sessions)
    return found


def uncontained(count: int) -> float:
    """Return the seconds of equally many Python processes that run the same code."""
    begun = time.perf_counter()
    with ThreadPoolExecutor(count) as pool:
        command = [PYTHON, "-I", "-S", "-B", "-c", CODE]
        done = pool.map(lambda _: subprocess.run(command, capture_output=True, check=True).stdout, range(count))
        assert set(done) == {b"42\n"}
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--conversations", type=int, default=64)
    parser.add_argument(
        "--memory", type=float, nargs="+", default=[0.0, 6.0], help="memory in GB that the process holds"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    box = Toolbox(AgentConfig(tools=["python"]))
    box.open()
    results = []
    try:
        for memory_gb in args.memory:
            size = max(1, int(memory_gb * 1e9))
            held = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            for start in range(0, size, mmap.PAGESIZE):
                held[start] = 1
            taken: dict[str, list[float]] = {"first": [], "second": [], "uncontained": []}
            for _ in range(args.rounds):
                for name, seconds in box.loop.run(round_of(box, args.conversations)).items():
                    taken[name].append(seconds)
                taken["uncontained"].append(uncontained(args.conversations))
            held.close()
            medians = {name: statistics.median(values) for name, values in taken.items()}
            results.append(
                {"memory_gb": memory_gb, "seconds": medians, "ratio": medians["first"] / medians["uncontained"]}
            )
            print(json.dumps(results[-1]))
    finally:
        box.close()
    model = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), "")
    about = {"processor": model.partition(":")[2].strip(), "cores": os.cpu_count(), "root": os.geteuid() == 0}
    if args.json:
        found = {"machine": about, "conversations": args.conversations, "rounds": args.rounds, "results": results}
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
