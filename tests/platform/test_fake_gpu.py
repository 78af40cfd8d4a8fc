"""What would happen on a GPU, as far as that shows without one (docs/gpu.md says how far): names, devices, and waits.

Where Transformer Engine is installed, the same tests look at its layers, and those that need it run.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.models import families
from tests.preloaded import PYTHON_WITH_PACKAGES

FAMILIES = [family.model_type for family in families.FAMILIES.values()]
ROUTED = [family.model_type for family in families.FAMILIES.values() if family.moe]
CHILD = Path(__file__).with_name("on_fake_gpu.py")
needs_te = pytest.mark.skipif(not importlib.util.find_spec("transformer_engine"), reason="needs Transformer Engine")


def child(*arguments: object) -> list[dict[str, Any]]:
    """A process that takes this machine for one with a GPU, and what each of its jobs found."""
    command = [PYTHON_WITH_PACKAGES, str(CHILD), *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(CHILD.parents[2])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"te"')]


@pytest.fixture(scope="module")
def found(tiny_model) -> list[dict[str, Any]]:
    """By family: of all what was built, and of two what was run."""
    folders = {family: tiny_model(family, "--layers", "2") for family in FAMILIES}
    names, forward = child("names", *folders.values(), "--", "forward", *(folders[f] for f in ("qwen3_moe", "gpt_oss")))
    by_folder = {folder.name: family for family, folder in folders.items()}
    return [{by_folder.get(name, name): one for name, one in each.items()} for each in (names, forward)]


@pytest.fixture
def built(found) -> dict[str, Any]:
    return found[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_goes_to_hugging_face_and_back(built, family):
    # Loading, which the child has done, refuses a tensor without a parameter and a parameter without a tensor.
    one = built[family]["one"]
    assert one["devices"] == ["FakeTensor cuda:0"]
    tied = {"lm_head.weight"} if family == "llama" else set()
    assert {n: s for n, s in one["exported"].items() if n not in tied} == one["folder"]
    fused = any(name.endswith("linear_qkv.layer_norm_weight") for name in one["parameters"])
    assert fused == (built["te"] and family != "deepseek_v3")


@pytest.mark.parametrize("family", FAMILIES)
def test_so_does_every_part_of_one_on_a_rank(built, family):
    one, two = built[family]["one"], built[family]["two"]
    assert two["devices"] == ["FakeTensor cuda:0"] and set(two["names"]) == set(two["parameters"])
    theirs = {name for names in two["names"].values() for name in names}
    # Each rank has half of the experts, whose names say 0 to 3 of 8 here; all else is there, cut or whole.
    absent = {name for name in set(one["folder"]) - theirs if not any(f".experts.{e}." in name for e in range(4, 8))}
    assert not absent and theirs <= set(one["folder"])
    smaller = [n for n, shape in two["parameters"].items() if shape != one["parameters"][n]]
    assert any("linear_qkv" in n or "linear_q_proj" in n for n in smaller)


@pytest.mark.parametrize("family", ROUTED)
def test_each_experts_parameters_are_found(built, family):
    layers = built[family]["one"]["experts"]
    assert set(layers) == ({"1"} if family == "deepseek_v3" else {"0", "1"})
    for found in layers.values():
        kinds = ("weight", "bias") if family == "gpt_oss" else ("weight",)
        assert set(found) == {f"linear_fc{i}.{kind}" for i in (1, 2) for kind in kinds}
        assert found["linear_fc1.weight"] == [[96, 64]] * 8 and found["linear_fc2.weight"] == [[64, 48]] * 8
    assert {len(s) for found in built[family]["two"]["experts"].values() for s in found.values()} == {4}


@pytest.mark.parametrize("family", ROUTED)
def test_experts_are_grouped_where_transformer_engine_is(built, family):
    found, te = built[family]["one"], built["te"]
    assert found["expert_module"] == (["TEGroupedMLP"] if te else ["GroupedExperts"])
    assert any(n.endswith("experts.linear_fc1.weight7") for n in found["parameters"]) == te
    settings = found["settings"]
    assert settings["moe_grouped_gemm"] == settings["moe_permute_fusion"] == te
    assert not found["unfused"]["moe_permute_fusion"] and found["unfused"]["moe_grouped_gemm"] == te
    # Which activations the grouped experts fuse; and with biases they refuse the other fusion.
    assert settings["bias_activation_fusion"] and found["grouped_fuse_it"]
    assert settings["bias_dropout_fusion"] == (family != "gpt_oss")
    assert any("mlp.experts.linear_fc1.weight" in key for key in found["checkpoint"]) or not te


@needs_te
def test_transformer_engine_is_what_was_looked_at(built):
    assert built["te"]


def test_fp32_is_that_of_local_layers(built):
    """Transformer Engine multiplies fp32 as TF32; its FP8 is computed where its layers are, and simulated in local ones."""
    te, found = built["te"], built["qwen3_moe"]["one"]["layers"]
    theirs = "transformer_engine" if te else "local"
    assert found["bf16"] == [theirs] and found["fp32"] == ["local"]
    if te:
        assert found["bf16, plain"] == found["fp8_blockwise, plain"] == ["local"]
        assert found["fp8_blockwise"] == [theirs, "blockwise"] and found["fp8_delayed"] == [theirs, "delayed"]


@needs_te
@pytest.mark.parametrize("family", FAMILIES)
def test_checkpoints_fit_both_kinds_of_layers(built, family):
    theirs, local = built[family]["one"]["stored"]
    assert theirs == local and len(local) > 7


@needs_te
def test_scoring_leaves_transformer_engines_scales(tiny_model):
    """fp8_delayed, by Transformer Engine's own bookkeeping: every layer has seen the same magnitude, or nothing."""
    [found] = child("delayed", tiny_model("qwen3_moe", "--layers", "2"))
    assert found["calibrated"] == {"scale": [448 / 2], "amax_history": [0]}
    assert found["while it scores"] == {"scale": [448 / 2], "amax_history": [5]}
    assert found["scored"] == found["calibrated"]
    assert found["trained"] == found["restored"] == {"scale": [448 / 4], "amax_history": [0]}
    assert "Refusing to load pickled" in found["refused"]


@pytest.fixture
def ran(found) -> dict[str, Any]:
    return found[1]


MEGATRONS_OWN = "wait aten._to_copy.default moe_utils.py"
"""Its dispatcher reads how many tokens go to each expert, twice a layer, on a stream of its own."""


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("stage", ["log_probs", "forward"])
@pytest.mark.skipif(bool(importlib.util.find_spec("transformer_engine")), reason="its kernels take no fake tensors")
def test_a_pass_never_waits_for_the_gpu(ran, family, stage):
    found = ran[family]
    theirs = [t for t in found["stages"][stage] if t.startswith(MEGATRONS_OWN)]
    ours = [t for t in found["stages"][stage] if t not in theirs]
    assert len(theirs) == 2 * 2
    uploads = [t for t in ours if t.startswith("upload")]  # where each expert's rows end, which Megatron has read
    assert len(uploads) == 2 and all(t.endswith(" upload") for t in uploads)
    ours = [t for t in ours if t not in uploads]
    assert len(ours) == (stage == "log_probs") and all(t.endswith(" look") for t in ours)  # after all micro-batches
    assert found["devices"] == ["cuda:0"] and found["grad"]


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.skipif(bool(importlib.util.find_spec("transformer_engine")), reason="its kernels take no fake tensors")
def test_an_update_is_read_a_few_times(ran, family):
    stages = ran[family]["stages"]
    assert stages["pack"] and all(t.startswith("upload") for t in stages["pack"])
    assert len(stages["totals"]) == 1  # how many tokens there are
    assert len(stages["look"]) == 1
    assert len(stages["sums"]) == 1  # of the loss and the routers
    assert all("wait aten._to_copy" in t and "mismatch_metrics.py" in t for t in stages["mismatch"])


@pytest.fixture
def operators(ran) -> dict[str, Any]:
    return ran["operators"]


def test_a_layer_of_experts_asks_as_often_however_many_there_are(operators):
    """Forward and backward of one linear layer. One by one it is five operators an expert, and fourteen with biases."""
    few, many = operators["experts together"]
    assert few == many <= 8
    few, many = operators["experts together with biases"]
    assert few == many <= 24
    for name, each in (("experts one by one", 5), ("experts one by one with biases", 14)):
        few, many = operators[name]
        assert many - few == each * (24 - 8)
    assert set(operators["experts' transfers"]) == {"upload"}


def test_the_norm_of_the_gradients_is_read_once(operators):
    few, many = operators["norm"]
    assert few == many and few.count("aten._foreach_norm.Scalar") == 1
    assert operators["norm's transfers"] == ["wait", "wait"]  # one for each of both


def test_the_heads_products_add_to_the_gradient(operators):
    """In fp32: no chunk's product of the weight's size is in bf16, and scaling and rounding are one."""
    of_hidden = ["aten.mm.default", "aten.copy_.default"]
    for chunks, names in zip((2, 5), operators["head"], strict=True):
        added = [*of_hidden, "aten.addmm.dtype_out"] * (chunks - 1)
        assert names == [*of_hidden, "aten.mm.dtype", *added, "aten.mul.out"]
