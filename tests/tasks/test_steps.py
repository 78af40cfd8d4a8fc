"""Steps of responses: where a text is parted, and the tokens with which its parts end."""

from __future__ import annotations

import numpy as np
import pytest
from transformers import AutoTokenizer

from megatron_rl.tasks.preferences import encode_steps, last_tokens, steps_of

SEPARATORS = ("\n", "\n\n", " ки", "<step>", ".")


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    return AutoTokenizer.from_pretrained(tiny_model("qwen3_moe"))


def text_of(rng: np.random.Generator, separator: str, pieces: int) -> str:
    """Words between separators, some of which follow each other, begin the text, or have blanks around them."""
    words = ["so", "x = 3", "né", "数", "🙂", "12", "", " ", "a b"]
    return separator.join("".join(rng.choice(words, int(rng.integers(0, 3)))) for _ in range(pieces))


@pytest.mark.parametrize("separator", SEPARATORS)
def test_a_response_is_parted_as_it_was_learned_from(separator, rng):
    """Steps that are joined, as rows of data are, are found again: each with all blanks behind it up to the next."""
    for _ in range(50):
        steps = [f"step {rng.integers(99)}{separator}" for _ in range(rng.integers(1, 6))]
        assert steps_of("".join(steps), separator) == steps == steps_of("".join(steps), separator, ended=False)
        # What the policy ends itself needs no last separator; what was cut off there is no step.
        assert steps_of("".join(steps).removesuffix(separator), separator) == steps
        assert steps_of("".join(steps).removesuffix(separator), separator, ended=False) == steps[:-1]
        assert steps_of(separator * 2 + "".join(steps), separator)[0] == separator * 2 + steps[0]


def test_blank_parts_belong_to_the_step_before_them():
    assert steps_of("a\n\n \nb\n\n", "\n") == ["a\n\n \n", "b\n\n"]
    assert steps_of("a\n  ", "\n") == ["a\n"] == steps_of("a\n  ", "\n", ended=False)
    assert steps_of("", "\n") == ["\n"] and steps_of(" \n", "\n") == [" \n"]  # it has ended: that is its one step
    assert steps_of("", "\n", ended=False) == steps_of("half", "\n", ended=False) == []
    assert steps_of("a\n\nb\nc", "\n\n") == ["a\n\n", "b\nc\n\n"]


@pytest.mark.parametrize("separator", SEPARATORS)
@pytest.mark.parametrize("canonical", [True, False])
def test_a_step_ends_with_the_token_that_completes_it(separator, canonical, tokenizer, rng):
    """An oracle decodes every beginning; not canonical: tokens as a policy may sample them, other than encoding has."""
    for _ in range(20):
        text = text_of(rng, separator, int(rng.integers(1, 7)))
        tokens = tokenizer.encode(text, add_special_tokens=False)
        if not canonical:  # of single bytes here and there
            tokens = [
                one
                for token in tokens
                for one in (
                    tokenizer.convert_tokens_to_ids(list(tokenizer.convert_ids_to_tokens(token)))
                    if rng.random() < 0.5
                    else [token]
                )
            ]
        assert tokenizer.decode(tokens) == text
        for ended in (True, False):
            steps = steps_of(text, separator, ended=ended)
            given = [*tokens, tokenizer.eos_token_id] if ended else tokens
            found = last_tokens(tokenizer, given, steps, ended=ended) if given else []
            lengths = np.cumsum([len(step) for step in steps])
            wanted = [
                next(i for i in range(len(tokens)) if len(tokenizer.decode(tokens[: i + 1])) >= end)
                for end in (lengths[:-1] if ended else lengths)
            ]
            assert found == [*wanted, len(given) - 1][: len(steps)]


def test_each_step_is_encoded_by_itself(tokenizer, rng):
    steps = steps_of(text_of(rng, "\n", 5), "\n")
    tokens, ends = encode_steps(tokenizer, steps)
    for step, start, end in zip(steps, [-1, *ends], ends, strict=False):
        assert tokens[start + 1 : end + 1] == tokenizer.encode(step, add_special_tokens=False)
    assert ends[-1] == len(tokens) - 1
