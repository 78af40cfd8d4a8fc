"""Tasks from files and Hugging Face data sets: good rows, bad rows, missing columns."""

from __future__ import annotations

import json
import logging
import random

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from megatron_rl.config import DataConfig
from megatron_rl.environments import build_task
from megatron_rl.errors import UserError


def write(path, lines):
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(path)


def rows(count, first=0):
    return [{"prompt": f"{i} + 1 =", "answer": str(i + 1)} for i in range(first, first + count)]


def test_lines_split_by_hash_into_disjoint_parts(tmp_path):
    task = build_task(DataConfig(path=write(tmp_path / "a.jsonl", rows(200) + rows(200))))
    train, held_out = ({p.text for p in task.prompts(s)} for s in ("train", "eval"))
    assert not train & held_out and len(train | held_out) == 200 and 5 <= len(held_out) <= 45


def test_bad_lines_are_skipped_counted_and_named(tmp_path, caplog):
    bad = [
        '{"prompt": "1 +',
        '"text"',
        {"prompt": "no answer"},
        {"prompt": "x", "answer": ""},
        {"prompt": 3, "answer": "1"},
    ]
    path = write(tmp_path / "a.jsonl", [rows(1)[0], *bad, "", *rows(20, 1)])
    with caplog.at_level(logging.WARNING):
        task = build_task(DataConfig(path=path))
    assert task.skipped == 5 and sum(len(task.prompts(s)) for s in ("train", "eval")) == 21
    for line, words in [
        (2, "not JSON"),
        (3, "not a JSON object"),
        (4, "no 'answer'"),
        (5, "is empty"),
        (6, "neither text"),
    ]:
        assert any(f"a.jsonl:{line} skipped" in m and words in m for m in caplog.messages), (line, caplog.messages)
    assert any("5 of 26 lines skipped" in m for m in caplog.messages)


def test_a_missing_column_names_the_nearest(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"promt": "1", "answer": "2"}])
    with pytest.raises(UserError, match=r"no column 'prompt' \(data.prompt_key\); did you mean 'promt'"):
        build_task(DataConfig(path=path))


def test_prompts_without_answers_are_judged_by_reward_models_alone(tmp_path):
    """Of a file of preferences the prompts; nothing but what a model says, once it is there, counts."""
    lines = [{"prompt": f"{i} + 1 =", "chosen": f"{i}.", "rejected": "?"} for i in range(random.randint(30, 60))]
    path = write(tmp_path / "a.jsonl", lines)
    with pytest.raises(UserError, match=r"no column 'answer' .*; prompts without answers need data\.verifier: none"):
        build_task(DataConfig(path=path))
    task = build_task(DataConfig(path=path, verifier="none"), later_parts=["liked"])
    prompts = [prompt for split in ("train", "eval") for prompt in task.prompts(split)]
    assert {prompt.text for prompt in prompts} == {line["prompt"] for line in lines}
    assert task.score(prompts, ["anything"] * len(prompts)) == [{}] * len(prompts)
    assert task.parts == ("liked",) and task.weights == {"liked": 1.0}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", "", r"data\.path: .*a\.jsonl is empty: it has no line"),
        ("a.jsonl", "{broken\n", "no usable line .1 skipped"),
        ("a.csv", "x", "neither .jsonl nor .parquet"),
        ("a.parquet", "PAR1 not really", "not a readable parquet file"),
    ],
)
def test_files_without_a_usable_line_are_errors(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=message):
        build_task(DataConfig(path=str(tmp_path / name)))


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UserError, match=r"data.path: there is no file .*nowhere.jsonl"):
        build_task(DataConfig(path=str(tmp_path / "nowhere.jsonl")))
    with pytest.raises(UserError, match=r"data.eval_path: there is no file"):
        build_task(DataConfig(path=write(tmp_path / "a.jsonl", rows(3)), eval_path="gone.jsonl"))


def test_parquet_rows_with_messages_and_nested_answers(tmp_path):
    table = [
        {"prompt": [{"role": "user", "content": f"{i}?"}], "reward_model": {"ground_truth": str(i)}} for i in range(30)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(table), tmp_path / "a.parquet")
    task = build_task(DataConfig(path=str(tmp_path / "a.parquet"), answer_key="reward_model.ground_truth"))
    prompt = task.prompts("train")[0]
    assert prompt.messages == [{"role": "user", "content": prompt.text}] and prompt.text == f"{prompt.answer}?"


def test_held_out_prompts_are_left_out_of_training(tmp_path, caplog):
    data = DataConfig(path=write(tmp_path / "a.jsonl", rows(10)), eval_path=write(tmp_path / "b.jsonl", rows(3, 8)))
    with caplog.at_level(logging.WARNING):
        task = build_task(data)
    assert len(task.prompts("train")) == 8 and len(task.prompts("eval")) == 3
    assert any("2 training prompts are also held-out" in m for m in caplog.messages)


def test_template_and_chat(tmp_path):
    path = write(tmp_path / "a.jsonl", rows(20))
    prompt = build_task(DataConfig(path=path, template="Q: {prompt} {x}", chat=True)).prompts("train")[0]
    assert (
        prompt.text.startswith("Q: ") and prompt.text.endswith("= {x}") and prompt.messages[0]["content"] == prompt.text
    )


def test_demonstrations_need_no_answer_but_a_response(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"prompt": f"{i}", "response": f"r{i}"} for i in range(20)])
    task = build_task(DataConfig(path=path), demonstrations=True)
    prompt = task.prompts("train")[0]
    assert task.demonstration(prompt, random.Random(0)) == f"r{prompt.text}"
    numbers = write(tmp_path / "c.jsonl", [{"prompt": f"{i}", "response": i} for i in range(20)])
    task = build_task(DataConfig(path=numbers), demonstrations=True)
    prompt = task.prompts("train")[0]
    assert task.demonstration(prompt, random.Random(0)) == prompt.text
    with pytest.raises(UserError, match=r"no column 'answer' \(data.answer_key\)"):
        build_task(DataConfig(path=path))
    with pytest.raises(UserError, match=r"no column 'response'"):
        build_task(DataConfig(path=write(tmp_path / "b.jsonl", rows(3))), demonstrations=True)


def test_demonstrations_may_be_conversations(tmp_path, caplog):
    call = {"id": "1", "type": "function", "function": {"name": "python", "arguments": '{"code": "1 + 2"}'}}
    turns = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_call_id": "1", "tool_calls": None},
        {"role": "assistant", "content": "It is 3."},
    ]
    odd = {
        "a role": [{"content": "3"}],
        "arguments that are JSON": [
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}
        ],
        "is no text": [{"role": "assistant", "content": 3}],
        "does not end with a message of the assistant": turns[:2],
        "one of messages: a message has": ["It is 3."],
    }
    good = [{"prompt": f"{i}", "response": turns} for i in range(20)]
    bad = [{"prompt": problem, "response": value} for problem, value in odd.items()]
    with caplog.at_level(logging.WARNING):
        task = build_task(DataConfig(path=write(tmp_path / "a.jsonl", good + bad)), demonstrations=True)
    prompts = task.prompts("train")
    assert len(prompts) + len(task.prompts("eval")) == 20 and task.skipped == len(odd)
    for problem, message in zip(odd, caplog.messages, strict=False):
        assert "'response'" in message and problem in message
    function = {"name": "python", "arguments": {"code": "1 + 2"}}
    assert task.demonstration(prompts[0], random.Random(0)) == [
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "content": "3", "name": "python"},
        {"role": "assistant", "content": "It is 3."},
    ]


def test_hub_reads_local_folders_and_saved_data_sets(tmp_path):
    (tmp_path / "files").mkdir()
    write(tmp_path / "files" / "train.jsonl", rows(30))
    write(tmp_path / "files" / "test.jsonl", rows(5, 100))
    from_files = build_task(DataConfig(task="hub", path=str(tmp_path / "files"), options={"eval_split": "test"}))
    assert len(from_files.prompts("train")) == 30 and len(from_files.prompts("eval")) == 5
    datasets.Dataset.from_list(rows(30)).save_to_disk(str(tmp_path / "saved"))
    saved = build_task(DataConfig(task="hub", path=str(tmp_path / "saved")))
    assert sum(len(saved.prompts(s)) for s in ("train", "eval")) == 30


def test_hub_errors_are_one_line(tmp_path):
    with pytest.raises(UserError, match="data set .*nowhere") as error:
        build_task(DataConfig(task="hub", path=str(tmp_path / "nowhere")))
    assert "\n" not in str(error.value)
    with pytest.raises(UserError, match="did you mean 'eval_split'"):
        build_task(DataConfig(task="hub", path=str(tmp_path), options={"evl_split": "test"}))
