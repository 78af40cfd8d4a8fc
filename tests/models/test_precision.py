"""Which recipes run on which machine, and with which words a run is refused: facts of machines that this is not."""

from __future__ import annotations

import re
from typing import get_args, get_type_hints

import pytest

from megatron_rl.config import PrecisionConfig
from megatron_rl.config.load import build_config
from megatron_rl.errors import UserError
from megatron_rl.models.precision import (
    ROLLOUT_DTYPES,
    TRAIN,
    Machine,
    check_precision,
    rollout_recipes,
    this_machine,
    trainer_recipes,
)

MACHINES = {
    "cpu": Machine(None, None, "0.47.0", "13.0"),
    "cpu with TE": Machine(None, "2.20.2", "0.47.0", "13.0"),
    "cpu alone": Machine(None, None, None, "13.0"),
    "a100": Machine((8, 0), "2.20.2", "0.47.0", "13.0"),
    "l40": Machine((8, 9), "2.20.2", "0.47.0", "13.0"),
    "h100": Machine((9, 0), "2.20.2", "0.47.0", "13.0"),
    "h100 without TE": Machine((9, 0), None, "0.47.0", "13.0"),
    "h100 with old TE": Machine((9, 0), "2.2.0", "0.47.0", "13.0"),
    "b200": Machine((10, 0), "2.20.2", "0.47.0", "13.0"),
    "b200 without modelopt": Machine((10, 0), "2.20.2", None, "13.0"),
    "h100 with CUDA 12.8": Machine((9, 0), "2.20.2", "0.47.0", "12.8"),
    "rtx 5090": Machine((12, 0), "2.20.2", "0.47.0", "13.0"),
    "torch without CUDA": Machine(None, None, "0.47.0", None),
}
STATES = {  # delayed, tensorwise, blockwise, mxfp8; rollout fp8. r runs, s simulated, - cannot
    "cpu": "-ss- s",
    "cpu with TE": "-ss- s",
    "cpu alone": "---- -",
    "a100": "---- -",
    "l40": "rr-- r",
    "h100": "rrr- r",
    "h100 without TE": "---- r",
    "h100 with old TE": "rr-- r",
    "b200": "rrrr r",
    "b200 without modelopt": "rrrr -",
    "h100 with CUDA 12.8": "rr-- r",
    "rtx 5090": "rrr- r",
    "torch without CUDA": "-ss- s",
}


@pytest.mark.parametrize("name", MACHINES)
def test_what_runs_where(name):
    letter = {"runs": "r", "simulated": "s", "cannot": "-"}
    train, rollout = trainer_recipes(MACHINES[name]), rollout_recipes(MACHINES[name])
    found = "".join(letter[train[r].state] for r in ("fp8_delayed", "fp8_tensorwise", "fp8_blockwise", "mxfp8"))
    assert f"{found} {letter[rollout['fp8'].state]}" == STATES[name]
    assert all(answers[r].state == "runs" for answers in (train, rollout) for r in ("bf16", "fp32"))
    for key, answers in (("train", train), ("rollout", rollout)):
        for recipe, answer in answers.items():
            precision = PrecisionConfig(**{key: recipe})
            if answer.state != "cannot":
                check_precision(precision, MACHINES[name])
                assert bool(answer.reason) == (answer.state == "simulated")
                continue
            with pytest.raises(UserError) as error:
                check_precision(precision, MACHINES[name])
            text = str(error.value)
            assert text.startswith(f"config: precision.{key} = {recipe} needs ") and "\n" not in text
            nearest, can = re.search(r"; here (\w+) can (run|be simulated)$", text).groups()
            assert answers[nearest].state == {"run": "runs", "be simulated": "simulated"}[can]


REFUSALS = """
cpu: train mxfp8 needs Transformer Engine and a GPU of compute capability 10.0 (Blackwell); here fp8_blockwise can be simulated
cpu: train fp8_delayed needs Transformer Engine and a GPU of compute capability 8.9 (Ada); here fp8_tensorwise can be simulated
cpu alone: train fp8_tensorwise needs nvidia-modelopt, or Transformer Engine and a GPU of compute capability 8.9 (Ada); here bf16 can run
h100 without TE: train fp8_blockwise needs Transformer Engine 2.3 or later (found: none); here bf16 can run
h100 with old TE: train fp8_blockwise needs Transformer Engine 2.3 or later (found: 2.2.0); here fp8_tensorwise can run
h100: train mxfp8 needs a GPU of compute capability 10.0 (Blackwell), this one has 9.0; here fp8_blockwise can run
l40: train fp8_blockwise needs a GPU of compute capability 9.0 (Hopper), this one has 8.9; here fp8_tensorwise can run
rtx 5090: train mxfp8 needs a GPU of compute capability 10.0 (Blackwell) and below 12.0, this one has 12.0; here fp8_blockwise can run
h100 with CUDA 12.8: train fp8_blockwise needs torch with CUDA 12.9 or later (found: 12.8); here fp8_tensorwise can run
a100: rollout fp8 needs a GPU of compute capability 8.9 (Ada), this one has 8.0; here bf16 can run
cpu alone: rollout fp8 needs nvidia-modelopt, which quantizes the weights; here bf16 can run
""".strip().splitlines()  # noqa: E501


@pytest.mark.parametrize("refusal", REFUSALS)
def test_refusals_name_the_reason_and_the_nearest(refusal):
    machine, words = refusal.split(": ", 1)
    key, recipe, reason = words.split(" ", 2)
    precision = PrecisionConfig(**{key: recipe})
    with pytest.raises(UserError) as error:
        check_precision(precision, MACHINES[machine])
    assert str(error.value) == f"config: precision.{key} = {recipe} {reason}"
    check_precision(precision, MACHINES[machine], trains=key != "train", rolls_out=key == "train")


def test_the_tables_are_the_choices_of_the_config():
    fields = get_type_hints(PrecisionConfig)
    assert get_args(fields["train"]) == tuple(TRAIN)
    assert get_args(fields["rollout"]) == tuple(ROLLOUT_DTYPES)
    assert this_machine().modelopt


def test_a_run_is_refused_before_anything_starts(tiny_model, monkeypatch):
    """By preflight, which asks this very machine; an evaluation trains nothing, and SFT has no engine."""
    from megatron_rl.checks import model_and_machine
    from megatron_rl.checks import preflight as checks

    monkeypatch.setattr(model_and_machine, "this_machine", lambda: MACHINES["cpu"])
    monkeypatch.setenv("WORLD_SIZE", "1")
    model = {"path": str(tiny_model("qwen3_moe"))}
    mxfp8 = build_config({"model": model, "precision": {"train": "mxfp8"}})
    for kind in ("train", "sft"):
        with pytest.raises(UserError, match="precision.train = mxfp8 needs"):
            checks.preflight(mxfp8, kind)
    checks.preflight(mxfp8, "sample")
    rollout = build_config({"model": model, "precision": {"rollout": "fp8"}})
    checks.preflight(rollout, "train")
    checks.preflight(rollout, "sft")
    with pytest.raises(UserError, match="precision.rollout = fp8 quantizes weights when they are pushed"):
        checks.preflight(rollout, "sample")
    monkeypatch.setattr(model_and_machine, "this_machine", lambda: MACHINES["cpu alone"])
    with pytest.raises(UserError, match="precision.rollout = fp8 needs nvidia-modelopt"):
        checks.preflight(rollout, "train")
    checks.preflight(rollout, "sft")
