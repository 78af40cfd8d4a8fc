"""Several evaluation sets in one run: whose task judges which, what is left out of training, and what errors name."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron_rl.agents.agent import Agents
from megatron_rl.checks.eval_sets import EvalSet, data_of, eval_sets, held_out_questions, overall, question
from megatron_rl.config import Config, DataConfig, EvalSetConfig
from megatron_rl.config.load import build_config, key_paths, parse_overrides
from megatron_rl.data.trajectory import Trajectory
from megatron_rl.errors import UserError
from megatron_rl.rewards.verify import give_rewards
from megatron_rl.rollout.program import SingleTurn
from megatron_rl.tasks import Prompt, PromptStream, build_task
from tests.tasks.scripted import ONE_PROCESS
from tools.make_tiny_model import text_tokenizer

ROOM = {"rollout": {"max_new_tokens": 8, "context_length": 2048}}


@pytest.fixture(scope="module")
def tokenizer():
    return text_tokenizer(512)


def write(file: Path, rows: list[dict]) -> str:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def sums(count: int, first: int = 0) -> list[dict]:
    return [{"prompt": f"What is {i} + 1?", "answer": str(i + 1)} for i in range(first, first + count)]


def made(tokenizer, kind="train", **tree):
    config = build_config({**ROOM, **tree})
    program = Agents if config.rollout.program == "agent" else SingleTurn
    task = build_task(config.data, demonstrations=kind == "sft", more_parts=program.parts)
    form = program(config, tokenizer, task, ONE_PROCESS)
    return form, eval_sets(config.data, config.eval, config.rollout, config.rewards, kind, form)


def test_without_sets_there_is_the_one_of_the_data(tokenizer, tmp_path):
    path = write(tmp_path / "train.jsonl", sums(40))
    for held_out in (None, write(tmp_path / "eval.jsonl", sums(4, 100))):
        eval_settings = {"prompts": 3, "samples": 5, "greedy": False}
        form, [one] = made(tokenizer, data={"path": path, "eval_path": held_out}, eval=eval_settings)
        assert one.program is form and [p.text for p in one.held_out] == [p.text for p in form.task.prompts("eval")[:3]]
        assert (one.name, one.samples, one.greedy) == ("", 5, False) and all(p.tokens for p in one.prompts)
        assert one.named({"eval/score": 0.5}) == {"eval/score": 0.5}
        assert not held_out_questions([one]), "the task keeps these out of training itself"


def test_each_set_has_rows_and_a_verifier_of_its_own(tokenizer, tmp_path):
    """And what it does not say is the data's: columns, template, task."""
    words = [{"ask": f"Say {word}.", "word": word} for word in ("red", "blue")]
    sets = {
        "sums": {"path": write(tmp_path / "sums.jsonl", sums(5, 50)), "samples": 9},
        "words": {
            "path": write(tmp_path / "words.jsonl", words),
            "prompt_key": "ask",
            "answer_key": "word",
            "verifier": "exact",
            "template": "Please. {prompt}",
            "prompts": 1,
        },
        "zigzag": {"task": "number_zigzag", "prompts": 2, "greedy": True},
        "own": {},
    }
    data = {"path": write(tmp_path / "train.jsonl", sums(40)), "verifier": "math", "template": "{prompt} Be brief."}
    evaluation = {"sets": sets, "prompts": 3, "greedy": False}
    form, found = made(tokenizer, data=data, eval=evaluation)
    assert [one.name for one in found] == [*sets]
    by_name = {one.name: one for one in found}
    assert [one.samples for one in found] == [9, 4, 4, 4] and [one.greedy for one in found] == [
        False,
        False,
        True,
        False,
    ]
    assert [p.text for p in by_name["sums"].prompts] == [f"What is {i} + 1? Be brief." for i in (50, 51, 52)]
    assert [p.text for p in by_name["words"].prompts] == ["Please. Say red."]
    assert len(by_name["zigzag"].prompts) == 2 and by_name["own"].program is form
    for name, answer, reward in (("sums", "It is 51.", 1.0), ("words", "red", 1.0), ("words", "51", 0.0)):
        one = by_name[name]
        tokens = np.asarray([*one.prompts[0].tokens, *tokenizer.encode(answer)])
        given = Trajectory(tokens=tokens, prompt_length=len(one.prompts[0].tokens), prompt_id="", group_id=0)
        [judged] = give_rewards(one.program.task, tokenizer, one.prompts, [given])
        assert judged.reward == reward, name
    assert by_name["sums"].named({"eval/pass@9": 1.0}) == {"eval/sums/pass@9": 1.0}
    form, found = made(tokenizer, data=data | {"eval_path": sets["sums"]["path"]}, eval=evaluation)
    assert [one.name for one in found] == ["", *sets], "that of data.eval_path stands beside the others"


def test_training_rows_are_not_read_again_for_each_set(tokenizer, tmp_path, monkeypatch):
    from megatron_rl.tasks import rows as files

    opened, read = [], files._read_jsonl
    monkeypatch.setattr(files, "_read_jsonl", lambda file: opened.append(file.name) or read(file))
    path = write(tmp_path / "train.jsonl", sums(30))
    sets = {name: {"path": write(tmp_path / f"{name}.jsonl", sums(3, 70))} for name in ("a", "b", "c")}
    _, found = made(tokenizer, data={"path": path}, eval={"sets": sets})
    assert opened == ["train.jsonl", "a.jsonl", "b.jsonl", "c.jsonl"] and [len(one.prompts) for one in found] == [
        3,
        3,
        3,
    ]


@pytest.mark.parametrize("template", ["{prompt}", "Q: {prompt}\nA:", "{prompt} Think."])
def test_no_prompt_of_a_set_is_trained_on(tokenizer, tmp_path, template):
    """Whatever stands around it in the set; and nothing else is left out of an epoch."""
    rng = random.Random()
    rows = sums(40)
    shared = {"a": rng.sample(rows, 5), "b": rng.sample(rows, 4) + sums(2, 900)}
    sets = {
        name: {"path": write(tmp_path / f"{name}.jsonl", part), "template": template} for name, part in shared.items()
    }
    data = {"path": write(tmp_path / "train.jsonl", rows), "template": "{prompt}\nAnswer briefly."}
    form, found = made(tokenizer, data=data, eval={"sets": sets})
    unseen = held_out_questions(found)
    held_out = {row["prompt"] for part in shared.values() for row in part}
    assert unseen == held_out
    stream = PromptStream(form.task, form, 2048, 8, seed=rng.randrange(1000))
    whole = {question(p, data["template"]) for p in form.task.prompts("train")}
    stream.leave_out(lambda prompt: question(prompt, data["template"]) in unseen)
    asked = [question(p, data["template"]) for p in stream.next(len(whole - held_out))]
    assert sorted(asked) == sorted(whole - held_out) and whole & held_out
    stream.next(1)
    assert len(stream.skipped) == len(whole & held_out), "they are counted"


def test_a_question_is_what_the_template_stands_around():
    for template in ("{prompt}", "a {prompt}", "{prompt} b", "a\n{prompt}\nb"):
        for text in ("x", "a b", "a", "", "a x b"):
            assert question(Prompt("", template.replace("{prompt}", text)), template) == text.strip()
    assert question(Prompt("", "a message of a conversation"), "Q: {prompt}") == "a message of a conversation"
    assert question(Prompt("", "ab"), "ab{prompt}b") == "ab", "too short to have the template around it"


def test_the_score_of_several_sets_is_their_mean():
    nobody: Any = None
    sets = [EvalSet(name, nobody, (), (), 1, False, "{prompt}") for name in ("", "a", "b")]
    scores = {"eval/a/score": 0.5, "eval/b/score": 0.25, "eval/a/score_unpruned": 1.0, "eval/a/pass@4": 1.0}
    assert overall(scores, "eval/score", sets) == {"eval/score": 0.375}
    assert overall(scores | {"eval/score": 0.1}, "eval/score", sets) == {}
    assert overall({"eval/a/greedy": 1.0}, "eval/score", sets) == {}
    assert overall({"eval/a/loss": 2.0}, "eval/loss", sets) == {"eval/loss": 2.0}
    parts = {"eval/a/score": 1.0, "eval/b/score": 1.0, "eval/a/reward/score": 0.0, "eval/reward/score": 0.0}
    assert overall(parts, "eval/score", sets) == {"eval/score": 1.0}, "a part of the reward may be called score"


def test_rows_that_are_not_evaluated_are_held_out_too(tokenizer, tmp_path):
    rows, seed = sums(30), random.randrange(1000)
    sets = {"a": {"path": write(tmp_path / "a.jsonl", rows[:20]), "prompts": 3}}
    form, found = made(tokenizer, data={"path": write(tmp_path / "train.jsonl", rows)}, eval={"sets": sets})
    unseen = held_out_questions(found)
    assert len(found[-1].prompts) == 3 and unseen == {row["prompt"] for row in rows[:20]}
    stream = PromptStream(form.task, form, 2048, 8, seed=seed)
    stream.leave_out(lambda prompt: question(prompt, "{prompt}") in unseen)
    assert not {prompt.text for prompt in stream.next(20)} & unseen
    with pytest.raises(UserError, match=r"eval\.sets has all \d+ training prompts of task 'file', so none is left"):
        stream.leave_out(lambda prompt: True)


def test_another_task_has_none_of_the_data_s_settings():
    data = DataConfig(
        task="file", path="a", eval_path="b", verifier="math", template="{prompt}!", options={"isolated": True}
    )
    same = data_of(EvalSetConfig(path="c", options={"verifier_timeout_s": 1}), data)
    assert (same.path, same.eval_path, same.verifier, same.template) == ("a", "c", "math", "{prompt}!")
    assert same.options == {"isolated": True, "verifier_timeout_s": 1} and data_of(EvalSetConfig(), data) == data
    other = data_of(EvalSetConfig(task="gsm8k", path="c", chat=True), data)
    assert other == DataConfig(task="gsm8k", eval_path="c", chat=True)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"path": "gone.jsonl"}, r"config: eval\.sets\.mine: data\.eval_path: there is no file gone\.jsonl"),
        ({"task": "gsm8ks"}, r"config: eval\.sets\.mine: data\.task: .*gsm8k"),
        ({"options": {"sizes": 1}}, r"config: eval\.sets\.mine: unknown key 'data\.options\.sizes'"),
        ({"task": "file"}, r"config: eval\.sets\.mine: the set has no held-out prompt"),
        ({"rewards": {"right": 1.0}}, r"config: eval\.sets\.mine: data\.rewards has 'right'"),
        (
            {"task": "verify_if", "options": {"turns": 2, "size": 40}},
            r"eval\.sets\.mine: .* needs rollout\.program: agent",
        ),
    ],
)
def test_an_error_names_the_set(tokenizer, tmp_path, settings, problem):
    data = {"path": write(tmp_path / "train.jsonl", [{"prompt": "1 + 1?", "answer": "2"}])}
    if settings == {"task": "file"}:  # its own held-out prompts, of which one row has none
        assert not build_task(build_config({"data": data}).data).prompts("eval")
    with pytest.raises(UserError, match=f"^{problem}" if problem.startswith("config") else problem):
        made(tokenizer, data=data, eval={"sets": {"mine": settings}})


@pytest.mark.parametrize("name", ["", "a/b", "agent", "reward", "a b", "-a", "a:b", "aime.v2"])
def test_a_name_that_metrics_cannot_have(name):
    with pytest.raises(UserError, match=r"eval\.sets.*a set's name has letters"):
        build_config({"eval": {"sets": {name: {}}}})


def test_a_set_is_given_by_the_command_line_too():
    tree = parse_overrides(["--eval.sets.aime24.path", "aime24", "--eval.sets.aime24.samples=32"])
    assert build_config(tree).eval.sets == {"aime24": EvalSetConfig(path="aime24", samples=32)}
    with pytest.raises(UserError, match=r"eval\.sets\.aime24\.pth"):
        build_config({"eval": {"sets": {"aime24": {"pth": "aime24"}}}})
    assert key_paths()["eval.sets"] and Config().eval.sets == {}


def test_conversations_of_a_set_talk_with_its_own_environment(tokenizer, tmp_path):
    """Turns that bring further instructions are of the set alone, and a tool that only its task has is refused."""
    sets = {"turns": {"task": "verify_if", "options": {"turns": 3, "size": 40}, "prompts": 2}}
    data = {"path": write(tmp_path / "train.jsonl", sums(40)), "verifier": "math"}
    settings = {"data": data, "eval": {"sets": sets}, "rollout": ROOM["rollout"] | {"program": "agent"}}
    form, [one] = made(tokenizer, **settings)
    try:
        worlds = [agents.task.environment(one.prompts[0], form.toolbox) for agents in (form, one.program)]
        assert [type(world).__name__ for world in worlds] == ["Environment", "FurtherTurns"]
        assert one.program.toolbox is form.toolbox and form.task is not one.program.task
        one.program.task.tools = lambda: [SimpleNamespace(name="lookup")]
        with pytest.raises(UserError, match="verify_if brings the tool 'lookup'"):
            form.with_task(one.program.task)
    finally:
        form.close()
