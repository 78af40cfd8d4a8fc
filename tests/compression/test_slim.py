"""Cutting a folder: against slices written by hand, for each form in which checkpoints hold their weights."""

from __future__ import annotations

import json
import random

import pytest
import torch
from models.test_convert import read_folder
from ranks import fresh_seed

from megatron_rl.compression.structured_pruning import Kept, Sizes, new_config, remove_parts
from megatron_rl.errors import UserError
from megatron_rl.models.families import moe_layers
from megatron_rl.models.hf_folder import write_weights
from megatron_rl.models.parallel_check import read_hf_config


@pytest.fixture
def rng() -> random.Random:
    seed = fresh_seed()
    return random.Random(seed)


def some(rng: random.Random, total: int, count: int) -> list[int]:
    return sorted(rng.sample(range(total), count))


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_experts_and_their_channels(family, tiny_model, tmp_path, rng):
    source = tiny_model(family, "--layers", "2")
    kept = Kept(experts={1: some(rng, 8, 3)}, expert_channels={1: [some(rng, 48, 9) for _ in range(8)]})
    remove_parts(source, tmp_path / "out", kept, Sizes(experts=3, expert_width=9))
    before, after = read_folder(source), read_folder(tmp_path / "out")
    module = "block_sparse_moe" if family == "mixtral" else "mlp"
    names = ("w1", "w3", "w2") if family == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    for new, old in enumerate(kept.experts[1]):
        channels = kept.expert_channels[1][old]
        for name in names:
            whole = before[f"model.layers.1.{module}.experts.{old}.{name}.weight"]
            part = whole[:, channels] if name == names[-1] else whole[channels]
            assert torch.equal(after[f"model.layers.1.{module}.experts.{new}.{name}.weight"], part)
    assert f"model.layers.1.{module}.experts.3.{names[0]}.weight" not in after
    for name in ("weight", "e_score_correction_bias") if family == "deepseek_v3" else ("weight",):
        router = f"model.layers.1.{module}.gate.{name}"
        assert torch.equal(after[router], before[router][kept.experts[1]])
    others = [name for name in before if ".layers.1." not in name or ".self_attn." in name]
    assert all(torch.equal(after[name], before[name]) for name in others)


def test_experts_in_one_tensor_with_gate_and_up_by_turns(tiny_model, tmp_path, rng):
    source = tiny_model("gpt_oss", "--layers", "2")
    experts, channels = some(rng, 8, 3), [some(rng, 48, 9) for _ in range(8)]
    kept = Kept(experts={0: experts}, expert_channels={0: channels}, groups={0: [1]})
    remove_parts(source, tmp_path / "out", kept, Sizes(experts=3, expert_width=9, heads=2))
    before, after = read_folder(source), read_folder(tmp_path / "out")
    for layer in ("model.layers.0.mlp.",):
        for new, old in enumerate(experts):
            gate_up, bias = (
                before[f"{layer}experts.gate_up_proj"][old],
                before[f"{layer}experts.gate_up_proj_bias"][old],
            )
            for half in (0, 1):  # gate, up
                found = after[f"{layer}experts.gate_up_proj"][new][:, half::2]
                assert torch.equal(found, gate_up[:, half::2][:, channels[old]])
                found = after[f"{layer}experts.gate_up_proj_bias"][new][half::2]
                assert torch.equal(found, bias[half::2][channels[old]])
            down = before[f"{layer}experts.down_proj"][old]
            assert torch.equal(after[f"{layer}experts.down_proj"][new], down[channels[old]])
        assert torch.equal(after[f"{layer}experts.down_proj_bias"], before[f"{layer}experts.down_proj_bias"][experts])
        for name in ("router.weight", "router.bias"):
            assert torch.equal(after[layer + name], before[layer + name][experts])
    heads = "model.layers.0.self_attn."
    for name, start in (
        ("sinks", 2),
        ("q_proj.bias", 32),
        ("q_proj.weight", 32),
        ("k_proj.bias", 16),
        ("v_proj.weight", 16),
    ):
        assert torch.equal(after[heads + name], before[heads + name][start:])
    assert torch.equal(after[heads + "o_proj.weight"], before[heads + "o_proj.weight"][:, 32:])
    assert torch.equal(after[heads + "o_proj.bias"], before[heads + "o_proj.bias"])


def test_layers_are_renumbered_and_the_config_follows(tiny_model, tmp_path):
    source = tiny_model("gpt_oss", "--layers", "4")
    remove_parts(source, tmp_path / "gpt_oss", Kept(layers=[0, 2, 3]), Sizes(layers=3))
    before, after = read_folder(source), read_folder(tmp_path / "gpt_oss")
    for new, old in enumerate([0, 2, 3]):
        name = "self_attn.q_proj.weight"
        assert torch.equal(after[f"model.layers.{new}.{name}"], before[f"model.layers.{old}.{name}"])
    assert not any(name.startswith("model.layers.3.") for name in after)
    config = json.loads((tmp_path / "gpt_oss" / "config.json").read_text())
    assert config["layer_types"] == ["sliding_attention", "sliding_attention", "full_attention"]
    source = tiny_model("deepseek_v3", "--layers", "4")
    for layers, dense in (([0, 1], 1), ([1, 3], 0)):
        remove_parts(source, tmp_path / f"deepseek{dense}", Kept(layers=layers), Sizes(layers=2))
        config = json.loads((tmp_path / f"deepseek{dense}" / "config.json").read_text())
        assert (config["num_hidden_layers"], config["first_k_dense_replace"]) == (2, dense)


def test_what_is_not_of_the_model_as_it_is_trained(tiny_model, tmp_path):
    """A constant of old folders and draft layers are left out; a tensor without a rule is refused by name."""
    source = tiny_model("llama", "--layers", "2")
    for name, problem in (
        ("model.layers.0.self_attn.rotary_emb.inv_freq", None),
        ("model.layers.2.eh_proj.weight", None),
        ("model.layers.1.self_attn.made_up.weight", "made_up"),
        ("model.layers.1.mlp.experts.gate_up_proj_blocks", "gate_up_proj_blocks"),
    ):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_bytes((source / "config.json").read_bytes())
        write_weights(folder, [*read_folder(source).items(), (name, torch.zeros(2, 2))])
        if problem is None:
            remove_parts(folder, folder / "out", Kept(layers=[0]), Sizes(layers=1))
            assert name not in read_folder(folder / "out")
            continue
        with pytest.raises(UserError, match=problem):
            remove_parts(folder, folder / "out", Kept(layers=[0, 1]), Sizes(layers=2))
        assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors"}


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_dense_layers_among_those_with_experts_stay_what_they_are(family, tiny_model, tmp_path, rng):
    source, layers = tmp_path / "hf", sorted(rng.sample(range(6), 4))
    source.mkdir()
    config = json.loads((tiny_model(family) / "config.json").read_text()) | {"num_hidden_layers": 6}
    config |= (
        {"decoder_sparse_step": 2, "mlp_only_layers": [3]} if family == "qwen3_moe" else {"first_k_dense_replace": 2}
    )
    (source / "config.json").write_text(json.dumps(config))
    before = moe_layers(read_hf_config(source))
    config |= new_config(source, Sizes(layers=4), layers)
    (source / "config.json").write_text(json.dumps(config))
    assert moe_layers(read_hf_config(source)) == tuple(layers.index(layer) for layer in layers if layer in before)
