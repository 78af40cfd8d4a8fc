"""Pairs from scored responses: the better one is chosen, equal ones make none, and no more than are asked for."""

from __future__ import annotations

import json
import random
from itertools import combinations

import pytest

from tools.make_preferences import main


def rows(rng: random.Random, prompts: int) -> list[dict]:
    found = []
    for number in range(prompts):
        for _ in range(rng.randint(1, 8)):
            score = rng.choice([0.0, 0.5, 1.0])
            text = f"answer {rng.randrange(6)}, {score}"
            found.append(
                {"prompt_id": f"p{number}", "prompt": f"question {number}", "response": text, "reward/correct": score}
            )
    rng.shuffle(found)
    return found


def test_prompts_are_what_was_asked_without_the_chat_template(tmp_path):
    asked = [{"role": "user", "content": "2 + 2 ="}]
    one = {"prompt_id": "p", "prompt": "<|user|>2 + 2 =<|assistant|>", "asked": asked}
    scored = [one | {"response": text, "reward": reward} for text, reward in (("4", 1), ("5", 0))]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in scored))
    assert main([str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl")]) == 0
    assert json.loads((tmp_path / "out.jsonl").read_text())["prompt"] == asked


@pytest.mark.parametrize("most", [1, 3, 100])
def test_pairs(most, tmp_path, capsys):
    rng = random.Random()
    responses = rows(rng, 16)  # a prompt has nothing but equal scores with a chance of 0.19: all have with one of 2e-12
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in responses))
    arguments = [
        str(tmp_path / "in.jsonl"),
        str(tmp_path / "out.jsonl"),
        "--by",
        "reward/correct",
        "--pairs",
        str(most),
    ]
    assert main(arguments) == 0
    pairs = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    score = {(row["prompt"], row["response"]): row["reward/correct"] for row in responses}
    for pair in pairs:
        better, worse = (score[pair["prompt"], pair[side]] for side in ("chosen", "rejected"))
        assert better - worse == pair["gap"] > 0
    assert len({(p["prompt"], p["chosen"], p["rejected"]) for p in pairs}) == len(pairs)
    for prompt in {row["prompt"] for row in responses}:
        texts = {text for asked, text in score if asked == prompt}
        possible = sum(score[prompt, a] != score[prompt, b] for a, b in combinations(texts, 2))
        assert sum(pair["prompt"] == prompt for pair in pairs) == min(possible, most)
    main(arguments)
    assert [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()] == pairs
    capsys.readouterr()


def test_errors(tmp_path, capsys):
    file, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    row = {"prompt_id": "p", "prompt": "q", "response": "a", "reward": 1.0}
    file.write_text(json.dumps(row) + "\n" + json.dumps(row | {"response": "b"}) + "\n")
    assert (
        main([str(file), str(out)]) == 2 and "no prompt has responses with different reward" in capsys.readouterr().err
    )
    assert (
        main([str(file), str(out), "--by", "reward/x"]) == 2
        and "a response has no 'reward/x'" in capsys.readouterr().err
    )
    assert main([str(tmp_path / "none"), str(out)]) == 2 and "No such file" in capsys.readouterr().err
    assert not out.exists()
