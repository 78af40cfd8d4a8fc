"""Texts that are learned whole: their rows, their tokens and bytes, and the pieces in which the stream gives them."""

from __future__ import annotations

import json
import logging
import random
import sys
import unicodedata
from pathlib import Path

import datasets
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.config import Config, DataConfig
from megatron_rl.errors import UserError
from megatron_rl.rollout.program import SingleTurn
from megatron_rl.tasks import Prompt, PromptStream, Task, build_task
from megatron_rl.tasks.chat import NO_TEXT, bytes_of, encode_text
from megatron_rl.tasks.stream import held_out_demonstrations

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
from make_tiny_model import numbers_tokenizer, text_tokenizer

BYTES = text_tokenizer(300)
"""Byte-level, mostly a token a byte; no beginning-of-sequence token."""
WITH_START = text_tokenizer(300)
WITH_START.add_special_tokens({"bos_token": "<|im_start|>"})
TEXTS = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from("e é€😀\n"), min_size=1).map(
    lambda text: unicodedata.normalize("NFC", text)
)


class Texts(Task):
    name = "texts"

    def __init__(self, texts):
        super().__init__(DataConfig(), demonstrations=True)
        self._prompts = [Prompt(str(i), text, document=True) for i, text in enumerate(texts)]

    def prompts(self, split):
        return self._prompts


def form(tokenizer):
    return SingleTurn(Config(), tokenizer, Texts([]), None)


def write(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


@given(TEXTS)
def test_bytes_are_those_of_the_tokens_but_that_a_character_counts_whole_at_its_last(text):
    tokens, sizes = encode_text(BYTES, text)
    assert tokens[-1] == BYTES.eos_token_id and sizes[-1] == NO_TEXT and len(tokens) == len(sizes)
    letters = BYTES.convert_ids_to_tokens(tokens[:-1])  # a letter of a byte-level token is a byte
    ends_of_characters = {len(text[:i].encode()) for i in range(len(text) + 1)}
    ends, whole = np.cumsum([len(token) for token in letters]), [0]
    for end in ends:
        whole.append(end if end in ends_of_characters else max(e for e in ends_of_characters if e < end))
    assert sizes[:-1] == np.diff(whole).tolist() and sum(sizes[:-1]) == len(text.encode())


def test_what_a_tokenizer_drops_or_composes_counts_too():
    assert encode_text(numbers_tokenizer(64), " 1  2+ ")[1] == [2, 3, 2, NO_TEXT]
    composed = "e\N{COMBINING ACUTE ACCENT}"  # which NFC makes one character of two bytes of three
    assert sum(encode_text(BYTES, composed)[1][:-1]) == len(composed.encode()) == 3
    assert bytes_of("", []) == []


@given(TEXTS, st.integers(2, 20), st.booleans())
def test_every_token_after_the_first_is_the_label_of_one_piece(text, longest, with_start):
    tokenizer = WITH_START if with_start else BYTES
    start = [tokenizer.bos_token_id] if with_start else []
    tokens = [*start, *tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
    pieces = form(tokenizer).document(text).cut(longest)
    assert [int(t) for piece in pieces for t in piece.tokens[piece.prompt_length :]] == tokens[1:]
    assert all(piece.prompt_length == 1 and piece["loss_mask"].all() for piece in pieces)
    assert [int(piece.tokens[0]) for piece in pieces] == tokens[: -1 : longest - 1]
    assert all(len(piece.tokens) == longest for piece in pieces[:-1]) and 2 <= len(pieces[-1].tokens) <= longest
    sizes = [int(size) for piece in pieces for size in piece["text_bytes"]]
    assert sizes == encode_text(tokenizer, text)[1][0 if with_start else 1 :]


def drawn(stream, count):
    return [one.tokens.tolist() for one in stream.next_demonstrations(count, random.Random(0))]


@given(st.lists(TEXTS, min_size=1, max_size=5), st.integers(2, 9), st.lists(st.integers(0, 7), max_size=8), st.data())
def test_the_stream_gives_all_pieces_in_any_steps_and_resumes_inside_a_text(texts, longest, steps, data):
    def stream():
        return PromptStream(Texts(texts), form(BYTES), longest, 8, seed=3)

    whole = stream()
    pieces = {
        p.prompt_id: [one.tokens.tolist() for one in form(BYTES).document(p.text).cut(longest)] for p in whole.prompts
    }
    expected = drawn(stream(), sum(steps))
    found, stepwise = [], stream()
    for count in steps:
        if data.draw(st.booleans()):
            state = json.loads(json.dumps(stepwise.state_dict()))
            stepwise = stream()
            stepwise.load_state_dict(state)
        found += drawn(stepwise, count)
    assert found == expected
    epoch = drawn(whole, sum(map(len, pieces.values())))
    order = [whole.prompts[i].prompt_id for i in whole._order]
    assert whole.epoch == 0 and epoch == [piece for name in order for piece in pieces[name]]


def test_texts_without_a_label_are_skipped_and_others_are_held_out_in_pieces(caplog):
    silent = numbers_tokenizer(64)
    silent.bos_token = silent.eos_token = None
    with caplog.at_level(logging.WARNING):
        stream = PromptStream(Texts(["1", "1 2 3"]), form(silent), 8, 8, seed=0)
        assert len(drawn(stream, 3)) == 3 and stream.skipped == {"0"}
    assert any("text 0 skipped: it needs at least two tokens" in message for message in caplog.messages)
    found = held_out_demonstrations(Texts(["1 2 3 4 5", "7"]).prompts("eval"), form(numbers_tokenizer(64)), 4)
    assert [len(one.tokens) for one in found] == [4, 4, 3] and not caplog.messages[1:]


def test_a_tokenizer_that_tells_no_spans_leaves_bytes_unknown(monkeypatch):
    tokens, _ = encode_text(BYTES, "a b")
    monkeypatch.setattr(type(BYTES), "is_fast", False)
    assert encode_text(BYTES, "a b") == (tokens, [NO_TEXT] * len(tokens))


# -- rows ------------------------------------------------------------------------------------------------------------


def build(tmp_path, lines, **data):
    return build_task(DataConfig(path=write(tmp_path / "a.jsonl", lines), **data), demonstrations=True)


def test_rows_with_a_text_alone_are_learned_whole(tmp_path, caplog):
    texts = [f"{'text ' * i}{i}" for i in range(200)]
    task = build(tmp_path, [{"content": text, "prompt": "of its own"} for text in texts], text_key="content")
    train, held_out = task.prompts("train"), task.prompts("eval")
    assert all(p.document and p.messages is None for p in [*train, *held_out]) and not caplog.messages
    assert {p.text for p in train} | {p.text for p in held_out} == set(texts) and 5 <= len(held_out) <= 40
    with pytest.raises(UserError, match=r"no column 'prompt' \(data.prompt_key\)"):
        build_task(DataConfig(path=write(tmp_path / "b.jsonl", [{"text": "for SFT alone"}])))


def test_rows_with_a_response_stay_demonstrations(tmp_path):
    mixed = [{"text": "t", "prompt": None, "response": None}, {"text": None, "prompt": "p", "response": "r"}]
    datasets.Dataset.from_list(mixed).save_to_disk(str(tmp_path / "saved"))
    data = DataConfig(task="hub", path=str(tmp_path / "saved"), template="Q: {prompt}")
    task = build_task(data, demonstrations=True)
    found = {p.text: p.document for part in ("train", "eval") for p in task.prompts(part)}
    assert found == {"t": True, "Q: p": False}
    of_prompts = [{"text": f"{i}", "response": "r"} for i in range(20)]
    assert not any(p.document for p in build(tmp_path, of_prompts, prompt_key="text").prompts("train"))


def test_bad_texts_are_skipped_and_named(tmp_path, caplog):
    bad = {"'text' is empty": ["", " \n", None], "'text' is not text": [3, ["a"]], "surrogates not allowed": ["\ud800"]}
    lines = [{"text": value} for values in bad.values() for value in values]
    with caplog.at_level(logging.WARNING):
        task = build(tmp_path, [*lines[:4], *({"text": f"good {i}"} for i in range(9))])
    assert task.skipped == 4
    for problem, values in bad.items():
        for value in values:
            with pytest.raises(UserError, match=f"no usable line .1 skipped; the first: .*{problem}"):
                build(tmp_path, [{"text": value}])


@pytest.mark.parametrize(
    ("row", "data", "message"),
    [
        ({"txt": "a"}, {}, r"no column 'text' \(data.text_key\); did you mean 'txt'"),
        ({"text": "a"}, {"text_key": "texts"}, r"no column 'texts' \(data.text_key\); did you mean 'text'"),
        ({"promt": "a", "response": "b"}, {}, r"no column 'prompt' \(data.prompt_key\); did you mean 'promt'"),
        ({"body": "a"}, {}, "neither 'prompt' and 'response' nor 'text': set data.prompt_key"),
        ({"text": "a"}, {"chat": True}, r"data.chat does nothing with texts \('text'\).*set it to false"),
        ({"text": "a"}, {"template": "Q: {prompt}"}, "data.template does nothing with texts"),
    ],
)
def test_what_does_not_fit_texts_is_named(tmp_path, row, data, message):
    with pytest.raises(UserError, match=message):
        build(tmp_path, [row | {"number": i} for i in range(30)], **data)
