"""Tasks, verifiers and preparation of rows that a user brings along."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl.config import DataConfig
from megatron_rl.errors import UserError
from megatron_rl.tasks import build_task, combine

VERIFIERS = """
import time

def contains(response, answer):
    return float(answer in response)

def two_parts(response: str, answer, *, prompt, truncated):
    return {"right": answer in response and not truncated, "echo": prompt in response}

def numbers(response, answer):
    return {"1": 1.0, "0": 0, "nan": float("nan")}[response]

def hangs(response, answer):
    time.sleep(600 if response == "hang" else 0)
    if response == "raise":
        raise KeyError(response)
    return 1

def text(response, answer):
    return "good"

def one_argument(response):
    return 1.0

number = 3
"""
TASK = """
from megatron_rl.tasks import Prompt, Task

class Reversal(Task):
    name = "reversal"

    def prompts(self, split):
        words = ["abc", "xyz"] if split == "train" else ["uvw"]
        return [Prompt(f"reversal:{word}", f"{word} reversed is ", answer=word[::-1]) for word in words]

    def score(self, prompts, texts, truncated=None):
        return [{"correct": float(text == prompt.answer)} for prompt, text in zip(prompts, texts)]

class Unaware(Reversal):
    def score(self, prompts, texts):
        return []

class Other:
    def __init__(self, data, demonstrations):
        pass

def one_argument(data):
    return Reversal(data)
"""
PREPARE = """
def rename(row):
    return {"prompt": row["q"] + "?", "answer": row["a"]} if row["a"] else None

def raises(row):
    return row["no_such"]

def text(row):
    return "row"
"""


@pytest.fixture
def folder(tmp_path):
    for name, text in (("verifiers", VERIFIERS), ("tasks", TASK), ("prepare", PREPARE)):
        (tmp_path / f"{name}.py").write_text(text)
    rows = [{"prompt": f"{n} and", "answer": str(n), "q": str(n), "a": str(n) if n % 2 else ""} for n in range(40)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def rows_task(folder, verifier: str, **more):
    return build_task(
        DataConfig(path=str(folder / "a.jsonl"), verifier=f"{folder / 'verifiers.py'}:{verifier}", **more)
    )


def test_a_verifier_that_gives_a_number(folder):
    task = rows_task(folder, "contains")
    prompts = task.prompts("train")[:2]
    assert task.parts == ("correct",) and task.weights == {"correct": 1.0}
    assert task.score(prompts, [f"it is {prompts[0].answer}", ""]) == [{"correct": 1.0}, {"correct": 0.0}]
    task.close()


def test_a_verifier_with_parts_prompt_and_truncation(folder):
    task = rows_task(folder, "two_parts", rewards={"right": 1.0, "echo": -0.5})
    prompts = task.prompts("train")[:1] * 3
    texts = [f"{prompts[0].answer}", prompts[0].text, prompts[0].answer]
    parts = task.score(prompts, texts, [False, False, True])
    assert parts == [{"right": 1, "echo": 0}, {"right": 1, "echo": 1}, {"right": 0, "echo": 0}]
    assert [combine(part, task.weights) for part in parts] == [1.0, 0.5, 0.0]
    task.close()


def test_what_hangs_raises_or_is_no_number_scores_zero_and_is_counted(folder, caplog):
    task = rows_task(folder, "hangs", options={"verifier_timeout_s": 3})
    prompts = task.prompts("train")[:3]
    assert [p["correct"] for p in task.score(prompts, ["hang", "raise", "fine"])] == [0, 0, 1]
    assert (task.verify.pooled.timeouts, task.verify.pooled.errors) == (1, 1)
    assert any("longer than 3 s" in m for m in caplog.messages) and any(
        "KeyError: 'raise'" in m for m in caplog.messages
    )
    task.close()
    task = rows_task(folder, "numbers")
    assert [p["correct"] for p in task.score(prompts, ["1", "0", "nan"])] == [1, 0, 0]
    assert task.verify.pooled.errors == 1
    task.close()


@pytest.mark.parametrize(
    ("verifier", "more", "message"),
    [
        ("contain", {}, "verifiers.py has no 'contain'; did you mean 'contains'"),
        ("number", {}, "verifiers.py:number is 3, not a verifier"),
        ("one_argument", {}, r"one_argument\(response\) cannot be called with \(response, answer\): too many"),
    ],
)
def test_mistakes_of_a_verifier_are_told_at_the_start(folder, verifier, more, message):
    with pytest.raises(UserError, match=f"config: data.verifier: .*{message}"):
        rows_task(folder, verifier, **more)


@pytest.mark.parametrize(
    ("verifier", "message"),
    [
        ("text", "text gives 'good', neither a number nor numbers by name"),
        (
            "two_parts",
            "two_parts gives the parts right, echo, but expected were correct: give each part a weight in data.rewards",
        ),
    ],
)
def test_a_verifier_of_another_form_is_no_zero(folder, verifier, message):
    task = rows_task(folder, verifier)
    with pytest.raises(UserError, match=message):
        task.rewards(task.prompts("train")[0], "x")
    task.close()


def test_a_task_from_outside(folder):
    task = build_task(DataConfig(task=f"{folder / 'tasks.py'}:Reversal"))
    prompt = task.prompts("train")[0]
    assert combine(task.rewards(prompt, "cba"), task.weights) == 1.0 and task.weights == {"correct": 1.0}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("{}/tasks.py:Reversl", "tasks.py has no 'Reversl'; did you mean 'Reversal'"),
        ("{}/tasks.py:Other", "Other gives Other, not a megatron_rl.tasks.Task"),
        (
            "{}/tasks.py:one_argument",
            r"cannot be made from \(data, demonstrations\): too many positional",
        ),
        ("{}/tasks.py:Unaware", r"Unaware.score does not take \(prompts, texts, truncated\): too many positional"),
        ("{}/task.py:Reversal", "there is no file"),
        ("number_sortin", "there is no task 'number_sortin'; did you mean 'number_sorting'"),
        ("no_such_module:Task", "there is no module 'no_such_module'"),
    ],
)
def test_mistakes_of_a_task_are_one_line(folder, name, message):
    with pytest.raises(UserError, match=f"config: data.task: .*{message}") as error:
        build_task(DataConfig(task=name.format(folder)))
    assert "\n" not in str(error.value)


def test_rows_are_prepared(folder):
    def task(name):
        return build_task(DataConfig(path=str(folder / "a.jsonl"), prepare=f"{folder / 'prepare.py'}:{name}"))

    texts = {p.text for split in ("train", "eval") for p in task("rename").prompts(split)}
    assert texts == {f"{n}?" for n in range(1, 40, 2)}
    with pytest.raises(UserError, match=r"data.prepare: .*raises fails on .*a.jsonl:1: KeyError: 'no_such'"):
        task("raises")
    with pytest.raises(UserError, match="data.prepare: .*text gives 'row', not a row or None"):
        task("text")
    with pytest.raises(
        UserError, match="data.prepare takes the rows of a file or data set, and 'number_sorting' has none"
    ):
        build_task(DataConfig(task="number_sorting", prepare="os.path:join"))


def test_the_examples_of_the_documents(tmp_path):
    text = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text()
    verifier, prepare, task, corrected = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    for name, code in (("rewards", verifier), ("prepare", prepare), ("reversal", f"{task}\n\n{corrected}")):
        (tmp_path / f"{name}.py").write_text(code)
    rows = [{"context": "x" * n, "question": "?", "answer": "7"} for n in range(1900, 2100, 10)]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    questions = build_task(
        DataConfig(
            path=str(tmp_path / "questions.jsonl"),
            verifier=f"{tmp_path / 'rewards.py'}:right_and_short",
            prepare=f"{tmp_path / 'prepare.py'}:only_short",
            rewards={"correct": 1.0, "short": 0.2},
        )
    )
    assert len(questions.prompts("train")) + len(questions.prompts("eval")) == 10
    parts = questions.score(questions.prompts("train")[:1] * 3, ["It is 7", "x" * 200 + "7", "8"])
    assert [combine(part, questions.weights) for part in parts] == [1.2, 1.0, 0.0]
    questions.close()
    reversal = build_task(DataConfig(task=f"{tmp_path / 'reversal.py'}:Reversal", seed=3))
    prompt = reversal.prompts("train")[5]
    assert reversal.rewards(prompt, prompt.text[5::-1]) == {"correct": 1.0}
    corrected = build_task(DataConfig(task=f"{tmp_path / 'reversal.py'}:Corrected"), preferences=True)
    prompt = corrected.prompts("train")[5]
    right, wrong = corrected.comparison(prompt, random.Random(0)).judged
    assert right.response == prompt.answer and sorted(wrong.response) == sorted(right.response)


MISTAKES = [
    (["--data.verifier", "mth"], "config: data.verifier: there is no verifier 'mth'; did you mean 'math'?"),
    (["--data.verifier", "no_such_module:f"], "there is no module 'no_such_module'"),
    (["--data.task", "number_sortin"], "there is no task 'number_sortin'; did you mean 'number_sorting'?"),
    (["--data.template", "x"], "data.template = 'x' does not contain {prompt}"),
    (["--batch.samples_per_prompt", "1"], "batch.samples_per_prompt = 1 leaves no other response"),
]


def test_mistakes_are_told_before_anything_heavy_is_imported(folder):
    (folder / "c.yaml").write_text(f"data: {{path: '{folder / 'a.jsonl'}'}}\n")
    program = (
        "import sys\n"
        "from megatron_rl.cli import main\n"
        f"for arguments in {[arguments for arguments, _ in MISTAKES]!r}:\n"
        f"    status = main(['train', {str(folder / 'c.yaml')!r}, *arguments])\n"
        "    print(status, 'torch' in sys.modules, 'datasets' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=os.environ, timeout=120)
    assert done.stdout == "2 False False\n" * len(MISTAKES), done.stderr
    for line, (_, message) in zip(done.stderr.splitlines(), MISTAKES, strict=True):
        assert message in line
