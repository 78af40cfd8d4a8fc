"""Agents through the program: SFT on conversations, GRPO over two leaders, resumed; an agent of one's own; by hand."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import numpy as np
import openai
import pytest

from megatron_rl.data.trajectory import file_of, load_trajectories
from megatron_rl.metrics.logger import read_json_lines
from megatron_rl.report.page import write_report
from tests.program import Program, forked

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def config(tmp_path_factory, tiny_model) -> Path:
    folder = tmp_path_factory.mktemp("agents")
    tree = {
        "name": "grpo",
        "runs_dir": str(folder / "runs"),
        "steps": 2,
        "model": {"path": str(tiny_model("qwen3_moe", "--layers", "2", "--tokenizer", "calls", "--vocab", "64"))},
        "data": {"task": "sums", "options": {"calls": 0.9, "digits": 1, "terms": 2}},
        "batch": {"prompts_per_step": 4, "samples_per_prompt": 4, "tokens_per_micro_batch": 512},
        "optimizer": {"lr": 3e-3},
        "precision": {"train": "fp32", "rollout": "fp32"},
        "rollout": {"program": "agent", "max_new_tokens": 64, "context_length": 96, "record": True},
        "agent": {"tools": ["calculator"], "max_turns": 3},
        "eval": {"prompts": 6, "samples": 2},
        "checkpoint": {"every": 1},
    }
    tree["rollout"]["server"] = {"threads": 1, "max_total_tokens": 8192}
    path = folder / "config.yaml"
    path.write_text(json.dumps(tree))
    return path


@pytest.fixture(scope="module")
def warm(config) -> Path:
    """A model that has learned a little of the form of calls."""
    steps = ["--steps", "120", "--batch.prompts_per_step", "32", "--checkpoint.every", "0"]
    forked("sft", str(config), "--name", "sft", *steps)
    return config.parent / "runs" / "sft" / "hf"


@pytest.mark.timeout(900)
def test_two_leaders_train_on_conversations_and_resume(config, warm):
    arguments = ["train", str(config), "--model.path", str(warm)]
    for steps in (1, 2):
        forked(*arguments, "--steps", str(steps), ranks=2)
    run = config.parent / "runs" / "grpo"
    lines = {line["step"]: line for line in read_json_lines(run / "metrics.jsonl")}
    assert sorted(lines) == [0, 1, 2]
    for step in (1, 2):
        line = lines[step]
        endings = sum(line[f"agent/end_{end}"] for end in ("stop", "turns", "tokens", "time", "failure"))
        assert endings == pytest.approx(1.0) and line["agent/end_failure"] == 0
        assert 1 <= line["agent/turns"] <= 3 and 0 <= line["agent/malformed"] <= 1
        assert line["response/trained"] <= line["response/length"] and line["mismatch/kl"] < 1e-6
        assert {"reward/well_formed", "reward/correct"} <= set(line)
    assert {"eval/agent/turns", "eval/agent/calls", "eval/score", "eval/pass@2"} <= set(lines[2])
    found = [t for rank in range(2) for t in load_trajectories(file_of(run / "rollouts", 1, rank))]
    assert len(found) == 16 and any(len(t.turns) == 3 for t in found), "some conversation called the calculator"
    for t in found:
        mask = np.concatenate([np.full(turn.end - turn.start, turn.role == "assistant") for turn in t.turns])
        assert (t["loss_mask"] == mask).all()
    page = write_report(run).read_text()
    assert "Conversations" in page and '<li class="trains">' in page


def test_an_agent_of_ones_own(config, warm):
    agent = f"{REPOSITORY / 'examples' / 'calculator_agent.py'}:calculator_agent"
    forked(
        *("train", str(config), "--name", "own", "--model.path", str(warm), "--steps", "1", "--checkpoint.every", "0"),
        *("--rollout.program", "openai_agent", "--agent.function", agent),
    )
    run = config.parent / "runs" / "own"
    lines = {line["step"]: line for line in read_json_lines(run / "metrics.jsonl")}
    assert lines[1]["mismatch/kl"] < 1e-6 and lines[1]["agent/end_failure"] == 0
    found = load_trajectories(file_of(run / "rollouts", 0, 0))
    assert len(found) == 16 and all(t.part == 0 for t in found), "messages that extend a conversation reuse its tokens"


def test_serving_an_agent_by_hand(config, warm):
    arguments = ["serve-agent", str(config), "--name", "hand", "--model.path", str(warm)]
    log = config.parent / "hand.log"
    with Program(*arguments, log=log) as program:
        url, deadline = None, time.monotonic() + 240
        while url is None and time.monotonic() < deadline:
            assert program.poll() is None, log.read_text()
            url = re.search(r"base_url: (\S+).*\n", log.read_text() if log.exists() else "")
            time.sleep(0.02)
        with openai.OpenAI(base_url=url[1], api_key="none", timeout=100) as client:
            reply = client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "3+4="}])
        os.kill(program.pid, signal.SIGINT)
        status, output = program.wait(100), log.read_text()
    assert status == 0 and "1 sequences with 1 replies" in output
    [row] = [json.loads(line) for line in (config.parent / "runs" / "hand" / "agent.jsonl").read_text().splitlines()]
    assert [turn["trains"] for turn in row["turns"]] == [True] and "3+4=" in row["prompt"]
    assert (reply.choices[0].message.content or "") in row["turns"][0]["text"] or reply.choices[0].message.tool_calls
