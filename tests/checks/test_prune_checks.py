"""What cannot be pruned is refused in one line that names the key and the remedy."""

from __future__ import annotations

import json
import shutil

import pytest

from megatron_rl.checks.preflight import check_keys
from megatron_rl.checks.prune_command import pruned_model
from megatron_rl.checks.refusals import refuse
from megatron_rl.config.load import build_config, load_config
from megatron_rl.errors import UserError
from megatron_rl.models.parallel_check import read_hf_config


def refused(folder, prune: dict, world_size: int = 1, **sections) -> str:
    config = build_config({"model": {"path": str(folder)}, "prune": prune} | sections)
    with pytest.raises(UserError) as error:
        check_keys(config, "prune", world_size)
        refuse(config, pruned_model, hf_config=read_hf_config(folder), world_size=world_size)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("family", "prune", "fragments"),
    [
        ("qwen3_moe", {}, ["removes nothing", "prune.experts"]),
        ("qwen3_moe", {"experts": 1}, ["prune.experts = 1", "goes to 2", "use 2 or more"]),
        ("qwen3_moe", {"experts": 9}, ["prune.experts = 9", "has 8 experts", "use 8 or fewer"]),
        ("qwen3_moe", {"layers": 5}, ["prune.layers = 5", "4 layers"]),
        ("qwen3_moe", {"heads": 3}, ["prune.heads = 3", "2 query heads share", "use 2"]),
        ("qwen3_moe", {"heads": 1}, ["prune.heads = 1", "use 2"]),
        ("qwen3_moe", {"width": 8}, ["prune.width = 8", "no dense MLP", "prune.expert_width"]),
        ("qwen3_moe", {"expert_width": 49}, ["prune.expert_width = 49", "48 inner channels"]),
        ("qwen3", {"experts": 2}, ["prune.experts = 2", "no experts"]),
        ("qwen3", {"expert_width": 2}, ["prune.expert_width = 2", "no experts", "prune.width"]),
        ("qwen3", {"width": 97}, ["prune.width = 97", "96 inner channels"]),
        ("deepseek_v3", {"experts": 4}, ["prune.experts = 4", "n_group = 2", "prune.expert_width"]),
        ("deepseek_v3", {"heads": 2}, ["prune.heads = 2", "latent"]),
        ("olmoe", {"heads": 2}, ["prune.heads = 2", "number of heads"]),
        ("mixtral", {"heads": 2}, ["prune.heads = 2", "number of heads"]),
        (
            "qwen3",
            {"layers": 2, "method": "magnitude"},
            ["prune.method = magnitude does nothing without prune.sparsity", "set prune.sparsity: '2:4'"],
        ),
        (
            "qwen3",
            {"sparsity": "2:4", "ratio": 0.3},
            ["prune.ratio = 0.3 does nothing with prune.sparsity = 2:4", "set prune.sparsity: unstructured"],
        ),
        ("qwen3", {"layers": 2, "targets": ["*"]}, ["prune.targets = ['*'] does nothing without prune.sparsity"]),
        ("qwen3", {"sparsity": "4:4"}, ["keeps all 4 of 4"]),
        (
            "qwen3",
            {"sparsity": "2:4", "targets": ["*.norm.*"]},
            ["'*.norm.*' matches no linear layer", "decoder.layers."],
        ),
        ("qwen3", {"width": 90, "sparsity": "2:4"}, ["the 90 inputs of", "linear_fc2", "not a multiple of 4"]),
        ("gpt_oss", {"expert_width": 32}, ["hidden_size", "square", "pruned model"]),
    ],
)
def test_what_the_model_does_not_have_or_cannot_lose(family, prune, fragments, tiny_model):
    found = refused(tiny_model(family, "--layers", "4"), prune)
    for fragment in fragments:
        assert fragment in found, found


@pytest.mark.parametrize(
    ("prune", "parallel", "world_size", "fragments"),
    [
        ({"experts": 3}, {"expert": 2}, 2, ["parallel.expert = 2", "3 experts", "pruned model"]),
        ({"layers": 3}, {"pipeline": 2}, 2, ["parallel.pipeline = 2", "3 layers", "pruned model"]),
        ({"heads": 2}, {"tensor": 2}, 2, ["parallel.tensor = 2", "1 key-value heads", "pruned model"]),
        ({"expert_width": 25}, {"tensor": 2}, 2, ["expert_tensor = 2", "25 expert intermediate size", "pruned model"]),
    ],
)
def test_what_would_not_fit_the_layout_afterwards(prune, parallel, world_size, fragments, tiny_model):
    found = refused(tiny_model("qwen3_moe", "--layers", "4"), prune, world_size, parallel=parallel)
    for fragment in fragments:
        assert fragment in found, found


def test_settings_that_hide_what_is_measured(tiny_model):
    folder, prune = tiny_model("qwen3_moe", "--layers", "4"), {"experts": 4}
    assert "moe_router_fusion" in refused(folder, prune, model={"path": str(folder), "moe_router_fusion": True})
    assert "moe_dispatcher" in refused(folder, prune, model={"path": str(folder), "moe_dispatcher": "allgather"})
    assert "lora.rank = 4" in refused(folder, prune, lora={"rank": 4})
    assert "precision.train" in refused(folder, prune, precision={"train": "fp8_blockwise"})


def test_folders_that_are_quantized_or_would_be_written_over(tiny_model, tmp_path):
    folder = tmp_path / "runs" / "one" / "hf"
    shutil.copytree(tiny_model("qwen3", "--layers", "4"), folder)
    assert "another name" in refused(folder, {"layers": 2}, runs_dir=str(tmp_path / "runs"), name="one")
    (tmp_path / "runs" / "two" / "checkpoints" / "step_3").mkdir(parents=True)
    assert "another name" in refused(folder, {"layers": 2}, runs_dir=str(tmp_path / "runs"), name="two")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps(config))
    assert "megatron-rl convert" in refused(folder, {"layers": 2})


def test_a_pattern_of_zeros_is_a_text_in_yaml_too(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("prune:\n  sparsity: 2:4\n")
    assert load_config(file).prune.sparsity == "2:4"
    assert load_config(file, ["--prune.sparsity", "1:2"]).prune.sparsity == "1:2"
    for wrong in ("half", "0:4", "2"):
        with pytest.raises(UserError, match="sparsity"):
            load_config(file, ["--prune.sparsity", wrong])
