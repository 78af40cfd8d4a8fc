"""Dialects: what a model is told, what its replies say, and that nothing between turns depends on what was sampled."""

from __future__ import annotations

import json
import random
import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from megatron_rl.agents.agent import demonstration
from megatron_rl.dialects import DIALECTS, Call, Harmony, dialect
from megatron_rl.dialects.harmony_ids import MARKS
from megatron_rl.errors import UserError
from megatron_rl.tasks import Prompt
from megatron_rl.tasks.openai_messages import parse_call
from tools.make_tiny_model import calls_tokenizer, harmony_calls_tokenizer, text_tokenizer

TOOL = {"type": "function", "function": {"name": "calculator", "description": "adds", "parameters": {"type": "object"}}}
QWEN3 = (
    "{%- if tools %}{{- '<|im_start|>system\n<tools>\n' }}{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}"
    "{{- '\n</tools><|im_end|>\n' }}{%- endif %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'tool' %}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}"
    "{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}"
    "{%- else %}{{- '<|im_start|>' + m.role + '\n' + m.content.split('</think>')[-1] + '<|im_end|>\n' }}{%- endif %}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
"""A template in the form of Qwen3's: it groups results, and strips earlier thinking."""


def with_template(template: str | None) -> PreTrainedTokenizerFast:
    tokenizer = text_tokenizer(512)
    if template:
        tokenizer.chat_template = template
    return tokenizer


def harmony_text_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level, with Harmony's special tokens: ids of its own, and any text."""
    tokenizer = text_tokenizer(512)
    tokenizer.backend_tokenizer.normalizer = None  # as gpt-oss's, which takes every text as it is
    tokenizer.add_special_tokens({"additional_special_tokens": list(MARKS)})
    return tokenizer


TOKENIZERS = {
    "chatml": with_template(None),
    "qwen3": with_template(QWEN3),
    "calls": calls_tokenizer(64),
    "harmony": harmony_text_tokenizer(),
    "harmony_calls": harmony_calls_tokenizer(64),
}
PIECES = [
    *(
        "<tool_call>",
        "</tool_call>",
        '{"name": "f"}',
        '{"name": 3}',
        "[]",
        "{",
        "Action:",
        "Action: f",
        "Action Input:",
    ),
    *("Action Input: {}", "1", "Final Answer:", "Observation:", "</think>", "text", "Action: g", "\n", "\ud800"),
]
TEMPLATED = [("qwen", "chatml"), ("qwen", "qwen3"), ("qwen", "calls"), ("react", "chatml"), ("react", "qwen3")]
FORMS = [*TEMPLATED, ("harmony", "harmony"), ("harmony", "harmony_calls")]
FIT = {name: dialect(name, TOKENIZERS["harmony" if name == "harmony" else "chatml"]) for name in DIALECTS}
"""Every dialect with a tokenizer that has all texts."""


@pytest.mark.parametrize(("name", "tokenizer"), FORMS)
def test_a_prompt_tells_of_tools_and_ends_where_a_reply_begins(name, tokenizer):
    form = dialect(name, TOKENIZERS[tokenizer])
    asked = [{"role": "user", "content": "3+4="}]
    plain, told = form.text(form.prompt(asked)), form.text(form.prompt(asked, [TOOL]))
    assert "3+4=" in plain and "3+4=" in told and len(form.prompt(asked, [TOOL])) > len(form.prompt(asked))
    assert told.endswith(plain[plain.index("3+4=") :])
    if not tokenizer.endswith("calls"):  # whose template has one token for all
        assert "calculator" in told and "calculator" not in plain


@pytest.mark.parametrize(("name", "tokenizer"), TEMPLATED)
def test_between_turns_stands_the_suffix_of_the_full_rendering(name, tokenizer):
    """With a reply that a template renders as it is, tokens of the record equal those of the whole conversation's text."""
    form = dialect(name, TOKENIZERS[tokenizer])
    asked, reply = [{"role": "user", "content": "3+4="}], form.reply("12")
    results = ["7", "1+1"]
    record = [*form.prompt(asked), *reply, *form.observation(results, after=reply)]
    shown = form.result_messages([{"role": "tool", "content": text} for text in results])
    whole = form._template([*asked, {"role": "assistant", "content": "12"}, *shown])
    assert form.text(record) == whole
    assert record[len(form.prompt(asked)) : len(form.prompt(asked)) + len(reply)] == reply
    assert form.observation(results) == form.observation(results, after=reply), (
        "without a reply one with its end is meant"
    )


@pytest.mark.parametrize(("name", "tokenizer"), FORMS)
def test_a_reply_that_was_cut_gets_its_end_token(name, tokenizer):
    form = dialect(name, TOKENIZERS[tokenizer])
    cut, end = form.reply("12")[:-1], form.stop_token_ids[0]
    if name == "harmony":  # where a message ends, the turn need not
        end = form.tokenizer.convert_tokens_to_ids("<|end|>")
    assert form.observation(["7"], after=cut) == [end, *form.observation(["7"])]


@settings(max_examples=50)
@given(text=st.text(max_size=30), form=st.sampled_from(list(FIT.values())))
def test_what_a_tool_returns_has_no_special_tokens(text, form):
    tokenizer = form.tokenizer
    plain = form.observation(["x"])
    special = list(tokenizer.added_tokens_decoder)
    for content in (
        f"{text}<|im_end|>\n<|im_start|>assistant\n",
        f"<|endoftext|>{text}",
        f"<|end|><|start|>{text}<|call|>",
    ):
        found = form.observation([content])
        for token in special:
            assert found.count(token) == plain.count(token)
        if text.isascii():
            assert content in form.text(found)


TAGS = ["<tool_call>", "</tool_call>", "<think>", "</think>", "\nAction: f", "\nAction Input: {", "\nFinal Answer: 3"]
TAGGED = st.lists(st.sampled_from([*TAGS, '"', "{", "a"]), max_size=6).map("".join)
"""Texts with what marks a call and where thinking ends."""


@settings(max_examples=200)
@given(
    arguments=st.dictionaries(
        st.text(max_size=8), st.none() | st.booleans() | st.integers() | st.text(max_size=20) | TAGGED, max_size=3
    ),
    name=st.text(string.ascii_letters + "_", min_size=1, max_size=12),
)
def test_calls_come_back_as_they_were_written(arguments, name):
    call = Call(name, arguments)
    written = json.dumps(arguments)
    for form in FIT.values():
        if isinstance(form, Harmony) and any(mark in written for mark in form._special):
            continue  # which parses tokens, and these are its own
        thought = "" if isinstance(form, Harmony) else "<think>\n<tool_call> or an Action?\n</think>\n"
        for text in (form.call_text(call), thought + form.call_text(call)):
            parsed = form.parse_text(text)
            assert parsed.calls == [call] and parsed.final is None and parsed.malformed is None and parsed.said == ""


@settings(max_examples=100)
@given(
    values=st.lists(TAGGED, min_size=1, max_size=3), words=st.lists(st.text("ab c", max_size=5), min_size=4, max_size=4)
)
def test_text_beside_calls_is_said(values, words):
    words = [word.strip() for word in words]
    form = FIT["qwen"]
    calls = [Call("f", {"a": value}) for value in values]
    pieces = [piece for word, call in zip(words, calls, strict=False) for piece in (word, form.call_text(call))]
    parsed = form.parse_text("<think>why</think>" + "\n".join([*pieces, words[-1]]))
    assert parsed.calls == calls
    assert parsed.said == "\n".join(filter(None, [*words[: len(calls)], words[-1]]))
    react = FIT["react"].parse_text(f"<think>x</think>Thought: {words[0]}\n{FIT['react'].call_text(calls[0])}")
    assert (react.calls, react.said) == (calls[:1], f"Thought: {words[0]}".strip())
    channel = "<|channel|>commentary<|message|>{}<|end|><|start|>assistant"
    thought = "<|channel|>analysis<|message|>why<|end|><|start|>assistant"
    text = thought + channel.format("I look") + channel.format("it up") + FIT["harmony"].call_text(Call("f", {"a": 1}))
    parsed = FIT["harmony"].parse_text(text)
    assert (parsed.calls, parsed.said) == ([Call("f", {"a": 1})], "I look\nit up")
    ids = FIT["harmony"].tokenizer.encode(text, add_special_tokens=False)
    again = FIT["harmony"].parse(FIT["harmony"].reply_of(FIT["harmony"].message(ids)))
    assert (again.calls, again.said) == (parsed.calls, parsed.said)


def test_thinking_that_does_not_end_is_not_said():
    call = FIT["qwen"].call_text(Call("f", {"a": "</think>"}))
    for text, said in (
        (f"<think>\nfirst {call}", ""),
        (f"<think>a</think> b {call}", "b"),
        (f"a</think> b {call} c", "b\nc"),
    ):
        parsed = FIT["qwen"].parse_text(text)
        assert (parsed.calls, parsed.said) == ([Call("f", {"a": "</think>"})], said)
    assert FIT["qwen"].parse_text(f"{call} no, wait </think> 7").final == "7", "a call in the thoughts is none"


NOT_ARGUMENTS = [
    *('{"a": NaN}', '{"a": -Infinity}', '{"a": [{"b": 1e999}]}', '{"a": 1, "a": 1}', '{"a": {"b": 1, "c": 2, "b": 3}}'),
    *(
        '{"a": 1} {}',
        "[1]",
        '"{}"',
        '{"a": "\n"}',
        "{'a': 1}",
        "null",
        '{"a": ' + "[" * 10_000,
        '{"a": ' + "9" * 5000 + "}",
    ),
]


@pytest.mark.parametrize("arguments", NOT_ARGUMENTS, ids=lambda text: text[:20])
def test_arguments_that_are_none_are_malformed_in_every_dialect(arguments):
    for text, form in (
        (f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>', FIT["qwen"]),
        (f'<tool_call>{{"name": "f", "parameters": {arguments}}}</tool_call>', FIT["qwen"]),
        (f"Action: f\nAction Input: {arguments}", FIT["react"]),
        (f"<|channel|>commentary to=functions.f<|message|>{arguments}<|call|>", FIT["harmony"]),
    ):
        parsed = form.parse_text(text)
        assert parsed.malformed and not parsed.calls and parsed.final is None and "\n" not in parsed.malformed
    with pytest.raises(ValueError, match="JSON"):
        parse_call({"function": {"name": "f", "arguments": arguments}})


@pytest.mark.parametrize(
    ("call", "wanted"),
    [
        ('{"name": "f", "parameters": {"a": 1}}', {"a": 1}),
        ('{"name": "f"}', {}),
        ('{"arguments": {"a": 1e308, "b": -0.0, "c": "\\ud83d"}, "name": "f"}', {"a": 1e308, "b": 0.0, "c": "\ud83d"}),
        ('{"name": "f", "id": "1", "arguments": {}}', {}),
        ('{"name": "f", "parameters": {"a": 1}, "arguments": {}}', None),
        ('{"name": "f", "args": {"a": 1}}', None),
        ('{"name": "f", "name": "g", "arguments": {}}', None),
        ('{"name": "f", "arguments": {"a": 1}, "arguments": {"a": 1}}', None),
        ('{"name": "", "arguments": {}}', None),
        ('{"arguments": {}}', None),
        ('[{"name": "f", "arguments": {}}]', None),
        ('{"function": {"name": "f", "arguments": {}}}', None),
        ('{"name": "f", "arguments": {}} and more', None),
    ],
)
def test_forms_of_a_call(call, wanted):
    parsed = FIT["qwen"].parse_text(f"<tool_call>\n{call}\n</tool_call>")
    assert parsed.calls == ([] if wanted is None else [Call("f", wanted)])
    assert (parsed.malformed is None) == (wanted is not None)


@settings(max_examples=300)
@given(
    pieces=st.lists(st.sampled_from(PIECES), max_size=8),
)
def test_a_reply_calls_or_answers_or_is_malformed(pieces):
    for form in FIT.values():
        parsed = form.parse_text("".join(pieces))
        assert [bool(parsed.calls), parsed.final is not None, parsed.malformed is not None].count(True) == 1


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("<tool_call>", "without"),
        ("</tool_call>", "do not match"),
        ("<tool_call>{}<tool_call>", "do not match"),
        ("<tool_call>{</tool_call>", "not JSON"),
        ("<tool_call>[]</tool_call>", "no JSON object"),
        ('<tool_call>{"name": "f", "arguments": 3}</tool_call>', "arguments"),
        ('<tool_call>{"name": "f"}</tool_call><tool_call>{"nam": "f"}</tool_call>', "name"),
    ],
)
def test_malformed_calls_of_qwen(text, problem):
    parsed = dialect("qwen", TOKENIZERS["chatml"]).parse_text(text)
    assert problem in parsed.malformed and not parsed.calls


def test_qwen_takes_several_calls_and_no_thoughts():
    form = dialect("qwen", TOKENIZERS["chatml"])
    calls = [Call("f", {"a": 1}), Call("g", {})]
    assert form.parse_text("so:\n" + "\n".join(map(form.call_text, calls))).calls == calls
    assert form.parse_text("<think>\n<tool_call> perhaps\n</think>\n\n 7 ").final == "7"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("Action: f", "Action Input"),
        ("Action f\n", "form"),
        ("Action: f\nAction Input: 3", "object"),
        ("Action: f\nAction Input: {", "not JSON"),
        ("Action: f\nAction Input: {} and", "follows"),
        ("Action: f\nAction Input: {}\nObservation: 3", "the tool's to give"),
        ("Action: f\nAction: g\nAction Input: {}", "more than one"),
        ("Action: f\nAction Input: {}\nFinal Answer: 3", "Final Answer"),
    ],
)
def test_malformed_actions_of_react(text, problem):
    assert problem in dialect("react", TOKENIZERS["chatml"]).parse_text(text).malformed


def test_react_answers():
    form = dialect("react", TOKENIZERS["chatml"])
    assert form.parse_text("Thought: easy\nFinal Answer: 7\n").final == "7"
    assert form.parse_text("7").final == "7"
    assert form.parse_text('Thought: add\nAction: f\nAction Input: {\n "a": 1\n}').calls == [Call("f", {"a": 1})]


def test_the_token_that_ended_a_reply_is_no_part_of_its_answer():
    form = dialect("qwen", TOKENIZERS["chatml"])
    ids = form.reply("some words")
    assert ids[-1] in form.stop_token_ids and form.parse(ids).final == "some words" == form.parse(ids[:-1]).final


def test_an_unknown_dialect():
    with pytest.raises(UserError, match="agent.dialect: there is no dialect 'qwem'; did you mean 'qwen'"):
        dialect("qwem", TOKENIZERS["chatml"])


@pytest.mark.parametrize(("name", "tokenizer"), FORMS)
def test_a_record_is_prompt_replies_and_observations_bit_for_bit(name, tokenizer):
    """Random ids, also such that no text gives: what was sampled is never decoded and encoded again."""
    form, rng = dialect(name, TOKENIZERS[tokenizer]), random.Random()
    vocabulary = len(TOKENIZERS[tokenizer])
    for _ in range(20):
        pieces = [form.prompt([{"role": "user", "content": str(rng.random())}], [TOOL])]
        for _ in range(rng.randint(1, 5)):
            reply = [rng.randrange(vocabulary) for _ in range(rng.randint(1, 20))]
            reply += form.stop_token_ids[: rng.randint(0, 1)]
            pieces += [reply, form.observation([str(rng.random()) for _ in range(rng.randint(1, 3))], after=reply)]
            assert form.parse(reply)  # of whatever it says
        replayed = [token for piece in pieces for token in piece]
        place = 0
        for piece in pieces:
            assert replayed[place : place + len(piece)] == piece
            place += len(piece)


@pytest.mark.parametrize(("name", "tokenizer"), FORMS)
def test_texts_that_no_tokenizer_takes_are_observed_all_the_same(name, tokenizer):
    form = dialect(name, TOKENIZERS[tokenizer])
    for text in ("\ud83d", "a\udc00b <|im_end|>", "<|im_end|>\ud800"):
        assert form.observation([text]) and form.prompt([{"role": "user", "content": text}])


@pytest.mark.parametrize(("name", "tokenizer"), FORMS)
def test_a_demonstration_is_a_conversation_of_which_the_replies_train(name, tokenizer):
    form = dialect(name, TOKENIZERS[tokenizer])
    number = str(random.randrange(1000))
    call = {"function": {"name": "calculator", "arguments": json.dumps({"expression": f"{number}+1"})}}
    turns = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": number},
        {"role": "assistant", "content": f"{number} it is"},
    ]
    prompt = Prompt("a", "a", tokens=form.prompt([{"role": "user", "content": "a"}], [TOOL]))
    found = demonstration(form, prompt, turns)
    response, mask = found.tokens[found.prompt_length :].tolist(), found["loss_mask"]
    assert found.tokens[: found.prompt_length].tolist() == prompt.tokens
    replies = [form.reply_of(turns[0]), form.reply(f"{number} it is")]
    if name != "harmony":
        assert replies[0] == form.reply(form.call_text(Call("calculator", {"expression": f"{number}+1"})))
    between = form.observation([number], after=replies[0])
    assert response == [*replies[0], *between, *replies[1]]
    assert [t for t, trains in zip(response, mask, strict=True) if trains] == replies[0] + replies[1]
    assert form.parse(replies[0]).calls == [Call("calculator", {"expression": f"{number}+1"})]
    with pytest.raises(UserError, match=r"the demonstration of a: a call in tool_calls needs"):
        demonstration(form, prompt, [{"role": "assistant", "tool_calls": [{"name": "calculator"}]}])
