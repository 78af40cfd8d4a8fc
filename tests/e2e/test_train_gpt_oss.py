"""gpt-oss through the program: sinks cut over two tensor-parallel ranks are trained, pushed and applied by the engine."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from safetensors.torch import load_file

from megatron_rl.metrics.logger import read_json_lines
from tests.program import forked
from tests.weights import scaled

STEPS = 3


@pytest.mark.timeout(900)
def test_sinks_are_trained_and_both_sides_have_them(tiny_model, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(tiny_model("gpt_oss", "--layers", "2", "--tokenizer", "numbers", "--max-position", "131072"), model)
    scaled(model, {"sinks": 10.0, "o_proj.weight": 10.0})  # so that both matter as in a trained model
    config = {
        "name": "sinks",
        "runs_dir": str(tmp_path),
        "steps": STEPS,
        "model": {"path": str(model)},
        "data": {"task": "number_sorting"},
        "batch": {"prompts_per_step": 8, "samples_per_prompt": 8, "tokens_per_micro_batch": 512},
        # A random model earns nothing: without the entropy its weights would not move.
        "algorithm": {"on_policy": True, "entropy_coefficient": 0.01},
        "optimizer": {"lr": 1e-2},
        "parallel": {"tensor": 2, "expert_tensor": 1},
        "precision": {"train": "fp32", "rollout": "fp32"},
        "rollout": {"max_new_tokens": 40, "context_length": 64, "server": {"threads": 1, "max_total_tokens": 8192}},
        "eval": {"prompts": 0},
    }
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    forked("train", str(tmp_path / "config.yaml"), ranks=2, timeout=400)
    rows = [row for row in read_json_lines(tmp_path / "sinks" / "metrics.jsonl") if row["step"] > 0]
    assert len(rows) == STEPS
    for row in rows:
        assert (row["loss/ratio"], row["loss/clip_fraction"]) == (1.0, 0.0), "on-policy, exactly"
        assert row["response/length"] > 24, "responses of more than three windows of 8"
        # Log-probs of -6 have a last bit of 5e-7; with sinks that the engine keeps in bf16 they are 1.4e-5 apart.
        assert row["mismatch/abs_median"] <= 5e-6
    # The square of a few last bits is below 1e-12, that of what sinks in bf16 make above 1e-10; but experts that tie but for
    # rounding move one log-prob by 0.1, and do so in one step of 200.
    assert min(row["mismatch/kl"] for row in rows) <= 1e-11
    forked("convert", str(tmp_path / "sinks" / "checkpoints" / f"step_{STEPS:06d}"), str(tmp_path / "hf"))
    before, after = (load_file(folder / "model.safetensors") for folder in (model, tmp_path / "hf"))
    sinks = [name for name in before if name.endswith(".self_attn.sinks")]
    assert len(sinks) == 2
    for name in sinks:
        moved = np.abs((after[name] - before[name]).numpy())
        assert moved.min() > 0 and moved.max() > 1e-3, f"{name} has hardly moved: {moved}"
