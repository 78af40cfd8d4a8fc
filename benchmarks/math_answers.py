"""The verifier `math` and the package math-verify on GSM8K's own solutions: accepted responses, and seconds per response.

    python benchmarks/math_answers.py train.jsonl test.jsonl --json docs/results/math-answers.json

The files are the published files of GSM8K: lines of {question, answer}. An answer is a solution that ends with a line
`#### NUMBER`. A verifier must accept the solution of a row, and its answer in four other forms. It must reject the solution of
another row with another answer.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from math_verify import parse, verify

from megatron_rl.verifiers.math import compare_math

FORMS = ("The answer is {}.", r"\boxed{{{}}}", "So she has {} apples.", "**Answer:** ${}$")


def ours(response: str, solution: str, question: str) -> bool:
    """Return True if the verifier accepts the response."""
    return bool(compare_math(response, solution, question)["correct"])


def theirs(response: str, solution: str, question: str) -> bool:
    """Return True if math-verify accepts the response, without its time limit."""
    del question
    gold = parse(solution.rpartition("####")[2].strip(), parsing_timeout=None)
    return verify(gold, parse(response, parsing_timeout=None), timeout_seconds=None)


def measure(judge: Callable[[str, str, str], bool], rows: list[dict[str, str]], others: list[dict[str, str]]) -> dict:
    """Return the number of accepted responses by kind, the number of responses, and the seconds per response."""
    seconds: list[float] = []

    def paid(response: str, row: dict[str, str]) -> bool:
        begun = time.perf_counter()
        found = judge(response, row["answer"], row["question"])
        seconds.append(time.perf_counter() - begun)
        return found

    counts = {
        "as_stated": sum(paid(row["answer"], row) for row in rows),
        "other_forms": {form: sum(paid(form.format(_final(row)), row) for row in rows) for form in FORMS},
    }
    pairs = [(row, other) for row, other in zip(rows, others, strict=True) if _value(row) != _value(other)]
    counts |= {"of_another_row": sum(paid(other["answer"], row) for row, other in pairs), "pairs": len(pairs)}
    return {"rows": len(rows), **counts, "median_s": statistics.median(seconds), "longest_s": max(seconds)}


def _final(row: dict[str, str]) -> str:
    return row["answer"].rpartition("####")[2].strip()


def _value(row: dict[str, str]) -> str:
    return _final(row).replace(",", "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = [json.loads(line) for file in args.files for line in file.read_text().splitlines()]
    others = random.Random(args.seed).sample(rows, len(rows))
    results = {}
    for name, judge in (("math", ours), ("math-verify", theirs)):
        results[name] = measure(judge, rows, others)
        print(json.dumps({name: results[name]}))
    model = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), "")
    about = {"processor": model.partition(":")[2].strip(), "cores": os.cpu_count()}
    if args.json:
        args.json.write_text(json.dumps({"machine": about, "seed": args.seed, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
