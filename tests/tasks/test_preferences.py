"""Preferences: rows of every form, what is wrong with them, their tokens and the stream of comparisons."""

from __future__ import annotations

import json
import logging
import math
import random
import re
from dataclasses import replace

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.agents.agent import Agents, demonstration
from megatron_rl.config import Config, DataConfig
from megatron_rl.config.load import build_config
from megatron_rl.dialects.harmony_ids import MARKS
from megatron_rl.errors import UserError
from megatron_rl.rollout.program import SingleTurn
from megatron_rl.tasks import Judged, Preference, Prompt, PromptStream, Step, Task, build_task
from megatron_rl.tasks.preference_rows import FilePreferences
from megatron_rl.tasks.stream import held_out_comparisons
from megatron_rl.tasks.task import HELD_OUT_SHARE
from tests.conftest import REPOSITORY
from tests.tasks.scripted import ONE_PROCESS
from tools.make_tiny_model import numbers_tokenizer, text_tokenizer

TEXT = text_tokenizer(512)
HARMONY = text_tokenizer(512)
HARMONY.backend_tokenizer.normalizer = None
HARMONY.add_special_tokens({"additional_special_tokens": list(MARKS)})
CALL = {"id": "1", "type": "function", "function": {"name": "python", "arguments": '{"code": "1 + 2"}'}}
PARSED = {"type": "function", "function": {"name": "python", "arguments": {"code": "1 + 2"}}}


def system(text):
    return {"role": "system", "content": text}


def user(text):
    return {"role": "user", "content": text}


def assistant(text, *calls):
    return {"role": "assistant", "content": text} | ({"tool_calls": list(calls)} if calls else {})


def tool(text):
    return {"role": "tool", "content": text, "tool_call_id": "1"}


PAIR = {"chosen": "good", "rejected": "bad"}
LIST = {"responses": ["a", "b", "c"], "scores": [1, 3.5, 1]}
STEPS = {"steps": ["one", "two"], "labels": [True, False]}
POINT = {"response": "a", "score": -2}
LABEL = {"response": "a", "label": True}
KINDS = {"pair": PAIR, "list": LIST, "steps": STEPS, "point": POINT, "label": LABEL}


def write(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def asked(row, count=20):
    """The row for `count` prompts, which are enough for some to be trained on."""
    return [{"prompt": f"q{i}", **row} for i in range(count)]


def prompts(task):
    return [prompt for split in ("train", "eval") for prompt in task.prompts(split)]


def built(tmp_path, rows, **data):
    return build_task(DataConfig(path=write(tmp_path / "a.jsonl", rows), **data), preferences=True)


def read(tmp_path, row, **data):
    """The one prompt that all copies of a row become, but for their ids."""
    found = [replace(p, prompt_id="") for p in prompts(built(tmp_path, [row] * 3, **data | {"eval_path": None}))]
    assert len(found) == 3 and found[0] == found[1] == found[2]
    return found[0]


@pytest.fixture(autouse=True)
def none_is_held_out(monkeypatch):
    """Tests have few rows."""
    monkeypatch.setattr("megatron_rl.tasks.task.HELD_OUT_SHARE", 0.0)


def plain(task, tokenizer=TEXT):
    return SingleTurn(Config(), tokenizer, task, None)


def agents(task, dialect, tokenizer):
    return Agents(
        build_config({"rollout": {"program": "agent"}, "agent": {"dialect": dialect}}), tokenizer, task, ONE_PROCESS
    )


def stream_of(task, form=None, context=512, seed=1):
    return PromptStream(task, form or plain(task), context, 10_000, seed)


# -- rows -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "kind", "judged"),
    [
        (PAIR, "pair", [Judged("good", 1), Judged("bad", 0)]),
        (LIST, "list", [Judged("a", 1), Judged("b", 3.5), Judged("c", 1)]),
        (LIST | {"scores": None}, "list", [Judged("a", -1), Judged("b", -2), Judged("c", -3)]),
        ({"responses": [1, 2.5]}, "list", [Judged("1", -1), Judged("2.5", -2)]),
        (
            {"responses": ["a", "a", "b"], "scores": [1, 1, 0]},
            "list",
            [Judged("a", 1), Judged("a", 1), Judged("b", 0)],
        ),
        (STEPS, "steps", [Judged("one\ntwo\n", 0, (Step("one\n", 1), Step("two\n", 0)))]),
        (
            {"steps": ["one\n"], "labels": [0.25]},
            "steps",
            [Judged("one\n", 0.25, (Step("one\n", 0.25),))],
        ),
        (POINT, "point", [Judged("a", -2)]),
        (LABEL, "label", [Judged("a", 1)]),
        (LABEL | {"label": 0}, "label", [Judged("a", 0)]),
        (LABEL | {"label": 1.0}, "label", [Judged("a", 1)]),
        (PAIR | POINT | LABEL, "pair", [Judged("good", 1), Judged("bad", 0)]),
        (LABEL | {"chosen": None, "rejected": None, "score": None}, "label", [Judged("a", 1)]),
    ],
)
def test_rows_of_every_kind(tmp_path, row, kind, judged):
    found = read(tmp_path, {"prompt": "q", **row})
    assert (found.text, found.messages) == ("q", None)
    assert found.preference == Preference(kind, tuple(judged))


def test_the_rows_of_the_document_are_of_their_kinds(tmp_path):
    text = (REPOSITORY / "docs" / "tasks.md").read_text().partition("## Preferences")[2]
    rows = re.findall(r"^\| (\w+)[^|]*\|.*\| `(\{.*\})` \|$", text, re.MULTILINE)
    [conversations] = re.findall(r"```json\n(.*?)```", text, re.DOTALL)
    found = {(kind, read(tmp_path, json.loads(row)).preference.kind) for kind, row in [*rows, ("pair", conversations)]}
    assert found == {(kind, kind) for kind in KINDS} and len(rows) == 6


def test_a_pair_may_have_a_margin(tmp_path):
    assert read(tmp_path, {"prompt": "q", **PAIR, "margin": 2}).preference.margin == 2.0
    assert read(tmp_path, {"prompt": "q", **PAIR, "margin": None}).preference.margin is None
    assert read(tmp_path, {"prompt": "q", **PAIR, "gap": 0.5}, margin_key="gap").preference.margin == 0.5


@pytest.mark.parametrize("kind", KINDS)
def test_columns_may_have_any_name(tmp_path, kind):
    """TRL's `completion` and `completions` too; a nested name reaches into a row."""
    names = {
        "response": "completion",
        "steps": "completions",
        "labels": "ok",
        "chosen": "sides.a",
        "rejected": "sides.b",
    }
    names |= {"label": "good", "score": "stars", "responses": "all", "scores": "stars", "prompt": "question"}
    row = {names.get(name, name): value for name, value in {"prompt": "q", **KINDS[kind]}.items()}
    if kind == "pair":
        row = {"question": "q", "sides": {"a": "good", "b": "bad"}}
    keys = {f"{name}_key": column for name, column in names.items()}
    expected = read(tmp_path, {"prompt": "q", **KINDS[kind]}).preference
    assert read(tmp_path, row, **keys).preference == expected


def test_templates_and_chats(tmp_path):
    row = {"prompt": "q", "chosen": [assistant("good")], "rejected": [assistant("bad")]}
    found = read(tmp_path, row, template="Q: {prompt}", chat=True)
    assert found.messages == [user("Q: q")] and found.preference == read(tmp_path, {"prompt": "q", **PAIR}).preference
    asked_before = [system("s"), user("1"), assistant("2"), user("3")]
    found = read(tmp_path, row | {"prompt": asked_before})
    assert (found.messages, found.text) == (asked_before, "3") and found.preference.judged[0].response == "good"


def test_a_reply_that_calls_stays_a_conversation(tmp_path):
    turns = [assistant(None, CALL), tool("3"), assistant("It is 3.")]
    found = read(tmp_path, {"prompt": "q", "chosen": turns, "rejected": [assistant("4")]})
    chosen, rejected = found.preference.judged
    assert chosen.response == [assistant("", PARSED), {"role": "tool", "content": "3", "name": "python"}, turns[2]]
    assert rejected.response == "4"
    found = read(tmp_path, {"prompt": "q", "responses": [turns, "4"]})
    assert [one.response for one in found.preference.judged] == [chosen.response, "4"]
    found = read(tmp_path, {"prompt": "q", "response": turns, "label": 1})
    assert found.preference.judged[0].response == chosen.response


@pytest.mark.parametrize("prompt", [{}, {"prompt": None}, {"prompt": "q"}, {"prompt": [user("q")]}])
def test_whole_conversations_bring_their_prompt(tmp_path, prompt):
    start = [system("s"), user("1"), assistant("2"), user("q")]
    row = {"chosen": [*start, assistant("good")], "rejected": [*start, assistant("bad"), user("?"), assistant("x")]}
    found = read(tmp_path, row | prompt)
    assert (found.messages, found.text) == (start, "q")
    chosen, rejected = found.preference.judged
    assert chosen.response == "good" and rejected.response == [assistant("bad"), user("?"), assistant("x")]


def test_a_conversation_may_begin_with_a_greeting(tmp_path):
    start = [assistant("Hello!"), user("q")]
    found = read(tmp_path, {"chosen": [*start, assistant("good")], "rejected": [*start, assistant("bad")]})
    assert found.messages == start and found.preference == read(tmp_path, {"prompt": "q", **PAIR}).preference
    turns = {"chosen": [*start, assistant("good")], "rejected": [assistant("bad")]}  # with a prompt they are replies
    assert read(tmp_path, {"prompt": "p", **turns}).preference.judged[0].response == turns["chosen"]


MESSAGE = st.tuples(st.sampled_from(["user", "assistant"]), st.sampled_from("ab"))


@settings(max_examples=100)
@given(st.lists(MESSAGE, max_size=6), st.lists(MESSAGE, max_size=3), st.lists(MESSAGE, max_size=3))
def test_the_prompt_of_two_conversations_is_the_longest_that_ends_with_a_user(tmp_path_factory, start, one, other):
    start = [("user", "a"), *start]
    chosen, rejected = ([*start, *end, ("assistant", "c")] for end in (one, other))
    ends = [
        n for n in range(len(chosen)) if chosen[:n] == rejected[:n] and chosen[:n][-1:] and chosen[n - 1][0] == "user"
    ]
    sides = [[{"role": role, "content": text} for role, text in side] for side in (chosen, rejected)]
    replies = [side[max(ends) :] for side in sides]
    row = {"chosen": sides[0], "rejected": sides[1]}
    if replies[0] == replies[1] or any(reply[0]["role"] != "assistant" for reply in replies):
        with pytest.raises(UserError, match=r"(are equal|does not begin with a message of the assistant)\)"):
            read(tmp_path_factory.mktemp("rows"), row)
        return
    found = read(tmp_path_factory.mktemp("rows"), row)
    assert found.messages == sides[0][: max(ends)]
    responses = [[assistant(r)] if isinstance(r, str) else r for r in (j.response for j in found.preference.judged)]
    assert responses == replies


def test_parquet_and_hub_rows(tmp_path):
    table = [{"prompt": [user(f"{i}?")], **PAIR, "margin": float(i)} for i in range(10)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(table), tmp_path / "a.parquet")
    task = build_task(DataConfig(path=str(tmp_path / "a.parquet")), preferences=True)
    assert [p.preference.margin for p in prompts(task)] == list(map(float, range(10)))
    rows = [{"completions": ["a", "b"], "prompt": f"{i}", "labels": [True, False]} for i in range(10)]
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    data = DataConfig(task="hub", path=str(tmp_path / "saved"), steps_key="completions")
    for prompt in (found := prompts(build_task(data, preferences=True))):
        assert [step.score for step in prompt.preference.judged[0].steps] == [1.0, 0.0]
    assert len(found) == 10


def test_prepared_rows(tmp_path, monkeypatch):
    (tmp_path / "rows.py").write_text(
        "def pair(row):\n    a, b = row['both']\n    return {'prompt': row['q'], 'chosen': a, 'rejected': b} if a else None\n"
    )
    monkeypatch.chdir(tmp_path)
    task = built(tmp_path, [{"q": "1", "both": ["a", "b"]}, {"q": "2", "both": ["", "b"]}], prepare="rows.py:pair")
    assert [p.preference for p in prompts(task)] == [Preference("pair", (Judged("a", 1), Judged("b", 0)))]


NAN, INFINITE, HUGE = math.nan, math.inf, 10**400
BAD = [
    ("pair", {"chosen": "bad"}, "'chosen' and 'rejected' are equal"),
    ("pair", {"chosen": "bad", "rejected": [assistant("bad")]}, "'chosen' and 'rejected' are equal"),
    ("pair", {"chosen": ""}, "'chosen' is empty"),
    ("pair", {"rejected": " \n"}, "'rejected' is empty"),
    ("pair", {"rejected": []}, "'rejected' is empty"),
    ("pair", {"rejected": [assistant("")]}, "'rejected' is empty"),
    ("pair", {"rejected": None}, "'rejected' is empty"),
    ("pair", {"chosen": None, "rejected": None}, "'chosen' is empty"),
    ("pair", {"prompt": ""}, "'prompt' is empty"),
    ("pair", {"chosen": {"text": "a"}}, "'chosen' is neither text nor a list of messages"),
    ("pair", {"chosen": True}, "'chosen' is neither text nor a list of messages"),
    ("pair", {"chosen": ["a"]}, "'chosen' is a list, but not one of messages: a message needs"),
    ("pair", {"chosen": [user("a"), assistant("b")]}, "'chosen' does not begin with a message of the assistant"),
    ("pair", {"chosen": [assistant("b"), user("a")]}, "'chosen' does not end with a message of the assistant"),
    (
        "pair",
        {"chosen": [user("a"), assistant("b")], "rejected": [user("b"), assistant("b")]},
        "no beginning in common",
    ),
    ("pair", {"chosen": [user("a")], "rejected": [user("a"), assistant("b")]}, "'chosen' is empty"),
    ("pair", {"margin": "wide"}, "'margin' is 'wide', not a finite number"),
    ("pair", {"margin": NAN}, "'margin' is nan, not a finite number"),
    ("pair", {"margin": -0.5}, "'margin' is -0.5: the chosen response would be the worse one"),
    ("list", {"responses": ["a"], "scores": [1]}, "'responses' has a single response"),
    ("list", {"responses": []}, "'responses' is empty"),
    ("list", {"responses": "a, b"}, "'responses' is not a list"),
    ("list", {"responses": ["a", "", "c"]}, "'responses' 2 is empty"),
    ("list", {"responses": ["a", "b", {}]}, "'responses' 3 is neither text nor a list of messages"),
    ("list", {"scores": [1, 2]}, "'scores' has 2 values for the 3 of 'responses'"),
    ("list", {"scores": [2, 2, 2.0]}, "'scores' are all equal"),
    ("list", {"scores": 3}, "'scores' is not a list"),
    ("list", {"scores": [1, INFINITE, 2]}, "'scores' 2 is inf, not a finite number"),
    ("list", {"scores": [1, 2, "3"]}, "'scores' 3 is '3', not a finite number"),
    ("list", {"responses": ["a", "b", "a"], "scores": [1, 1, 2]}, "'responses' 1 and 3 are equal"),
    ("list", {"responses": ["a", "a"], "scores": None}, "'responses' 1 and 2 are equal"),
    ("steps", {"labels": [1]}, "'labels' has 1 values for the 2 of 'steps'"),
    ("steps", {"labels": [1, None]}, "'labels' 2 is None, not a finite number"),
    ("steps", {"labels": None}, "'labels' is empty"),
    ("steps", {"steps": ["one", " "]}, "'steps' 2 is empty"),
    ("steps", {"steps": ["one", 2]}, "'steps' 2 is not text"),
    ("steps", {"steps": [], "labels": []}, "'steps' is empty"),
    ("steps", {"steps": "one\ntwo"}, "'steps' is not a list"),
    ("point", {"score": "high"}, "'score' is 'high', not a finite number"),
    ("point", {"score": -INFINITE}, "'score' is -inf, not a finite number"),
    ("point", {"score": HUGE}, "not a finite number"),
    ("point", {"response": ""}, "'response' is empty"),
    ("label", {"label": 2}, "'label' is 2, neither true or false nor 1 or 0"),
    ("label", {"label": "true"}, "'label' is 'true', neither"),
    ("label", {"label": NAN}, "'label' is nan, neither"),
    ("label", {"response": " "}, "'response' is empty"),
]


@pytest.mark.parametrize(("kind", "change", "problem"), BAD)
def test_a_bad_row_is_skipped_counted_and_named(tmp_path, caplog, kind, change, problem):
    good = {"prompt": "q", **KINDS[kind]}
    with caplog.at_level(logging.WARNING):
        task = built(tmp_path, [good, good | change, good])
    assert task.skipped == 1 and [p.prompt_id[-2:] for p in prompts(task)] == [":1", ":3"]
    named, counted = caplog.messages
    assert f"{tmp_path}/a.jsonl:2 skipped: " in named and problem in named and counted.endswith("1 of 3 lines skipped")
    with pytest.raises(UserError, match=r"a.jsonl has no usable line \(2 skipped; the first: ") as error:
        built(tmp_path, [good | change, {"prompt": "q"}])
    assert problem in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"prompt": "q", "chosn": "a", "rejected": "b"},
            r"no column 'chosen' \(data.chosen_key\); did you mean 'chosn'",
        ),
        (
            {"prompt": "q", "chosn": "a", "rejectd": "b"},
            r"no column 'chosen' \(data.chosen_key\); did you mean 'chosn'",
        ),
        (
            {"promt": "q", "chosen": [assistant("a")], "rejected": [assistant("b")]},
            r"no column 'prompt' .* mean 'promt'",
        ),
        ({"promt": "q", **PAIR}, r"no column 'prompt' \(data.prompt_key\); did you mean 'promt'"),
        ({"prompt": "q", "completion": "a", "label": 1}, r"no column 'response' \(data.response_key\)"),
        ({"prompt": "q", "response": "a", "lable": 1}, r"no column 'label' \(data.label_key\); did you mean 'lable'"),
        (
            {"prompt": "q", "steps": ["a"], "lables": [1]},
            r"no column 'labels' \(data.labels_key\); did you mean 'lables'",
        ),
        (
            {"prompt": "q", "answer": "a", "response": "b"},
            r"the first: it has none of the columns of preferences \('chosen'",
        ),
    ],
)
def test_a_missing_column_names_the_nearest(tmp_path, row, message):
    with pytest.raises(UserError, match=message) as error:
        built(tmp_path, [row] * 3)
    assert f"{tmp_path}/a.jsonl has no " in str(error.value)


@pytest.mark.parametrize(
    ("first", "other"), [("pair", "label"), ("list", "pair"), ("point", "label"), ("steps", "list")]
)
def test_rows_are_of_one_kind(tmp_path, first, other):
    rows = [*asked(KINDS[first], 3), {"prompt": "x", **KINDS[other]}]
    with pytest.raises(UserError, match=rf"a.jsonl:4 is a {other} \('.*a.jsonl:1 is a {first} \('") as error:
        built(tmp_path, rows)
    assert "data.prepare" in str(error.value)
    held_out = write(tmp_path / "b.jsonl", asked(KINDS[other], 2))
    with pytest.raises(UserError, match=rf"b.jsonl:1 is a {other} .*a.jsonl:1 is a {first}"):
        built(tmp_path, asked(KINDS[first], 3), eval_path=held_out)
    columns = {name: None for row in (KINDS[first], KINDS[other]) for name in row}  # as a data set has them
    datasets.Dataset.from_list([columns | row for row in rows]).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(UserError, match=rf"saved:train:4 is a {other} .*saved:train:1 is a {first}"):
        build_task(DataConfig(task="hub", path=str(tmp_path / "saved")), preferences=True)


def test_all_comparisons_of_a_prompt_are_on_one_side(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_rl.tasks.task.HELD_OUT_SHARE", HELD_OUT_SHARE)
    rng = random.Random()
    rows = [{"prompt": f"q{i % 100}", "chosen": f"good {i}", "rejected": "bad"} for i in range(400)]
    rng.shuffle(rows)
    task = built(tmp_path, rows)
    train, held_out = ({p.text for p in task.prompts(split)} for split in ("train", "eval"))
    assert not train & held_out and len(train | held_out) == 100 and train and held_out
    assert len(prompts(task)) == 400
    demonstrated = [{"prompt": row["prompt"], "response": "x"} for row in rows]  # the split is that of SFT
    sft = build_task(DataConfig(path=write(tmp_path / "b.jsonl", demonstrated)), demonstrations=True)
    assert {p.text for p in sft.prompts("eval")} == held_out


def test_held_out_rows_of_their_own_file(tmp_path, caplog):
    held_out = write(tmp_path / "b.jsonl", [{"prompt": "q1", **PAIR}, {"prompt": "new", **PAIR}])
    with caplog.at_level(logging.WARNING):
        task = built(tmp_path, asked(PAIR, 4), eval_path=held_out)
    assert [p.text for p in task.prompts("train")] == ["q0", "q2", "q3"] and len(task.prompts("eval")) == 2
    assert any("1 training prompts are also held-out" in m for m in caplog.messages)


# -- tasks ------------------------------------------------------------------------------------------------------------


class Drawn(Task):
    """A task of its own, that draws what is compared."""

    def prompts(self, split):
        return [Prompt(f"{split}:{i}", f"{i}") for i in range(20)]

    def score(self, prompts, texts, truncated=()):
        return [{"correct": 0.0}] * len(texts)

    def comparison(self, prompt, rng):
        return Preference("pair", (Judged(f"good {rng.random()}", 1), Judged("bad", 0)), margin=rng.random())


def test_a_task_may_draw_what_is_compared():
    task = build_task(DataConfig(task=f"{__file__}:Drawn"), preferences=True)
    [one, *_], [same, *_], [other, *_] = (
        stream_of(task).next_comparisons(2, random.Random(seed)) for seed in (1, 1, 2)
    )
    assert one.sequences[0].tokens.tolist() == same.sequences[0].tokens.tolist() != other.sequences[0].tokens.tolist()
    assert one.margin == same.margin != other.margin


class Wrong(Drawn):
    def comparison(self, prompt, rng):
        return ("good", "bad")


def test_what_is_no_preference_is_refused():
    one, other = Judged("a", 1), Judged("b", 0)
    for kind, judged, problem in [
        ("pair", (one,), "has 1 responses"),
        ("pair", (other, one), "score is not higher"),
        ("list", (one, one), "only equal scores"),
        ("list", (one,), "has 1 responses"),
        ("list", (one, Judged("x", NAN)), "not a finite number"),
        ("point", (one, other), "has 2 responses"),
        ("label", (), "has 0 responses"),
        ("steps", (one,), "has no steps"),
        ("pairs", (one, other), "no kind of preference 'pairs'; did you mean 'pair'"),
    ]:
        with pytest.raises(UserError, match=problem):
            Preference(kind, judged)
    with pytest.raises(UserError, match="not a finite number"):
        Preference("pair", (one, other), margin=INFINITE)
    task = build_task(DataConfig(task=f"{__file__}:Wrong"))
    with pytest.raises(UserError, match=r"Wrong.comparison gives \('good', 'bad'\), no Preference"):
        stream_of(task).next_comparisons(1, random.Random(0))


def test_a_task_without_preferences_says_so(tmp_path):
    message = "data.task 'number_sorting' has no preferences, so it cannot be used for"
    with pytest.raises(UserError, match=message):
        build_task(DataConfig(task="number_sorting"), preferences=True)
    with pytest.raises(UserError, match=message):
        stream_of(build_task(DataConfig(task="number_sorting"))).next_comparisons(1, random.Random(0))
    task = built(tmp_path, asked(LABEL))
    with pytest.raises(UserError, match="has no demonstrations"):
        task.demonstration(task.prompts("train")[0], random.Random(0))
    assert isinstance(task, FilePreferences)


# -- tokens -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def form_of():
    """form_of(name, task) -> a rollout program with a tokenizer that has all texts."""
    made = []

    def make(name, task):
        made.append(agents(task, name, HARMONY if name == "harmony" else TEXT) if name != "plain" else plain(task))
        return made[-1]

    yield make
    for form in made:
        form.close()


@pytest.mark.parametrize("name", ["plain", "qwen", "react", "harmony"])
@pytest.mark.parametrize("chat", [False, True])
def test_responses_have_the_tokens_of_demonstrations(tmp_path, form_of, name, chat):
    rng = random.Random()
    texts = [["".join(rng.choices("ab ü\n日<", k=20)) + str(i) for i in range(3)] for _ in range(10)]
    rows = [{"prompt": f"q{i}", "responses": some} for i, some in enumerate(texts)]
    flat = [{"prompt": f"q{i}", "response": text} for i, some in enumerate(texts) for text in some]
    task = built(tmp_path, rows, chat=chat)
    data = DataConfig(path=write(tmp_path / "b.jsonl", flat), chat=chat)
    sft = build_task(data, demonstrations=True)
    form, expected = form_of(name, task), form_of(name, sft)
    demonstrations = iter([expected.demonstration(expected.encode(p), rng) for p in prompts(sft)])
    for prompt in prompts(task):
        comparison = form.comparison(form.encode(prompt), rng)
        for sequence, want in zip(comparison.sequences, demonstrations, strict=False):
            assert sequence.tokens.tolist() == want.tokens.tolist() and sequence.prompt_length == want.prompt_length
            assert sequence["loss_mask"].tolist() == want["loss_mask"].tolist()
            assert sequence.tokens[-1] in (TEXT.eos_token_id, *HARMONY.convert_tokens_to_ids(["<|return|>"]))


@pytest.mark.parametrize("name", ["qwen", "react", "harmony"])
def test_calls_are_written_in_the_dialect(tmp_path, form_of, name):
    turns = [assistant("Let me see.", CALL), tool("3"), assistant("It is 3.")]
    row = {"chosen": [user("1 + 2?"), *turns], "rejected": [user("1 + 2?"), assistant("It is 4.")]}
    task = built(tmp_path, [row] * 3)
    form = form_of(name, task)
    prompt = form.encode(task.prompts("train")[0])
    chosen, rejected = form.comparison(prompt, random.Random(0)).sequences
    want = demonstration(form.dialect, prompt, turns)
    assert chosen.tokens.tolist() == want.tokens.tolist() and chosen["loss_mask"].tolist() == want["loss_mask"].tolist()
    assert not chosen["loss_mask"].all() and rejected["loss_mask"].all()
    text = form.dialect.text(chosen.tokens)
    assert "1 + 2?" in text and "Let me see." in text and "1 + 2" in text and text.count("It is 3.") == 1
    with pytest.raises(UserError, match=r"a.jsonl:1 is a conversation; set rollout.program: agent"):
        stream_of(task).next_comparisons(3, random.Random(0))


@pytest.mark.parametrize("name", ["plain", "qwen", "react", "harmony"])
def test_steps_end_where_their_texts_do(tmp_path, form_of, name):
    rng = random.Random()
    texts = [["x" + "".join(rng.choices("ab ü.\n=", k=8)) for _ in range(rng.randint(1, 5))] for _ in range(10)]
    labels = [[rng.random() for _ in some] for some in texts]
    rows = [{"prompt": f"q{i}", "steps": s, "labels": v} for i, (s, v) in enumerate(zip(texts, labels, strict=True))]
    task = built(tmp_path, rows, step_separator=" #\n")
    form = form_of(name, task)
    for prompt, steps, scores in zip(prompts(task), texts, labels, strict=True):
        found = form.comparison(form.encode(prompt), rng)
        [sequence], [ends] = found.sequences, found.step_ends
        assert found.step_labels == [scores] and found.scores == [min(scores)] and sequence["loss_mask"].all()
        response = sequence.tokens[sequence.prompt_length :].tolist()
        whole = form.sequence(form.encode(prompt), "")
        frame = whole.tokens[whole.prompt_length :].tolist()
        start = len(frame) - 1
        assert response[:start] == frame[:-1] and response[ends[-1] + 1 :] == frame[-1:]
        for step, end in zip(steps, ends, strict=True):
            tokens, start = response[start : end + 1], end + 1
            assert form.tokenizer.decode(tokens) == f"{step} #\n"
            assert tokens == form.tokenizer.encode(f"{step} #\n", add_special_tokens=False)


@settings(max_examples=30)
@given(
    st.lists(st.text("ab. \n", min_size=1).filter(str.strip), min_size=1, max_size=4),
    st.sampled_from(["\n", "", "\n\n"]),
)
def test_a_separator_is_added_where_it_is_missing(tmp_path_factory, texts, separator):
    row = {"prompt": "q", "steps": texts, "labels": [1] * len(texts)}
    [judged] = read(tmp_path_factory.mktemp("rows"), row, step_separator=separator).preference.judged
    assert [step.text.removesuffix(separator) for step in judged.steps] == [t.removesuffix(separator) for t in texts]
    assert all(step.text.endswith(separator) for step in judged.steps)
    assert judged.response == "".join(step.text for step in judged.steps)


# -- the stream -------------------------------------------------------------------------------------------------------


def test_comparisons_come_in_the_order_of_prompts(tmp_path):
    task = built(tmp_path, asked(PAIR, 40))
    order = [p.prompt_id for p in PromptStream(task, plain(task), 512, 8, seed=1).next(90)]
    found = stream_of(task).next_comparisons(90, random.Random(0))
    assert [one.prompt_id for one in found] == order and len(set(order[:40])) == 40
    assert [one.prompt_id for one in stream_of(task, seed=2).next_comparisons(90, random.Random(0))] != order


@pytest.mark.parametrize("before", [0, 5, 30, 47])
def test_the_stream_resumes_exactly(tmp_path, before):
    rows = [{"prompt": f"q{i}", "chosen": "good" * (i % 4 * 9 + 1), "rejected": "bad"} for i in range(40)]
    task = built(tmp_path, rows)
    stream, rng = stream_of(task, context=40), random.Random(0)
    stream.next_comparisons(before, rng)
    state = json.loads(json.dumps(stream.state_dict()))
    expected = [one.prompt_id for one in stream.next_comparisons(70, rng)]
    resumed = stream_of(task, context=40)
    resumed.load_state_dict(state)
    assert [one.prompt_id for one in resumed.next_comparisons(70, rng)] == expected
    assert resumed.skipped == stream.skipped and 0 < len(stream.skipped) < 40


def test_too_long_comparisons_are_skipped_and_counted(tmp_path, caplog):
    """By their longest response, whichever it is."""
    texts = ["x", "x y " * 30]
    rows = [{"prompt": f"q{i}", "chosen": texts[i % 2], "rejected": texts[(i + i // 2) % 2] + "!"} for i in range(40)]
    task = built(tmp_path, rows)
    long = {p.prompt_id for p in prompts(task) if any(len(j.response) > 9 for j in p.preference.judged)}
    stream = stream_of(task, context=20)
    with caplog.at_level(logging.WARNING):
        found = stream.next_comparisons(30, random.Random(0))
    assert stream.skipped == long and not long & {one.prompt_id for one in found} and 5 < len(long) < 40
    named = [m for m in caplog.messages if m.startswith("data: comparison ")]
    assert len(named) == 5 and len(caplog.messages) == 6
    assert "a.jsonl:" in named[0] and "its longest sequence has" in named[0] and named[0].endswith("context_length 20")
    with pytest.raises(UserError, match="none of the 40 comparisons has .* rollout.context_length 3"):
        stream_of(task, context=3).next_comparisons(1, random.Random(0))
    lengths = {c.prompt_id: max(len(one.tokens) for one in c.sequences) for c in found}
    limit = max(lengths.values())
    assert min(lengths.values()) < limit
    for context in (limit, limit - 1):
        names = {one.prompt_id for one in stream_of(task, context=context).next_comparisons(60, random.Random(0))}
        assert names == {name for name, length in lengths.items() if length <= context}


class Blank(Drawn):
    def comparison(self, prompt, rng):
        return Preference("steps", (Judged("1 ", 0, (Step("1", 1), Step(" ", 0))),))


def test_responses_that_are_the_same_to_the_tokenizer_are_skipped(tmp_path, caplog):
    """The tokenizer of numbers has one token for all other signs, and none for white space."""
    numbers = numbers_tokenizer(64)
    rows = [{"prompt": "1", "responses": some} for some in (["1", "2", "x"], ["1", "x", "y"], ["1 2", "1", "1  2"])]
    task = built(tmp_path, rows)
    with caplog.at_level(logging.WARNING):
        found = stream_of(task, plain(task, numbers)).next_comparisons(3, random.Random(0))
    assert {one.prompt_id[-2:] for one in found} == {":1"}
    named = sorted(m.split("a.jsonl:")[1] for m in caplog.messages)
    assert [m[:1] for m in named] == ["2", "3"] and "2 and 3 have the same tokens" in named[0]
    assert "1 and 3 have the same tokens" in named[1]
    equal = [{"prompt": "1", "responses": ["x", "y", "1"], "scores": [1, 1, 0]}]  # the same, and as good
    task = built(tmp_path, equal)
    assert stream_of(task, plain(task, numbers)).next_comparisons(1, random.Random(0))
    task = build_task(DataConfig(task=f"{__file__}:Blank"))
    with pytest.raises(UserError, match="none of the 20 comparisons"):
        stream_of(task, plain(task, numbers)).next_comparisons(1, random.Random(0))
    assert "the tokenizer has no token for a step" in caplog.text


def test_held_out_comparisons(tmp_path, caplog):
    rows = [{"prompt": f"q{i}", "chosen": "good" * (1 + i % 2 * 30), "rejected": "bad"} for i in range(10)]
    task = built(tmp_path, [{"prompt": "new", **PAIR}], eval_path=write(tmp_path / "b.jsonl", rows))
    form, held_out = plain(task), task.prompts("eval")
    with caplog.at_level(logging.WARNING):
        found = held_out_comparisons(held_out, form, 20)
    assert [one.prompt_id for one in found] == [p.prompt_id for p in held_out[::2]]
    [message] = caplog.messages
    assert "5 of 10 held-out comparisons are skipped" in message and "b.jsonl:2" in message
    with pytest.raises(UserError, match="10 of 10 .* set eval.prompts to 0"):
        held_out_comparisons(held_out, form, 3)
    assert held_out_comparisons([], form, 3) == []
    drawn = build_task(DataConfig(task=f"{__file__}:Drawn"), preferences=True)
    one, other = (held_out_comparisons(drawn.prompts("eval"), plain(drawn), 512) for _ in range(2))
    assert [c.margin for c in one] == [c.margin for c in other] and len({c.margin for c in one}) == 20
