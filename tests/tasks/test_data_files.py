"""Tasks from files and Hugging Face data sets: good rows, bad rows, missing columns."""

from __future__ import annotations

import json
import logging
import random

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from megatron_rl.agents.agent import Agents
from megatron_rl.config import DataConfig
from megatron_rl.config.load import build_config
from megatron_rl.data.trajectory import Trajectory
from megatron_rl.errors import UserError
from megatron_rl.rollout.demonstrations import row_of
from megatron_rl.rollout.program import SingleTurn
from megatron_rl.tasks import Prompt, build_task
from megatron_rl.tasks.stream import check_forms
from megatron_rl.tasks.task import HELD_OUT_SHARE, is_held_out
from tests.tasks.scripted import ONE_PROCESS
from tools.make_tiny_model import text_tokenizer

TOKENIZER = text_tokenizer(300)


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
        "is not text": [{"role": "assistant", "content": 3}],
        "does not end with a message of the assistant": turns[:2],
        "one of messages: a message needs": ["It is 3."],
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


# -- values that are no text -------------------------------------------------------------------------------------------

HALF = "a \ud83d"
NUMBERS = {
    "nan": float("nan"),
    "inf": float("inf"),
    "-inf": -float("inf"),
    "true": True,
    "object": {"role": "assistant"},
}
SIDES = {"chosen": "good", "rejected": "bad"}
ANSWER = {"role": "assistant", "content": "x"}
CALLS = [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"x": HALF}}}]}]
HALVES = {
    "prompt": {"prompt": HALF, "answer": "1"},
    "system": {"prompt": [{"role": "system", "content": HALF}, {"role": "user", "content": "q"}], "answer": "1"},
    "answer": {"prompt": "q", "answer": HALF},
    "nested answer": {"prompt": "q", "answer": {"a": [HALF]}},
    "key": {"prompt": "q", "answer": {HALF: 1}},
    "tools": {"prompt": "q", "answer": "1", "tools": [{"name": "f", "description": HALF}]},
}
LEARNED = {
    "response": {"prompt": "q", "response": HALF},
    "message": {"prompt": "q", "response": [{"role": "assistant", "content": HALF}]},
    "arguments": {"prompt": "q", "response": [*CALLS, {"role": "tool", "content": "1"}, ANSWER]},
    "result": {"prompt": "q", "response": [ANSWER, {"role": "tool", "content": HALF}, ANSWER]},
    "thinking": {"prompt": "q", "response": [{"role": "assistant", "content": "x", "reasoning": HALF}]},
    "text": {"text": HALF},
}
JUDGED = {
    "chosen": {"prompt": "q", **SIDES, "chosen": HALF},
    "prompt of a pair": {"prompt": HALF, **SIDES},
    "rejected": {"prompt": "q", **SIDES, "rejected": [{"role": "assistant", "content": HALF}]},
}
GOOD = {"rl": {"answer": "1"}, "sft": {"response": "1"}, "preferences": SIDES}
ROWS = [
    *(("rl", name, row) for name, row in HALVES.items()),
    *(("sft", name, row) for name, row in LEARNED.items()),
    *(("preferences", name, row) for name, row in JUDGED.items()),
]


def load(tmp_path, kind, lines, **data):
    good = [{"prompt": f"{i}?", **GOOD[kind]} for i in range(20)]
    path = write(tmp_path / "a.jsonl", [*good, *lines])
    return build_task(DataConfig(path=path, **data), demonstrations=kind == "sft", preferences=kind == "preferences")


def count(task):
    return sum(len(task.prompts(split)) for split in ("train", "eval"))


@pytest.mark.parametrize(("kind", "name", "row"), ROWS, ids=lambda value: value if isinstance(value, str) else "")
@pytest.mark.parametrize("own", [True, False], ids=["eval_path", "split"])
def test_half_a_surrogate_pair_skips_its_row(tmp_path, caplog, kind, name, row, own):
    """In whatever becomes text, of each kind of data; the row is named with its column."""
    others = {"eval_path": write(tmp_path / "e.jsonl", [{"prompt": "other", **GOOD[kind]}, row])} if own else {}
    with caplog.at_level(logging.WARNING):
        task = load(tmp_path, kind, [row], **others)
    assert task.skipped == 1 + own and count(task) == 20 + own
    column = next(key for key, value in row.items() if "\\ud83d" in json.dumps(value))
    assert any(f"a.jsonl:21 skipped: '{column}': half a surrogate pair ('\\ud83d')" in line for line in caplog.messages)


def test_half_a_pair_in_steps_and_in_what_is_not_used(tmp_path):
    rows = [{"prompt": f"{i}?", "steps": ["a", HALF if i % 2 else "b"], "labels": [1, 0]} for i in range(40)]
    task = build_task(DataConfig(path=write(tmp_path / "a.jsonl", rows)), preferences=True)
    assert task.skipped == count(task) == 20
    assert load(tmp_path, "rl", [{"prompt": "q", "answer": "1", "source": HALF}]).skipped == 0


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize(
    ("kind", "column"),
    [("rl", "prompt"), ("sft", "prompt"), ("sft", "response"), ("preferences", "chosen"), ("preferences", "rejected")],
)
def test_what_is_no_text_skips_its_row(tmp_path, name, kind, column):
    task = load(tmp_path, kind, [{"prompt": "q", **GOOD[kind], column: NUMBERS[name]}])
    assert task.skipped == 1 and count(task) == 20


@pytest.mark.parametrize("value", [NUMBERS["nan"], NUMBERS["inf"], [NUMBERS["nan"]], ["a", None], []])
def test_neighbors_of_what_is_no_text(tmp_path, value):
    rows = [
        ("sft", {"prompt": "q", "response": value}),
        ("sft", {"prompt": "q", "response": [{"role": "assistant", "content": value}]}),
        ("sft", {"prompt": [{"role": "system", "content": value}, {"role": "user", "content": "q"}], "response": "r"}),
        ("sft", {"text": value}),
        ("preferences", {"prompt": "q", "chosen": value, "rejected": "r"}),
    ]
    if not isinstance(value, list):
        rows.append(("rl", {"prompt": "q", "answer": value}))
    for kind, row in rows:
        assert load(tmp_path, kind, [row]).skipped == 1, row


def test_a_row_that_is_nested_too_deeply_is_skipped(tmp_path, caplog):
    """JSON takes it no more, or only what works on it does not; integers are as long as they are."""
    rows = ['{"prompt": "q", "answer": ' + "[" * n + "]" * n + "}" for n in (3, 2_000, 100_000)]
    rows += ['{"a": ' * 50_000 + "1" + "}" * 50_000]
    rows += ['{"prompt": "big", "answer": ' + "9" * 4000 + "}"]
    with caplog.at_level(logging.WARNING):
        task = load(tmp_path, "rl", rows)
    assert task.skipped == 3 and count(task) == 22
    assert sum("recursion" in line or "nested too deeply" in line for line in caplog.messages) == 3
    (big,) = [p for split in ("train", "eval") for p in task.prompts(split) if p.text == "big"]
    assert big.answer == int("9" * 4000)


def test_a_table_with_a_text_that_is_not_utf8(tmp_path):
    """One row of many; those beside it are used."""
    texts = [b"caf\xe9" if i == 7 else f"{i}?".encode() for i in range(30)]
    ends = [sum(map(len, texts[:i])) for i in range(31)]
    offsets = pyarrow.array(ends, pyarrow.int32()).buffers()[1]
    column = pyarrow.Array.from_buffers(pyarrow.string(), 30, [None, offsets, pyarrow.py_buffer(b"".join(texts))])
    pyarrow.parquet.write_table(pyarrow.table({"prompt": column, "answer": ["1"] * 30}), tmp_path / "a.parquet")
    task = build_task(DataConfig(path=str(tmp_path / "a.parquet")))
    assert task.skipped == 1 and count(task) == 29
    assert not any(p.prompt_id.endswith("a.parquet:8") for split in ("train", "eval") for p in task.prompts(split))


# -- which prompts are the same ----------------------------------------------------------------------------------------


def talk(*texts):
    said = zip(["system", "user", "assistant"], texts, strict=False)
    return [*({"role": role, "content": text} for role, text in said), {"role": "user", "content": "Solve it."}]


LIKE = {
    "system": lambda i: {"prompt": talk(f"Problem {i}")},
    "earlier turn": lambda i: {"prompt": talk("S", f"{i}?", "Which?")},
    "reply": lambda i: {"prompt": talk("S", "?", f"Which of {i}?")},
    "role": lambda i: {"prompt": [{"role": f"reader {i}", "content": "?"}, *talk()]},
    "tools": lambda i: {"prompt": talk(), "tools": [{"name": f"f{i}"}]},
    "thinking": lambda i: {
        "prompt": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "1", "thinking": f"{i}"}, *talk()]
    },
}


@pytest.mark.parametrize("difference", LIKE)
def test_prompts_that_differ_anywhere_are_two(tmp_path, difference):
    """They fall to the splits one by one, and are left out of training only where all of one is held out."""
    rows = [LIKE[difference](i) | {"answer": "1"} for i in range(200)]
    path = write(tmp_path / "a.jsonl", rows)
    whole = build_task(DataConfig(path=path))
    assert 2 <= len(whole.prompts("eval")) <= 50
    assert count(whole) == 200
    twice = build_task(DataConfig(path=write(tmp_path / "b.jsonl", rows * 2)))
    assert len(twice.prompts("eval")) == 2 * len(whole.prompts("eval")), "equal ones never part"
    held = random.sample(range(200), 3)
    others = [rows[i] for i in held] + [LIKE[difference](1000) | {"answer": "1"}]
    task = build_task(DataConfig(path=path, eval_path=write(tmp_path / "e.jsonl", others)))
    left = {int(prompt.prompt_id.rpartition(":")[2]) - 1 for prompt in task.prompts("train")}
    assert left == set(range(200)) - set(held) and len(task.prompts("eval")) == 4


def test_a_single_message_of_the_user_is_split_by_its_text():
    """As the text alone is, so that splits stay what they were."""
    for i in range(50):
        text = f"{random.random()} {i}?"
        same = [
            Prompt("a", text),
            Prompt("b", text, messages=[{"role": "user", "content": text}]),
            Prompt("c", text, answer="1", metadata={"a": 1}),
        ]
        assert {prompt.identity for prompt in same} == {text}
        assert len({is_held_out(prompt.identity, HELD_OUT_SHARE) for prompt in same}) == 1
        other = Prompt("d", text, messages=[{"role": "system", "content": text}])
        assert other.identity != text


def test_preferences_part_by_the_whole_prompt(tmp_path):
    rows = [{"prompt": talk(f"Problem {i}"), **SIDES} for i in range(200)]
    task = build_task(DataConfig(path=write(tmp_path / "a.jsonl", rows)), preferences=True)
    assert 2 <= len(task.prompts("eval")) <= 50 and count(task) == 200


# -- tools of a row, and arguments of tables ----------------------------------------------------------------------------

LOOKUP = {
    "name": "lookup",
    "description": "d",
    "parameters": {"type": "object", "properties": {"key": {"type": "string"}}},
}
SCHEMA = {"type": "function", "function": LOOKUP}
FORMS = {"list": [SCHEMA], "JSON": json.dumps([SCHEMA]), "list of JSON": [json.dumps(SCHEMA)], "bare": [LOOKUP]}


def said(name, arguments):
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "3"}]


def done(name, arguments):
    return [*said(name, arguments), {"role": "assistant", "content": "ok"}]


def agents(task, path, **settings):
    config = build_config({"data": {"path": path}, "rollout": {"program": "agent"}, "agent": settings})
    return Agents(config, TOKENIZER, task, ONE_PROCESS)


@pytest.mark.parametrize("form", FORMS)
def test_the_tools_of_a_row_are_told_of(tmp_path, form):
    rows = [{"prompt": f"{i}?", "tools": FORMS[form], "response": done("lookup", {"key": "x"})} for i in range(20)]
    path = write(tmp_path / "a.jsonl", rows)
    task = build_task(DataConfig(path=path), demonstrations=True)
    assert task.prompts("train")[0].tools == [SCHEMA]
    program = agents(task, path)
    try:
        asked = TOKENIZER.decode(program.encode(task.prompts("train")[0]).tokens)
        assert json.dumps(SCHEMA) in asked
        check_forms(task.prompts("train"), program, program.demonstration)
        with pytest.raises(
            UserError, match=r"a\.jsonl:\d+ has the tool 'lookup' \('tools'\), which the run does not have"
        ):
            check_forms(task.prompts("train"), program)
    finally:
        program.close()
    assert build_task(DataConfig(path=path, tools_key=None), demonstrations=True).prompts("train")[0].tools == []


def test_tools_that_the_run_has_are_told_of_by_the_row(tmp_path):
    """Several are told of only as far as the row names them."""
    calculator = {
        "type": "function",
        "function": {"name": "calculator", "description": "of this row", "parameters": {}},
    }
    path = write(tmp_path / "a.jsonl", [{"prompt": f"{i}?", "tools": [calculator], "answer": "1"} for i in range(20)])
    task = build_task(DataConfig(path=path))
    program = agents(task, path, tools=["calculator", "python"])
    try:
        check_forms(task.prompts("train"), program)
        asked = TOKENIZER.decode(program.encode(task.prompts("train")[0]).tokens)
        assert "of this row" in asked and "python" not in asked
    finally:
        program.close()


def test_tools_that_nothing_tells_of_are_refused(tmp_path):
    """A template that says nothing of them, and a text without one."""
    rows = [{"prompt": f"{i}?", "tools": [SCHEMA], "answer": "1"} for i in range(20)]
    path = write(tmp_path / "a.jsonl", rows)
    for chat, problem in (
        (True, "says nothing of tools"),
        (False, r"is a text, which cannot show its tools.*tools_key: null"),
    ):
        config = build_config({"data": {"path": path, "chat": chat}})
        form = SingleTurn(config, TOKENIZER, build_task(config.data), ONE_PROCESS)
        with pytest.raises(UserError, match=rf"data: prompt .*a\.jsonl:\d+.* {problem}"):
            check_forms(form.task.prompts("train"), form)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"tools": "["}, "'tools': a list of schemas is not JSON"),
        ({"tools": "[" * 100_000}, "'tools': a list of schemas is not JSON"),
        ({"tools": "3"}, "'tools': it is not a list of schemas"),
        ({"tools": {"name": "f"}}, "'tools': it is not a list of schemas"),
        ({"tools": [3]}, "'tools': 1 is not a schema of a function with a name"),
        ({"tools": [SCHEMA, {"type": "function", "function": {}}]}, "'tools': 2 is not a schema"),
        (
            {"tools": [SCHEMA], "response": done("look", {})},
            r"'response' calls 'look', which is not a tool of the row \(lookup\)",
        ),
    ],
)
def test_schemas_and_calls_that_do_not_fit_skip_the_row(tmp_path, row, problem):
    with pytest.raises(UserError, match=problem):
        build_task(
            DataConfig(path=write(tmp_path / "a.jsonl", [{"prompt": "q", "response": "r"} | row])), demonstrations=True
        )


def test_rows_that_a_rollout_writes_have_the_prompt_s_tools(tmp_path):
    prompt = Prompt("a", "q", messages=[{"role": "user", "content": "q"}], tools=[SCHEMA], tokens=[5, 6])
    t = Trajectory(tokens=np.asarray([5, 6, 7], np.int32), prompt_length=2, prompt_id="a", group_id=0)
    t["loss_mask"] = np.ones(1, bool)
    row = row_of(t, prompt, TOKENIZER, "x")
    assert row["tools"] == [SCHEMA] and "tools" not in row_of(t, Prompt("a", "q", tokens=[5, 6]), TOKENIZER, "x")


def table(kind, tmp_path, rows):
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
        return DataConfig(path=str(tmp_path / "a.parquet"))
    if kind == "hub":
        datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
        return DataConfig(task="hub", path=str(tmp_path / "saved"))
    return DataConfig(path=write(tmp_path / "a.jsonl", rows))


def arguments(task):
    found = {}
    for split in ("train", "eval"):
        for prompt in task.prompts(split):
            [call] = task.demonstration(prompt, random.Random())[0]["tool_calls"]
            found[prompt.text] = call["function"]["arguments"]
    return found


@pytest.mark.parametrize("kind", ["parquet", "hub"])
def test_a_table_s_nulls_are_no_arguments(tmp_path, kind):
    """A struct has the fields of all rows; nested ones too."""
    calls = {"move": {"x": 1, "to": {"a": 1}}, "say": {"text": "hi", "to": {"b": [1]}}}
    rows = [{"prompt": f"{i} {name}", "response": done(name, calls[name])} for i in range(10) for name in calls]
    found = arguments(build_task(table(kind, tmp_path, rows), demonstrations=True))
    assert len(found) == 20 and all(value == calls[text.split()[1]] for text, value in found.items())


def test_nulls_that_the_author_wrote_stay(tmp_path):
    """In JSON, as rows and as text; and in a table where the tool requires the argument and takes null."""
    null = {"x": None, "y": 1}
    rows = [{"prompt": f"{i}", "response": done("f", null if i % 2 else json.dumps(null))} for i in range(20)]
    assert all(
        value == null for value in arguments(build_task(table("jsonl", tmp_path, rows), demonstrations=True)).values()
    )
    texts = [{"prompt": f"{i}", "response": done("f", json.dumps(null))} for i in range(20)]
    assert all(
        v == null for v in arguments(build_task(table("parquet", tmp_path, texts), demonstrations=True)).values()
    )
    for takes in ({"type": ["string", "null"]}, {"anyOf": [{"type": "string"}, {"type": "null"}]}, {"type": "string"}):
        for required in (["x"], []):
            schema = {"name": "f", "parameters": {"type": "object", "properties": {"x": takes}, "required": required}}
            rows = [
                {
                    "prompt": f"{i}",
                    "tools": json.dumps([schema]),
                    "response": done("f", {"x": None if i % 2 else "a", "y": 1}),
                }
                for i in range(20)
            ]
            found = arguments(build_task(table("parquet", tmp_path, rows), demonstrations=True))
            kept = bool(required) and takes != {"type": "string"}
            assert all(
                value == (({"x": None} if kept else {}) | {"y": 1}) for text, value in found.items() if int(text) % 2
            )


def test_schemas_of_a_table_have_their_own_fields_alone(tmp_path):
    schemas = [
        {
            "type": "function",
            "function": {"name": f"f{i % 2}", "parameters": {"properties": {f"p{i % 2}": {"type": "string"}}}},
        }
        for i in range(20)
    ]
    rows = [{"prompt": f"{i}", "tools": [schema], "answer": "1"} for i, schema in enumerate(schemas)]
    task = build_task(table("parquet", tmp_path, rows))
    assert all(prompt.tools == [schemas[int(prompt.text)]] for prompt in task.prompts("train"))


# -- messages -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("turns", "problem"),
    [
        (
            [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
            "does not begin with a message of the assistant",
        ),
        ([{"role": "assistant", "content": "b", "weight": 0}], "has nothing to learn: all its weights are 0"),
        ([{"role": "assistant", "content": "b", "weight": 2}], "the weight of a message is 2"),
        (
            [{"role": "assistant", "content": "b", "images": ["a"]}],
            "role assistant has 'images', which the model would not be shown",
        ),
    ],
)
def test_messages_that_would_be_learned_otherwise_skip_the_row(tmp_path, turns, problem):
    with pytest.raises(UserError, match=problem):
        build_task(
            DataConfig(path=write(tmp_path / "a.jsonl", [{"prompt": "q", "response": turns}])), demonstrations=True
        )
    if "begin" not in problem:
        row = {"prompt": "q", "chosen": turns, "rejected": "c"}
        with pytest.raises(UserError, match=problem):
            build_task(DataConfig(path=write(tmp_path / "b.jsonl", [row])), preferences=True)


def test_a_weight_in_a_prompt_is_no_part_of_it(tmp_path):
    """Messages of the prompt never count."""
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    weighed = [turn | ({"weight": i % 2} if turn["role"] == "assistant" else {}) for i, turn in enumerate(turns)]
    rows = [{"prompt": weighed, "response": "d"}, {"prompt": turns, "response": "d"}]
    held_out = write(tmp_path / "e.jsonl", [{"prompt": "x", "response": "y"}])
    data = DataConfig(path=write(tmp_path / "a.jsonl", rows), eval_path=held_out)
    task = build_task(data, demonstrations=True)
    one, other = task.prompts("train")
    assert one.messages == other.messages and one.identity == other.identity


def test_thinking_of_a_preferred_response_is_not_lost(tmp_path):
    """A single message with thinking is no plain text."""
    thought = [{"role": "assistant", "content": "4", "reasoning_content": "2 and 2"}]
    rows = [{"prompt": f"{i}", "chosen": thought, "rejected": "5"} for i in range(20)]
    task = build_task(DataConfig(path=write(tmp_path / "a.jsonl", rows)), preferences=True)
    chosen, rejected = (one.response for one in task.prompts("train")[0].preference.judged)
    assert chosen == thought and rejected == "5"
