"""Reward models that the trainer's processes score by: the same rewards on every parallel layout, and transformers'."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from covering import parallel_of
from ranks import fresh_seed, run_ranks, without_ties
from scorer_ranks import make_texts, make_trajectories
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from weights import classifier

from tests.judge_server import Scripted, fenced, nonce_of

LAYOUTS = {name: {"parallel": parallel_of(name)} for name in ("tp2_sp", "pp2", "cp2", "ep2")}


@pytest.fixture(scope="module")
def found(tiny_model, tmp_path_factory):
    """(expected, layout -> rewards by ids of trajectories, and of texts in steps)."""
    head = fresh_seed()
    model = str(tiny_model("qwen3_moe", "--layers", "2"))
    folder = str(classifier(Path(model), tmp_path_factory.mktemp("models") / "classifier", head))
    judge = Scripted(lambda text: "Hm." if unjudged(fenced(text)) else f"VERDICT {nonce_of(text)}: {len(fenced(text))}")
    try:
        arguments = (model, folder, judge.url)
        seed, [alone] = without_ties(
            lambda seed: (seed, run_ranks(1, "scorer_ranks:score", (*arguments, seed, [{}]), refuse_ties=True))
        )
        split = run_ranks(2, "scorer_ranks:score", (*arguments, seed, list(LAYOUTS.values())))
    finally:
        judge.die()
    assert split[0] == split[1]
    return (expected(folder, seed), expected_steps(folder, seed)), {"alone": alone[0]} | dict(
        zip(LAYOUTS, split[0], strict=True)
    )


def expected(folder: str, seed: int) -> dict[str, float]:
    """Twice what transformers' classifier says behind the last token of its own, normalized; 0 of what is not judged."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    model.config.pad_token_id = 63_000  # nothing is padding
    scores = {}
    for t in make_trajectories(seed):
        if not t.masked and not t.truncated:
            end = t.prompt_length + int(np.flatnonzero(t["loss_mask"])[-1]) + 1
            with torch.no_grad():
                scores[t.prompt_id] = model(torch.tensor([t.tokens[:end].tolist()])).logits.item()
    values = np.array(list(scores.values()))
    normalized = {number: 2 * (score - values.mean()) / values.std() for number, score in scores.items()}
    return {t.prompt_id: normalized.get(t.prompt_id, 0.0) for t in make_trajectories(seed)}


@pytest.mark.parametrize("layout", ["alone", *LAYOUTS])
def test_rewards_are_those_of_transformers(found, layout):
    wanted, rewards = found[0][0], found[1][layout][0]
    assert rewards.keys() == wanted.keys() and sum(map(bool, wanted.values())) == len(wanted) - 2
    assert rewards == pytest.approx(wanted, abs=1e-4)


def unjudged(text: str) -> bool:
    return len(text) % 5 == 1


@torch.no_grad()
def expected_steps(folder: str, seed: int) -> dict[str, tuple[float, list[float]]]:
    """(twice the mean of its steps' probabilities + the judge's mark, the probability where each step ends) of each text."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    model.config.pad_token_id = 63_000  # nothing is padding
    tokenizer, found = AutoTokenizer.from_pretrained(folder), {}
    for t in make_texts(seed, tokenizer):
        text, labels = t.text, t.tokens[t.prompt_length :].tolist()
        whole, line_break, rest = text.rpartition("\n")
        text = f"{text}\n" if not t.truncated and (rest.strip() or not line_break) else whole + line_break
        steps = re.findall(r"(?:[^\S\n]*\n)*?[^\n]*\S[^\n]*\n(?:[^\S\n]*\n)*", text) or ([] if t.truncated else [text])
        scores, at, seen, length = [], [-1.0] * len(labels), t.tokens[: t.prompt_length].tolist(), 0
        masked = t.masked or unjudged(t.text.strip())
        for step in () if masked else steps:
            seen += tokenizer.encode(step, add_special_tokens=False)
            length += len(step)
            scores.append(model(torch.tensor([seen])).logits.sigmoid().item())
            place = len(labels) - 1
            if len(scores) < len(steps) or t.truncated:
                place = next(i for i in range(len(labels)) if len(tokenizer.decode(labels[: i + 1])) >= length)
            at[place] = scores[-1]
        mark = 0.0 if masked else len(t.text.strip()) / 100
        found[t.prompt_id] = ((2 * float(np.mean(scores)) if scores else 0.0) + mark, at)
    return found


@pytest.mark.parametrize("layout", ["alone", *LAYOUTS])
def test_steps_are_scored_where_they_end(found, layout):
    """transformers scores each after those before it; a token of the text's own ends where its line break does."""
    wanted, steps = found[0][1], found[1][layout][1]
    assert steps.keys() == wanted.keys() and any(reward > 0 for reward, _ in wanted.values())
    for number, (reward, scores) in wanted.items():
        assert steps[number][0] == pytest.approx(reward, abs=1e-4), number
        assert steps[number][1] == pytest.approx(scores, abs=1e-4), number
