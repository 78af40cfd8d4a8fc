"""The math verifier: a literal final answer counts, the question said again does not."""

from __future__ import annotations

import json
import os
import random

import pytest

from megatron_rl.config import DataConfig
from megatron_rl.environments import build_task
from megatron_rl.environments.math_answer import clean, literals, only_number
from megatron_rl.environments.verifiers import compare_math, math_answer

QUESTION = "What is 9 + 11?"


def correct(text: str, answer: str, prompt: str = "", truncated: bool = False) -> float:
    return compare_math(text, answer, prompt, truncated)["correct"]


@pytest.mark.parametrize("asked", [QUESTION, ""])
@pytest.mark.parametrize(
    "text",
    [
        "To calculate 9 + 11, we can do it without using our",
        "9 + 11",
        "$9+11$",
        "The answer is 9 + 11",
        "Answer: (9) + (11)",
        "#### 9 + 11",
        "**9** + **11**",
        "9 + 11 =",
        "9 \N{FULLWIDTH PLUS SIGN} 11",
        r"\(9 + 11\)",
        "9 - -11",
        "(9 + 11)/1",
        "The sum of 9 and 11",
        "9 plus 11",
        "",
        "####",
    ],
)
def test_the_question_said_again_is_no_answer(text, asked):
    assert correct(text, "20", asked) == 0


@pytest.mark.parametrize("text", [r"\boxed{9+11}", r"\boxed{11 + 9}", r"\boxed{9+11+0}", r"\boxed{\text{9 + 11}}"])
def test_not_even_in_a_box(text):
    assert correct(text, "20", QUESTION) == 0


@pytest.mark.parametrize(
    "text",
    [
        "20",
        "= 20",
        "x = 20",
        "9 + 11 = 20",
        "20 = 9 + 11",
        "So 9 and 11 make 20.",
        "20 apples",
        "20!",
        "\\(20\\)",
        "- 20",
        "#### 20",
        "#### 20\nThat was easy, as 3 is 3.",
        "#### Step 1: add 9 and 11\n#### 20",
        "<answer>20</answer>",
        "The answer is 20",
        "The answer is $20.00.",
        "The answer is 20 because 20 = 9 + 11",
        "The answer is 20 (9 + 11 = 20)",
        "The answer is 20 of 29.",
        "The answer is:\n\n$$20$$",
        "The answer is 5. No, wait: \\boxed{20}. It has 2 digits.",
        "Answer: 9 + 11 = 20 apples.",
        "**Answer:** 20",
        "**Answer**: 20",
        "Final answer: **20**",
        r"\boxed{20}",
        r"\boxed{9 + 11 = 20}",
        r"\boxed{20 \text{ apples}}",
    ],
)
def test_a_right_answer_counts_however_it_is_said(text):
    assert compare_math(text, "20", QUESTION) == {"correct": 1.0, "answered": 1.0}
    assert correct(text, "21", QUESTION) == 0
    assert compare_math(text, "20", QUESTION, truncated=True) == {"correct": 0.0, "answered": 0.0}


@pytest.mark.parametrize(
    ("answer", "texts"),
    [
        (
            r"\frac{3}{4}",
            ["3/4", "0.75", r"$\frac{3}{4}$", r"\boxed{\frac{3}{4}}", r"\boxed{\dfrac34}", "The answer is 3/4.", "75%"],
        ),
        (r"-\frac{1}{2}", [r"\boxed{-\frac{1}{2}}", "-1/2", "The answer is -0.5"]),
        (
            "70,000",
            [
                "70,000",
                "$70,000.",
                "70000",
                r"\boxed{70{,}000}",
                r"\boxed{70\,000}",
                r"\$70,000",
                r"7 \times 10^4",
                "7e4",
            ],
        ),
        ("-5", ["-5", "$-5$", "-$5", "The answer is -5.", r"\boxed{-5}", "x = - 5", "The answer is \N{MINUS SIGN}5"]),
        ("She sells 3 * 14 = <<3*14=42>>42.\n#### 42", ["#### 42", "3 * 14 = $<<3*14=42>>42", "42 eggs/day"]),
        ("18 dollars", ["$18", "18", "The answer is 18 dollars a day."]),
        (r"45^\circ", [r"$45^\circ$", r"\boxed{45}", "The angle is 45 degrees"]),
        ("2x+1", ["$1+2x$", r"\boxed{2x + 1}", "The answer is 2x+1."]),
        (r"2\sqrt{2}", [r"\boxed{2\sqrt{2}}", r"The answer is $\sqrt{2} \cdot 2$."]),
        ("(1, 2)", [r"\boxed{(1,2)}", "The answer is (1, 2)."]),
        ("1,2,3", [r"\boxed{1,2,3}"]),
    ],
)
def test_forms_of_an_answer(answer, texts):
    for text in texts:
        assert correct(text, answer) == 1, text
    for text in (
        "70",
        "5",
        r"\frac{4}{3}",
        "1-2x",
        r"\boxed{(2,1)}",
        r"\boxed{1,2,4}",
        r"\boxed{\sqrt{2}}",
        r"\boxed{2\pi}",
    ):
        assert correct(text, answer) == 0, text


def test_an_expression_of_the_prompt_counts_where_it_is_the_answer_alone():
    assert correct("The answer is $x+x+1$", "2x+1", "Simplify x + x + 1.") == 0
    assert correct("To simplify $x+x+1$", "2x+1", "Simplify x + x + 1.") == 0
    assert correct(r"\boxed{\sqrt{8}}", r"2\sqrt{2}", r"Simplify $\sqrt{8}$.") == 0
    assert correct("The answer is 3/4", "0.75", "What is 3/4 as a decimal?") == 0
    assert correct("The answer is 12/4", "3", "What is 12 : 4?") == 0
    assert correct("The answer is 3/4", "3/4", "Which is larger, 3/4 or 2/3?") == 1
    assert correct("The answer is 20", "20", "Ann is 20 and Bob is 3. How old is Ann?") == 1
    assert correct(r"\boxed{2^{10}}", "1024", "How many subsets does a set of 10 elements have?") == 1
    assert correct(r"\boxed{2^{10}}", "1024", "What is 2^10?") == 0


def random_number(rng: random.Random) -> int:
    return rng.choice((-1, 1, 1)) * rng.randrange(2, 10 ** rng.randint(1, 6))


def test_random_sums_pay_for_the_result_alone():
    rng = random.Random(os.urandom(8))
    for _ in range(60):
        a, b, sign = random_number(rng), abs(random_number(rng)), rng.choice("+-*")
        value = {"+": a + b, "-": a - b, "*": a * b}[sign]
        if value in (a, b, -b):
            continue
        spaced = sign if rng.random() < 0.5 else f" {sign} "
        expression = rng.choice((f"{a}{spaced}{b}", f"${a}{spaced}{b}$", f"({a}){spaced}({b})", f"{a:,}{spaced}{b:,}"))
        prompt = f"What is {a} {sign} {b}?"
        for frame in ("{}", "The answer is {}.", "#### {}", r"\boxed{{{}}}", "To work out {}, we", "**{}**", "{} = ?"):
            text = frame.format(expression)
            assert correct(text, str(value), prompt) == 0, (text, value)
        for frame in (
            "{0} = {1}",
            "The answer is {1}.",
            "#### {1}",
            r"\boxed{{{1}}}",
            "{0} makes {1:,}",
            "**{1}**",
            "{1} = {0}",
        ):
            text = frame.format(expression, value)
            assert correct(text, str(value), prompt) == 1, (text, value)
            assert correct(text, str(value + 1), prompt) == 0, (text, value)


def test_random_fractions_are_literals_in_lowest_terms():
    rng = random.Random(os.urandom(8))
    for _ in range(30):
        top, bottom = rng.choice((-1, 1)) * rng.randint(1, 99), rng.randint(2, 99)
        forms = (f"{top}/{bottom}", rf"\frac{{{top}}}{{{bottom}}}", rf"-\frac{{{-top}}}{{{bottom}}}")
        for text in forms[: 2 if top > 0 else 3]:
            found = [literal.text for literal in literals(f"so it is ${text}$ then")]
            assert found == ([text] if top % bottom else []), text
            if top % bottom:
                assert correct(f"The answer is ${text}$.", rf"\frac{{{top}}}{{{bottom}}}") == 1, text


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("9 and 11 make 20", ["9", "11", "20"]),
        ("5 - 3 more", []),
        ("2x + 7 and 5x", []),
        ("x - 5, x+5, 5 - x", []),
        ("v1.2.3 of H2O and x2", []),
        (r"\sqrt{16} or 2^{10} or 3\pi or 2\cdot x or 4(5)", []),
        (r"5 \text{ cm}, 7cm, 3 km/h, 12 - the rest", ["5", "7", "3", "12"]),
        ("1,234 12,34 .5", ["1234", "12", "34", ".5"]),
    ],
)
def test_literals(text, found):
    assert [literal.text for literal in literals(clean(text))] == found


def test_only_number():
    assert only_number("$18$").text == "18" and only_number("18 dollars").text == "18"
    assert all(only_number(text) is None for text in ("2x", "1, 2", "x = 5", r"2\pi", "2 pi", "yes"))


def test_math_answer_is_one_text_for_equal_answers():
    assert math_answer("The answer is $1,000.") == math_answer(r"\boxed{1000}") == math_answer("so 1000\n") == "1000"
    assert math_answer(r"\boxed{x+1}") == "x+1" and math_answer("") == ""


def test_the_task_tells_the_verifier_of_prompts_and_cut_off_responses(tmp_path):
    rows = [{"prompt": f"What is {n} + 11?", "answer": f"#### {n + 11}"} for n in range(40)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = build_task(DataConfig(path=str(tmp_path / "a.jsonl"), verifier="math"))
    prompts = task.prompts("train")[:3]
    right = [prompt.answer for prompt in prompts]
    restated = [rf"\boxed{{{p.text[8:-1]}}}" for p in prompts]
    assert [p["correct"] for p in task.score(prompts, right)] == [1, 1, 1]
    assert [p["correct"] for p in task.score(prompts, right, [False, True, False])] == [1, 0, 1]
    assert [p["correct"] for p in task.score(prompts, restated)] == [0, 0, 0]
    task.close()
