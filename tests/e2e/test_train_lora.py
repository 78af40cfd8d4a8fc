"""Adapters on the real stack: SFT, then GRPO with a teacher, pushed merged; a resume, and what is left in the folders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_rl.cli import main
from megatron_rl.metrics.logger import read_json_lines

STEPS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_model):
    """SFT by LoRA, then a run of RL whose last step was made by another process, from its checkpoint and rollouts."""
    folder = tmp_path_factory.mktemp("lora")
    model, teacher = (
        tiny_model("qwen3_moe", "--layers", "2", "--tokenizer", "numbers", *more) for more in ((), ("--seed", "1"))
    )
    config = {
        "runs_dir": str(folder),
        "model": {"path": str(model)},
        "lora": {"rank": 4, "alpha": 8.0, "targets": ["*.linear_*", "*.router.*"]},
        "data": {"task": "number_sorting"},
        "batch": {"prompts_per_step": 4, "tokens_per_micro_batch": 128},
        "optimizer": {"lr": 1e-2},
        "precision": {"train": "fp32", "rollout": "fp32"},
        "rollout": {
            "max_new_tokens": 8,
            "context_length": 64,
            "routes": True,
            "server": {"threads": 1, "max_total_tokens": 4096},
        },
        "eval": {"prompts": 0},
        "checkpoint": {"every": 1, "keep": STEPS},
        "logging": {"trackers": [], "progress": False},
    }
    (folder / "sft.yaml").write_text(json.dumps(config | {"steps": 2}))
    assert main(["sft", str(folder / "sft.yaml"), "--name", "sft"]) == 0
    kl = {"coefficient": 0.1}
    rl = config | {
        "steps": STEPS,
        "lora": config["lora"] | {"path": str(folder / "sft" / "adapter")},
        "distillation": {
            "teacher": str(teacher),
            "placement": "advantage",
            "coefficient": 0.5,
            "task_coefficient": 1.0,
        },
        "algorithm": {"kl": kl},
        "batch": config["batch"] | {"samples_per_prompt": 4, "updates_per_step": 1},
        "rollout": config["rollout"] | {"record": True},
    }
    (folder / "rl.yaml").write_text(json.dumps(rl))
    command = ["train", str(folder / "rl.yaml"), "--name"]
    assert main([*command, "whole"]) == 0
    recorded = ["resumed", "--rollout.record", "false", "--rollout.load", str(folder / "whole" / "rollouts")]
    assert main([*command, *recorded, "--steps", str(STEPS - 1)]) == 0
    assert main([*command, *recorded]) == 0
    attention = {"rank": 4, "alpha": 8.0, "targets": ["*.self_attention.linear_*"]}
    asked = {"prompts": 2, "samples": 1}
    apart = rl | {"steps": 2, "lora": attention, "sync": {"adapters": "unmerged"}, "eval": asked}
    apart["rollout"] = config["rollout"]
    (folder / "unmerged.yaml").write_text(json.dumps(apart))
    assert main(["train", str(folder / "unmerged.yaml"), "--name", "unmerged"]) == 0
    return folder


def checkpoint(folder: Path, name: str, step: int) -> Path:
    return folder / name / "checkpoints" / f"step_{step:06d}"


def test_the_engine_samples_from_the_merged_weights(folder):
    """In every step its log-probs are the trainer's, whose adapters are apart; every step moved them."""
    for row in (row for row in read_json_lines(folder / "whole" / "metrics.jsonl") if row["step"] > 0):
        assert row["update/grad_norm"] > 0
        assert row["mismatch/kl"] <= 1e-6 and row["mismatch/abs_median"] <= 1e-4
        assert row["kl/reference"] > 0  # from the first on: SFT's adapters are no part of the reference
        assert row["distillation/reverse_kl"] != 0


def test_a_resumed_run_ends_with_the_same_adapters(folder):
    one, other = (
        load_file(checkpoint(folder, name, STEPS) / "adapter" / "adapter_model.safetensors")
        for name in ("whole", "resumed")
    )
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_checkpoint_becomes_a_model_and_an_adapter(folder, tmp_path):
    path = checkpoint(folder, "whole", STEPS)
    assert main(["convert", str(path), str(tmp_path / "merged")]) == 0
    assert main(["convert", str(path), str(tmp_path / "adapter"), "--adapter"]) == 0
    adapter = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    base, merged = (load_file(Path(f) / "model.safetensors") for f in (base_of(tmp_path), tmp_path / "merged"))
    assert base.keys() == merged.keys()
    prefix = "base_model.model."
    for name in base:
        layer = prefix + name.removesuffix(".weight")
        if f"{layer}.lora_B.weight" in adapter:
            added = 2.0 * adapter[f"{layer}.lora_B.weight"] @ adapter[f"{layer}.lora_A.weight"]
            assert added.abs().max() > 0
            assert torch.allclose(merged[name], base[name] + added, rtol=1e-6, atol=1e-7), name
        else:
            assert torch.equal(merged[name], base[name]), name


def base_of(folder: Path) -> str:
    return json.loads((folder / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"]


def test_sft_leaves_a_merged_model_beside_its_adapters(folder):
    merged = load_file(folder / "sft" / "hf" / "model.safetensors")
    base = load_file(Path(base_of(folder / "sft")) / "model.safetensors")
    changed = {name for name in base if not torch.equal(base[name], merged[name])}
    assert changed and all(any(part in name for part in ("proj", "gate")) for name in changed)


def test_adapters_are_served_beside_the_model(folder):
    """Pushed unmerged they are kilobytes; the engine's log-probs are the trainer's, before and after an update."""
    rows = [
        row
        for row in read_json_lines(folder / "unmerged" / "metrics.jsonl")
        if row["step"] > 0 and "loss/policy" in row
    ]
    assert [row["step"] for row in rows] == [1, 2]
    weights = (Path(base_of(folder / "sft")) / "model.safetensors").stat().st_size
    adapter = checkpoint(folder, "unmerged", 2) / "adapter" / "adapter_model.safetensors"
    for row in rows:
        assert row["update/grad_norm"] > 0
        assert row["mismatch/kl"] <= 1e-6 and row["mismatch/abs_median"] <= 1e-4
        assert row["rollout/stale"] == 0
        assert row["sync/megabytes"] * 1e6 <= adapter.stat().st_size < 0.1 * weights
    assert rows[1]["kl/reference"] > 1e-6  # what the second step sampled was of adapters that had moved
    assert not (folder / "unmerged" / "sync").exists()
