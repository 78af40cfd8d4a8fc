"""A run whose server shares the trainer's device, on the real stack: the order of their turns, and a death in between."""

from __future__ import annotations

import re
import time
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
import yaml

from megatron_rl.metrics.logger import read_json_lines
from tests.program import Program

TIMEOUT = 540
RELEASE, RESUME = "/release_memory_occupation", "/resume_memory_occupation"


def start(config: Path) -> Program:
    return Program("train", str(config), log=config.with_suffix(".log"))


def requests(run: Path) -> list[str]:
    """What the server was asked, in order, by its own log; of several equal ones in a row the first."""
    log = run / "sglang.log"
    found = re.findall(r'"POST (/\S+) HTTP/1.1" 200', log.read_text()) if log.exists() else []
    return [path for before, path in pairwise(["", *found]) if path != before]


def steps(run: Path) -> list[int]:
    return [record["step"] for record in read_json_lines(run / "metrics.jsonl") if record["step"]]


def processes_of(run: Path) -> list[str]:
    """Command lines that name the run: SGLang's own processes have names of their own, but end with these."""
    lines = (" ".join(p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"]))
    return [line for line in lines if str(run) in line]


@pytest.fixture(scope="module")
def killed(tmp_path_factory, tiny_model) -> tuple[Path, list[str]]:
    """A run of two steps that was killed in its second one, while the server slept, and what its server was asked."""
    folder = tmp_path_factory.mktemp("colocate")
    model = tiny_model("qwen3_moe", "--layers", "2", "--tokenizer", "numbers")
    server = {
        "threads": 1,
        "max_total_tokens": 4096,
        "start_timeout_s": 500,
        "extra_args": ["--log-level-http", "info"],
    }
    config = {
        "name": "run",
        "steps": 2,
        "runs_dir": str(folder),
        "model": {"path": str(model)},
        "data": {"task": "number_sorting"},
        "batch": {"prompts_per_step": 4, "samples_per_prompt": 4, "updates_per_step": 2, "tokens_per_micro_batch": 256},
        "algorithm": {"entropy_coefficient": 0.01},  # a random model earns nothing: its weights move by this alone
        "optimizer": {"lr": 1e-3},
        "precision": {"train": "fp32", "rollout": "fp32"},
        "rollout": {"colocate": True, "max_new_tokens": 16, "context_length": 64, "record": True, "server": server},
        "sync": {"transport": "tensor"},
        "eval": {"prompts": 0},
        "checkpoint": {"every": 1},
        "logging": {"trackers": []},
    }
    path, run = folder / "config.yaml", folder / "run"
    path.write_text(yaml.safe_dump(config))
    sampled = run / "rollouts" / "step_000001.rank0.npz"
    with start(path) as program:
        asleep = lambda: steps(run) and requests(run)[-1] == RELEASE and sampled.exists()  # noqa: E731
        program.until(asleep, TIMEOUT, "the second step's samples, with the server asleep")
    return path, requests(run)


ASLEEP = ["/pause_generation", RELEASE]
PUSH = [RESUME, "/pause_generation", "/begin_weight_update", "/update_weights_from_tensor", "/end_weight_update"]
AWAKE = [RESUME, "/continue_generation"]


def test_the_order_of_the_turns(killed):
    """The server sleeps before the trainer is built, and whenever it scores, updates or saves."""
    _, asked = killed
    steps = {
        "before the trainer is built": ASLEEP,
        "first weights, rollout, update": [*PUSH, *AWAKE, "/generate", *ASLEEP],
        "new weights, then the checkpoint": [*PUSH, *AWAKE, *ASLEEP],
        "they were lost again; rollout, update": [*PUSH, *AWAKE, "/generate", *ASLEEP],
    }
    assert [path for path in asked if path not in ("/weights_checker", "/freeze_gc")] == [
        path for step in steps.values() for path in step
    ]
    checked = [index for index, path in enumerate(asked) if path == "/weights_checker"]
    assert sum(asked[index - 1] == "/end_weight_update" for index in checked) == 3, "checksums after every push"


def test_killed_while_the_server_sleeps_then_resumed(killed):
    path, _ = killed
    run = path.parent / "run"
    deadline = time.monotonic() + 60
    while processes_of(run) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not processes_of(run), "no process outlives the trainer"
    assert steps(run) == [1]
    with start(path) as program:
        program.finish(TIMEOUT)
    assert "resumed at step 1" in path.with_suffix(".log").read_text()
    assert steps(run) == [1, 2]
    record = read_json_lines(run / "metrics.jsonl")[-1]
    assert record["rollout/restarts"] == 0 and record["update/skipped"] == 0
    assert record["time/sleep_s"] > 0 and record["time/wake_s"] > 0
    assert record["mismatch/kl"] < 1e-6, "the engine woke with the trainer's weights"
