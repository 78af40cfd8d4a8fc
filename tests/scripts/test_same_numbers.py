"""What same_numbers takes for the same: renames in both directions, and every kind of difference named."""

from __future__ import annotations

import copy
import importlib.util
import json
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file
from torch.distributed import checkpoint

from megatron_rl.config.load import build_config

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "same_numbers.py"
NONE = {"metrics": {}, "tensors": {}, "keys": {}, "values": {}}
RENAMES = {
    "metrics": {r"vp2o/(.*)strangers": r"vp2o/\1repelled", "loss/old_kl": "kl/old"},
    "tensors": {r"(.*)\.fc(\d)": r"\1.linear_\2"},
    "keys": {"sync.refresh.max_age": "sync.refresh.max_staleness"},
    "values": {"algorithm.advantage": {"group_relative": "grpo"}},
}
OLD = {
    "metrics": [
        {"step": 1, "loss/old_kl": 0.1, "vp2o/layer_00/strangers": 3.0, "entropy": None},
        {"step": 2, "loss/old_kl": 0.2, "vp2o/layer_00/strangers": 4.0, "entropy": 1.5},
    ],
    "tensors": {"layers.fc1": "aa", "layers.fc2": "bb", "router": "cc"},
}
NEW = {
    "metrics": [
        {"step": 1, "kl/old": 0.1, "vp2o/layer_00/repelled": 3.0, "entropy": None, "extra": 7},
        {"step": 2, "kl/old": 0.2, "vp2o/layer_00/repelled": 4.0, "entropy": 1.5, "extra": 8},
    ],
    "tensors": {"layers.linear_1": "aa", "layers.linear_2": "bb", "router": "cc"},
}


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("same_numbers", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_renamed_results_are_the_same_and_new_metrics_are_told(tool):
    assert tool.differences(OLD, NEW, RENAMES) == ([], ["extra"])
    assert tool.differences(OLD, OLD, NONE) == ([], [])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda r: r["metrics"][1].update({"kl/old": 0.2000000001}),
            ["step 2: kl/old 0.2 -> 0.2000000001"],
        ),
        (lambda r: r["metrics"][1].update({"kl/old": 0.20000000000000004}), []),  # the order of a sum
        (lambda r: r["metrics"][0].update(entropy=0.0), ["step 1: entropy None -> 0.0"]),
        (lambda r: r["metrics"][0].pop("entropy"), ["step 1: entropy is gone"]),
        (lambda r: r["metrics"].pop(), ["steps [1, 2] -> [1]"]),
        (lambda r: r["tensors"].update(router="dd"), ["tensor router differs"]),
        (lambda r: r["tensors"].pop("layers.linear_2"), ["tensor layers.linear_2 is gone"]),
        (lambda r: r["tensors"].update(bias="ee"), ["tensor bias is new"]),
    ],
)
def test_every_difference_is_named(tool, change, said):
    new = copy.deepcopy(NEW)
    change(new)
    assert tool.differences(OLD, new, RENAMES)[0] == said


def test_two_metrics_cannot_become_one(tool):
    with pytest.raises(ValueError, match="two names become kl/old"):
        tool.renamed({"loss/old_kl": 0.1, "kl/old": 0.1}, RENAMES["metrics"])


def test_settings_are_said_in_the_words_of_an_older_checkout(tool):
    new = {"sync.refresh.max_staleness": 3, "algorithm.advantage": "grpo", "steps": 8}
    before = {"sync.refresh.max_age": None, "algorithm.advantage": ["group_relative"], "steps": None}
    after = {"sync.refresh.max_staleness": None, "algorithm.advantage": ["grpo", "rloo"], "steps": None}
    old = {"sync.refresh.max_age": 3, "algorithm.advantage": "group_relative", "steps": 8}
    assert tool.in_words_of(before, new, RENAMES) == old
    assert tool.in_words_of(after, new, RENAMES) == new
    with pytest.raises(KeyError, match="max_staleness"):
        tool.in_words_of(before, new, NONE)


def test_the_exit_status_says_what_was_found(tool, tmp_path, capsys):
    for name, result in (("old", OLD), ("same", NEW), ("other", NEW | {"tensors": {}})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "grpo.json").write_text(json.dumps(result))
    assert tool.compare(tmp_path / "old", tmp_path / "same", RENAMES) == 0
    assert capsys.readouterr().out == "grpo: same\n    new metrics: extra\n"
    assert tool.compare(tmp_path / "old", tmp_path / "other", RENAMES) == 1
    assert capsys.readouterr().out.startswith("grpo: DIFFERENT; tensor layers.linear_1 is gone; ")
    (tmp_path / "empty").mkdir()
    assert tool.compare(tmp_path / "old", tmp_path / "empty", RENAMES) == 1
    assert tool.main(["compare", str(tmp_path / "same"), str(tmp_path / "same")]) == 0


def test_every_scenario_is_a_valid_config_of_this_checkout(tool):
    plan = yaml.safe_load(SCRIPT.with_suffix(".yaml").read_text())
    known = tool.choices((SCRIPT.parents[1] / "docs" / "configuration.md").read_text())
    assert known["algorithm.kl.estimator"] == ["k1", "k2", "k3"] and known["data.options"] is None
    for name, about in (plan["before"] | plan["scenarios"]).items():
        settings = plan["every"] | (plan["train"] if about.get("command", "train") == "train" else {})
        settings = tool.flat(settings, known) | tool.flat(about.get("settings", {}), known)
        settings |= tool.flat(about.get("record", {}), known)
        build_config(tool.nested(tool.in_words_of(known, settings, plan["renames"])), name)
        assert about.get("rollouts", name) in plan["before"] | plan["scenarios"]
        first, _, run = about.get("model", "runs/warm/hf").partition("/")
        assert (run.removesuffix("/hf") in plan["before"]) if run else first in plan["models"]


def test_numbers_of_a_report_are_found(tool):
    report = {"model": "runs/a", "loss": {"before": 1.5, "after": 2.0}, "importance": {"layers": [0.5, None]}}
    assert tool.figures(report) == {"loss/before": 1.5, "loss/after": 2.0, "importance/layers/0": 0.5}


def test_rows_of_steps_are_labeled_by_the_response_that_they_are_of(tool):
    rows = tool.steps_of(
        [{"prompt": "3 1 2", "chosen": "1 2", "rejected": "3"}, {"prompt": "1", "chosen": "1", "rejected": ""}]
    )
    assert [row["steps"] for row in rows] == [["1", "2"], ["3"], ["1"]]
    assert [row["labels"] for row in rows] == [[1.0, 1.0], [0.0], [1.0]]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_hashes_are_of_the_bits_of_every_tensor(tool, tmp_path):
    state = {"w": torch.randn(3, 5), "half": torch.randn(4).bfloat16(), "empty": torch.zeros(0), "zero": torch.zeros(1)}
    checkpoint.save(state | {"step": 8}, checkpoint_id=tmp_path / "a", no_dist=True)
    hashes = tool.tensor_hashes(tmp_path / "a")
    assert hashes == {name: tool.tensor_hash(tensor) for name, tensor in state.items()}
    for name, other in (
        ("w", state["w"].view(5, 3)),
        ("half", state["half"].view(torch.int16)),
        ("zero", -state["zero"]),
    ):
        assert tool.tensor_hash(other) != hashes[name]


def test_hashes_of_a_folder_are_those_of_its_safetensors(tool, tmp_path):
    state = {"w": torch.randn(3, 5), "fp8": torch.randn(4, 4).to(torch.float8_e4m3fn), "scale": torch.tensor(0.5)}
    save_file({"w": state["w"]}, tmp_path / "model-1.safetensors")
    save_file({name: state[name] for name in ("fp8", "scale")}, tmp_path / "model-2.safetensors")
    assert tool.folder_hashes(tmp_path) == {name: tool.tensor_hash(tensor) for name, tensor in state.items()}
    assert tool.folder_hashes(tmp_path / "none") == {}
