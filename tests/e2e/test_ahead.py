"""Runs that are ended in a step lose none of its samples; servers that sample ahead of the trainer."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_rl.data.trajectory import Trajectory, file_of, load_trajectories
from megatron_rl.metrics.logger import METRICS_FILE, read_json_lines
from megatron_rl.rollout.sample_journal import _records
from tests.e2e.test_recovery import final_tensors
from tests.e2e.test_train import scheduler_of
from tests.program import Program

STEPS, RESPONSES = 4, 16
TIMEOUT_S = 240


def write_config(folder: Path, model: Path) -> Path:
    config = {
        "steps": STEPS,
        "runs_dir": str(folder / "runs"),
        "model": {"path": str(model)},
        "data": {"task": "number_sorting"},
        # Many micro-batches, and calls of a few long responses, two at a time: a step has a middle.
        "batch": {"prompts_per_step": 4, "samples_per_prompt": 4, "updates_per_step": 1, "tokens_per_micro_batch": 350},
        # A random model earns nothing: without the entropy its weights would not move.
        "algorithm": {"entropy_coefficient": 0.01},
        "optimizer": {"lr": 1e-3},
        "precision": {"train": "fp32", "rollout": "fp32"},
        "rollout": {"max_new_tokens": 300, "context_length": 340, "concurrency": 4, "record": True},
        "checkpoint": {"every": 0, "keep": 9},
        "eval": {"prompts": 0},
        "logging": {"trackers": []},
    }
    path = folder / "config.yaml"
    path.write_text(json.dumps(config))
    return path


class Run:
    def __init__(self, config: Path, name: str) -> None:
        self.config, self.name = config, name
        self.folder = config.parent / "runs" / name
        self.log = config.parent / f"{name}.log"

    def start(self, *overrides: str) -> Program:
        return Program("train", str(self.config), "--name", self.name, *overrides, log=self.log)

    def finish(self, *overrides: str) -> None:
        with self.start(*overrides) as program:
            program.finish(TIMEOUT_S)

    def end_when(self, true: Callable[[], bool], number: signal.Signals, *overrides: str) -> None:
        """Send a signal once something is true, and wait for the end."""
        with self.start(*overrides) as program:
            program.until(true, TIMEOUT_S, "the point at which it is ended")
            os.kill(program.pid, number)
            status = program.wait(TIMEOUT_S)
            assert status == (0 if number == signal.SIGTERM else -number), self.log.read_text()[-4000:]

    def rows(self) -> list[dict]:
        return [row for row in read_json_lines(self.folder / METRICS_FILE) if row["step"] > 0]

    def pending(self, step: int) -> dict[int, list[Trajectory]]:
        files = (self.folder / "pending").glob(f"step_{step:06d}.*")
        return {request: one for file in files for samples, _ in _records(file) for request, one in samples.items()}

    def trained(self, step: int) -> list[Trajectory]:
        return load_trajectories(file_of(self.folder / "rollouts", step, 0))

    def in_rollout(self, step: int) -> bool:
        return 0 < len(self.pending(step)) < RESPONSES

    def in_training(self, step: int) -> bool:
        return file_of(self.folder / "rollouts", step, 0).exists() and len(self.rows()) == step


@pytest.fixture(scope="module")
def config(tmp_path_factory, tiny_model) -> Path:
    model = tiny_model("qwen3_moe", "--layers", "2", "--tokenizer", "numbers")
    return write_config(tmp_path_factory.mktemp("ahead"), model)


@pytest.fixture(scope="module")
def broken(config) -> tuple[Run, list[dict[int, list[Trajectory]]]]:
    """A run that is ended in a rollout and in an update, and killed in a rollout; samples that it had at each."""
    run, had = Run(config, "broken"), []

    def keep(step: int) -> None:
        had.append(run.pending(step))

    run.end_when(lambda: run.in_rollout(1), signal.SIGTERM)
    keep(1)
    assert [p.name for p in (run.folder / "checkpoints").iterdir()] == ["step_000001"]
    run.end_when(lambda: run.in_training(2), signal.SIGTERM)
    keep(2)
    assert sorted(p.name for p in (run.folder / "checkpoints").iterdir()) == ["step_000001", "step_000002"]
    assert len(run.rows()) == 2, "the step was not done to its end"
    run.end_when(lambda: run.in_rollout(3), signal.SIGKILL)
    keep(2)
    keep(3)
    run.finish()
    return run, had


@pytest.mark.timeout(900)  # its fixture starts four servers
def test_no_sample_is_asked_for_again(broken):
    """In the rollout's middle, in the update's, and two steps behind the last checkpoint."""
    run, (in_rollout, in_update, lost, killed) = broken
    assert len(in_update) == len(lost) == RESPONSES
    assert 0 < len(in_rollout) < RESPONSES and 0 < len(killed) < RESPONSES
    for step, samples in ((1, in_rollout), (2, in_update), (2, lost), (3, killed)):
        trained = run.trained(step)
        assert len(trained) == RESPONSES
        for request, [sample] in samples.items():
            assert np.array_equal(trained[request].tokens, sample.tokens)
            assert np.array_equal(trained[request]["rollout_log_probs"], sample["rollout_log_probs"])
            assert {span.version for span in trained[request].weight_spans} == {str(step)}
    rows = run.rows()
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    # Counted since the start of each process; the last one has done steps 3 and 4.
    assert [row["rollout/reused"] for row in rows] == [0, len(in_rollout), RESPONSES, RESPONSES + len(killed)]
    assert not list((run.folder / "pending").iterdir()), "the last checkpoint has them all"


@pytest.mark.timeout(900)
def test_what_was_ended_and_went_on_has_learned_the_same_to_the_bit(broken, config):
    run, _ = broken
    whole = Run(config, "whole")
    whole.finish("--rollout.load", str(run.folder / "rollouts"))
    expected, found = final_tensors(config.parent, "whole"), final_tensors(config.parent, "broken")
    assert expected.keys() == found.keys() and len(found) > 40
    assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.mark.timeout(900)
def test_two_processes_give_up_an_update_and_learn_the_same_to_the_bit(config):
    """Their launcher is told to end; both save behind the last whole step, and train the broken one again from its samples."""
    layout = ("--nproc", "2", "--parallel.tensor", "2")
    ended, whole = Run(config, "two-ended"), Run(config, "two-whole")
    ended.end_when(lambda: ended.in_training(1), signal.SIGTERM, *layout)
    had = ended.pending(1)
    assert [p.name for p in (ended.folder / "checkpoints").iterdir()] == ["step_000001"] and len(had) == RESPONSES
    ended.finish(*layout)
    for request, [sample] in had.items():
        assert np.array_equal(ended.trained(1)[request].tokens, sample.tokens)
    assert [row["rollout/reused"] for row in ended.rows()] == [0, RESPONSES, RESPONSES, RESPONSES]
    whole.finish(*layout, "--rollout.load", str(ended.folder / "rollouts"))
    expected, found = (final_tensors(config.parent, run.name) for run in (whole, ended))
    assert expected.keys() == found.keys() and len(found) > 40
    assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("partial", [True, False])
def test_servers_ahead_of_the_trainer(broken, config, partial):
    """One step: the prompts are the same, and the responses come from weights at most one step older.

    Where pushes interrupt them, the server is killed too, while both sides are at work.
    """
    run, ahead = broken[0], Run(config, f"ahead-{partial}")
    size = ("--rollout.max_new_tokens", "100")
    correction = ("--correction.mode", "truncate", "--correction.high", "2.0")
    options = ("--rollout.max_staleness", "1", "--rollout.partial_rollout", str(partial).lower(), *size, *correction)
    with ahead.start(*options) as program:
        if partial:
            program.until(ahead.rows, TIMEOUT_S, "its first step")
            scheduler = scheduler_of(program)
            assert scheduler is not None
            scheduler.kill()
        program.finish(TIMEOUT_S)
    rows = ahead.rows()
    assert rows[-1]["rollout/restarts"] == (1 if partial else 0)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    mixed = 0
    for step, row in enumerate(rows):
        trained = ahead.trained(step)
        assert [t.prompt_id for t in trained] == [t.prompt_id for t in run.trained(step)]
        versions = [[int(span.version) for span in t.weight_spans] for t in trained]
        allowed = {max(step - 1, 0), step} if partial else {max(step - 1, 0)}
        assert {v for of_one in versions for v in of_one} <= allowed, f"step {step}"
        assert all(sorted(of_one) == of_one for of_one in versions)
        mixed += sum(len(set(of_one)) > 1 for of_one in versions)
        stale = [step - min(of_one) for of_one in versions]
        assert row["rollout/staleness"] == pytest.approx(np.mean(stale)) and row["rollout/staleness_max"] == max(stale)
        assert row["mismatch/kl"] is not None and np.isfinite(row["mismatch/kl"])
    assert partial or not mixed
