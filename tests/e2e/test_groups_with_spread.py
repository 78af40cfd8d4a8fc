"""Runs that learn from groups with spread alone: the prompts of every step, ahead of the trainer and across an end too."""

from __future__ import annotations

import json
import os
import random
import signal
from collections import deque
from collections.abc import Iterator
from itertools import islice
from math import ceil
from pathlib import Path

import numpy as np
import pytest

from megatron_rl.config import DataConfig
from megatron_rl.data.trajectory import file_of, load_trajectories
from megatron_rl.metrics.logger import METRICS_FILE, read_json_lines
from megatron_rl.rollout.sample_journal import _records
from megatron_rl.tasks import build_task
from tests.program import Program

STEPS, WANTED, SAMPLES, PROMPTS = 3, 5, 3, 400
TIMEOUT_S = 500
# Long random responses, and 2^32 rewards: they differ but where responses are the same.
REWARD = """
import zlib

def spread(response, answer):
    return zlib.crc32(response.encode()) / 2**32 if answer == "spread" else 0.5
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory, tiny_model) -> Path:
    folder = tmp_path_factory.mktemp("spread")
    (folder / "reward.py").write_text(REWARD)
    tree = {
        "steps": STEPS,
        "runs_dir": str(folder / "runs"),
        "model": {"path": str(tiny_model("qwen3_moe", "--layers", "2", "--tokenizer", "numbers"))},
        "data": {"path": str(folder / "prompts.jsonl"), "verifier": f"{folder / 'reward.py'}:spread"},
        "batch": {"prompts_per_step": WANTED, "samples_per_prompt": SAMPLES, "tokens_per_micro_batch": 2000},
        "algorithm": {"entropy_coefficient": 0.01},
        "precision": {"train": "fp32", "rollout": "fp32"},
        "rollout": {
            "max_new_tokens": 40,
            "context_length": 80,
            "concurrency": 4,
            "record": True,
            "dynamic_sampling": {"max_rounds": 100},
            "server": {"threads": 1, "max_total_tokens": 8192},
        },
        "checkpoint": {"every": 0, "keep": 9},
        "eval": {"prompts": 0},
        "logging": {"trackers": []},
    }
    path = folder / "config.yaml"
    path.write_text(json.dumps(tree))
    while True:
        answers = [random.choices(["spread", "none"], [3, 7])[0] for _ in range(PROMPTS)]
        rows = [{"prompt": f"<{i:03d}:", "answer": answer} for i, answer in enumerate(answers)]
        (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        drawn = [expected_steps(path, 0, 1.0), expected_steps(path, 1, 1.4)]
        if all(any(rounds > 1 for _, rounds in steps) for steps in drawn):  # one draw in 40,000 has no second round
            return path


def in_order(config: Path) -> Iterator[tuple[str, bool]]:
    """Prompts (their ids) and whether they have spread, as the run asks for them: the first epoch is shuffled by its seed."""
    tree = json.loads(config.read_text())["data"]
    prompts = list(build_task(DataConfig(**tree)).prompts("train"))
    random.Random("0/0").shuffle(prompts)
    return ((prompt.prompt_id, prompt.answer == "spread") for prompt in prompts)


def expected_steps(config: Path, ahead: int, over_sampling: float) -> list[tuple[list[str], int]]:
    """Prompts that each step learns from, and its rounds, where servers are so many steps ahead."""
    stream, batches, found = in_order(config), deque(), []
    for step in range(STEPS):
        while len(batches) < min(ahead, STEPS - 1 - step) + 1:
            batches.append([*islice(stream, ceil(WANTED * over_sampling))])
        asked, rounds = batches.popleft(), 1
        while (have := sum(spread for _, spread in asked)) < WANTED:
            asked += islice(stream, ceil((WANTED - have) * over_sampling))
            rounds += 1
        found.append(([name for name, spread in asked if spread][:WANTED], rounds))
    return found


def samples_on_disk(folder: Path, step: int) -> dict[str, dict[int, bytes]]:
    """By what was asked for: the tokens of each request that has been answered."""
    found: dict[str, dict[int, bytes]] = {}
    for file in (folder / "pending").glob(f"step_{step:06d}.*"):
        of_key = found.setdefault(file.name.split(".")[1], {})
        for samples, _ in _records(file):
            of_key |= {request: trajectory.tokens.tobytes() for request, [trajectory] in samples.items()}
    return found


def check(config: Path, folder: Path, leaders: int, expected: list[tuple[list[str], int]]) -> None:
    for step, (prompts, rounds) in enumerate(expected):
        parts = [load_trajectories(file_of(folder / "rollouts", step, leader)) for leader in range(leaders)]
        groups: dict[int, list] = {}
        for trajectory in (t for part in parts for t in part):
            groups.setdefault(trajectory.group_id, []).append(trajectory)
        assert sorted(groups) == list(range(WANTED))
        for group, name in enumerate(prompts):
            assert len(groups[group]) == SAMPLES and len({t.reward for t in groups[group]}) > 1
            assert {t.prompt_id for t in groups[group]} == {name}
        row = [row for row in read_json_lines(folder / METRICS_FILE) if row["step"] == step + 1][-1]
        assert row["rollout/rounds"] == rounds and row["rollout/missing"] == 0 and row["reward/zero_std"] == 0
        lengths = [t.response_length for part in parts for t in part]
        assert row["response/length"] == pytest.approx(np.mean(lengths))
        assert row["response/length_quantile/max"] == max(lengths) <= row["generated/length_quantile/max"]
        assert row["response/length_quantile/p50"] == np.quantile(lengths, 0.5, method="inverted_cdf")


@pytest.mark.timeout(1200)
def test_groups_that_lie_on_two_leaders(config):
    with Program("train", str(config), "--name", "two", log=config.parent / "two.log", ranks=2) as program:
        program.finish(TIMEOUT_S)
    expected = expected_steps(config, 0, 1.0)
    assert max(rounds for _, rounds in expected) > 1
    check(config, config.parent / "runs" / "two", 2, expected)


@pytest.mark.timeout(1800)
def test_ahead_of_the_trainer_and_ended_in_a_later_round(config):
    """No prompt is left out or asked twice, and samples of the round that was broken off are there."""
    folder, log = config.parent / "runs" / "ahead", config.parent / "ahead.log"
    options = ["--rollout.max_staleness", "1", "--rollout.dynamic_sampling.over_sampling", "1.4"]
    options += ["--correction.mode", "truncate", "--correction.high", "2.0"]
    expected = expected_steps(config, 1, 1.4)
    broken = next(step for step, (_, rounds) in enumerate(expected) if rounds > 1)
    had: dict[str, dict[int, bytes]] = {}

    def in_its_second_round() -> bool:
        had.update(samples_on_disk(folder, broken))
        return len(had) > 1

    with Program("train", str(config), "--name", "ahead", *options, log=log) as program:
        program.until(in_its_second_round, TIMEOUT_S, "its second round")
        os.kill(program.pid, signal.SIGTERM)
        program.finish(TIMEOUT_S)
    metrics = folder / METRICS_FILE
    # It may have been done with the step before it heard of its end.
    ended = not metrics.exists() or len(read_json_lines(metrics)) <= broken
    if ended:
        kept = samples_on_disk(folder, broken)
        assert all(kept[key].items() >= samples.items() for key, samples in had.items())
    with Program("train", str(config), "--name", "ahead", *options, log=log) as program:
        program.finish(TIMEOUT_S)
    check(config, folder, 1, expected)
    if not ended:
        return
    reused = max(row["rollout/reused"] for row in read_json_lines(folder / METRICS_FILE) if row["step"] > broken)
    assert reused >= sum(map(len, had.values()))
