"""Conversion on two processes over gloo, under one layout there and another one back, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tools.make_tiny_model import Sizes, make_tiny_model

TP2, EP2, PP2 = {"tensor": 2}, {"expert": 2}, {"pipeline": 2}
TP2_WHOLE_EXPERTS = {"tensor": 2, "expert_tensor": 1}
CASES = [
    ("qwen3_moe", {"pipeline": 2, "virtual_pipeline": 2}, {"expert": 2, "tensor": 2}),
    ("gpt_oss", EP2, TP2_WHOLE_EXPERTS),
    ("deepseek_v3", PP2, TP2),
    ("olmoe", TP2, EP2),
]
REST = [
    ("qwen3_moe", TP2, EP2),
    ("qwen3_moe", PP2, TP2),
    ("gpt_oss", TP2_WHOLE_EXPERTS, PP2),
    ("deepseek_v3", EP2, PP2),
    ("mixtral", EP2, TP2_WHOLE_EXPERTS),
    ("llama", PP2, TP2),
]


def there_and_back(cases: list[tuple[str, dict, dict]], folder: Path, more: list[tuple[str, tuple]]) -> list[list]:
    """Convert each family under one layout to a checkpoint and under the other one back, and compare the tensors; returns
    what `more` of round_trips.py returns on each rank."""
    trips = []
    for i, (family, one, other) in enumerate(cases):
        # A vocabulary that two tensor-parallel ranks have to pad, and a layer for each part of a pipeline.
        sizes = Sizes(layers=4 if "virtual_pipeline" in one else 2, vocab=511)
        source = make_tiny_model(family, folder / f"{i}.model", sizes=sizes)
        trips.append((str(source), one, str(folder / f"{i}.checkpoint"), other, str(folder / f"{i}.hf")))
    wanted = [("there_and_back", (trips,)), *more]
    results = run_ranks(2, "models.round_trips:several", (wanted,), timeout=900.0)
    for source, _, _, _, out in trips:
        with (
            safe_open(f"{source}/model.safetensors", "pt") as theirs,
            safe_open(f"{out}/model.safetensors", "pt") as ours,
        ):
            assert set(ours.keys()) == set(theirs.keys())
            for name in theirs.keys():  # noqa: SIM118 (not a dict)
                assert torch.equal(ours.get_tensor(name), theirs.get_tensor(name)), (out, name)
    return [found[1:] for found in results]


@pytest.mark.timeout(1200)
def test_layouts(tmp_path):
    half = make_tiny_model("gpt_oss", tmp_path / "half", sizes=Sizes(layers=2), dtype=torch.bfloat16)
    results = there_and_back(CASES, tmp_path, [("export", (str(half), TP2_WHOLE_EXPERTS, "fp32"))])
    # Weights stored in bf16 and trained in fp32: the same values, whole on every rank.
    stored = load_file(half / "model.safetensors")
    for [exported] in results:
        assert exported.keys() == stored.keys()
        for name, tensor in stored.items():
            assert exported[name].dtype == torch.float32
            assert torch.equal(exported[name], tensor.float()), name


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_other_families_and_layouts(tmp_path):
    there_and_back(REST, tmp_path, [])


@pytest.mark.timeout(900)
@pytest.mark.parametrize("layout", [EP2, PP2], ids=["expert", "pipeline"])
def test_all_ranks_hear_of_a_missing_tensor(layout, tmp_path):
    """A tensor that only the second rank needs: the first one must not wait for it."""
    folder = make_tiny_model("mixtral", tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    missing = "model.layers.3.block_sparse_moe.experts.7.w2.weight"
    del tensors[missing]
    save_file(tensors, folder / "model.safetensors")
    errors = run_ranks(2, "models.round_trips:load_error", (str(folder), layout), timeout=600.0)
    assert all(f"tensor {missing} is missing" in error for error in errors)
