"""The README is short, and the code, config and data that it shows are the project's own and work."""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml

from megatron_rl.config.load import build_config

REPOSITORY = Path(__file__).resolve().parents[2]
README = (REPOSITORY / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_it_is_short_and_begins_with_a_command():
    lines = README.splitlines()
    assert len(lines) <= 120
    assert next(number for number, line in enumerate(lines, 1) if line.startswith("    examples/")) <= 10


def test_its_loop_is_in_train_py():
    loop = [line.strip() for line in blocks("python")[0].splitlines()]
    rest = iter(line.strip() for line in (REPOSITORY / "megatron_rl/train.py").read_text().splitlines())
    missing = [line for line in loop if line not in rest]  # each is looked for behind the one before it
    assert len(loop) > 8 and not missing


def test_its_config_and_reward_work_together():
    config = build_config(yaml.safe_load(blocks("yaml")[0]))
    namespace: dict = {}
    exec(blocks("python")[1], namespace)
    reward = namespace[config.data.verifier.partition(":")[2]]
    row = json.loads(next(line for line in README.splitlines() if line.strip().startswith('{"prompt"')))
    assert {config.data.prompt_key, config.data.answer_key} == {*row}
    assert reward(f"17 + 25 is {row['answer']}.", row["answer"]) == {"correct": 1.0, "short": 1.0}
    assert reward("I do not know", row["answer"]) == {"correct": 0.0, "short": 0.0}
    assert {*reward("", row["answer"])} == {*config.data.rewards}
