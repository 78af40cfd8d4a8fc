"""Verifiable instructions: every checker on its own examples, rows of the public sets' forms, generated ones, several turns."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nltk
import pytest

from megatron_rl.agents.agent import Agents
from megatron_rl.config import DataConfig
from megatron_rl.errors import UserError
from megatron_rl.tasks import build_task
from megatron_rl.tasks.verify_if import DRAWN, TURNS
from megatron_rl.verifiers import instruction_checkers as checkers
from megatron_rl.verifiers.instructions import follows, listed
from tests.tasks.scripted import play
from tests.verifiers.instruction_examples import EXAMPLES

SEED = random.randrange(10**6)
ABSENT = "averaged_perceptron_tagger_eng"
"""The data of NLTK that no package of the tests brings along."""


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def ifeval(instructions: dict[str, dict], prompt: str = "Say something.") -> dict:
    return {
        "key": 1,
        "prompt": prompt,
        "instruction_id_list": list(instructions),
        "kwargs": list(instructions.values()),
    }


@pytest.fixture(scope="module")
def copied_nltk_data(tmp_path_factory):
    """The data that llama-index-core has, in a folder of its own: NLTK refuses files that an installer has linked."""
    spec = importlib.util.find_spec("llama_index.core")
    assert spec and spec.origin
    folder = tmp_path_factory.mktemp("nltk") / "data"
    shutil.copytree(Path(spec.origin).parent / "_static" / "nltk_cache", folder)
    return folder


@pytest.fixture
def nltk_data(copied_nltk_data, monkeypatch):
    monkeypatch.setattr(nltk.data, "path", [str(copied_nltk_data)])
    checkers.lacking.cache_clear()
    yield
    checkers.lacking.cache_clear()


def test_there_are_examples_of_all_83_instructions():
    assert EXAMPLES.keys() == checkers.CHECKERS.keys() and len(EXAMPLES) == 83
    assert len(checkers.IFEVAL) == 25 and len(checkers.IFBENCH) == 58


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_checker_on_its_own_examples(name, request):
    if needed := checkers.NLTK_DATA.get(name):
        if ABSENT in needed:
            pytest.skip(f"{name} needs NLTK's {ABSENT}, which has to be downloaded")
        request.getfixturevalue("nltk_data")
    arguments, good, bad = EXAMPLES[name]
    row = ifeval({name: arguments})
    found = follows(good, row)
    assert 0 <= found.pop("content") <= 1
    assert found == dict.fromkeys(("correct", "followed", "correct_loose", "followed_loose"), 1.0)
    assert follows(bad, row)["correct"] == follows(bad, row)["followed"] == 0.0


WITH_THIS_DATA = """
import json, nltk, sys
nltk.data.path = sys.argv[1:]
from megatron_rl.verifiers import instruction_checkers as checkers
from tests.verifiers.instruction_examples import EXAMPLES
followed = [name for name, (arguments, good, _) in EXAMPLES.items() if checkers.follow(good, name, arguments)[0]]
print(json.dumps([followed, {name: checkers.lacking(name) for name in EXAMPLES}]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["none", "linked"])
def test_without_nltks_data_its_checkers_alone_fail_and_are_refused(kind, copied_nltk_data, tmp_path):
    """So that no response scores 0 for want of a file; NLTK finds files with hard links, as installers make, but reads none.

    In a process of its own: what NLTK has read, it keeps.
    """
    if kind == "linked":
        shutil.copytree(copied_nltk_data, tmp_path / "linked", copy_function=os.link)
    command = [sys.executable, "-c", WITH_THIS_DATA, str(tmp_path / kind)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    followed, lacking = json.loads(done.stdout)
    assert set(followed) == EXAMPLES.keys() - checkers.NLTK_DATA.keys()
    assert {name for name, problem in lacking.items() if problem} == checkers.NLTK_DATA.keys()
    for name in checkers.NLTK_DATA:
        reason = r" \(.*multiply-linked.*\)" if kind == "linked" and name != "words:start_verb" else r".*"
        remedy = r"python -m nltk.downloader -d FOLDER \w+, and NLTK_DATA"
        assert re.match(rf"{name} needs NLTK's \w+{reason}: {remedy}", lacking[name]), lacking[name]
    assert "raw.githubusercontent" not in done.stderr, "nothing is downloaded"


def test_an_instruction_that_cannot_be_checked_ends_the_run(monkeypatch):
    monkeypatch.setattr(checkers, "lacking", lambda name: f"{name} lacks something")
    with pytest.raises(UserError, match="^data: punctuation:no_comma lacks something"):
        follows("It rains.", ifeval({"punctuation:no_comma": {}}))


PIECES = (
    *(
        "word",
        "Word",
        "WORD",
        "*",
        "**",
        "***",
        "- ",
        "\n",
        "\n\n",
        " ",
        ".",
        "?!",
        ",",
        '"',
        "'",
        "(",
        "]",
        "{",
        "<<",
        ">>",
    ),
    *(
        "<i>",
        "</em>",
        "```json",
        "1",
        "2,3",
        "1799-13-77",
        "Question 1.",
        "A)",
        "P.S.",
        "🌧",
        "世界",
        "\ud800",
        "\x00",
        "é",
    ),
    *("[x]", "Section 1", "<think>", "</think>", "StudentID\t", "ID,Country", "Zimbabwe", "bald eagle", "Ph.D.", "\r"),
)


@pytest.mark.slow
def test_no_text_makes_a_checker_raise(nltk_data, caplog):
    # IFEval's checker of the language logs each text that it cannot tell, and pytest-xdist cannot send a lone surrogate.
    caplog.set_level(logging.CRITICAL)
    rng = random.Random(SEED)
    texts = ["", " ", "\n", "a" * 5000, "a " * 5000, ". " * 2000, "*" * 2000]
    texts += ["".join(rng.choices(PIECES, k=rng.randint(1, 60))) for _ in range(20)]
    for name, (arguments, *_) in EXAMPLES.items():
        if ABSENT not in checkers.NLTK_DATA.get(name, ()):
            for text in texts:
                strict, loose = checkers.follow(text, name, arguments)
                assert loose >= strict, (name, ascii(text))
                assert text.strip() or not loose, name


def test_strict_and_loose_by_prompt_and_by_instruction():
    """As IFEval has it: loosely, a first line such as `Sure!` and asterisks do not count."""
    row = ifeval({"punctuation:no_comma": {}, "detectable_format:title": {}, "change_case:english_lowercase": {}})
    body = "<<a walk>>\nwe walked along the river until it was time for lunch\nit was lovely"
    parts = ("correct", "followed", "correct_loose", "followed_loose")
    assert [follows(body, row)[part] for part in parts] == [1, 1, 1, 1]
    assert [follows(f"Sure, here it is:\n{body}", row)[part] for part in parts] == [0, 1 / 3, 1, 1]
    assert [follows(body.replace("river", "river, slowly,"), row)[part] for part in parts] == [0, 2 / 3, 0, 2 / 3]
    assert [follows(f"<think>Well, A and B.</think>{body}", row)[part] for part in parts] == [1, 1, 1, 1]


MULTI = "[{'instruction_id': ['punctuation:no_comma', 'keywords:existence'], 'kwargs': [None, {'keywords': ['lamp']}]}]"


@pytest.mark.parametrize(
    "answer",
    [
        MULTI,
        [MULTI.removeprefix("[").removesuffix("]")],
        {"instruction_id": ["punctuation:no_comma", "keywords:existence"], "kwargs": [None, {"keywords": ["lamp"]}]},
        {
            "instruction_id_list": '["punctuation:no_comma", "keywords:existence"]',
            "kwargs": '["{}", "{\\"keywords\\": [\\"lamp\\"], \\"num_words\\": null}"]',
        },
    ],
)
def test_the_forms_in_which_instructions_are_listed(answer):
    assert listed(answer) == [("punctuation:no_comma", {}), ("keywords:existence", {"keywords": ["lamp"]})]


@pytest.mark.parametrize(
    "answer",
    [
        *(None, 3, "", "lamp", "[1, 2", "[]", "[" * 5000, {}, [], {"instruction_id_list": [], "kwargs": []}),
        *({"instruction_id_list": ["a"], "kwargs": []}, {"instruction_id_list": [3], "kwargs": [{}]}),
        {"instruction_id_list": ["a"], "kwargs": [[1]]},
    ],
)
def test_what_lists_no_instructions(answer):
    with pytest.raises(ValueError, match="instruction|kwargs|JSON"):
        listed(answer)


def multi_if(turns: list[tuple[str, dict[str, dict]]]) -> dict:
    """A row of Multi-IF, whose columns hold JSON, and the third turn may be missing."""
    row = {"key": "1000:1:en", "turn_index": 3, "language": "English", "turn_3_prompt": ""}
    for number, (text, instructions) in enumerate(turns, 1):
        row[f"turn_{number}_prompt"] = json.dumps({"role": "user", "content": text})
        row[f"turn_{number}_instruction_id_list"] = json.dumps(list(instructions))
        row[f"turn_{number}_kwargs"] = json.dumps([json.dumps(given) for given in instructions.values()])
    return row


@pytest.mark.slow
def test_rows_of_the_public_sets_and_one_that_takes_for_ever(tmp_path):
    """Of IFEval and IFBench, where every argument is a column, and IF_multi_constraints_upto5.

    section_spliter goes into a regular expression as it is: what that does is bounded and counted.
    """
    nothing = dict.fromkeys(("num_words", "keywords", "N", "end_phrase"))
    rows = [
        ifeval({"punctuation:no_comma": nothing, "count:numbers": nothing | {"N": 2}}, f"Ask {i}.") for i in range(30)
    ]
    messages = [{"role": "user", "content": "Say something about light."}]
    upto5 = {"key": "a", "messages": messages, "ground_truth": MULTI, "dataset": "ifeval", "constraint_type": "multi"}
    endless = ifeval({"detectable_format:multiple_sections": {"section_spliter": "(a+)+b", "num_sections": 1}})
    paths = [write(tmp_path / "ifeval.jsonl", rows), write(tmp_path / "others.jsonl", [upto5, endless])]
    options = {"verifier_timeout_s": 3.0}
    data = DataConfig(
        task="verify_if", path=paths[0], eval_path=paths[1], template="{prompt} Be brief.", options=options
    )
    task = build_task(data)
    try:
        train, (light, sections) = task.prompts("train"), task.prompts("eval")
        assert [p.text for p in train] == [f"Ask {i}. Be brief." for i in range(30)]
        assert light.messages == messages and task.program is None
        texts = ["From 3 to 7.", "From 3 to 7, or so.", "A lamp.", "a" * 60, "aab 1 and so on"]
        found = task.score([*train[:2], light, sections, sections], texts)
        assert [parts["followed"] for parts in found] == [1.0, 0.5, 1.0, 0.0, 1.0]
        assert task.verify.pooled.timeouts == 1 and task.verify.pooled.errors == 0
        forms = {"correct": 1.0, "followed": 0.0, "correct_loose": 0.0, "followed_loose": 0.0}
        assert task.weights == forms | {"content": 1.0}
    finally:
        task.close()


@pytest.mark.parametrize(
    ("instructions", "problem"),
    [
        ({"keywords:existance": {}}, "has no instruction 'keywords:existance'; did you mean 'keywords:existence'"),
        ({"count:numbers": {}}, "count:numbers: if-verifiable would draw 'N' at random, not use None"),
        (
            {
                "repeat:repeat_span": {
                    "prompt_to_repeat": "one two three four five six seven eight",
                    "n_start": 0,
                    "n_end": 2,
                }
            },
            "would draw 'n_start' at random, not use 0",
        ),
        ({"combination:repeat_prompt": {}}, "combination:repeat_prompt: prompt_to_repeat must be set"),
        ({"count:numbers": {"M": 3}}, "count:numbers: .*unexpected keyword argument 'M'"),
    ],
)
def test_a_row_that_cannot_be_scored_is_told_or_left_out(tmp_path, instructions, problem, monkeypatch, caplog):
    # What the package would draw for n_start = 0 may be 0.
    monkeypatch.setattr(random, "randint", lambda low, high: high)
    good = [ifeval({"punctuation:no_comma": {}}, f"Ask {i}.") for i in range(30)]
    path = write(tmp_path / "a.jsonl", [*good, ifeval(instructions)])
    with pytest.raises(UserError, match=rf"^data: .*a.jsonl:31 cannot be scored: .*{problem}.*skip_unscorable: true"):
        build_task(DataConfig(task="verify_if", path=path))
    task = build_task(DataConfig(task="verify_if", path=path, options={"skip_unscorable": True}))
    assert sum(len(task.prompts(split)) for split in ("train", "eval")) == 30
    assert re.search(problem, caplog.text) and "1 of 31 lines skipped" in caplog.text
    task.close()


@pytest.mark.parametrize("turns", [1, 3])
def test_generated_rows_are_the_same_for_a_seed_disjoint_and_free_of_conflicts(turns):
    make = lambda seed: build_task(DataConfig(task="verify_if", seed=seed, options={"size": 400, "turns": turns}))  # noqa: E731
    tasks = [make(SEED), make(SEED), make(SEED + 1)]
    train, held_out = ([(p.text, p.answer, p.metadata) for p in tasks[0].prompts(s)] for s in ("train", "eval"))
    assert [(p.text, p.answer, p.metadata) for p in tasks[1].prompts("train")] == train
    assert [(p.text, p.answer, p.metadata) for p in tasks[2].prompts("train")] != train
    # One in ten is held out, and one instruction in nine is a prompt's: five, or 360 prompts without one, 1e-11 at most.
    assert not {text for text, *_ in train} & {text for text, *_ in held_out} and len(held_out) > 5
    assert tasks[0].program == (None if turns == 1 else "agent")
    names = set()
    for _, answer, metadata in train:
        further = metadata.get(TURNS, [])
        assert len(further) == turns - 1
        wanted = [name for name, _ in listed(further[-1][1] if further else answer)]
        assert len(wanted) == len(set(wanted)) and not any(
            a in checkers.CONFLICTS.get(b, ()) for a in wanted for b in wanted if a != b
        )
        names |= set(wanted)
    assert names == DRAWN.keys()
    for task in tasks:
        task.close()


def obey(instructions: list[tuple[str, dict]]) -> str:
    """A response that follows all of them."""
    given = dict(instructions)
    of = lambda name: given.get(name, {})  # noqa: E731
    numbers = of("count:numbers").get("N", 0)
    words = [*of("keywords:existence").get("keywords", [])]
    words += [of("keywords:frequency").get("keyword", "")] * of("keywords:frequency").get("frequency", 0)
    body = (
        "the weather was lovely and we walked along the old road for an hour or so but nobody was there to see us and every"
        " night the lamp turned and ships found their way home while the keeper wrote letters to his sister by its light"
    )
    length = of("length_constraints:number_words")
    few = length["num_words"] if length.get("relation") == "at least" else 0
    letter = of("keywords:letter_frequency")
    text = " ".join([*[body] * (1 + few // 40), *words])
    if letter:
        text += f" {letter['letter'] * letter['let_frequency']}"
    text += "".join(f" {n + 1}" for n in range(numbers))
    text += " [x]" * of("detectable_content:number_placeholders").get("num_placeholders", 0)
    text += " *so*" * of("detectable_format:number_highlighted_sections").get("num_highlights", 0)
    for n in range(of("detectable_format:number_bullet_lists").get("num_bullets", 0)):
        text += f"\n* point {'abcd'[n]}"
    for _ in range(of("length_constraints:number_paragraphs").get("num_paragraphs", 1) - 1):
        text += "\n***\nanother one"
    if "detectable_content:postscript" in given:
        text += "\nP.S. good night"
    if "startend:end_checker" in given:
        text += f"\n{given['startend:end_checker']['end_phrase']}"
    if "detectable_format:title" in given:
        text = f"<<a walk>>\n{text}"
    if "change_case:english_lowercase" in given:
        text = text.lower()
    if "change_case:english_capital" in given:
        text = text.upper()
    return f'"{text}"' if "startend:quotation" in given else text


def test_generated_instructions_can_be_followed_at_once():
    task = build_task(DataConfig(task="verify_if", seed=SEED, options={"size": 150, "turns": 3}))
    task.close()
    for prompt in [*task.prompts("train"), *task.prompts("eval")]:
        answer = prompt.metadata[TURNS][-1][1]
        wanted = listed(answer)
        assert follows(obey(wanted), answer)["correct"] == 1.0, (wanted, obey(wanted))


@pytest.mark.slow
def test_an_episode_of_several_turns(tmp_path):
    """Earlier instructions still hold; the reward is the mean over the turns, and one that is not come to counts 0."""
    comma, title = {"punctuation:no_comma": {}}, {"detectable_format:title": {}}
    number = {"count:numbers": {"N": 2}}
    turns = [
        ("Say something. No commas.", comma),
        ("Give it a title.", comma | title),
        ("Two numbers.", comma | title | number),
    ]
    rows = [multi_if(turns), multi_if([("Another. No commas.", comma), ("A title!", comma | title)])] * 8
    task = build_task(DataConfig(task="verify_if", path=write(tmp_path / "a.jsonl", rows)), more_parts=Agents.parts)
    try:
        assert task.program == "agent"
        prompts = [*task.prompts("train"), *task.prompts("eval")]
        three = next(p for p in prompts if p.text == turns[0][0])
        two = next(p for p in prompts if p.text != turns[0][0])
        assert len(two.metadata[TURNS]) == 1

        found, seen = play(task, three, ["It rains.", "<<Rain>>\nIt rains.", "<<Rain>>\nIt rains 3 of 7 days."])
        parts = found.reward_parts
        assert parts["correct"] == 1.0 and found.finish_reason == "stop" and len(seen) == 3
        assert turns[1][0] in seen[1] and turns[2][0] not in seen[1] and turns[2][0] in seen[2]
        assert [turn.role for turn in found.turns] == ["assistant", "user", "assistant", "user", "assistant"]

        found, _ = play(task, three, ["It rains.", "<<Rain>>\nIt rains, again.", "<<Rain>>\n3, 7"])
        parts = found.reward_parts
        assert found.reward == parts["correct"] + parts["content"] and parts["correct"] == pytest.approx(1 / 3), (
            "the first turn alone follows all"
        )
        assert parts["followed"] == pytest.approx((1 + 1 / 2 + 2 / 3) / 3)

        found, _ = play(task, three, ["It rains.", "<<Rain>>\nIt rains."], max_turns=2)
        assert found.finish_reason == "turns" and found.reward_parts["correct"] == pytest.approx(2 / 3)
        found, _ = play(task, three, ["It rains.", "It rains " * 4000])
        assert found.finish_reason == "tokens" and found.reward_parts["correct"] == pytest.approx(1 / 3)
        found, _ = play(task, two, ["It rains, or so.", "<<Rain>>\nIt rains."])
        assert found.reward_parts["correct"] == 0.5
    finally:
        task.close()


@pytest.mark.parametrize("comma", [",", "\uff0c", "\u3001", "\u060c", "\ufe50", "\ufe10"])
def test_a_comma_is_one_in_any_script(comma):
    assert checkers.follow(f"red{comma} green", "punctuation:no_comma", {}) == (False, False)
    assert checkers.follow("red and green", "punctuation:no_comma", {}) == (True, True)


@pytest.mark.parametrize("word", ["thunder", "Thunder", "thun\u00adder", "thun\u200bder", "\uff54hunder"])
def test_a_forbidden_word_is_found_in_any_width_and_with_signs_that_do_not_show(word):
    forbidden = {"forbidden_words": ["thunder"]}
    assert checkers.follow(f"There is {word} here.", "keywords:forbidden_words", forbidden) == (False, False)
    assert checkers.follow("It blunders here.", "keywords:forbidden_words", forbidden) == (True, True)
