"""The math verifier: the final answer as a whole counts, in the form that is asked for; the question said again does not."""

from __future__ import annotations

import json
import os
import random
import time
from fractions import Fraction
from pathlib import Path

import pytest

from megatron_rl.config import DataConfig
from megatron_rl.tasks import build_task
from megatron_rl.verifiers.math import compare_math, expected
from megatron_rl.verifiers.math_answer import clean, math_answer, numbers_in
from megatron_rl.verifiers.numbers import read_number

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
    assert correct(r"\boxed{2^{10}}", "1024", "How many subsets does a set of 10 elements have?") == 0


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


def test_random_fractions_are_numbers_where_there_is_no_division_to_do():
    rng = random.Random(os.urandom(8))
    for _ in range(30):
        top, bottom = rng.choice((-1, 1)) * rng.randint(1, 99), rng.randint(2, 99)
        forms = (f"{top}/{bottom}", rf"\frac{{{top}}}{{{bottom}}}", rf"-\frac{{{-top}}}{{{bottom}}}")
        for text in forms[: 2 if top > 0 else 3]:
            found = [number.value for number in numbers_in(clean(f"so it is ${text}$ then"))]
            assert found == ([Fraction(top, bottom)] if top % bottom else []), text
            if top % bottom:
                assert correct(f"The answer is ${text}$.", rf"\frac{{{top}}}{{{bottom}}}") == 1, text


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("9 and 11 make 20", [9, 11, 20]),
        ("5 - 3 more", []),
        ("2x + 7 and 5x", []),
        ("x - 5, x+5, 5 - x", []),
        ("v1.2.3 of H2O and x2", []),
        (r"\sqrt{16} or 2^{10} or 3\pi or 2\cdot x or 4(5)", []),
        (r"5 \text{ cm}, 7cm, 3 km/h, 12 - the rest", [5, 7, 3, 12]),
        ("1,234 12 .5", [1234, 12, 0.5]),
        ("She has $5 and he has $7.", [5, 7]),
        ("So she pays $20 for $x$ and $y$.", [20]),
        ("that is 1 000 km", [1000]),
        ("3 1/2 cups of 20 million", [3.5, 20_000_000]),
        ("AZYUK2A", []),
    ],
)
def test_numbers_in_prose(text, found):
    assert [number.value for number in numbers_in(clean(text))] == found


@pytest.mark.parametrize(
    "text",
    [
        "2x",
        "20 x",
        "1, 2",
        "x = 5",
        r"2\pi",
        "2 pi",
        "yes",
        "9+11",
        "20!",
        "2^{10}",
        "--20",
        "1.5.2",
        "12/4",
        "20 or 21",
        "5 4",
        "June 20",
        "20 not",
        "3 half",
        r"\frac{20}{1}",
        r"\binom{5}{2}",
        "1/0",
        "9" * 5000,
        "1e9999",
    ],
)
def test_no_number(text):
    assert read_number(text) is None


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


FORMS = [
    (
        "Expand (x-2)(x-3).",
        "x^2-5x+6",
        [
            "(x-3)(x-2)",
            "(x-2)(x-3)",
            "x^2-2x-3x+6",
            "x(x-5)+6",
            "(x-2.5)^2-0.25",
            "-(2-x)(x-3)",
            "(x-2)(x-3)+0",
            "x \\cdot x-5x+6",
            r"\sqrt{((x-2)(x-3))^2}",
        ],
        ["x^2-5x+6", "6-5x+x^2", "x^2 - 5x + 6"],
    ),
    (
        "Factor x^2-5x+6.",
        "(x-2)(x-3)",
        ["x^2-5x+6", "X^2-5X+6", "6-5x+x^2", "x^2-5x+6.0", "1(x^2-5x+6)", "x(x-5)+6"],
        ["(x-3)(x-2)", "(2-x)(3-x)", r"\left(x-2\right)\left(x-3\right)"],
    ),
    (
        "Simplify x+x+1.",
        "2x+1",
        ["1+x+x", "x+x+1", "x + 1 + x", "x+x+1+0", "x+x+1.0", "2x+1+0", "3x-x+1", "2y+1"],
        ["2x+1", "1+2x", "2x + 1"],
    ),
    (
        "What is the derivative of x^3?",
        "3x^2",
        [r"\frac{d}{dx} x^3", r"\frac{d}{dx}(x^3)", "x^3"],
        ["3x^2", r"3 \cdot x^2"],
    ),
    (
        r"Simplify $\sqrt{8}$.",
        r"2\sqrt{2}",
        [r"\sqrt{8}", r"\sqrt{4 \cdot 2}", r"\sqrt{4}\sqrt{2}", r"\sqrt{8.0}", "8^{1/2}", r"\sqrt{8}+0"],
        [r"2\sqrt{2}", r"\sqrt{2} \cdot 2", r"2 \sqrt 2"],
    ),
    (
        r"Simplify $\frac{x^2-1}{x-1}$.",
        "x+1",
        [r"\frac{x^2-1}{x-1}", r"\frac{(x-1)(x+1)}{x-1}", r"\frac{x^2-1.0}{x-1}", r"\frac{1-x^2}{1-x}"],
        ["x+1", "1+x"],
    ),
    (
        "Reduce 12/16.",
        r"\frac{3}{4}",
        ["12/16", "24/32", r"\frac{12}{16}", "6/8", "12.0/16", r"\frac{12}{16}+0"],
        ["3/4", r"\frac34", r"\dfrac{3}{4}"],
    ),
    ("Write 12/16 in lowest terms.", r"3/4", ["12/16", "24/32", "0.75", "6/8"], ["3/4"]),
    (
        "Write the prime factorization of 360.",
        r"2^3 \cdot 3^2 \cdot 5",
        ["360", "36 \\cdot 10", "8 \\cdot 9 \\cdot 5", "360 \\cdot 1", "2^3 \\cdot 45"],
        [r"2^3 \cdot 3^2 \cdot 5", r"5 \cdot 2^3 \cdot 3^2", "2^3*3^2*5"],
    ),
    (
        "What is 2^10?",
        "1024",
        ["2^10", "2^{10}", "4^5", "2^{5+5}", "32^2", "2^{10.0}", "32*32", "1024+0", "1023+1"],
        ["1024", "1,024", "2^{10} = 1024"],
    ),
    (
        "Solve x+1=6.",
        "5",
        ["x+2=7", "x+1=6", "6-1", "x=6-1", "5+0", "10/2", "\\sqrt{25}", "5 or 6", "5,6", "\\{5,6\\}", "5 5", "x+0=5"],
        ["5", "x=5", "x = 5"],
    ),
    (
        "What is the sum of 1 to 100?",
        "5050",
        [r"\sum_{j=1}^{100} j", "100*101/2", r"\frac{100 \cdot 101}{2}", r"\binom{101}{2}"],
        ["5050", "5,050"],
    ),
    ("What is 5!?", "120", ["5!", "(4+1)!", "5*4*3*2", r"\Gamma(6)", "120.5-.5"], ["120"]),
    (
        "Natalia sold 48 and half as many. How many in all?",
        "72",
        ["48+48/2", "48+24", "(48+24)", "48 + 24 = ?", r"\frac{144}{2}", "72 and 73", "between 71 and 73", "about 72"],
        ["72", "48+24=72", "72 clips", "72.0", r"72\text{ clips}"],
    ),
    (
        "",
        "2",
        [
            r"\frac{\pi}{2}",
            r"\frac{a}{2}",
            r"\frac{1+\sqrt5}{2}",
            r"\frac{3\sqrt7}{2}",
            r"2\pi",
            "2x",
            r"\sqrt{2}",
            "2i",
        ],
        ["2", "2.0", "2.", r"\text{2}"],
    ),
    ("", "1", [r"\{1,2,4\}", "1,2", "1 or 2", "[1,2]", "1_2"], ["1", "x=1", "100\\%"]),
    ("", "3", [r"3 \text{ or } 7", "3, 7", "(3,7)", "3 \\pm 4"], ["3"]),
    ("", "7/2", ["3", "1/2", "2"], [r"3\frac{1}{2}", "3 1/2", "3.5", r"\frac{7}{2}"]),
    ("", "2 1/2", ["3/2", "2", "1/2", "2 1/3"], ["5/2", "2.5", r"2\frac{1}{2}"]),
    ("", "10 3/4", ["13/4"], ["43/4", "10.75"]),
    ("", "June 20", ["May 20", "June 21", "20", "20 May"], ["June 20", r"\text{June 20}", "June 20th"]),
    ("", "Room 5", ["Table 5", "5"], ["Room 5"]),
    ("", "2516_8", ["2516_9", "2517_8"], ["2516_8", "2516_{8}"]),
    ("", "no", ["on", "yes"], ["no", r"\text{No}", "No."]),
    (
        "",
        "2 hours 30 minutes",
        ["2 hours", "30 minutes", "2 hours 31 minutes", "3 hours 30 minutes"],
        ["2 hours 30 minutes", "2 hours and 30 minutes", "150 minutes", "2.5 hours"],
    ),
    ("", "£12", ["£13", "$12"], ["£12", "12", "12 pounds"]),
    ("", "12", [], ["£12", "\\$12", "12 dollars"]),
    ("", r"x \le 3", ["x<3", r"x \ge 3", "x=3", "3"], [r"x \le 3", r"3 \ge x", "x <= 3"]),
    ("", "[0,1)", ["(0,1)", "[0,1]", "0,1", "[0,2)"], ["[0,1)"]),
    ("", r"\{1,2\}", ["1", r"\{1,3\}", "(1,2,3)", r"\{1,2,3\}"], [r"\{2,1\}", "1,2", "1 and 2", "1, 2"]),
    ("", "(1,2)", ["(2,1)", "1", "(1,2,3)", "(1,3)"], ["(1,2)", "(1, 2)"]),
    ("", r"\frac{1}{2^{99}}", [r"\frac{1}{2^{98}}", "0"], [r"\frac{1}{2^{99}}", "2^{-99}"]),
    ("", r"\{\frac{1}{2^{99}}, 1\}", [r"\{\frac{1}{2^{98}}, 1\}"], [r"\{1, \frac{1}{2^{99}}\}"]),
    ("", "0.333333", ["0.34"], ["1/3"]),
    ("", "1/3", ["0.3", "0.33", "0.333", "1/3+0", "0.34"], ["0.33333", r"0.\overline{3}", r"\frac13"]),
    ("", "3.14", [r"\pi", "22/7"], ["3.14", "3.140"]),
    ("", r"\pi", ["3.14", "22/7", "3"], [r"\pi", "pi"]),
    ("", "5 km", ["5 m", "500 m"], ["5 km", "5000 m", "5", r"5\text{ km}"]),
    ("", "-5", ["5", "--5"], ["-5", "\u22125", "x=-5"]),
    ("", "20 million", ["20", "2 million"], ["20 million", "20,000,000"]),
    ("", "1,000", ["1", "1,0000", "1.000"], ["1000", "1,000", "1{,}000", "10^3", "1e3", r"1\,000"]),
    ("What is 7 * 10^4?", "70,000", [r"7 \times 10^4", "7e4", "7*10^4", r"7.0 \cdot 10^{4}", "70 * 10^3"], ["70000"]),
    ("", "50", ["0.5"], [r"50\%", "50 percent", "50"]),
    ("", r"a^2+b^2", ["(a+b)^2", "a^2+b", "c^2+d^2"], ["b^2+a^2"]),
    ("", "x=1", ["y=1", "2"], ["x=1", "1"]),
    (
        "",
        "16",
        ["16^2", "16\u00b2", "16^{3}", r"\sqrt{16}", "\u221a16", "16 halved", "16 tenths", r"16\phantom{0}"],
        [r"16\text{ cm}^2"],
    ),
    ("", "3 km", [], [r"3\,\text{km}", r"3\ \text{km}", r"3~\mathrm{km}", r"3\;\mathrm{km}\,", r"\ 3 \quad"]),
    ("", "6 m/s", [], [r"6\,\text{m}\cdot\text{s}^{-1}", r"6\frac{\text{m}}{\text{s}}", r"6\,\mathrm{m/s}", "6 m/s"]),
    ("", "12.50", ["12.51"], ["US$12.50", "USD 12.50", r"12.50\$", "$12.50"]),
    ("", "45", ["46"], ["45\u00ba", "45^o", r"45{}^\circ", r"45^{^\circ}", r"45\,^\circ"]),
    ("", "20", [r"\boxed{20} or \boxed{21}"], [r"\boxed{20}", r"\bf 20", r"{\bf 20}", r"\large 20", r"\underline{20}"]),
    ("", "-1/2", ["1/2", "-2"], [r"\frac{1}{-2}", "-(1/2)", "(-1)/2", r"-\frac12"]),
    (
        "",
        "5/2",
        ["21/2"],
        ["2\u00bd", "2 \u00bd", "2\\,\\frac{1}{2}", r"{5 \over 2}", r"\displaystyle{\frac{5}{2}}", "5\u20442"],
    ),
    ("", "2.5e-4", ["2.5e-3"], ["2.5\u00d710\u207b\u2074", r"2.5 \times 10^{-4}~\mathrm{m}"]),
    ("", "x^2+1", ["x2+1", "x+1"], ["x\u00b2+1", "x**2+1"]),
    ("", r"\frac{\pi}{4}", [], [r"\frac\pi4", r"\tfrac\pi4", r"{\pi \over 4}"]),
    ("", r"2\sqrt{3}", ["3.46"], ["2\u221a3", "2sqrt(3)", r"2\sqrt{3} \approx 3.46", r"2\sqrt{3}\ \text{cm}"]),
    ("", "(3,-4)", ["x=-4, y=3", "x=3", "x=3, x=-4"], ["x=3, y=-4", r"y=-4 \text{ and } x=3", r"\bigl(3,-4\bigr)"]),
    ("", r"\{1,2,3\}", ["1, 2"], ["1, 2, and 3", r"1\text{, }2\text{, and }3"]),
    ("", "3+4i", ["3", "7"], [r"3+4\mathrm{i}"]),
    (
        "Which? (A) 1 (B) 2 (C) 3",
        "C",
        ["(B)", "(B) or (C)", "B. 2"],
        ["C", "(C)", r"\text{(C)}", r"\textbf{(C) }3", "C) 3", "C. 3"],
    ),
    ("What is 25 in base 2?", "11001_2", ["25", "11010"], ["11001", "11001_2"]),
    ("Write 45000 in scientific notation.", r"4.5 \times 10^4", ["45000", r"45 \times 10^3"], [r"4.5\cdot10^{4}"]),
    ("Solve $2x+1>5$.", "x>2", ["2x>4", "x+1>3", "2x+1>5"], ["x>2", "2<x", r"x \in (2,\infty)"]),
    ("Solve for y: $2x+y=5$.", "y=5-2x", ["2x+y=5", "y+2x=5"], ["y=5-2x", "-2x+5"]),
    (
        "Rationalize 1/sqrt(2).",
        r"\frac{\sqrt{2}}{2}",
        [r"\frac{1}{\sqrt{2}}", "2^{-1/2}"],
        [r"\frac{\sqrt{2}}{2}", r"\frac12\sqrt2"],
    ),
    (
        "Factor $x^2+5x+6$.",
        "(x+2)(x+3)",
        [
            r"(x^2+5x+6)\cdot\frac{x}{x}",
            r"\frac{(x^2+5x+6)^2}{x^2+5x+6}",
            r"x(x+5+\frac{6}{x})",
            "x^0(x^2+5x+6)",
            r"\sqrt{x^2+5x+6}\sqrt{x^2+5x+6}",
        ],
        ["(x+3)(x+2)", "(-x-2)(-x-3)"],
    ),
    (
        r"Simplify $\sqrt{12}$.",
        r"2\sqrt{3}",
        ["12^{0.5}", r"\sqrt[4]{144}", r"\frac{6}{\sqrt{3}}"],
        [r"\sqrt{3}\cdot2"],
    ),
    ("Simplify $x+x+1$.", "2x+1", [r"\phantom{2}x+1"], [r"\displaystyle{2x+1}"]),
    ("", "y = 2x+1", ["y=2x", "2x+1=0", "x=2y+1"], ["y=2x+1", "2x+1", "2x-y+1=0"]),
]
"""(question, expected answer, what is none or a wrong one, what is right)"""


@pytest.mark.parametrize(("prompt", "gold", "wrong", "right"), FORMS, ids=[f"{row[0]}{row[1]}" for row in FORMS])
def test_forms_of_answers(prompt, gold, wrong, right):
    for text in wrong:
        assert correct(rf"\boxed{{{text}}}", gold, prompt) == 0, text
    for text in right:
        assert correct(rf"\boxed{{{text}}}", gold, prompt) == 1, text


@pytest.mark.parametrize(
    "text",
    [
        "The answer is 20 or 21",
        "The answer is 20, or maybe 21.",
        "The answer is $20$ or $21$.",
        "The answer is 20 apples or 21 apples",
        "The answer is 20 to 25",
        "The answer is 20, 21",
        "The answer is between 20 and 21",
        "The answer is not 20.",
        "The answer isn't 20.",
        "The answer is more than 20",
        "The answer is 20 squared",
        "The answer is 20 times 2",
        "The answer is 20 \u00b1 5",
        "The answer is sqrt(20)",
        "The answer is 20^2",
        "#### 20 or 21",
        "#### 20, 21",
        "#### not 20",
        "21 or 20",
        "$21$ or $20$",
        "1 2 3 4 20",
        "The answer is 20 to 25",
        "The answer is [19, 20)",
        "(19, 20]",
        "It is not 20.",
        "It is less than 20.",
        "x is not equal to $20$",
    ],
)
def test_what_leaves_the_answer_open_is_none(text):
    assert correct(text, "20") == 0


@pytest.mark.parametrize(
    "text",
    [
        "The answer is 20, or 20.0.",
        "The answer is 20 minutes or 1200 seconds",
        "The answer is 20, as 4 or 5 of them left.",
        "The answer is 20, not 21.",
        "The answer is 20. To find 15 + 5, you add 15 and 5 together.",
        "The answer is 20 apples. To find 15 + 5, you add 15 and 5 together.",
        "The answer is 20! Or, if you like, 2 tens.",
        "The sum of both (15 + 5 = 20)",
        "(15 + 5 = 20)",
        "It is a day on which 15 + 5 equals 20.)",
        "The answer is 20 (or (15 + 5)).",
        "The answer is 20, which is more than 5.",
        "The answer is $20 more than before.",
        "He sold between 5 and 8 boxes, so in all 20",
        "It is greater than 5, so it is 20.",
        "There were not 5 but 20 apples.",
        "He went 20 times.",
        "The answer is about 20.",
        r"The answer is $\boxed {20}$",
        r"So $x = \boxed 20$",
    ],
)
def test_other_words_leave_it_as_it_is(text):
    assert correct(text, "20") == 1


@pytest.mark.parametrize("pair", ["{}", "()", "[]", "||", (r"\left(", r"\right)"), ("x^{", "}"), (r"\sin(", ")")])
def test_brackets_in_brackets_are_not_parsed_without_end(pair):
    start = time.process_time()
    assert correct(rf"\boxed{{{pair[0] * 40}x{pair[1] * 40}+1}}", "2x+1") == 0
    assert time.process_time() - start < 5


def rewritten(rng: random.Random, expression: str) -> str:
    """The question's expression in other words."""
    return rng.choice(
        (
            lambda e: e.replace(" ", ""),
            lambda e: f"{e} + 0",
            lambda e: f"({e})",
            lambda e: rf"\sqrt{{({e})^2}}",
            lambda e: f"1 \\cdot ({e})",
            lambda e: f"{e} + 7 - 7",
            lambda e: f"{e} + x - x",
            lambda e: rf"\frac{{{e}}}{{1}}",
            lambda e: "0 + " + e,
            lambda e: e.replace(" + ", ".0 + ") + ".0",
            lambda e: " + ".join(reversed(e.split(" + "))),
            lambda e: rf"\text{{{e}}}",
            lambda e: f"{e} = {e}",
            lambda e: f"y = {e}",
        )
    )(expression)


def test_rewritten_questions_pay_nothing():
    """Sums, products, powers, sums of x and products of brackets, rewritten up to three times."""
    seed = int.from_bytes(os.urandom(4))
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(200):
        a, b, c = (rng.randint(2, 999) for _ in range(3))
        expression, gold = rng.choice(
            (
                (f"{a} + {b}", a + b),
                (f"{a} + {b} + {c}", a + b + c),
                (rf"{a} \cdot {b} + {c}", a * b + c),
                (f"{a}^2 + {b}", a * a + b),
                (f"{a} x + {b} x + {c}", f"{a + b}x+{c}"),
            )
        )
        text = expression
        for _ in range(rng.randint(1, 3)):
            text = rewritten(rng, text)
        start = time.process_time()
        assert correct(rf"\boxed{{{text}}}", str(gold), f"Simplify ${expression}$.") == 0, (text, gold)
        assert time.process_time() - start < 5, text
        assert correct(rf"\boxed{{{gold}}}", str(gold), f"Simplify ${expression}$.") == 1, (expression, gold)


@pytest.mark.parametrize(
    ("text", "gold", "right"),
    [
        (r"<think>It is \boxed{7}.</think> I do not know.", "7", 0),
        (r"<think>It is \boxed{7}.</think> It is \boxed{8}.", "7", 0),
        (r"<think>It is \boxed{8}.</think> The answer is 7.", "7", 1),
        (r"<think>It is \boxed{7}.", "7", 0),
        (r"I think: 8? No.</think>\boxed{7}", "7", 1),
        (r"\boxed{7} <think>or 8", "7", 1),
        (r"\boxed{1} and \boxed{2}", "1", 0),
        (r"\boxed{1} and \boxed{2}", "1, 2", 1),
        (r"First \boxed{1}. So it is \boxed{2}", "2", 1),
        (r"\boxed{20} or so. The answer is 21.", "20", 1),
        (r"\boxed{20}? Final answer: 21", "21", 1),
    ],
)
def test_the_part_of_a_response_that_counts(text, gold, right):
    assert correct(text, gold) == right


FALSE_ZEROS = {
    30: "9+1 still has to be computed",
    37: "so has 3/3",
    136: "its text has a form feed in the place of a backslash and an f",
    139: "0.33 is not a third",
    192: "an interval is expected, and not an inequality; its neighbor, the same, expects 0",
    194: "a decimal number is expected, and not a root",
    197: "prose in a set",
    224: "a box without an end, and another variable",
    260: "another variable: it is compared less strictly there",
}
"""Cases of math-verify's tests that are judged otherwise here, and why."""


def test_math_verifys_own_cases():
    lines = (Path(__file__).with_name("math_verify_cases") / "cases.jsonl").read_text().splitlines()
    cases = [json.loads(line) for line in lines]
    found = [correct(case["pred"], case["gold"]) for case in cases]
    false_ones = [i for i, (case, score) in enumerate(zip(cases, found, strict=True)) if score > case["expected"]]
    false_zeros = {i for i, (case, score) in enumerate(zip(cases, found, strict=True)) if score < case["expected"]}
    assert len(cases) == 261 and not false_ones and false_zeros <= FALSE_ZEROS.keys(), (false_ones, false_zeros)


@pytest.mark.parametrize(
    "text",
    [
        "Answer:" + "\n" * 16000,
        "<answer>" * 4000,
        "\\boxed{" * 4000,
        "\\boxed{1}" * 4000,
        " ".join(map(str, range(4000))),
        "$" * 20000,
        "\\(" * 20000,
        "{" * 50000,
        "answer is " * 4000,
        "1/" * 20000,
        "#### a\n" * 10000,
        "a1 " * 20000,
        "(" * 20000 + "1",
        "\\frac{" * 5000,
        "-1" * 20000,
        "9" * 100000,
        "$a b" * 5000,
        "answer" + "*" * 20000,
    ],
    ids=lambda text: repr(text[:12]),
)
def test_time_is_linear_in_the_text(text):
    """A text of 16 times the length takes less than 64 times as long: four times of it are for noise."""
    for whole in (text, f"The answer is {text}", rf"\boxed{{{text}}}"):
        took = []
        for part in (whole[: len(whole) // 16], whole):
            start = time.process_time()
            math_answer(part)
            took.append(time.process_time() - start)
        assert took[1] < 64 * took[0] + 0.2, took


def test_what_is_expected_is_read_from_whole_solutions():
    assert expected(r"So it is $2 + 2$, which is $\boxed{4}$.").text == "4"
    assert expected("He has 3 + 4 = <<3+4=7>>7.\n#### 7").number.value == 7
    with pytest.raises(ValueError, match="is empty"):
        expected("####")
