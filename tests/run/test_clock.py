"""Times of a step's parts, and the trace of a step."""

from __future__ import annotations

import gzip
import json
import math

import pytest
import torch

from megatron_rl.errors import UserError
from megatron_rl.report.step import MOST_IDLE_STEPS, idle_steps
from megatron_rl.run.run import Clock


def test_times_add_up():
    clock = Clock()
    with clock("train"):
        torch.ones(8) @ torch.ones(8)
    times = clock.times()
    assert set(times) == {"time/train_s", "time/other_s", "time/step_s"}
    assert abs(times["time/train_s"] + times["time/other_s"] - times["time/step_s"]) < 1e-9


def test_a_trace_has_the_parts_and_the_operators_in_them(tmp_path):
    clock = Clock(tmp_path / "profile" / "step_3.json.gz")
    with clock("log_probs"):
        pass
    with clock("train"):
        torch.ones(8, 8) @ torch.ones(8, 8)
    times = clock.times()
    assert set(times) == {"time/log_probs_s", "time/train_s", "time/other_s", "time/step_s"}
    with gzip.open(tmp_path / "profile" / "step_3.json.gz", "rt") as file:
        events = {e["name"]: e for e in json.load(file)["traceEvents"] if "dur" in e}
    assert {"log_probs", "train", "aten::mm"} <= set(events)
    part, operator = events["train"], events["aten::mm"]
    assert part["ts"] <= operator["ts"] <= operator["ts"] + operator["dur"] <= part["ts"] + part["dur"]


def test_a_run_that_learns_nothing_ends():
    """After so many steps in a row; one in which the critic alone learns says nothing."""
    done, left_out = ({"update/skipped": skipped, "update/grad_norm": 1.0} for skipped in (1.0, 2.0))
    idle = 0
    for found, updates in (
        [(left_out, 2)] * (MOST_IDLE_STEPS - 1) + [(done, 2)] + [(left_out, 2)] * (MOST_IDLE_STEPS - 1)
    ):
        idle = idle_steps(idle, updates, found)
    assert idle_steps(idle, 0, {}) == idle == MOST_IDLE_STEPS - 1
    with pytest.raises(UserError, match=r"nothing was learned in 10 steps: no token counts.*agent\.on_truncation"):
        idle_steps(idle, 2, left_out)
    with pytest.raises(UserError, match=r"nothing was learned in 10 steps: no gradient norm is finite.*optimizer\.lr"):
        idle_steps(idle, 2, left_out | {"update/grad_norm": math.nan})
