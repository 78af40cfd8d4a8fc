"""reasoning-gym's own scorers: of all its data sets none pays for anything, none evaluates a response, none remembers one."""

from __future__ import annotations

import json
import os
import random
import warnings

import pytest

from megatron_rl.config import DataConfig
from megatron_rl.errors import UserError
from megatron_rl.sandbox import isolated
from megatron_rl.sandbox.worker_pool import Failure, WorkerPool
from megatron_rl.tasks import build_task, reasoning_gym
from tests.tasks.canary import PAYLOADS, Canary

pytestmark = pytest.mark.skipif(bool(isolated.problem()), reason=isolated.problem() or "isolated")
EVALUATING = {
    *(
        "binary_matrix",
        "countdown",
        "intermediate_integration",
        "n_queens",
        "number_sorting",
        "polynomial_multiplication",
    ),
    *("puzzle24", "simple_integration", "spiral_matrix", "string_insertion"),
}
"""Data sets whose scorers evaluate texts. The versions are pinned: a new one is seen here."""
NAMES = sorted(reasoning_gym._registry().keys() - {"composite"})
POISON = (
    "exec('import importlib; c = importlib.import_module({module!r}).{kind}; c.score_answer = lambda s, a, e: 1.0')",
    "[setattr(__import__('sys').modules[{module!r}].{kind}, 'score_answer', lambda s, a, e: 1.0)]",
    "[c for c in ().__class__.__base__.__subclasses__() if setattr(c, 'score_answer', lambda *a: 1.0)]",
)
"""Responses that would change what later ones are paid."""


@pytest.fixture(scope="module")
def scorers():
    pool = WorkerPool(f"{reasoning_gym.__name__}:score_isolated", timeout_s=60.0, imports=["reasoning_gym"], size=1)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def entries():
    """The first entry of each data set."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {name: reasoning_gym._dataset(name, "{}", 10, 1)[0] for name in NAMES}


def scored(pool, entries, calls: list[tuple[str, str]]) -> list[float]:
    found = pool.map([(name, "{}", entries[name], text, 20.0) for name, text in calls])
    return [repr(result) if isinstance(result, Failure) else result["score"] for result in found]


@pytest.mark.slow
@pytest.mark.parametrize("others", [15, len(NAMES)])
def test_one_response_never_changes_the_score_of_another(scorers, entries, tmp_path, others):
    """Over the data sets whose scorers evaluate and `others`, in random order: right and wrong answers are paid as before,
    whatever was scored between them."""
    rng = random.Random(os.urandom(8))
    names = sorted({*EVALUATING, *rng.sample(NAMES, others)})
    right, wrong = [(name, str(entries[name]["answer"])) for name in names], [(name, "#?!") for name in names]
    with Canary(tmp_path) as canary:
        hostile = []
        for name in names:
            kind = reasoning_gym._registry()[name][0]
            poison = rng.choice(POISON).format(module=kind.__module__, kind=kind.__name__)
            hostile += [(name, poison)] if name in EVALUATING else []
            hostile += [(name, rng.choice(canary.texts()))]
        everything = right * 2 + wrong + hostile
        rng.shuffle(everything)
        found = scored(scorers, entries, everything)
        seen: dict[tuple[str, str], set[float]] = {}
        for call, score in zip(everything, found, strict=True):
            seen.setdefault(call, set()).add(score)
        assert {call: scores for call, scores in seen.items() if len(scores) > 1} == {}
        assert not canary.signs()
    for name in names:
        assert seen[name, "#?!"] <= {0.0, 0.01, 0.02, 0.05} or name in reasoning_gym.REFUSED
    # rush_hour, rubiks_cube and the like have no answer of their own to compare with
    full = {name for name, text in right if seen[name, text] == {1.0}}
    # At least 90 of 105 are: 15 that are drawn by lot have fewer than 3 of them with a chance of 1e-11.
    assert len(full) > (0.85 if others == len(NAMES) else 0.5) * len(names) and full >= EVALUATING


@pytest.mark.parametrize("name", sorted(EVALUATING))
def test_a_scorer_that_evaluates_is_given_values_alone(name, tmp_path, entries):
    """Here without the isolation, which would hold as well."""
    kind = reasoning_gym._registry()[name][0]
    assert reasoning_gym._evaluates(kind)
    with Canary(tmp_path) as canary:
        hostile = [
            *canary.texts("python", "sympy"),
            *(p.format(module=kind.__module__, kind=kind.__name__) for p in POISON),
        ]
        for text in canary.texts():
            assert reasoning_gym.score(name, "{}", entries[name], text)["score"] <= 0.05
        for text in hostile:
            for form in (
                text,
                f"[{text}]",
                f"({text},)",
                f"{{{text}}}",
                f"1 + {text}",
                f"{text} + x",
                f"[[0, {text}]]",
            ):
                assert not reasoning_gym.is_plain(form), form
                assert reasoning_gym.score(name, "{}", entries[name], form)["score"] == 0.0
        assert not canary.signs()


def test_the_scorers_that_evaluate_are_known():
    assert {name for name in NAMES if reasoning_gym._evaluates(reasoning_gym._registry()[name][0])} == EVALUATING


@pytest.mark.parametrize(
    "text",
    [
        "[[0, 1], [1, 0]]",
        "['a', 'b']",
        "3*x**2 - 2*x + 1",
        "(95 - 3)*4 + 7",
        "-cos(x)/2 + C",
        "2*exp(3*x)/5 + C",
        "1 2 3",
        "x * y",
    ],
)
def test_answers_that_scorers_know_are_values(text):
    assert reasoning_gym.is_plain(text)


CALLS = (
    "f(1)(2)",
    "exp(1)(2)",
    "[1][0](2)",
    "a[0]",
    "print(1)",
    "open(x)",
    "E(1)(x)",
    "x(1)",
    "x\n(1)",
    "[x](1)",
    "(x)[0]",
)
OTHERS = (
    "x.real",
    "sin.__class__",
    "(1).real",
    "lambda: 1",
    "[x for x in y]",
    "'a' % x",
    "f'{x}'",
    "x := 1",
    "__import__",
    "@f",
    "x;y",
)


@pytest.mark.parametrize("text", [*CALLS, *OTHERS, "9" * 5000])
def test_what_could_do_more_is_none(text):
    assert not reasoning_gym.is_plain(text)


@pytest.mark.parametrize("name", sorted(reasoning_gym.REFUSED))
def test_data_sets_that_pay_for_anything_are_refused_by_name(name):
    with pytest.raises(UserError, match=rf"^config: data.task: reasoning_gym:{name}: .*choose another data set$"):
        build_task(DataConfig(task=f"reasoning_gym:{name}"))


@pytest.mark.parametrize(("text", "paid"), [("0", 1.0), ("nan", 0.5), ("?!", 0.2)])
def test_a_data_set_that_pays_for_rubbish_is_refused(monkeypatch, text, paid):
    kind = reasoning_gym._registry()["chain_sum"][0]
    monkeypatch.setattr(kind, "score_answer", lambda self, answer, entry: paid if answer == text else 0.0)
    with pytest.raises(UserError, match=rf"the scorer of reasoning_gym:chain_sum pays {paid:g} for rubbish"):
        build_task(DataConfig(task="reasoning_gym:chain_sum"))


def test_what_depends_on_the_question_is_no_rubbish(monkeypatch):
    """A share for an answer that is near, or one that is right now and then."""
    kind = reasoning_gym._registry()["chain_sum"][0]
    monkeypatch.setattr(
        kind, "score_answer", lambda self, answer, entry: float(answer == "0" and "1" in entry["answer"])
    )
    build_task(DataConfig(task="reasoning_gym:chain_sum", seed=3)).close()


@pytest.mark.parametrize("name", ["countdown", "palindrome_generation", "color_cube_rotation"])
def test_the_little_that_any_text_is_paid_is_nothing(name):
    task = build_task(DataConfig(task=f"reasoning_gym:{name}", options={"size": 20}))
    try:
        prompts = task.prompts("train")[:2]
        assert [parts["score"] for parts in task.score([prompts[0]] * 3, ["?!", "no answer", "1"])] == [0.0] * 3
        if prompts[1].answer is not None:
            assert task.score([prompts[1]], [str(prompts[1].answer)])[0]["score"] == 1.0
    finally:
        task.close()


def test_the_payloads_would_do_what_they_say(tmp_path):
    """Or else nothing is shown by their absence."""
    with Canary(tmp_path) as canary:
        for text in canary.texts("python"):
            eval(text)
            assert canary.signs(), text
            canary.clear()
    assert json.dumps(PAYLOADS)
