"""Times of a step's parts, and the trace of a step."""

from __future__ import annotations

import gzip
import json

import torch

from megatron_rl.launch.run import Clock


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
