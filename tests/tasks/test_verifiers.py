"""Verifiers, the worker processes behind the slow ones, and evaluation scores."""

from __future__ import annotations

import itertools
import json
import os
import random
import statistics
import time
from collections import Counter

import pytest

from megatron_rl.config import DataConfig
from megatron_rl.dialects import Qwen, ReAct
from megatron_rl.errors import UserError
from megatron_rl.metrics.evaluation import average_at_n, collision, distinct_right, majority_at_n, pass_at_k
from megatron_rl.tasks import build_task, reasoning_gym
from megatron_rl.tasks.verifiers import VERIFIERS, exact, extract_answer, number_list, zigzag
from tools.make_tiny_model import text_tokenizer

TOWER = r"\boxed{9^{9^{9^9}}}"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("a\nb\n c ", "c"),
        ("<answer>1</answer> <ANSWER> 2\n</ANSWER> end", "2"),
        ("The answer is -4.\nBye", "-4"),
        ("Final answer: **12**", "12"),
        (r"so \boxed{\frac{1}{2}} it is", r"\frac{1}{2}"),
        (r"\boxed{1", r"\boxed{1"),
        ("", ""),
    ],
)
def test_extract_answer(text, answer):
    assert extract_answer(text) == answer


READERS = {
    "exact": lambda text: exact(text, "x"),
    "number_list": lambda text: number_list(text, "1 2"),
    "zigzag": lambda text: zigzag(text, "<6 15 3:"),
    **{f"extract of {name}": verifier.extract for name, verifier in VERIFIERS.items()},
    "grids": lambda text: extract_answer(text, multiline=True),
    "qwen": Qwen(text_tokenizer(512)).parse_text,
    "react": ReAct(text_tokenizer(512)).parse_text,
}
"""Readers of responses in the trainer's own process, where no limit of time holds."""
REPEATED = [
    "Answer:\n",
    "\n",
    " ",
    "<answer>",
    "<answer></answer>",
    "answer is ",
    "answer to ",
    "**",
    r"\boxed{",
    r"\boxed{1}",
]
REPEATED += [
    "{",
    "}",
    "$",
    r"\[",
    "1 ",
    "1,",
    "9",
    "#### 1\n",
    "<think>",
    "</think>",
    "```",
    "```\n",
    "~~~\nx\n",
    "> - ",
    "1. a\n",
]
REPEATED += [
    "<tool_call>",
    "<tool_call></tool_call>",
    "Action: x\n",
    "Action Input:",
    "Final Answer: ",
    "'",
    '"',
    "(",
    "x=",
    "é",
]


@pytest.mark.parametrize("reader", READERS)
def test_what_reads_in_the_trainers_process_is_linear_in_the_response(reader):
    """Texts of 16 times the length take less than 64 times as long, where quadratic time takes 256: 4 times are noise."""
    for repeated in REPEATED:
        for around in ("{}", "Answer: {}", "{} x"):
            took = []
            for length in (2_000, 32_000):
                text = around.replace("{}", repeated * (length // len(repeated)))
                start = time.process_time()
                READERS[reader](text)
                took.append(time.process_time() - start)
            assert took[1] < 64 * took[0] + 0.5, (repeated, around, took)


def test_code_that_the_parser_warns_of_says_nothing_in_the_trainers_log(recwarn):
    assert VERIFIERS["code"].extract("```python\nx = 1if 2else 3\ny = '\\d' is 5\n```")
    assert not recwarn.list


def test_exact():
    assert exact("I think\nParis ", "Paris") == {"correct": 1.0}
    assert exact("Paris, France", "Paris") == {"correct": 0.0}
    assert exact("The answer is 7", 7) == {"correct": 1.0}
    assert exact("", "") == exact(r"\boxed{}", "") == {"correct": 0.0}


@pytest.mark.parametrize(
    ("text", "correct", "answered"),
    [
        ("3 6 12", 1, 1),
        (" [3, 6.0, 12] ", 1, 1),
        ("3 12 6", 0, 1),
        ("3 6", 0, 1),
        ("3 6 12 12", 0, 1),
        ("3 < 6 12", 0, 0),
        ("", 0, 0),
        ("3 6 twelve", 0, 0),
    ],
)
def test_number_list(text, correct, answered):
    for answer in ([3, 6, 12], "3 6 12"):
        assert number_list(text, answer) == {"correct": correct, "answered": answered}


def test_numbers_of_a_list_are_compared_exactly():
    assert number_list("9007199254740993", [9007199254740992])["correct"] == 0
    assert number_list("9" * 400, "8" * 400)["correct"] == 0
    assert number_list("0.1 -0", [0.1, 0])["correct"] == 1
    assert number_list("", [])["correct"] == 0


@pytest.fixture(scope="module")
def math_task(tmp_path_factory):
    path = tmp_path_factory.mktemp("math") / "data.jsonl"
    answers = [
        "9 * 2 = $<<9*2=18>>18 a day.\n#### 18",
        "#### 70,000",
        r"\frac{3}{4}",
        "2x+1",
        "$-5$",
        "(1, 2)",
        "####",
        "1,2,3",
    ]
    path.write_text("".join(json.dumps({"prompt": f"p{i}", "answer": a}) + "\n" for i, a in enumerate(answers)))
    held_out = path.with_name("eval.jsonl")
    held_out.write_text('{"prompt": "e", "answer": "1"}\n')
    data = DataConfig(path=str(path), eval_path=str(held_out), verifier="math", options={"verifier_timeout_s": 8})
    task = build_task(data)
    yield task
    task.close()


@pytest.mark.parametrize(
    ("prompt", "text", "correct"),
    [
        (0, "She earns $2 each, so $18\n#### 18", 1),
        (0, r"\boxed{18}", 1),
        (0, "The answer is $18.00.", 1),
        (0, "#### 81", 0),
        (0, "18 or so\n#### 19", 0),
        (0, "", 0),
        (1, "She has $70,000.", 1),
        (1, r"\boxed{70000}", 1),
        (1, "70", 0),
        (2, "3/4", 1),
        (2, "0.75", 1),
        (2, r"$\frac{4}{3}$", 0),
        (3, "$1+2x$", 1),
        (3, "$1-2x$", 0),
        (4, "-5", 1),
        (4, "5", 0),
        (5, r"\boxed{(1,2)}", 1),
        (5, r"\boxed{(2,1)}", 0),
        (7, r"\boxed{1,2,3}", 1),
        (7, r"\boxed{1,2}", 0),
    ],
)
def test_math(math_task, prompt, text, correct):
    assert math_task.rewards(math_task.prompts("train")[prompt], text)["correct"] == correct


@pytest.mark.slow
def test_endless_and_unparsable_math_scores_zero(math_task, caplog):
    prompts = math_task.prompts("train")
    timeouts, errors = math_task.verify.pooled.timeouts, math_task.verify.pooled.errors
    parts = math_task.score([prompts[0], prompts[0], prompts[6]], [TOWER, "#### 18", "1"])
    assert [p["correct"] for p in parts] == [0.0, 1.0, 0.0]
    assert (math_task.verify.pooled.timeouts - timeouts, math_task.verify.pooled.errors - errors) == (0, 1)
    assert any("data.jsonl:7 scored 0" in m and "'####' is empty" in m for m in caplog.messages)
    assert math_task.rewards(prompts[0], "18")["correct"] == 1.0


def test_score_keeps_the_order(math_task):
    prompts = math_task.prompts("train")[:6] * 10
    texts = ["18", "70000", "3/4", "$2x+1$", "-5", r"\boxed{(1,2)}"] * 10
    random.Random(0).shuffle(texts)
    one_by_one = [math_task.rewards(p, t) for p, t in zip(prompts, texts, strict=True)]
    assert math_task.score(prompts, texts) == one_by_one
    with pytest.raises(ValueError, match="shorter"):
        math_task.score(prompts, texts[:2])


@pytest.mark.slow
def test_reasoning_gym_uses_the_data_sets_own_scorer():
    task = build_task(DataConfig(task="reasoning_gym:chain_sum", options={"size": 50}, template="Work out: {prompt}"))
    prompts = task.prompts("train")[:3]
    texts = [f"The answer is {p.answer}" for p in prompts]
    assert all(p.text.startswith("Work out: ") for p in prompts)
    assert [p["score"] for p in task.score(prompts, texts)] == [1.0] * 3
    assert [p["score"] for p in task.score(prompts, ["I do not know"] * 3)] == [0.0] * 3
    assert not {p.text for p in task.prompts("train")} & {p.text for p in task.prompts("eval")}
    task.close()


def test_reasoning_gym_scorers_that_raise_count_as_zero():
    task = build_task(DataConfig(task="reasoning_gym:prime_factorization", options={"size": 50}))
    entry = task.prompts("train")[0].metadata["entry"]
    scores = [
        reasoning_gym.score(task.dataset, task.options, entry, text)["score"] for text in ("x * y", "", entry["answer"])
    ]
    assert scores == [0.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        ("game_of_life_halting", {}, "pays 1.0 for any text"),
        ("chain_sums", {}, "did you mean 'chain_sum'"),
        ("chain_sum", {"min_term": 2}, "did you mean 'min_terms'"),
        ("chain_sum", {"min_terms": -1}, "min_terms"),
    ],
)
def test_reasoning_gym_refusals(task, options, message):
    with pytest.raises(UserError, match=message):
        build_task(DataConfig(task=f"reasoning_gym:{task}", options=options))


def test_pass_at_k_is_the_mean_over_all_subsets():
    rng = random.Random(os.urandom(8))
    rewards = [[float(rng.random() < 0.4) for _ in range(6)] for _ in range(5)]
    for k in range(1, 7):
        subsets = [[any(s) for s in itertools.combinations(row, k)] for row in rewards]
        assert pass_at_k(rewards, k) == pytest.approx(statistics.fmean(statistics.fmean(s) for s in subsets))
    with pytest.raises(ValueError, match="at least 7"):
        pass_at_k(rewards, 7)


def test_distinct_right_answers():
    answers = [["a", "a", "b", "c"], ["a", "b", "c", "d"]]
    assert distinct_right(answers, [[1, 1, 1, 0], [0, 0, 0.4, 0.6]], threshold=0.5) == [2, 1]


def test_collision_is_the_share_of_the_pairs_of_right_answers_that_are_the_same():
    rng = random.Random(os.urandom(8))
    answers = [[rng.choice("abc") for _ in range(7)] for _ in range(5)]
    rewards = [[float(rng.random() < 0.6) for _ in range(7)] for _ in range(5)]
    chances = []
    for row, row_rewards in zip(answers, rewards, strict=True):
        right = [answer for answer, reward in zip(row, row_rewards, strict=True) if reward]
        pairs = list(itertools.combinations(right, 2))
        chances += [statistics.fmean(a == b for a, b in pairs)] if pairs else []
    found = collision(answers, rewards)
    assert found == (pytest.approx(statistics.fmean(chances)) if chances else None)
    assert collision([["a"], ["a", "b"]], [[1], [1, 0]]) is None


@pytest.mark.parametrize("question", ["<6 15 3 12:", ">6 15 3 12:"])
def test_zigzag_accepts_each_order_that_turns_at_every_number(question):
    right = set()
    for order in itertools.permutations((6, 15, 3, 12)):
        signs = [a < b for a, b in itertools.pairwise(order)]
        expected = signs == ([True, False, True] if question[0] == "<" else [False, True, False])
        assert zigzag(" ".join(map(str, order)), question) == {"correct": float(expected), "answered": 1.0}
        right |= {order} if expected else set()
    assert len(right) == 5
    for text in ("6 15 3", "6 15 3 12 14", "6 15 3 13", "6 15 6 12"):
        assert zigzag(text, question) == {"correct": 0.0, "answered": 1.0}
    assert zigzag("", question) == zigzag("six", question) == {"correct": 0.0, "answered": 0.0}


def test_average_and_majority():
    assert average_at_n([[1, 0], [1, 1], [0, 0]]) == pytest.approx(0.5)
    assert majority_at_n(
        [["a", "a", "b"], ["c", "d", "d"], ["e", "f"]], [[1, 1, 0], [1, 0, 0], [1, 0]]
    ) == pytest.approx(0.5)
    assert majority_at_n([["a", "a", "b"]], [[1, 0, 0]]) == pytest.approx(0.5)  # one of the two was cut off
    rng = random.Random(0)
    answers = [[rng.randrange(4) for _ in range(9)] for _ in range(50)]
    expected = []
    for row in answers:
        counts = Counter(row)
        winners = [a for a in counts if counts[a] == max(counts.values())]
        expected.append(sum(a == 2 for a in winners) / len(winners))
    assert majority_at_n(answers, [[float(a == 2) for a in row] for row in answers]) == pytest.approx(
        statistics.fmean(expected)
    )
    with pytest.raises(ValueError, match="at least one prompt"):
        average_at_n([])
